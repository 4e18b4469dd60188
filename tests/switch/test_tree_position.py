"""A switch's position in a job's tree, and the tree that ranks derive from their paths."""

from __future__ import annotations

import re

import pytest

from netfold.communicator.switch_tree import PathToRoot, common_tree
from netfold.errors import SwitchError
from netfold.switch.tree import MAX_DEPTH, Child, TreePosition, tree_position

ROOT, MIDDLE, LEFT, RIGHT = 90, 80, 70, 60
# Workers 0 and 3 below the left leaf, 1 below the right one, 2 at the middle, 4 at the root.
PATHS = [[LEFT, MIDDLE, ROOT], [RIGHT, ROOT], [MIDDLE, ROOT], [LEFT, MIDDLE, ROOT], [ROOT]]


@pytest.mark.parametrize(
    ("me", "place"),
    [
        (LEFT, TreePosition((Child((0,)), Child((3,))), MIDDLE)),
        (RIGHT, TreePosition((Child((1,)),), ROOT)),
        (MIDDLE, TreePosition((Child((0, 3), LEFT), Child((2,))), ROOT)),
        (ROOT, TreePosition((Child((0, 2, 3), MIDDLE), Child((1,), RIGHT), Child((4,))), None)),
    ],
)
def test_every_switch_finds_its_children_in_the_order_of_their_lowest_worker(me: int, place: TreePosition) -> None:
    assert tree_position(me, PATHS) == place


def test_a_switch_with_all_workers_has_no_leaves_and_no_parent() -> None:
    assert tree_position(7, [[7]] * 3) == TreePosition((Child((0,)), Child((1,)), Child((2,))))


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ([[LEFT, ROOT], [RIGHT]], "or that is no tree"),  # two roots
        ([[LEFT, ROOT], [LEFT, MIDDLE, ROOT]], "has two parents"),
        ([[LEFT, RIGHT], [RIGHT, LEFT]], "has two parents"),  # a cycle
        ([[LEFT, RIGHT, LEFT]], "has two parents"),
        ([[LEFT], []], "worker 1 is below 0 switches"),
        ([[LEFT, *range(MAX_DEPTH)]], "1 to 8 levels"),
        ([[RIGHT]], f"switch {LEFT:08x} is not in the tree"),
    ],
)
def test_paths_that_form_no_tree_are_refused(paths: list[list[int]], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        tree_position(LEFT, paths)


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
