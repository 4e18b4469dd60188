"""The grants of a switch by tenant and job, and the totals of ended jobs. It holds a job from its opening to its end.

Invariants: the grants of a tenant fit into its quota; a removed job releases everything.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from netfold._native import protocol
from netfold._native.dataplane import DataPlane
from netfold.switch.bmv2 import PipelineError
from netfold.switch.job import Job, RefusedError
from netfold.switch.quota import Limits, Quota, fitting_window, quota_of
from netfold.switch.tokens import Tenant
from netfold.switch_protocol.data_path import MIN_WINDOW_CHUNKS

# The one tenant of a switch without tokens.
DEFAULT_TENANT = Tenant("default")
# Counters that the switch keeps after their job has ended.
_TOTALS = ("result_bytes", "results", "contributions", "results_sent", "results_resent")


class Ledger:
    """The jobs and grants of one switch.

    limits: of the whole switch, which `tenants` share by weight.
    planes: the data planes, one thread each.
    """

    def __init__(self, limits: Limits, tenants: Sequence[Tenant], planes: Sequence[DataPlane]) -> None:
        self.limits = limits
        self.planes = planes
        self.jobs: dict[str, Job] = {}
        self.refusals: Counter[str] = Counter()
        # Why the switch takes no new job; "" while it does.
        self.draining = ""
        self._quotas = {tenant: quota_of(tenant, tenants, limits) for tenant in tenants}
        self._ids: set[int] = set()
        self._memory_bytes = 0
        self._started = 0
        # Totals of ended jobs.
        self._ended: Counter[str] = Counter()
        self._ended_drops: Counter[str] = Counter()

    def holds(self, job: Job) -> bool:
        """Whether `job` has not ended. A later job may have the same name."""
        return self.jobs.get(job.name) is job

    def check_quota(self, tenant: Tenant, size: int) -> None:
        """Raise RefusedError where `tenant` may not have one more job, with `size` workers at this switch."""
        if self.draining:
            raise RefusedError("draining", f"the switch is shutting down: {self.draining}")
        quota, own = self._quotas[tenant], self._jobs_of(tenant)
        if len(own) >= quota.jobs:
            raise RefusedError("full", f"this switch is full: it serves {quota.jobs} jobs (--max-jobs){_for(tenant)}")
        if sum(job.size for job in own) + size > quota.connections:
            raise RefusedError("full", f"this switch is full: it serves {quota.connections} workers{_for(tenant)}")
        if size > self.limits.workers:
            raise RefusedError(
                "bound",
                f"a job has at most {self.limits.workers} workers here (--max-workers), not {size}; several switches "
                "below this one (--parent) take more",
            )

    def available(self, tenant: Tenant) -> dict[str, int]:
        """Return what `tenant` could still get; slots: -1 where the tenant has no bound on them."""
        quota, own = self._quotas[tenant], self._jobs_of(tenant)
        return {
            "jobs": quota.jobs - len(own),
            "workers": min(self.limits.workers, quota.connections - sum(job.size for job in own)),
            "memory_bytes": quota.memory_bytes - sum(job.memory_bytes for job in own),
            "slots": -1 if quota.slots is None else quota.slots - sum(job.slots for job in own),
        }

    def draw_id(self) -> int:
        """Draw a job id that no job of this switch has; never 0."""
        while (drawn := secrets.randbelow(0xFFFFFFFE) + 1) in self._ids:
            pass
        return drawn

    def least_loaded_plane(self) -> DataPlane:
        """Return the data plane with the fewest jobs, so a group with two jobs on this switch gets two threads."""
        return min(self.planes, key=lambda each: sum(job.plane is each for job in self.jobs.values()))

    def add(self, job: Job) -> None:
        self.jobs[job.name] = job
        job.memory_bytes = job.buffer_bytes
        self._memory_bytes += job.memory_bytes
        self._ids.add(job.id)

    def fitting_window(self, job: Job, payload: int) -> int:
        """Return the largest window, in chunks, that the quota can hold.

        Raises RefusedError where that is below MIN_WINDOW_CHUNKS.
        """
        quota, own = self._quotas[job.tenant], self._jobs_of(job.tenant)
        free_bytes = (
            quota.memory_bytes - job.buffer_bytes - sum(other.memory_bytes for other in own if other is not job)
        )
        free_slots = None if quota.slots is None else quota.slots - sum(other.slots for other in own)
        has_parent = job.link is not None
        window = fitting_window(job.size, payload, job.window_bytes, free_bytes, free_slots, has_parent, job.encrypts)
        if window == 0:
            least = protocol.job_memory_bytes(job.size, MIN_WINDOW_CHUNKS, payload, has_parent, job.encrypts)
            raise RefusedError(
                "full",
                f"this switch is full: the job needs {least / 2**20:.1f} MiB and {2 * MIN_WINDOW_CHUNKS} slots at "
                f"least, {free_bytes / 2**20:.1f} of {quota.memory_bytes / 2**20:.1f} MiB"
                + ("" if quota.slots is None else f" and {free_slots} of {quota.slots} slots")
                + f" are free (--memory){_for(job.tenant)}",
            )
        return window

    def grant(self, job: Job, window: int, payload: int) -> None:
        slots = protocol.job_memory_bytes(job.size, window, payload, job.link is not None, job.encrypts)
        memory = job.buffer_bytes + slots
        self._memory_bytes += memory - job.memory_bytes
        job.memory_bytes = memory
        job.slots = protocol.job_slots(window)

    def started(self, job: Job, epoch: int) -> None:
        job.started = True
        job.epoch = epoch
        self._started += 1

    def remove(self, job: Job) -> dict[str, Any] | None:
        """Release everything; return the job's counters, or None where the data plane no longer has the job."""
        counters = job.counters()
        job.plane.close(job.id)
        if job.pipeline is not None:
            with contextlib.suppress(PipelineError):  # a pipeline that is gone holds nothing
                job.pipeline.remove(job.id)
        del self.jobs[job.name]
        self._ids.discard(job.id)
        self._memory_bytes -= job.memory_bytes
        if counters is not None:
            self._ended.update({name: counters[name] for name in _TOTALS})
            self._ended_drops.update(counters["drops"])
        return counters

    def status(self, counters: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        """Return all jobs and tenants as plain values.

        counters: by job id; a job that was just opened has none, and is left out.
        """
        jobs = [_job_status(job, counters[job.id]) for job in self.jobs.values() if job.id in counters]
        drops = self._ended_drops.copy()
        totals = self._ended.copy()
        for counted in (job["counters"] for job in jobs):
            drops.update(counted["drops"])
            totals.update({name: counted[name] for name in _TOTALS})
        return {
            "memory_granted_bytes": self._memory_bytes,
            "memory_free_bytes": self.limits.memory_bytes - self._memory_bytes,
            "jobs_limit": self.limits.jobs,
            "jobs_started": self._started,
            "refusals": dict(self.refusals),
            "totals": {**{name: totals[name] for name in _TOTALS}, "drops": dict(drops)},
            "tenants": [self._tenant_status(tenant, quota) for tenant, quota in self._quotas.items()],
            "jobs": jobs,
        }

    def _tenant_status(self, tenant: Tenant, quota: Quota) -> dict[str, Any]:
        own = self._jobs_of(tenant)
        granted_bytes = sum(job.memory_bytes for job in own)
        return {
            "name": tenant.name,
            "jobs": len(own),
            "memory_granted_bytes": granted_bytes,
            "memory_free_bytes": quota.memory_bytes - granted_bytes,
        }

    def _jobs_of(self, tenant: Tenant) -> list[Job]:
        return [job for job in self.jobs.values() if job.tenant == tenant]


def retransmissions(counters: dict[str, Any]) -> int:
    """Count contributions that came again: answered from the kept result, or dropped as duplicates."""
    drops = counters["drops"]
    return int(counters["results_resent"] + drops["duplicate"] + drops["stale"])


def _job_status(job: Job, counters: dict[str, Any]) -> dict[str, Any]:
    lags = zip(
        job.position.contributors,
        counters["arrivals"],
        counters["arrival_lag_ns"],
        counters["last_arrivals"],
        strict=True,
    )
    return {
        "id": f"{job.id:08x}",
        "name": job.label,
        "tenant": job.tenant.name,
        "state": "running" if job.started else "assembling",
        "size": job.size,
        "joined": len(job.members),
        "parent": None if job.link is None else job.link.parent.endpoint,
        "epoch": job.epoch,
        "port": job.port,
        "fabric": None if job.fabric is None else job.fabric["provider"],
        "age_s": time.monotonic() - job.created,
        "memory_bytes": job.memory_bytes,
        "capacity_bytes_per_s": job.capacity_bytes_per_s,
        "retransmissions": retransmissions(counters),
        "counters": counters,
        "ranks": [
            # A switch is named by the lowest rank below it.
            {
                "rank": each.rank,
                "ranks_below": 0 if each.switch is None else each.workers,
                "arrivals": arrivals,
                "lag_s": lag_ns / 1e9,
                "last": last,
            }
            for each, arrivals, lag_ns, last in lags
        ],
    }


def _for(tenant: Tenant) -> str:
    """Name the tenant whose quota a bound is; "" on a switch without tenants."""
    return "" if tenant is DEFAULT_TENANT else f"; that is the quota of {tenant.name}"
