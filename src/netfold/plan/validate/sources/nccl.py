"""nccl-tests of all_reduce within a node, as vTrain's repository has them."""

from __future__ import annotations

from collections.abc import Sequence

from netfold.plan.cluster import load_cluster
from netfold.plan.step import FITTED
from netfold.plan.step.traffic import Group, collective_s
from netfold.plan.validate.score import Compared
from netfold.plan.validate.sources.table import Case, Published

_LARGE = 16 << 20
# What is aimed at, as the band: large messages, and others.
_BANDS = 0.05, 0.15


def bus_bandwidth(rows: Sequence[Published]) -> list[Case]:
    """GB/s, as nccl-tests counts them: 2(P-1)/P of the bytes, by the time."""
    cases = []
    for row in rows:
        size, ranks = int(row.model.split()[1]), int(row.workers)
        cluster = load_cluster("dgx-1" if row.hardware == "V100" else "dgx-a100")
        seconds = collective_s("all_reduce", size, Group(ranks), cluster, FITTED)
        found = 2 * (ranks - 1) / ranks * size / seconds / 1e9
        band = _BANDS[0] if size >= _LARGE else _BANDS[1]
        name = f"all_reduce of {size} bytes, {ranks} x {row.hardware}"
        cases.append(Case(name, "GB/s", Compared(None, row.value, found, found * (1 - band), found * (1 + band))))
    return cases
