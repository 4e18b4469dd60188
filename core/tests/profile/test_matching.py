"""Matching of the records of different ranks to operations, and records without a match."""

from __future__ import annotations

from dataclasses import replace

from traces import EVENTS, PROFILER, Op, Trace, make_run, make_trace

from netfold.profile.columns import columns_of
from netfold.profile.matching import Matching, match, synchronising_operations


def matched(*traces: Trace) -> Matching:
    run = make_run(*traces)
    return match(run, columns_of(run))


def places(matching: Matching) -> list[list[list[int]]]:
    return [group.places.tolist() for group in matching.groups]


def test_sequence_numbers_match_operations_in_any_order_of_completion() -> None:
    one = make_trace(0, 2, [Op(0, 9, sequence=1), Op(1, 5, sequence=2)])
    other = make_trace(1, 2, [Op(1, 5, sequence=2), Op(0, 9, sequence=1)])
    found = matched(one, other)
    assert places(found) == [[[0, 1], [1, 0]]]
    assert not found.left_out


def test_records_of_only_some_ranks_are_left_out_and_counted() -> None:
    one = make_trace(0, 2, [Op(0, 1, sequence=1), Op(1, 2, sequence=2), Op(2, 3, sequence=4)])
    other = make_trace(1, 2, [Op(1, 2, sequence=2), Op(2, 3, sequence=3)])
    found = matched(one, other)
    assert places(found) == [[[1, 0]]]
    assert found.left_out == {"that not all ranks of the group have": 3}


def test_a_repeated_sequence_number_matches_nothing() -> None:
    one = make_trace(0, 2, [Op(0, 1), Op(1, 2, operation="broadcast")])
    other = make_trace(1, 2, [Op(0, 1), Op(1, 2, operation="all_reduce")])
    assert places(matched(one, other)) == [[[0, 0]]]
    twice = make_trace(1, 2, [Op(0, 1, sequence=1), Op(1, 2, sequence=1)])
    found = matched(one, twice)
    assert places(found) == [[]]
    assert found.left_out == {"that not all ranks of the group have": 4}


def test_groups_match_by_name_and_need_records_of_all_ranks() -> None:
    groups = {"world": range(3), "pair": [0, 1]}
    both = [Op(0, 1), Op(1, 2, group="pair"), Op(2, 3)]
    one = make_trace(0, 3, both, groups=groups)
    other = make_trace(1, 3, both, groups=dict(reversed(groups.items())))
    assert {int(number) for number in one.metadata.groups} & {int(number) for number in other.metadata.groups} == set()
    found = matched(one, other)
    assert [group.group.name for group in found.groups] == ["pair"]
    assert places(found) == [[[1, 1]]]
    assert found.left_out == {"of a group in which a rank left no records": 4}


def test_groups_of_one_name_and_different_ranks_are_different_and_of_unknown_ranks_none() -> None:
    """All rows of a mesh have the name of the mesh, and "one of several groups" does not tell which."""
    rows = [{"row": [0, 1]}, {"row": [0, 1]}, {"row": [2, 3]}, {"row": [2, 3]}]
    found = matched(*(make_trace(rank, 4, [Op(0, 1, group="row")], groups=row) for rank, row in enumerate(rows)))
    assert [(group.group.ranks, group.members) for group in found.groups] == [((0, 1), (0, 1)), ((2, 3), (2, 3))]
    assert places(found) == [[[0, 0]], [[0, 0]]]
    unknown = matched(*(make_trace(rank, 2, [Op(0, 1)], groups={"world": []}) for rank in (0, 1)))
    assert not unknown.groups
    assert unknown.left_out == {"of a group whose ranks are not known": 2}


def test_a_rank_with_records_of_both_kinds_has_those_of_netfolds_groups_matched_by_number() -> None:
    """In order the second number of rank 0 would meet the first of rank 1."""
    groups = {"world": [0, 1], "other": [0, 1]}
    ops = [[Op(0, 1, sequence=1), Op(2, 3, sequence=2)], [Op(0, 1, sequence=2), Op(2, 3, sequence=1)]]
    traces = []
    for rank, mine in enumerate(ops):
        trace = make_trace(rank, 2, [*mine, Op(4, 5, group="other")], groups=groups)
        named = {
            number: replace(group, backend="gloo") if group.name == "other" else group
            for number, group in trace.metadata.groups.items()
        }
        about = replace(trace.metadata, source=f"{EVENTS} and {PROFILER}", groups=named)
        traces.append(Trace(about, trace.operations, trace.steps, trace.progress))
    found = matched(*traces)
    assert places(found) == [[[0, 1], [1, 0]], [[2, 2]]]


def test_the_profilers_records_match_by_order_where_counts_agree() -> None:
    one = [Op(0, 1, 4), Op(1, 2, 8), Op(2, 3, 4), Op(3, 4, 16)]
    other = [Op(0, 1, 8), Op(1, 2, 4), Op(2, 3, 4), Op(3, 4, 16), Op(4, 5, 16)]
    found = matched(make_trace(0, 2, one, source=PROFILER), make_trace(1, 2, other, source=PROFILER))
    assert places(found) == [[[0, 1], [1, 0], [2, 2]]]
    assert found.left_out == {"that not all ranks of the group have": 3}
    mixed = matched(make_trace(0, 2, one, source=PROFILER), make_trace(1, 2, one, source=EVENTS))
    assert not mixed.groups
    assert mixed.left_out == {"of a group whose ranks have records of different kinds": 8}


def test_messages_between_two_ranks_are_no_operation_of_the_group() -> None:
    one = make_trace(0, 2, [Op(0, 1, operation="send", sequence=1), Op(1, 2, sequence=1)])
    other = make_trace(1, 2, [Op(0, 1, operation="receive", sequence=1), Op(1, 2, sequence=1)])
    found = matched(one, other)
    assert places(found) == [[[1, 1]]]
    assert not found.left_out


def test_only_operations_that_need_all_ranks_are_synchronising() -> None:
    held = [Op(0, 1, operation=name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")]
    ops = [
        *held,
        Op(0, 1, 0, "barrier"),
        Op(0, 1, operation="broadcast"),
        Op(0, 1, operation="reduce"),
        Op(0, 1, 0, "all_gather"),  # no rank must wait for an empty block
        Op(0, 1),
    ]
    failed = [*ops[:-1], replace(ops[-1], error="peer_lost")]
    for source, count in ((EVENTS, 5), (PROFILER, 4)):  # of the profiler's, an all_to_all may be empty for some
        run = make_run(make_trace(0, 2, ops, source=source), make_trace(1, 2, failed, source=source))
        columns = columns_of(run)
        (group,) = match(run, columns).groups
        assert sorted(synchronising_operations(run, columns, group).places[:, 0].tolist()) == [
            index for index in range(5) if source == EVENTS or index != 3
        ]
        assert len(synchronising_operations(run, columns, group).places) == count


def test_a_submission_is_not_synchronising() -> None:
    """A record of nccl may end before its operation, so it does not bound the start on other ranks."""
    traces = []
    for rank in range(2):
        trace = make_trace(rank, 2, [Op(0, 1)], source=PROFILER)
        nccl = {number: replace(group, backend="nccl") for number, group in trace.metadata.groups.items()}
        traces.append(Trace(replace(trace.metadata, groups=nccl), trace.operations, trace.steps, trace.progress))
    run = make_run(*traces)
    columns = columns_of(run)
    (group,) = match(run, columns).groups
    assert len(group.places) == 1
    assert len(synchronising_operations(run, columns, group).places) == 0
