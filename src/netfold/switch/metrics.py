"""A switch's status as Prometheus metrics, named as its guide says: unit last, `_total` for what only grows.

Series of a job live as long as the job, so there are never more than jobs and workers are admitted. What ended jobs did
stays in the totals of the switch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPE = re.compile(r'[\\"\n]')
# Kinds of packets that were no drop, and where a job's counters have them.
PACKET_KINDS = {
    "contribution": "contributions",
    "result": "results_sent",
    "hello": "hellos",
    "mismatch": "mismatches",
    "sum": "sums_sent",
}


def exposition(status: dict[str, Any]) -> bytes:
    """Prometheus' text format of what `Switch.status` returned."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(status))
    return generate_latest(registry) + jobs_text(status["jobs"])


class _Status:
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from _switch(self._status)


def _switch(status: dict[str, Any]) -> Iterator[Metric]:
    for name, text, value in (
        ("draining", "1 while the switch takes no new job, else 0.", status["state"] == "draining"),
        ("authenticated", "1 where data packets carry tags, else 0.", status["authenticated"]),
        ("jobs", "Jobs that are assembled or under way.", len(status["jobs"])),
        ("workers", "Workers of those jobs that have joined.", sum(job["joined"] for job in status["jobs"])),
        ("connections", "Control connections, of strangers too.", status["connections"]),
        ("unauthenticated_connections", "Connections that have not joined yet.", status["unauthenticated_connections"]),
        ("memory_granted_bytes", "Memory granted to jobs for slots.", status["memory_granted_bytes"]),
        ("memory_free_bytes", "Memory that is left to grant.", status["memory_free_bytes"]),
    ):
        yield GaugeMetricFamily(f"netfold_switch_{name}", text, value=float(value))
    totals = status["totals"]
    for name, text, value in (
        ("uptime_seconds", "Time since the switch started.", status["uptime_s"]),
        ("cpu_seconds", "CPU time of the thread that handles packets.", status["cpu_s"]),
        ("jobs_started", "Jobs that began to add.", status["jobs_started"]),
        ("goodput_bytes", "Bytes of results, of all jobs so far, without padding.", totals["result_bytes"]),
    ):
        yield CounterMetricFamily(f"netfold_switch_{name}", text, value=float(value))
    refusals = CounterMetricFamily("netfold_switch_refusals", "Workers and jobs refused, by reason.", labels=["reason"])
    for reason, count in status["refusals"].items():
        refusals.add_metric([reason], count)
    yield refusals
    drops = CounterMetricFamily(
        "netfold_switch_drops", "Packets of all jobs so far that changed nothing.", labels=["reason"]
    )
    for reason, count in totals["drops"].items():
        drops.add_metric([reason], count)
    yield drops
    fabrics = GaugeMetricFamily(
        "netfold_switch_fabric_jobs", "Jobs whose packets come over a provider of libfabric.", labels=["provider"]
    )
    for provider, jobs in status["fabrics"].items():
        fabrics.add_metric([provider], jobs)
    yield fabrics
    if status["parent"] is not None:
        parent = GaugeMetricFamily(
            "netfold_switch_parent_jobs", "Jobs whose sums go to the switch above.", labels=["parent"]
        )
        parent.add_metric([status["parent"]["endpoint"]], status["parent"]["jobs"])
        yield parent
    for name, text in (("granted", "Memory granted to a tenant's jobs."), ("free", "What is left of a tenant's part.")):
        memory = GaugeMetricFamily(f"netfold_switch_tenant_memory_{name}_bytes", text, labels=["tenant"])
        for tenant in status["tenants"]:
            memory.add_metric([tenant["name"]], tenant[f"memory_{name}_bytes"])
        yield memory


class _Family:
    """Series of one name, a line a sample, in Prometheus' text format.

    For jobs, which may have thousands of series: prometheus_client checks and quotes every label of every sample, 13 ms
    of a core with 64 jobs, in which the switch admits nobody. This takes 1 ms. `labels` come from `_labels`.
    """

    def __init__(self, kind: str, name: str, text: str) -> None:
        self._name = f"netfold_switch_job_{name}" + ("_total" if kind == "counter" else "")
        self.lines = [f"# HELP {self._name} {text}", f"# TYPE {self._name} {kind}"]

    def add(self, labels: str, value: float, suffix: str = "") -> None:
        self.lines.append(f"{self._name}{suffix}{{{labels}}} {float(value)!r}")


def _labels(**values: str) -> str:
    """As they stand between braces; text format 0.0.4 escapes three characters."""
    return ",".join(f'{name}="{_ESCAPE.sub(_escaped, value)}"' for name, value in values.items())


def _escaped(found: re.Match[str]) -> str:
    return "\\n" if found[0] == "\n" else "\\" + found[0]


def jobs_text(jobs: list[dict[str, Any]]) -> bytes:
    """The series of all jobs."""
    workers = _Family("gauge", "workers", "Workers that have joined.")
    memory = _Family("gauge", "memory_granted_bytes", "Memory granted for slots.")
    slots = _Family("gauge", "slots", "Slots granted.")
    collecting = _Family("gauge", "slots_collecting", "Slots that wait for some of the workers.")
    capacity = _Family("gauge", "capacity_bytes_per_second", "Of tensor through this switch, as the job measured it.")
    goodput = _Family("counter", "goodput_bytes", "Bytes of results, without padding.")
    packets = _Family("counter", "packets", "Packets handled, by kind.")
    drops = _Family("counter", "drops", "Packets that changed nothing, by reason.")
    again = _Family("counter", "retransmissions", "Contributions that came again.")
    sums_resent = _Family("counter", "sum_retransmissions", "Sums that went to the parent again.")
    lag = _Family("summary", "arrival_lag_seconds", "From a chunk's first contribution to this rank's own.")
    last = _Family("counter", "last_arrivals", "Chunks for which all others waited for this rank.")
    for job in jobs:
        labels = _labels(id=job["id"], name=job["name"], tenant=job["tenant"])
        counters = job["counters"]
        workers.add(labels, job["joined"])
        memory.add(labels, job["memory_bytes"])
        slots.add(labels, counters["slots"])
        collecting.add(labels, counters["slots_collecting"])
        if job["capacity_bytes_per_s"] is not None:
            capacity.add(labels, job["capacity_bytes_per_s"])
        goodput.add(labels, counters["result_bytes"])
        again.add(labels, job["retransmissions"])
        sums_resent.add(labels, counters["sums_resent"])
        for kind, counter in PACKET_KINDS.items():
            packets.add(f'{labels},kind="{kind}"', counters[counter])
        for reason, count in counters["drops"].items():
            drops.add(f'{labels},reason="{reason}"', count)
        for member in job["ranks"]:
            rank = f'{labels},rank="{"+".join(map(str, [member["rank"], *member["below"]]))}"'
            lag.add(rank, member["arrivals"], "_count")
            lag.add(rank, member["lag_s"], "_sum")
            last.add(rank, member["last"])
    families = (workers, memory, slots, collecting, capacity, goodput, packets, drops, again, sums_resent, lag, last)
    return "".join(f"{line}\n" for family in families for line in family.lines).encode()
