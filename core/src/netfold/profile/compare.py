"""Compare two runs: hvprof's table, in which a loss is shown as a loss.

A difference can be noise. A permutation test asks whether a run's own variation explains the difference: with the
labels A and B shuffled, how often are the means as far apart as they are? Neighbours in time resemble each other, so
the test shuffles not single operations but the means of up to 32 stretches of the run (batch means): of steps if both
runs have steps, otherwise of a row's operations. The limit is one time in twenty. With fewer than four stretches that
have any operation the test cannot reach the limit, and there is no verdict on noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from netfold.profile.analyse import title_of
from netfold.profile.columns import Bools, Floats, columns_of, submissions
from netfold.profile.findings import BUCKETS, bucket_ends, submissions_text
from netfold.profile.matching import match
from netfold.profile.run import Run, Trace
from netfold.profile.summary import Key, assign_rows, sized

_STRETCHES = 32
_LEAST_STRETCHES = 4
_SHUFFLES = 1999
_LIMIT = 0.05


@dataclass(frozen=True)
class Change:
    """One operation in one bucket of sizes, or all operations together.

    A row with `submitted_only` has no times. If A or B has submissions, the total is `submitted_only` too and has no
    verdict; the total time of a run with submissions only is None.
    """

    operation: str | None  # None: all operations
    above_bytes: int
    to_bytes: int | None
    a_s: float | None  # a rank's total time (Row.total_s)
    b_s: float | None
    counts: tuple[float, float]  # a rank's operations in A and in B
    steps: tuple[int, int] | None  # of A and of B; None if one of them has none
    # Whether the runs' own variation explains the difference. None: too little data, or, without steps, other counts.
    within_noise: bool | None
    submitted_only: bool = False  # as in Row

    @property
    def name(self) -> str:
        """The name in a table."""
        if self.operation is None:
            return "total"
        return f"{self.operation} (submitted)" if self.submitted_only else self.operation

    @property
    def improvement(self) -> float | None:
        """In percent of A's time, negative if B takes longer; None if A has no such operation or no times."""
        return None if self.submitted_only else _improvement(self.a_s, self.b_s)

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
        """`faster`, `SLOWER`, `within noise`, `only in A`, `only in B`, `same` (equal times) or `not timed`.

        With steps, the verdict is on the time of a step.
        """
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
    """The result of `compare`."""

    a_title: str
    b_title: str
    rows: list[Change]  # by operation, sizes ascending
    total: Change
    notes: list[str]  # differences of the two runs


@dataclass(frozen=True)
class _Side:
    """One run by rows. Rows of submissions have a count only."""

    total_s: dict[Key, float]  # a rank's
    count: dict[Key, float]  # a rank's
    series: dict[Key, Floats]  # [n] in the order of time, the time of each step or of each operation

    @property
    def submitted(self) -> bool:
        return any(submitted for _, _, submitted in self.count)

    @property
    def whole_s(self) -> float | None:
        """The time of all rows; None if there are submissions only."""
        return sum(self.total_s.values()) if self.total_s or not self.submitted else None


def compare(a: Run, b: Run, buckets: Sequence[int] = BUCKETS) -> Comparison:
    """Compare two runs, whole or as `window.in_steps` cut them.

    buckets: as in `analyse`. The result is deterministic: shuffles have a fixed seed.
    """
    steps = (_steps(a), _steps(b))
    by_step = min(steps) > 0
    first, second = _side(a, buckets, by_step), _side(b, buckets, by_step)
    rng = np.random.default_rng(0)
    rows: list[Change] = []
    shuffles: list[Floats | None] = []
    for key in sorted(first.count.keys() | second.count.keys()):
        operation, bucket, submitted = key
        counts = (first.count.get(key, 0.0), second.count.get(key, 0.0))
        shuffled = None
        if key in first.series and key in second.series and (by_step or counts[0] == counts[1]):
            shuffled = _shuffled(first.series[key], second.series[key], rng)
        shuffles.append(None if shuffled is None else shuffled * (1 if by_step else counts[0]))
        a_s, b_s = (None if submitted else side.total_s.get(key, 0.0) for side in (first, second))
        ends = bucket_ends(bucket, buckets)
        noise = _is_noise(shuffled)
        rows.append(Change(operation, *ends, a_s, b_s, counts, steps if by_step else None, noise, submitted))
    whole: Floats | None = None
    if by_step:
        sums = [np.sum(list(side.series.values()), axis=0) if side.series else np.zeros(0) for side in (first, second)]
        whole = _shuffled(sums[0], sums[1], rng)
    elif shuffles and all(each is not None for each in shuffles):
        whole = np.sum([each for each in shuffles if each is not None], axis=0)
    total = Change(
        None,
        0,
        None,
        first.whole_s,
        second.whole_s,
        (sum(first.count.values()), sum(second.count.values())),
        steps if by_step else None,
        _is_noise(whole),
        first.submitted or second.submitted,
    )
    return Comparison(title_of(a), title_of(b), rows, total, _notes(a, b, steps))


def _improvement(a: float | None, b: float | None) -> float | None:
    return 100 * (a - b) / a if a is not None and b is not None and a > 0 else None


def _steps(run: Run) -> int:
    """The smallest number of steps of a rank. Steps beyond it are not used."""
    return min((len(trace.steps) for trace in run.traces), default=0)


def _side(run: Run, buckets: Sequence[int], by_step: bool) -> _Side:
    columns = columns_of(run)
    places = assign_rows(sized(columns, match(run, columns).groups), buckets)
    total, count, series = {}, {}, {}
    ranks, steps = len(run.traces), _steps(run)
    for index, key in enumerate(places.keys):
        rows = [of_trace == index for of_trace in places.of_trace]
        times = [_times(trace, selected) for trace, selected in zip(run.traces, rows, strict=True)]
        count[key] = sum(map(len, times)) / ranks
        if key[2]:
            continue
        total[key] = sum(float(time.sum()) for time in times) / ranks
        if by_step:
            of_steps = [
                _times_of_steps(trace, selected, steps) for trace, selected in zip(run.traces, rows, strict=True)
            ]
            series[key] = np.mean(of_steps, axis=0)
        elif len({len(time) for time in times}) == 1:
            series[key] = np.mean(times, axis=0)
    return _Side(total, count, series)


def _times(trace: Trace, selected: Bools) -> Floats:
    """[n] seconds of the operations `selected`, in the order of their starts."""
    records = trace.operations[selected]
    records = records[np.argsort(records["started_ns"], kind="stable")]
    times: Floats = (records["finished_ns"] - records["started_ns"]) / 1e9
    return times


def _times_of_steps(trace: Trace, selected: Bools, steps: int) -> Floats:
    """[steps] seconds. An operation counts in the step in which it started, and not at all outside of steps."""
    records = trace.operations[selected]
    step = np.searchsorted(trace.steps["began_ns"], records["started_ns"], side="right") - 1
    inside = (step >= 0) & (step < steps)
    inside[inside] = records["started_ns"][inside] < trace.steps["ended_ns"][step[inside]]
    seconds = (records["finished_ns"] - records["started_ns"])[inside] / 1e9
    return np.bincount(step[inside], seconds, minlength=steps).astype(np.float64)


def _shuffled(a: Floats, b: Floats, rng: np.random.Generator) -> Floats | None:
    """[1 + shuffles]: mean(B) - mean(A), first as measured, then with shuffled labels; None with too few stretches."""
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


def _is_noise(shuffled: Floats | None) -> bool | None:
    if shuffled is None:
        return None
    # The tolerance is for shuffles with equal means that were added in another order.
    as_far = np.abs(shuffled) >= np.abs(shuffled[0]) * (1 - 1e-9)
    return bool(as_far.mean() > _LIMIT)


def _notes(a: Run, b: Run, steps: tuple[int, int]) -> list[str]:
    texts = [(name, submissions_text(submissions(run))) for name, run in (("A", a), ("B", b))]
    notes = [f"{name}: {text}" for name, text in texts if text]
    if min(steps) > 0 and steps[0] != steps[1]:
        notes.append(f"A has {steps[0]} steps, B {steps[1]}: verdicts are on the time of a step, not on the totals")
    if (steps[0] > 0) != (steps[1] > 0):
        notes.append(f"only {'A' if steps[0] else 'B'} has steps: the totals are compared, whatever work they contain")
    one, other = (" and ".join(map(str, sorted({trace.metadata.size for trace in run.traces}))) for run in (a, b))
    if one != other:
        notes.append(f"A is of {one} ranks, B of {other}")
    one, other = (" and ".join(sorted({trace.metadata.source for trace in run.traces})) for run in (a, b))
    if one != other:
        notes.append(f"A's times are of {one}, B's of {other}, which may count different things")
    return notes
