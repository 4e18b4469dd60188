"""A switch's status as Prometheus metrics, named by Prometheus' guide: unit last, `_total` for counters.

The series of a job exist as long as the job, so admission bounds their number. The totals of the switch keep what
ended jobs did. Jobs may have thousands of series. prometheus_client checks and quotes every label of every sample: with
64 jobs that takes 13 ms, in which the switch admits no worker. Text takes 1 ms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    return _text(_switch_families(status)) + jobs_text(status["jobs"])


class _Family:
    """The series of one metric, a line for each sample, in Prometheus' text format.

    values: by labels, which come from `_labels`; "" for a metric without labels.
    """

    def __init__(self, kind: str, name: str, text: str, values: Mapping[str, float] | None = None) -> None:
        self._name = f"netfold_switch_{name}" + ("_total" if kind == "counter" else "")
        self.lines = [f"# HELP {self._name} {text}", f"# TYPE {self._name} {kind}"]
        for labels, value in (values or {}).items():
            self.add(labels, value)

    def add(self, labels: str, value: float, suffix: str = "") -> None:
        braced = f"{{{labels}}}" if labels else ""
        self.lines.append(f"{self._name}{suffix}{braced} {float(value)!r}")


def _text(families: Sequence[_Family]) -> bytes:
    return "".join(f"{line}\n" for family in families for line in family.lines).encode()


def _switch_families(status: dict[str, Any]) -> list[_Family]:
    """The metrics of the whole switch."""
    jobs, totals, parent = status["jobs"], status["totals"], status["parent"]
    unlabelled = (
        ("gauge", "draining", "1 while the switch drains and takes no new job, else 0.", status["state"] == "draining"),
        ("gauge", "authenticated", "1 if data packets are authenticated, else 0.", status["authenticated"]),
        ("gauge", "jobs", "Jobs that assemble or run.", len(jobs)),
        ("gauge", "workers", "Workers of those jobs that have joined.", sum(job["joined"] for job in jobs)),
        ("gauge", "connections", "Control connections, unauthenticated ones included.", status["connections"]),
        (
            "gauge",
            "unauthenticated_connections",
            "Connections that have not joined yet.",
            status["unauthenticated_connections"],
        ),
        ("gauge", "memory_granted_bytes", "Memory granted to jobs for slots.", status["memory_granted_bytes"]),
        ("gauge", "memory_free_bytes", "Memory free to grant.", status["memory_free_bytes"]),
        ("counter", "uptime_seconds", "Time since the switch started.", status["uptime_s"]),
        ("counter", "cpu_seconds", "CPU time of the threads that handle packets.", status["cpu_s"]),
        ("counter", "jobs_started", "Jobs that started.", status["jobs_started"]),
        ("counter", "goodput_bytes", "Bytes of results of all jobs so far, without padding.", totals["result_bytes"]),
    )
    labelled = [
        ("counter", "refusals", "Workers and jobs refused, by reason.", "reason", status["refusals"]),
        ("counter", "drops", "Packets of all jobs so far that changed nothing.", "reason", totals["drops"]),
        ("gauge", "fabric_jobs", "Jobs whose packets come over a libfabric provider.", "provider", status["fabrics"]),
    ]
    if parent is not None:
        below = {parent["endpoint"]: parent["jobs"]}
        labelled.append(("gauge", "parent_jobs", "Jobs whose sums go to the switch above.", "parent", below))
    for name, text in (
        ("granted", "Memory granted to a tenant's jobs."),
        ("free", "Memory free in a tenant's quota."),
    ):
        memory = {tenant["name"]: tenant[f"memory_{name}_bytes"] for tenant in status["tenants"]}
        labelled.append(("gauge", f"tenant_memory_{name}_bytes", text, "tenant", memory))
    return [
        *(_Family(kind, name, text, {"": value}) for kind, name, text, value in unlabelled),
        *(
            _Family(kind, name, text, {_labels(**{label: each}): value for each, value in values.items()})
            for kind, name, text, label, values in labelled
        ),
    ]


def _labels(**values: str) -> str:
    """Labels as they stand between braces; text format 0.0.4 escapes three characters."""
    return ",".join(f'{name}="{_ESCAPE.sub(_escaped, value)}"' for name, value in values.items())


def _escaped(found: re.Match[str]) -> str:
    return "\\n" if found[0] == "\n" else "\\" + found[0]


def jobs_text(jobs: list[dict[str, Any]]) -> bytes:
    """Render the series of all jobs."""
    workers = _Family("gauge", "job_workers", "Workers that have joined.")
    memory = _Family("gauge", "job_memory_granted_bytes", "Memory granted for slots.")
    slots = _Family("gauge", "job_slots", "Slots granted.")
    collecting = _Family("gauge", "job_slots_collecting", "Slots that wait for contributions.")
    capacity = _Family(
        "gauge", "job_capacity_bytes_per_second", "Tensor bytes per second through this switch, as the job measured it."
    )
    goodput = _Family("counter", "job_goodput_bytes", "Bytes of results, without padding.")
    packets = _Family("counter", "job_packets", "Packets handled, by kind.")
    drops = _Family("counter", "job_drops", "Packets that changed nothing, by reason.")
    again = _Family("counter", "job_retransmissions", "Contributions that arrived again.")
    sums_resent = _Family("counter", "job_sum_retransmissions", "Sums sent to the parent again.")
    lag = _Family("summary", "job_arrival_lag_seconds", "Time from a chunk's first contribution to this rank's.")
    last = _Family("counter", "job_last_arrivals", "Chunks for which all other ranks waited for this rank.")
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
            rank = f'{labels},rank="{"leaf of " if member["ranks_below"] else ""}{member["rank"]}"'
            lag.add(rank, member["arrivals"], "_count")
            lag.add(rank, member["lag_s"], "_sum")
            last.add(rank, member["last"])
    families = (workers, memory, slots, collecting, capacity, goodput, packets, drops, again, sums_resent, lag, last)
    return _text(families)
