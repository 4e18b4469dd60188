"""A run with steps: its steps are counted, and neither start-up nor warm-up."""

from __future__ import annotations

import pytest
from traces import MB, Op, make_run, make_trace

from netfold.profile.analyse import analyse
from netfold.profile.compare import compare
from netfold.profile.run import Run
from netfold.profile.window import in_steps
from netfold.tuning.advice import advise


def job() -> Run:
    """Two ranks of one host. Start-up: an all_gather of 900 ms, for which rank 1 is 800 ms late. Then four steps of
    20 ms, each with an all_reduce of 10, in which rank 0 is 2 ms late; step 3 has one of 14. Last a barrier. The
    process lives for 6 s, and imports for 4 of them."""
    traces = []
    for rank in range(2):
        late = 2 if rank == 0 else 0
        ops = [Op(4000 + 800 * rank, 4900, operation="all_gather")]
        ops += [Op(5000 + 20 * step + late, 5000 + 20 * step + (14 if step == 2 else 10)) for step in range(4)]
        ops += [Op(5100 + 500 * rank, 5600, 0, operation="barrier")]
        steps = [(5000.0 + 20 * step, 5020.0 + 20 * step) for step in range(4)]
        lines = [(0.0, 0.0), (4000.0, 4000.0), *((5000.0 + 5 * k, 4000.0) for k in range(20)), (6000.0, 4000.0)]
        traces.append(make_trace(rank, 2, ops, host="a", steps_ms=steps, progress_ms=lines))
    return make_run(*traces)


def test_start_up_and_the_end_are_in_no_number_and_blame_no_rank() -> None:
    run = in_steps(job())
    found = advise(run, analyse(run))
    (row,) = found.rows
    assert (row.operation, row.count, row.share) == ("all_reduce", 4, 1.0)
    # Of 80 ms of steps: 44 on rank 1, 36 on rank 0, which begins 2 ms late each time.
    assert found.overall.wall_s == pytest.approx(0.080)
    assert found.overall.communication_s == pytest.approx(0.040)
    assert found.overall.exposed_s == pytest.approx(0.040)
    assert [each.waited_for_s for each in found.stragglers] == pytest.approx([0.008, 0.0])
    assert found.coverage_gaps[0].startswith("4 operations of all ranks were submitted outside of the steps")
    assert all("rank 1" not in each.text for each in found.advice)


def test_a_range_of_steps_counts_these_alone() -> None:
    run = in_steps(job(), "3..3")
    found = analyse(run)
    assert [(row.count, row.total_s) for row in found.rows] == [(1, pytest.approx(0.013))]
    assert found.steps is not None and found.steps.count == 1
    assert found.coverage_gaps[0].startswith("10 operations of all ranks were submitted outside of steps 3..3")
    assert found.overall.exposed_s == pytest.approx(0.013), "the thread was watched around the step"
    assert in_steps(job(), "2..9").traces[0].operations.size == 3


def test_all_counts_the_whole_run_and_a_run_without_steps_is_whole() -> None:
    everything = analyse(in_steps(job(), "all"))
    assert {row.operation for row in everything.rows} == {"all_reduce", "all_gather", "barrier"}
    # From the first operation to the last one: imports are no training.
    assert everything.overall.wall_s == pytest.approx((1.6 + 0.8) / 2, rel=0.4)
    bare = make_run(make_trace(0, 1, [Op(0, 1, MB)]))
    assert in_steps(bare) is bare and analyse(in_steps(bare)).coverage_gaps == analyse(bare).coverage_gaps


@pytest.mark.parametrize("text", ["5..3", "0..2", "3", "-1..2", "two..3", "7..9"])
def test_a_range_that_names_no_step_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--steps (takes a range as 10\.\.200, or all|7\.\.9: the run has 4 steps)"):
        in_steps(job(), text)


def test_runs_are_compared_by_their_steps() -> None:
    changes = compare(in_steps(job()), in_steps(job(), "1..2"))
    assert [(each.operation, each.counts) for each in changes.rows] == [("all_reduce", (4.0, 2.0))]
