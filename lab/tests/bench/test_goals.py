"""Goals, verdicts and the report, without a worker."""

import dataclasses
import json

import pytest

from netfold_lab.bench.config import BenchEnvironment, Measured, SizeResult, Trials
from netfold_lab.bench.goals import MB, MPIS, SECTIONS, Goal, all_goals, places, trials_at
from netfold_lab.bench.link_probe import LinkMeasurement, lower_bound_s
from netfold_lab.bench.report import Row, make_rows
from netfold_lab.bench.rules import evaluate_goal, render_verdicts, unmeasured
from netfold_lab.bench.suite import Section, render_markdown

PLACE = BenchEnvironment(2, switch=False)
GOAL = Goal("all-reduce", PLACE, "all_reduce", MB, "netfold", ("mpi:openmpi", "mpi:mpich"), 1.3)


def rows(**times_ms: list[float]) -> dict[str, Row]:
    """Rows of one trial, from each backend's rounds; `_` in a name stands for `:`."""
    backends = [name.replace("_", ":") for name in times_ms]
    measured = [Measured([round(t * 1e6) for t in times], wrong=0) for times in times_ms.values()]
    result = [SizeResult(MB, MB // 4, measured)]
    return {row.backend: row for row in make_rows(PLACE, Trials("all_reduce", backends, [MB]), result)}


@pytest.mark.parametrize("quick", [True, False])
def test_every_section_has_goals_or_measurements_of_its_own(quick: bool) -> None:
    assert {goal.section for goal in all_goals(quick)} | {"waiting", "ddp"} == set(SECTIONS)


def asked(section: str, **what: object) -> list[float | None]:
    matching = [
        goal
        for goal in all_goals(quick=False)
        if goal.section == section and all(getattr(goal, name) == value for name, value in what.items())
    ]
    return [goal.at_least for goal in matching]


def test_the_goals_equal_the_documented_goals() -> None:
    assert asked("all-reduce", size_bytes=64 * MB, peers=("gloo",)) == [4.0, 4.0, None]
    assert asked("all-reduce", size_bytes=64 * MB, peers=MPIS) == [1.3, 1.3, 0.9]
    assert asked("all-reduce", size_bytes=MB, ours="netfold") == [4.0, 4.0, None]
    assert asked("all-reduce", size_bytes=MB, ours="communicator") == [0.9, 0.9, None]
    assert asked("shared") == [2.5, 2.5, 2.5]
    assert asked("small", ours="netfold")[0] == 5.0
    assert asked("small", peers=("mpi:openmpi",))[0] == pytest.approx(1 / 3)
    assert set(asked("collectives")) == {2.5} and len(asked("collectives")) == 16
    assert asked("messages") == [4.0, 2.0, 1.0]
    assert asked("hosts", size_bytes=MB) == [1 / 1.10] and asked("hosts", size_bytes=16 * MB) == [1 / 1.05]
    assert asked("in-network", size_bytes=16 * MB) == [1.35, 1.35]


def test_a_trial_is_run_once_for_all_goals_that_share_it_and_without_absent_backends() -> None:
    goals = all_goals(quick=True)
    for place in places(goals):
        trials = trials_at(place, goals, quick=True, missing=("mpi:intel", "mpi:intel:out"))
        assert len({(one.collective, one.sizes[0]) for one in trials}) == len(trials)
        assert not any("mpi:intel" in one.backends for one in trials)
    (large,) = [one for one in trials_at(PLACE_OF_TWO, goals, quick=True) if one.collective == "all_reduce"][:1]
    assert large.backends == ["netfold", "gloo", *MPIS, "netfold:shared"]


PLACE_OF_TWO = next(goal.place for goal in all_goals(quick=True) if goal.place.workers == 2)


def test_goals_compare_with_the_best_peer_by_ratios_paired_by_round() -> None:
    verdict = evaluate_goal(GOAL, rows(netfold=[1, 2, 1], mpi_openmpi=[9, 9, 9], mpi_mpich=[1.5, 3, 1.5]))
    assert (verdict.peer, verdict.met) == ("mpi:mpich", True)
    assert verdict.ratio.startswith("1.50 (1.50..1.50")


def test_a_missed_goal_is_marked() -> None:
    verdict = evaluate_goal(GOAL, rows(netfold=[1, 1], mpi_openmpi=[1.29, 1.29]))
    assert verdict.met is False
    assert "**missed**" in render_verdicts([verdict])[-1]


def test_a_goal_without_a_number_is_only_reported() -> None:
    verdict = evaluate_goal(dataclasses.replace(GOAL, at_least=None), rows(netfold=[1], mpi_openmpi=[0.1]))
    assert verdict.met is None and verdict.goal == "-"


def test_an_unmeasured_goal_has_its_reason_in_one_table_line() -> None:
    refused = rows(netfold=[1], mpi_mpich=[1])
    refused["netfold"] = dataclasses.replace(refused["netfold"], time_ns=None, refused="not | yet\nmore")
    lines = render_verdicts(
        [evaluate_goal(GOAL, refused), evaluate_goal(GOAL, rows(netfold=[1])), unmeasured(GOAL, "no rack")]
    )
    assert "not / yet" in lines[2] and "no peer of mpi:openmpi, mpi:mpich is here" in lines[3] and "no rack" in lines[4]
    assert len({line.count("|") for line in lines}) == 1


def test_the_alpha_beta_limit_has_log_p_steps_and_the_fewest_bytes() -> None:
    wire = LinkMeasurement(round_trip_s=100e-6, rate_bits=10**9, mss=1448, stream_bits=0)
    # 2 log2(4) steps of 50 us; 1.5 bytes per byte at 1448 of every 1514 bytes.
    assert lower_bound_s(wire, "all_reduce", 10**6, 4) == pytest.approx(4 * 50e-6 + 1.5e6 * 8 / 1e9 * 1514 / 1448)
    assert lower_bound_s(wire, "all_gather", 10**6, 4) == pytest.approx(2 * 50e-6 + 0.75e6 * 8 / 1e9 * 1514 / 1448)
    against = dataclasses.replace(GOAL, against_limit=True, at_least=1 / 1.1)
    assert evaluate_goal(against, rows(netfold=[10.9, 10.9]), limit_s=10e-3).met is True
    assert evaluate_goal(against, rows(netfold=[11.1, 11.1]), limit_s=10e-3).met is False


def test_a_report_is_rendered_from_its_json_alone() -> None:
    section = Section([evaluate_goal(GOAL, rows(netfold=[1], mpi_mpich=[2]))], ["a note\nand its rest"], [], 0)
    whole = json.loads(json.dumps({"all-reduce": dataclasses.asdict(section)}))
    markdown = render_markdown(whole)
    assert "## all-reduce" in markdown and "| met |" in markdown and "- a note\n" in markdown
