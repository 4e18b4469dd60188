"""Divide a switch among its tenants: each has a quota of everything, by weight, and its jobs draw on that quota.

A quota is reserved for its tenant, even while it is idle: memory that was granted to a job cannot be taken back, so
another tenant cannot borrow it. The only tenant of a switch has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold._native import protocol
from netfold.switch.tokens import Tenant
from netfold.switch_protocol.data_path import MIN_WINDOW_CHUNKS, window_chunks


@dataclass(frozen=True)
class Limits:
    """The bounds of a whole switch. A job beyond one is refused, and the refusal names the bound."""

    jobs: int = 64
    workers: int = protocol.MAX_WORKERS  # of one job
    memory_bytes: int = 1 << 30
    window_bytes: int = 1 << 20  # in flight from one worker
    connections: int = 4096


@dataclass(frozen=True)
class Quota:
    """The limits of all jobs of one tenant together.

    slots: None for as many as the memory holds.
    """

    jobs: int
    connections: int
    memory_bytes: int
    slots: int | None


def quota_of(tenant: Tenant, tenants: Sequence[Tenant], limits: Limits) -> Quota:
    """Return the quota of `tenant`, one of `tenants`: its share by weight, within its own bounds.

    Raises ValueError where any of it is 0.
    """
    total = sum(each.weight for each in tenants)

    def share(whole: int) -> int:
        return whole * tenant.weight // total

    memory_bytes = share(limits.memory_bytes)
    if tenant.memory_bytes is not None:
        memory_bytes = min(memory_bytes, tenant.memory_bytes)
    quota = Quota(share(limits.jobs), share(limits.connections), memory_bytes, tenant.slots)
    if not (quota.jobs and quota.connections and quota.memory_bytes):
        raise ValueError(
            f"{tenant.name}'s quota, {tenant.weight} of {total}, is {quota.jobs} jobs, {quota.connections} connections "
            f"and {quota.memory_bytes} bytes: raise its weight, --max-jobs or --memory"
        )
    return quota


def fitting_window(
    workers: int,
    payload_bytes: int,
    window_bytes: int,
    memory_bytes: int,
    slots: int | None,
    has_parent: bool = False,
    encrypts: bool = False,
) -> int:
    """Return the chunks that a worker may have in flight; 0 where not even MIN_WINDOW_CHUNKS fit.

    The window fills `window_bytes`; it is smaller where memory or slots are short. It is then half a power of two,
    since slots are allocated in powers of two.
    memory_bytes, slots: what is free.
    """

    def fits(window: int) -> bool:
        memory = protocol.job_memory_bytes(workers, window, payload_bytes, has_parent, encrypts)
        return bool(memory <= memory_bytes and (slots is None or protocol.job_slots(window) <= slots))

    window = window_chunks(window_bytes, payload_bytes)
    if fits(window):
        return window
    window = 1 << window.bit_length() - 1
    while window >= MIN_WINDOW_CHUNKS and not fits(window):
        window //= 2
    return window if window >= MIN_WINDOW_CHUNKS else 0
