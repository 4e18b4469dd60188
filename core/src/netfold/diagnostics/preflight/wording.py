"""Format ranks, sizes and rates."""

from __future__ import annotations

from collections.abc import Sequence

from netfold.diagnostics.preflight.facts import Facts
from netfold.units import first_few


def by_host(facts: Sequence[Facts]) -> list[tuple[Facts, list[int]]]:
    """For each host: the facts of its first rank, and all of its ranks."""
    by_boot: dict[str, list[int]] = {}
    for each in facts:
        by_boot.setdefault(each.boot, []).append(each.rank)
    return [(facts[ranks[0]], ranks) for ranks in by_boot.values()]


def listed(ranks: Sequence[int]) -> str:
    return first_few([str(rank) for rank in ranks], 8)


def size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def rate_of(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8e-6
    return f"{bits:.0f} Mbit/s" if bits < 10000 else f"{bits / 1000:.1f} Gbit/s"
