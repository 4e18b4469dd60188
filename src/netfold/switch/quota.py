"""How a switch is divided: each tenant has a part of everything, by weight; what a job takes comes out of that part.

A part is there for its tenant whatever the others do: memory that was granted is never taken back, so what is lent
today is missing tomorrow. A tenant alone on a switch has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from netfold._native import protocol
from netfold.switch.tokens import Tenant


@dataclass(frozen=True)
class Limits:
    """What a switch grants in all. Past a bound a job is refused, with the bound in the reason."""

    jobs: int = 64
    workers: int = protocol.MAX_WORKERS  # of one job
    memory_bytes: int = 1 << 30
    window_bytes: int = 1 << 20  # in flight from one worker
    connections: int = 4096


@dataclass(frozen=True)
class Quota:
    """What one tenant's jobs may have together. slots: None for as many as the memory holds."""

    jobs: int
    connections: int
    memory_bytes: int
    slots: int | None


def quota_of(tenant: Tenant, tenants: Sequence[Tenant], limits: Limits) -> Quota:
    """What `tenant`, one of `tenants`, gets of `limits` by its weight, within its bounds; ValueError for nothing."""
    total = sum(each.weight for each in tenants)

    def share(whole: int) -> int:
        return whole * tenant.weight // total

    memory_bytes = share(limits.memory_bytes)
    if tenant.memory_bytes is not None:
        memory_bytes = min(memory_bytes, tenant.memory_bytes)
    part = Quota(share(limits.jobs), share(limits.connections), memory_bytes, tenant.slots)
    if not (part.jobs and part.connections and part.memory_bytes):
        raise ValueError(
            f"{tenant.name}'s part, {tenant.weight} of {total}, is {part.jobs} jobs, {part.connections} connections and"
            f" {part.memory_bytes} bytes: raise its weight, --max-jobs or --memory"
        )
    return part


def fitting_window(
    workers: int,
    payload_bytes: int,
    window_bytes: int,
    memory_bytes: int,
    slots: int | None,
    least: int,
    has_parent: bool = False,
    encrypts: bool = False,
) -> int:
    """Chunks in flight from a worker: as many as fill `window_bytes`, fewer where memory or slots are short.

    memory_bytes, slots: what is left. 0 where not even `least` fit. Slots come in powers of two, so where they are
    short the window is half of one.
    """

    def fits(window: int) -> bool:
        memory = protocol.job_memory_bytes(workers, window, payload_bytes, has_parent, encrypts)
        return bool(memory <= memory_bytes and (slots is None or protocol.job_slots(window) <= slots))

    window: int = max(least, window_bytes // (payload_bytes + protocol.HEADER_BYTES))
    if fits(window):
        return window
    window = 1 << window.bit_length() - 1
    while window >= least and not fits(window):
        window //= 2
    return window if window >= least else 0
