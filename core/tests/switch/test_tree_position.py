"""The tree of a job: what ranks make of their paths, what a join says of it, and a switch's position in it."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgpack
import pytest

from netfold.communicator.switch_tree import PathToRoot, check_size, common_tree, trees_of
from netfold.errors import SwitchError
from netfold.switch.tree import TreePosition, position_without_tree, tree_position
from netfold.switch_protocol.control_messages import MAX_MESSAGE_BYTES
from netfold.switch_protocol.job_tree import (
    MAX_DEPTH,
    MAX_JOB_WORKERS,
    Contributor,
    Level,
    levels_by_worker,
    parse_levels,
)

ROOT, MIDDLE, LEFT, RIGHT = 90, 80, 70, 60
# Workers 0 and 3 below the left leaf, 1 below the right one, 2 at the middle, 4 at the root.
PATHS = [[LEFT, MIDDLE, ROOT], [RIGHT, ROOT], [MIDDLE, ROOT], [LEFT, MIDDLE, ROOT], [ROOT]]
RANKS = [0, 2, 4, 6, 8]


def position(me: int, tree: list[Any]) -> TreePosition:
    return tree_position(me, parse_levels(msgpack.unpackb(msgpack.packb(tree))))


@pytest.mark.parametrize(
    ("me", "place"),
    [
        (LEFT, TreePosition((Contributor(0, 0), Contributor(3, 6)), 5, MIDDLE)),
        (RIGHT, TreePosition((Contributor(1, 2),), 5, ROOT)),
        (MIDDLE, TreePosition((Contributor(0, 0, LEFT, 2), Contributor(2, 4)), 5, ROOT)),
        (ROOT, TreePosition((Contributor(0, 0, MIDDLE, 3), Contributor(1, 2, RIGHT, 1), Contributor(4, 8)), 5, None)),
    ],
)
def test_every_switch_finds_its_contributors_in_the_order_of_their_lowest_worker(me: int, place: TreePosition) -> None:
    trees = levels_by_worker(PATHS, RANKS)
    above = [tree[path.index(me) :] for tree, path in zip(trees, PATHS, strict=True) if me in path]
    assert {position(me, tree) for tree in above} == {place}, "whoever joins says the same"


def test_a_switch_with_all_workers_has_no_leaves_and_no_parent() -> None:
    alone = position_without_tree([4, 6])
    assert alone == TreePosition((Contributor(0, 4), Contributor(1, 6)), 2)
    assert position(7, levels_by_worker([[7]] * 2, [4, 6])[0]) == alone


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([[LEFT, ROOT], [RIGHT]], "end at more than one switch"),
        ([[LEFT, ROOT], [LEFT, MIDDLE, ROOT]], "has two parents"),
        ([[LEFT, RIGHT], [RIGHT, LEFT]], "has two parents"),  # a cycle
        ([[LEFT, RIGHT, LEFT]], "has two parents"),
        ([[LEFT], []], "worker 1 is below 0 switches"),
        ([[LEFT, *range(MAX_DEPTH)]], "1 to 8 levels"),
    ],
)
def test_paths_that_form_no_tree_are_refused(paths: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        levels_by_worker(paths, range(len(paths)))


@pytest.mark.parametrize(
    "tree",
    [
        None,
        "a tree",
        [],
        [[LEFT, [[0, 0]]]] * 2,  # a switch above itself
        [[LEFT, [[0, 0]]]] * (MAX_DEPTH + 1),
        [LEFT],
        [[LEFT]],
        [[LEFT, []]],
        [[LEFT, 5]],
        [["left", [[0, 0]]]],
        [[LEFT, [[0, "zero"]]]],
        [[LEFT, [[0, True]]]],
        [[LEFT, [[0, -1]]]],
        [[LEFT, [[0, 0, MIDDLE, 1, 5]]]],
        [[LEFT, [[0, 0], [0, 1]]]],  # a worker twice
        [[LEFT, [[1, 1], [0, 0]]]],
        [[LEFT, [[0, 0], [1, 0]]]],  # a rank twice
        [[LEFT, [[0, 0, MIDDLE, 1], [1, 1, MIDDLE, 1]]]],  # a switch twice
        [[LEFT, [[0, 0, MIDDLE, 0]]]],  # a switch of no worker
        [[LEFT, [[0, 0]]], [ROOT, [[0, 0], [1, 1]]]],  # the leaf is not below its parent
        [[LEFT, [[0, 0]]], [ROOT, [[0, 0, RIGHT, 1]]]],
        [[LEFT, [[0, 0]]], [ROOT, [[0, 0, LEFT, 2]]]],  # with another number of workers
        [[LEFT, [[1, 1]]], [ROOT, [[0, 0, LEFT, 1]]]],  # under another name
        [[LEFT, [[0, 0, MIDDLE, MAX_JOB_WORKERS], [1, 1]]]],
    ],
)
def test_levels_that_are_none_or_contradict_each_other_are_refused(tree: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        parse_levels(tree)


def test_a_switch_that_the_tree_does_not_begin_with_refuses_it() -> None:
    with pytest.raises(ValueError, match=f"switch {LEFT:08x} is not where the tree of this job puts it"):
        position(LEFT, levels_by_worker([[RIGHT]], [0])[0])


def test_a_join_grows_with_the_contributors_of_its_switches_and_not_with_the_workers_of_the_job() -> None:
    ids = [0xFFFF_0000 + leaf for leaf in range(16)]
    paths = [[ids[worker // 256], 0xFFFF_FFFF] for worker in range(MAX_JOB_WORKERS)]
    ranks = [16 * worker for worker in range(MAX_JOB_WORKERS)]
    trees = levels_by_worker(paths, ranks)
    assert max(len(msgpack.packb(tree)) for tree in trees[::256]) < 3000
    assert len({id(tree[0]) for tree in trees}) == 16, "workers of one switch share its level"
    root = position(0xFFFF_FFFF, trees[-1][1:])
    assert root.workers == MAX_JOB_WORKERS and len(root.contributors) == 16
    # The largest that there may be: 256 contributors at each of 8 levels.
    levels = [
        Level(level, tuple(Contributor(at, 1 << 20 | at, 1 << 31 | at, 16) for at in range(256))) for level in range(8)
    ]
    assert len(msgpack.packb([[level.switch, level.contributors] for level in levels])) < MAX_MESSAGE_BYTES


def path(*ids: int, broken: str = "") -> PathToRoot:
    return PathToRoot(ids, tuple(f"h{each}:7171" for each in ids), broken)


def test_paths_end_at_the_lowest_switch_that_all_workers_are_below() -> None:
    assert common_tree([path(LEFT, MIDDLE, ROOT), path(LEFT, MIDDLE, ROOT)], [0, 1]) == [[LEFT], [LEFT]]
    assert common_tree([path(LEFT, MIDDLE, ROOT), path(MIDDLE, ROOT)], [0, 1]) == [[LEFT, MIDDLE], [MIDDLE]]
    assert common_tree([path(LEFT, MIDDLE, ROOT), path(RIGHT, ROOT)], [0, 1]) == [[LEFT, MIDDLE, ROOT], [RIGHT, ROOT]]


def test_paths_without_a_common_switch_are_all_named_with_the_reason() -> None:
    ways = [
        path(LEFT, MIDDLE),
        path(LEFT, MIDDLE),
        path(RIGHT, broken="the parent switch at h90:7171 cannot be reached"),
    ]
    with pytest.raises(SwitchError) as caught:
        common_tree(ways, [0, 2, 4])
    assert (
        "have no common parent: rank 0's is h70:7171 below h80:7171; rank 4's is h60:7171 (the parent switch at "
        "h90:7171 cannot be reached)" in str(caught.value)
    )


def messages(*paths: PathToRoot) -> dict[int, dict[str, Any]]:
    return {rank: {"type": "path_to_root", **each._asdict()} for rank, each in enumerate(paths)}


def test_a_job_at_one_switch_has_no_tree() -> None:
    found = messages(path(LEFT, ROOT), path(LEFT, ROOT))
    assert trees_of(found, [0, 1], 0) == [None, None]
    found = messages(path(LEFT, ROOT), path(ROOT))
    assert trees_of(found, [0, 1], 0) == levels_by_worker([[LEFT, ROOT], [ROOT]], [0, 1])


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (
            [path(ROOT)] * 257,
            "257 ranks join the switch at h90:7171, and one switch adds for at most 256: start several",
        ),
        (
            [path(LEFT, ROOT)] * 3 + [path(ROOT)] * 256,
            "257 ranks and switches join the switch at h90:7171, and one switch adds for at most 256",
        ),
        ([path(LEFT, ROOT)] * 300 + [path(ROOT)], "300 ranks join the switch at h70:7171"),
    ],
)
def test_more_contributors_than_a_switch_takes_are_refused_with_what_to_do(paths: list[PathToRoot], says: str) -> None:
    with pytest.raises(SwitchError, match=re.escape(says)) as caught:
        trees_of(messages(*paths), range(len(paths)), 3)
    assert str(caught.value).startswith("rank 3: ")
    assert "(netfold switch --parent), and let NETFOLD_SWITCH of each rank name the one of its rack" in str(
        caught.value
    )


def test_as_many_contributors_as_a_switch_takes_are_a_tree_of_4096_workers() -> None:
    leaves = [path(leaf, ROOT) for leaf in range(1000, 1016)]
    found = messages(*itertools.chain.from_iterable([leaf] * 256 for leaf in leaves))
    trees = trees_of(found, range(MAX_JOB_WORKERS), 0)
    assert all(tree is not None and len(tree[0][1]) == 256 for tree in trees)


def test_a_job_of_more_workers_than_any_tree_takes_is_refused() -> None:
    check_size(MAX_JOB_WORKERS)
    with pytest.raises(ValueError, match="at most 4096 workers of a job, not 4097: unset NETFOLD_SWITCH, or"):
        check_size(MAX_JOB_WORKERS + 1)
