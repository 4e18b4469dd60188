"""EDSR on up to 512 V100 with three libraries: from each table's runs of 1 to 16, those of 32 and more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from netfold.plan.scaling import fit_law
from netfold.plan.validate.score import Compared
from netfold.plan.validate.sources.table import Case, Published

_KNOWN_RANKS = 16
# The table has whole images a second.
_RESOLUTION = 1.0


def throughputs(rows: Sequence[Published]) -> list[Case]:
    by_library: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row.metric == "throughput" and row.parallelism.startswith("DP"):
            by_library[row.parallelism].append((int(row.workers), row.value))
    cases = []
    for library, runs in by_library.items():
        law = fit_law([run for run in runs if run[0] <= _KNOWN_RANKS], _RESOLUTION)
        for ranks, measured in runs:
            if ranks > _KNOWN_RANKS:
                found = law.samples_per_s(ranks)
                low, high = found * (1 - law.spread), found * (1 + law.spread)
                cases.append(Case(f"{library}, {ranks}", "img/s", Compared(None, measured, found, low, high)))
    return cases
