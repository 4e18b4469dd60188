"""A switch's status as Prometheus metrics, named as its guide says: unit last, `_total` for what only grows.

Series of a job live as long as the job, so there are never more than jobs and workers are admitted. What ended jobs did
stays in the totals of the switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_JOB = ("id", "name", "tenant")
# Kinds of packets that were no drop, and where a job's counters have them.
PACKET_KINDS = {
    "contribution": "contributions",
    "answer": "answers_sent",
    "hello": "hellos",
    "mismatch": "mismatches",
    "sum": "sums_sent",
}


def exposition(status: dict[str, Any]) -> bytes:
    """Prometheus' text format of what `Switch.status` returned."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(status))
    return generate_latest(registry)


class _Status:
    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from _switch(self._status)
        yield from _jobs(self._status["jobs"])


def _switch(status: dict[str, Any]) -> Iterator[Metric]:
    for name, text, value in (
        ("draining", "1 while the switch takes no new job, else 0.", status["state"] == "draining"),
        ("authenticated", "1 where data packets carry tags, else 0.", status["authenticated"]),
        ("jobs", "Jobs that are assembled or under way.", len(status["jobs"])),
        ("workers", "Workers of those jobs that have joined.", sum(job["joined"] for job in status["jobs"])),
        ("connections", "Control connections, of strangers too.", status["connections"]),
        ("strangers", "Connections that have not joined yet.", status["strangers"]),
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


def _jobs(jobs: list[dict[str, Any]]) -> Iterator[Metric]:
    def family(kind: Any, name: str, text: str, *labels: str) -> Any:
        return kind(f"netfold_switch_job_{name}", text, labels=[*_JOB, *labels])

    workers = family(GaugeMetricFamily, "workers", "Workers that have joined.")
    memory = family(GaugeMetricFamily, "memory_granted_bytes", "Memory granted for slots.")
    slots = family(GaugeMetricFamily, "slots", "Slots granted.")
    collecting = family(GaugeMetricFamily, "slots_collecting", "Slots that wait for some of the workers.")
    goodput = family(CounterMetricFamily, "goodput_bytes", "Bytes of results, without padding.")
    packets = family(CounterMetricFamily, "packets", "Packets handled, by kind.", "kind")
    drops = family(CounterMetricFamily, "drops", "Packets that changed nothing, by reason.", "reason")
    again = family(CounterMetricFamily, "retransmissions", "Contributions that came again.")
    sums_again = family(CounterMetricFamily, "sum_retransmissions", "Sums that went to the parent again.")
    lag = family(
        SummaryMetricFamily, "arrival_lag_seconds", "From a chunk's first contribution to this rank's own.", "rank"
    )
    last = family(CounterMetricFamily, "last_arrivals", "Chunks for which all others waited for this rank.", "rank")
    for job in jobs:
        labels = [job["id"], job["name"], job["tenant"]]
        counters = job["counters"]
        workers.add_metric(labels, job["joined"])
        memory.add_metric(labels, job["memory_bytes"])
        slots.add_metric(labels, counters["slots"])
        collecting.add_metric(labels, counters["slots_collecting"])
        goodput.add_metric(labels, counters["result_bytes"])
        again.add_metric(labels, job["retransmissions"])
        sums_again.add_metric(labels, counters["sums_again"])
        for kind, counter in PACKET_KINDS.items():
            packets.add_metric([*labels, kind], counters[counter])
        for reason, count in counters["drops"].items():
            drops.add_metric([*labels, reason], count)
        for member in job["ranks"]:
            rank = [*labels, "+".join(map(str, [member["rank"], *member["below"]]))]
            lag.add_metric(rank, count_value=member["arrivals"], sum_value=member["lag_s"])
            last.add_metric(rank, member["last"])
    yield from (workers, memory, slots, collecting, goodput, packets, drops, again, sums_again, lag, last)
