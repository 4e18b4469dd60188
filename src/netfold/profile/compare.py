"""Two runs beside one another: hvprof's table, in which a loss is shown as a loss.

A difference can be noise. What is tested is whether a run's own variation explains it, by permutation: with the labels
A and B shuffled, how often would the means be as far apart as they are? Neighbours in time resemble each other, so that
what is shuffled are not single operations but the means of up to 32 stretches of the run (batch means): of steps, where
both runs have them, else of a row's operations. One time in twenty is the limit; fewer than four stretches with
anything in them can never be under it, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netfold.profile.analyse import submissions, title_of
from netfold.profile.columns import Bools, Floats, columns_of
from netfold.profile.findings import BUCKETS, submissions_text
from netfold.profile.matching import match
from netfold.profile.run import Run, Trace
from netfold.profile.summary import RowIndex, assign_rows, sized

_STRETCHES = 32
_LEAST_STRETCHES = 4
_SHUFFLES = 1999
_LIMIT = 0.05


@dataclass(frozen=True)
class Change:
    """One operation in one bucket of sizes, or, with no operation, all of them.

    a_s, b_s: a rank's total time (Row.total_s); counts: a rank's operations in A and in B; steps: of A and of B, None
    where one of them has none. within_noise: the runs' own variation explains the difference; None where there is too
    little to tell, or where, without steps, the numbers of operations differ. submitted_only: as Row has it, and of all
    operations together where A or B has such; nothing is then said of which is faster. A row's a_s and b_s are then
    None, as is the total of a run with nothing else.
    """

    operation: str | None
    above_bytes: int
    to_bytes: int | None
    a_s: float | None
    b_s: float | None
    counts: tuple[float, float]
    steps: tuple[int, int] | None
    within_noise: bool | None
    submitted_only: bool = False

    @property
    def name(self) -> str:
        """As a table has it."""
        if self.operation is None:
            return "total"
        return f"{self.operation} (submitted)" if self.submitted_only else self.operation

    @property
    def improvement(self) -> float | None:
        """In percent of A's time, negative where B takes longer; None where A has nothing of it, or not timed."""
        return _improvement(self.a_s, self.b_s) if not self.submitted_only else None

    @property
    def per_step_s(self) -> tuple[float, float] | None:
        if self.steps is None or self.a_s is None or self.b_s is None:
            return None
        return self.a_s / self.steps[0], self.b_s / self.steps[1]

    @property
    def improvement_per_step(self) -> float | None:
        return None if self.per_step_s is None or self.submitted_only else _improvement(*self.per_step_s)

    @property
    def verdict(self) -> str:
        """`faster`, `SLOWER`, `within noise`, `only in A`, `only in B`, for equal times `same`, or `not timed`; by the
        step where there are steps."""
        if self.submitted_only or self.a_s is None or self.b_s is None:
            return "not timed"
        if self.a_s <= 0 or self.b_s <= 0:
            return "only in A" if self.b_s <= 0 < self.a_s else "only in B" if self.b_s > 0 else "same"
        if self.within_noise:
            return "within noise"
        judged = self.improvement if self.steps is None else self.improvement_per_step
        assert judged is not None
        return "faster" if judged > 0 else "SLOWER" if judged < 0 else "same"


@dataclass(frozen=True)
class Comparison:
    """rows: by operation, sizes ascending; total: of all of them; notes: what the two do not have in common."""

    a_title: str
    b_title: str
    rows: list[Change]
    total: Change
    notes: list[str]


@dataclass(frozen=True)
class _Side:
    """One run by rows, as `RowIndex` has them. total_s, count: a rank's; series: [n] in the order of time, a step's or
    an operation's time. Of submissions there is the count alone."""

    total_s: dict[tuple[str, int, bool], float]
    count: dict[tuple[str, int, bool], float]
    series: dict[tuple[str, int, bool], Floats]

    @property
    def submitted(self) -> bool:
        return any(submitted for _, _, submitted in self.count)

    @property
    def whole_s(self) -> float | None:
        """Of all that is timed; None where there are submissions alone."""
        return sum(self.total_s.values()) if self.total_s or not self.submitted else None


def compare(a: Run, b: Run, buckets: Sequence[int] = BUCKETS) -> Comparison:
    """buckets: as in `analyse`. The same two runs always compare alike: shuffles are seeded."""
    steps = (_steps(a), _steps(b))
    by_step = min(steps) > 0
    first, second = _side(a, buckets, by_step), _side(b, buckets, by_step)
    keys = sorted(first.count.keys() | second.count.keys())
    rng = np.random.default_rng(0)
    rows, chances = [], []
    for key in keys:
        counts = (first.count.get(key, 0.0), second.count.get(key, 0.0))
        chance = None
        if key in first.series and key in second.series and (by_step or counts[0] == counts[1]):
            chance = _shuffled(first.series[key], second.series[key], rng)
        chances.append(None if chance is None else chance * (1 if by_step else counts[0]))
        rows.append(_change(key, buckets, first, second, counts, steps if by_step else None, _is_noise(chance)))
    if by_step:
        whole = [np.sum(list(side.series.values()), axis=0) if side.series else np.zeros(0) for side in (first, second)]
        chance = _shuffled(whole[0], whole[1], rng)
    else:
        known = [each for each in chances if each is not None]
        chance = np.sum(known, axis=0) if known and len(known) == len(chances) else None
    total = Change(
        None,
        0,
        None,
        first.whole_s,
        second.whole_s,
        (sum(first.count.values()), sum(second.count.values())),
        steps if by_step else None,
        _is_noise(chance),
        first.submitted or second.submitted,
    )
    return Comparison(title_of(a), title_of(b), rows, total, _notes(a, b, steps))


def _improvement(a: float | None, b: float | None) -> float | None:
    return 100 * (a - b) / a if a is not None and b is not None and a > 0 else None


def _change(
    key: tuple[str, int, bool],
    buckets: Sequence[int],
    first: _Side,
    second: _Side,
    counts: tuple[float, float],
    steps: tuple[int, int] | None,
    within_noise: bool | None,
) -> Change:
    name, bucket, submitted = key
    return Change(
        operation=name,
        above_bytes=buckets[bucket - 1] if bucket else 0,
        to_bytes=buckets[bucket] if bucket < len(buckets) else None,
        a_s=None if submitted else first.total_s.get(key, 0.0),
        b_s=None if submitted else second.total_s.get(key, 0.0),
        counts=counts,
        steps=steps,
        within_noise=within_noise,
        submitted_only=submitted,
    )


def _steps(run: Run) -> int:
    """The fewest that a rank has; those beyond are in no sample."""
    return min((len(trace.steps) for trace in run.traces), default=0)


def _side(run: Run, buckets: Sequence[int], by_step: bool) -> _Side:
    columns = columns_of(run)
    places = assign_rows(sized(columns, match(run, columns).groups), buckets)
    total, count, series = {}, {}, {}
    ranks, steps = len(run.traces), _steps(run)
    for index, key in enumerate(places.keys):
        times = _times(run, places, index)
        count[key] = sum(map(len, times)) / ranks
        if key[2]:
            continue
        total[key] = sum(float(time.sum()) for time in times) / ranks
        if by_step:
            series[key] = np.mean(
                [
                    _of_steps(trace, of_trace == index, steps)
                    for trace, of_trace in zip(run.traces, places.of_trace, strict=True)
                ],
                axis=0,
            )
        elif len({len(time) for time in times}) == 1:
            series[key] = np.mean(times, axis=0)
    return _Side(total, count, series)


def _times(run: Run, places: RowIndex, index: int) -> list[Floats]:
    """[n] seconds a trace, in the order in which operations started."""
    found = []
    for trace, of_trace in zip(run.traces, places.of_trace, strict=True):
        mine = trace.operations[of_trace == index]
        mine = mine[np.argsort(mine["started_ns"], kind="stable")]
        found.append((mine["finished_ns"] - mine["started_ns"]) / 1e9)
    return found


def _of_steps(trace: Trace, mine: Bools, steps: int) -> Floats:
    """[steps] seconds: each operation counts in the step in which it started; outside of steps in none."""
    records = trace.operations[mine]
    step = np.searchsorted(trace.steps["began_ns"], records["started_ns"], side="right") - 1
    inside = (step >= 0) & (step < steps)
    inside[inside] = records["started_ns"][inside] < trace.steps["ended_ns"][step[inside]]
    seconds = (records["finished_ns"] - records["started_ns"])[inside] / 1e9
    return np.bincount(step[inside], seconds, minlength=steps).astype(np.float64)


def _shuffled(a: Floats, b: Floats, rng: np.random.Generator) -> Floats | None:
    """[1 + shuffles]: mean(B) - mean(A), as it is and with the stretches' labels shuffled."""
    stretches = [_stretches(each) for each in (a, b)]
    if min(np.count_nonzero(each) for each in stretches) < _LEAST_STRETCHES:
        return None
    together = np.concatenate(stretches)
    split = len(stretches[0])
    orders = rng.permuted(np.tile(np.arange(len(together)), (_SHUFFLES, 1)), axis=1)
    values = together[np.concatenate([[np.arange(len(together))], orders])]
    differences: Floats = values[:, split:].mean(axis=1) - values[:, :split].mean(axis=1)
    return differences


def _stretches(series: Floats) -> Floats:
    parts = np.array_split(series, min(len(series), _STRETCHES)) if len(series) else []
    return np.array([part.mean() for part in parts])


def _is_noise(chance: Floats | None) -> bool | None:
    if chance is None:
        return None
    # Shuffles that give the same means by another order of adding are as far apart, not less.
    as_far = np.abs(chance) >= np.abs(chance[0]) * (1 - 1e-9)
    return bool(as_far.mean() > _LIMIT)


def _notes(a: Run, b: Run, steps: tuple[int, int]) -> list[str]:
    texts = [(name, submissions_text(submissions(run))) for name, run in (("A", a), ("B", b))]
    notes = [f"{name}: {text}" for name, text in texts if text]
    if min(steps) > 0 and steps[0] != steps[1]:
        notes.append(f"A has {steps[0]} steps, B {steps[1]}: what is faster is said of a step, not of the totals")
    if (steps[0] > 0) != (steps[1] > 0):
        notes.append(
            f"only {'A' if steps[0] else 'B'} says what a step is: totals are compared, whatever was done in them"
        )
    sizes = [{trace.metadata.size for trace in run.traces} for run in (a, b)]
    if sizes[0] != sizes[1]:
        said = [" and ".join(map(str, sorted(size))) for size in sizes]
        notes.append(f"A is of {said[0]} ranks, B of {said[1]}")
    sources = [{trace.metadata.source for trace in run.traces} for run in (a, b)]
    if sources[0] != sources[1]:
        said = [" and ".join(sorted(source)) for source in sources]
        notes.append(f"A's times are of {said[0]}, B's of {said[1]}, which may count different things")
    return notes
