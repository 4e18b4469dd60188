"""A switch's status as Prometheus metrics, named by Prometheus' guide: unit last, `_total` for counters.

The series of a job exist as long as the job, so admission bounds their number. The totals of the switch keep what
ended jobs did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPE = re.compile(r'[\\"\n]')
# Kinds of handled packets, and their names in a job's counters.
PACKET_KINDS = {
    "contribution": "contributions",
    "result": "results_sent",
    "hello": "hellos",
    "mismatch": "mismatches",
    "sum": "sums_sent",
}


def exposition(status: dict[str, Any]) -> bytes:
    """Render the result of `Switch.status` in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(status))
    return generate_latest(registry) + jobs_text(status["jobs"])


class _Status:
    """The metrics of the whole switch, as a collector of prometheus_client."""

    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        for name, text, value in (
            ("draining", "1 while the switch drains and takes no new job, else 0.", status["state"] == "draining"),
            ("authenticated", "1 if data packets are authenticated, else 0.", status["authenticated"]),
            ("jobs", "Jobs that assemble or run.", len(status["jobs"])),
            ("workers", "Workers of those jobs that have joined.", sum(job["joined"] for job in status["jobs"])),
            ("connections", "Control connections, unauthenticated ones included.", status["connections"]),
            (
                "unauthenticated_connections",
                "Connections that have not joined yet.",
                status["unauthenticated_connections"],
            ),
            ("memory_granted_bytes", "Memory granted to jobs for slots.", status["memory_granted_bytes"]),
            ("memory_free_bytes", "Memory free to grant.", status["memory_free_bytes"]),
        ):
            yield GaugeMetricFamily(f"netfold_switch_{name}", text, value=float(value))
        totals = status["totals"]
        for name, text, value in (
            ("uptime_seconds", "Time since the switch started.", status["uptime_s"]),
            ("cpu_seconds", "CPU time of the threads that handle packets.", status["cpu_s"]),
            ("jobs_started", "Jobs that started.", status["jobs_started"]),
            ("goodput_bytes", "Bytes of results of all jobs so far, without padding.", totals["result_bytes"]),
        ):
            yield CounterMetricFamily(f"netfold_switch_{name}", text, value=float(value))
        counter, gauge, parent = CounterMetricFamily, GaugeMetricFamily, status["parent"]
        refusals, drops = status["refusals"], totals["drops"]
        yield _labelled(counter, "refusals", "Workers and jobs refused, by reason.", "reason", refusals)
        yield _labelled(counter, "drops", "Packets of all jobs so far that changed nothing.", "reason", drops)
        text = "Jobs whose packets come over a libfabric provider."
        yield _labelled(gauge, "fabric_jobs", text, "provider", status["fabrics"])
        if parent is not None:
            jobs = {parent["endpoint"]: parent["jobs"]}
            yield _labelled(gauge, "parent_jobs", "Jobs whose sums go to the switch above.", "parent", jobs)
        for name, text in (
            ("granted", "Memory granted to a tenant's jobs."),
            ("free", "Memory free in a tenant's quota."),
        ):
            memory = {tenant["name"]: tenant[f"memory_{name}_bytes"] for tenant in status["tenants"]}
            yield _labelled(gauge, f"tenant_memory_{name}_bytes", text, "tenant", memory)


def _labelled(kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Make a metric with a sample for each value of `label`."""
    metric: Metric = kind(f"netfold_switch_{name}", text, labels=[label])
    for value_of_label, value in values.items():
        metric.add_metric([value_of_label], value)  # type: ignore[attr-defined]
    return metric


class _Family:
    """The series of one metric of jobs, a line for each sample, in Prometheus' text format.

    Jobs may have thousands of series. prometheus_client checks and quotes every label of every sample: with 64 jobs
    that takes 13 ms, in which the switch admits no worker. This class takes 1 ms. Its `labels` come from `_labels`.
    """

    def __init__(self, kind: str, name: str, text: str) -> None:
        self._name = f"netfold_switch_job_{name}" + ("_total" if kind == "counter" else "")
        self.lines = [f"# HELP {self._name} {text}", f"# TYPE {self._name} {kind}"]

    def add(self, labels: str, value: float, suffix: str = "") -> None:
        self.lines.append(f"{self._name}{suffix}{{{labels}}} {float(value)!r}")


def _labels(**values: str) -> str:
    """Labels as they stand between braces; text format 0.0.4 escapes three characters."""
    return ",".join(f'{name}="{_ESCAPE.sub(_escaped, value)}"' for name, value in values.items())


def _escaped(found: re.Match[str]) -> str:
    return "\\n" if found[0] == "\n" else "\\" + found[0]


def jobs_text(jobs: list[dict[str, Any]]) -> bytes:
    """Render the series of all jobs."""
    workers = _Family("gauge", "workers", "Workers that have joined.")
    memory = _Family("gauge", "memory_granted_bytes", "Memory granted for slots.")
    slots = _Family("gauge", "slots", "Slots granted.")
    collecting = _Family("gauge", "slots_collecting", "Slots that wait for contributions.")
    capacity = _Family(
        "gauge", "capacity_bytes_per_second", "Tensor bytes per second through this switch, as the job measured it."
    )
    goodput = _Family("counter", "goodput_bytes", "Bytes of results, without padding.")
    packets = _Family("counter", "packets", "Packets handled, by kind.")
    drops = _Family("counter", "drops", "Packets that changed nothing, by reason.")
    again = _Family("counter", "retransmissions", "Contributions that arrived again.")
    sums_resent = _Family("counter", "sum_retransmissions", "Sums sent to the parent again.")
    lag = _Family("summary", "arrival_lag_seconds", "Time from a chunk's first contribution to this rank's.")
    last = _Family("counter", "last_arrivals", "Chunks for which all other ranks waited for this rank.")
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
