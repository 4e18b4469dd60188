"""Native ranks below different switches: the tree is the one that Python makes of the same paths, and it adds."""

from __future__ import annotations

import random
import secrets
from typing import Any

import msgpack
import numpy as np
import pytest
from native_rank import add, fields, join, part, total
from ranks import run_threads, two_leaves, values

from netfold._native_dev import control
from netfold.communicator.switch_tree import PathToRoot, trees_of
from netfold.errors import SwitchError

pytestmark = pytest.mark.native


def native_path(path: PathToRoot) -> bytes:
    switches = [[switch, address] for switch, address in zip(path.ids, path.endpoints, strict=True)]
    return bytes(msgpack.packb({"switches": switches, "error": path.error}))


def both(paths: list[PathToRoot]) -> tuple[Any, Any]:
    """The trees of all workers by Python and natively, or each one's error."""
    messages = {rank: dict(path._asdict()) for rank, path in enumerate(paths)}
    made: list[Any] = []
    try:
        made.append(trees_of(messages, list(range(len(paths))), 0))
    except SwitchError as error:
        made.append(str(error))
    try:
        trees = control.trees_of([native_path(path) for path in paths])
        made.append([trees[path.ids[0]] if trees else None for path in paths])
    except RuntimeError as error:
        made.append(str(error))
    return made[0], made[1]


def random_paths(rng: random.Random) -> list[PathToRoot]:
    """Of workers below the switches of a random tree; now and then one whose parent changed, or of another tree."""
    parents: dict[int, int | None] = {1: None}
    for switch in range(2, rng.randint(2, 9)):
        parents[switch] = rng.choice(list(parents))
    if rng.random() < 0.1:
        parents[len(parents) + 1] = None
    paths = []
    for _ in range(rng.randint(1, 20)):
        switch: int | None = rng.choice(list(parents))
        ids = []
        while switch is not None:
            ids.append(switch)
            switch = rng.choice(list(parents)) if rng.random() < 0.01 else parents[switch]
            if len(ids) == 8:
                break
        paths.append(PathToRoot(tuple(ids), tuple(f"10.0.0.{each}:7171" for each in ids), ""))
    return paths


def test_trees_are_those_that_python_makes() -> None:
    kinds = {"one switch": 0, "tree": 0, "refused": 0}
    for seed in range(2000):
        python, native = both(random_paths(random.Random(seed)))
        if isinstance(python, str):
            kinds["refused"] += 1
            assert isinstance(native, str), (seed, python, native)
        else:
            assert native == python, seed
            kinds["one switch" if python[0] is None else "tree"] += 1
    assert min(kinds.values()) > 50, kinds


def path_of(*switches: int, error: str = "") -> PathToRoot:
    return PathToRoot(switches, tuple(f"10.0.0.{each}:7171#{'0' * 64}" for each in switches), error)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (
            [path_of(1), path_of(2, 3), path_of(1)],
            "no common parent: rank 0's is 10.0.0.1:7171; rank 1's is 10.0.0.2:7171 below 10.0.0.3:7171",
        ),
        ([path_of(1, error="10.0.0.9:1 is down"), path_of(2)], "rank 0's is 10.0.0.1:7171 (10.0.0.9:1 is down)"),
        (
            [path_of(1, 2, 4), path_of(1, 3, 4), path_of(5, 4)],
            "two parents in the paths of the ranks: was a switch started again",
        ),
        ([path_of(1)] * 257, "257 ranks join the switch at 10.0.0.1:7171, and one switch adds for at most 256"),
        ([path_of(1)] * 256 + [path_of(2, 1)], "257 ranks and switches join the switch at 10.0.0.1:7171"),
        ([path_of(each // 250 + 2, 1) for each in range(4097)], "at most 4096 ranks of a job, not 4097"),
    ],
)
def test_paths_that_make_no_tree(paths: list[PathToRoot], said: str) -> None:
    with pytest.raises(RuntimeError) as error:
        control.trees_of([native_path(path) for path in paths])
    assert said in str(error.value)


def test_a_tree_of_4096_ranks_fits_its_messages() -> None:
    trees = control.trees_of([native_path(path_of(each // 256 + 2, 1)) for each in range(4096)])
    assert len(trees) == 16 and all(len(msgpack.packb(tree)) < 1 << 16 for tree in trees.values())


@pytest.mark.parametrize(
    "message",
    [
        None,
        {},
        {"switches": 3},
        {"switches": []},
        {"switches": [[number, "10.0.0.1:1"] for number in range(9)]},
        {"switches": [[1]]},
        {"switches": [[1, "10.0.0.1:1", 2]]},
        {"switches": [["1", "10.0.0.1:1"]]},
        {"switches": [[-1, "10.0.0.1:1"]]},
        {"switches": [[1 << 32, "10.0.0.1:1"]]},
        {"switches": [[1, 2]]},
        {"switches": [[1, "10.0.0.1"]]},
        {"switches": [[1, "10.0.0.1:1#ff"]]},
    ],
)
def test_a_path_that_makes_no_sense_is_refused(message: Any) -> None:
    with pytest.raises(RuntimeError):
        control.trees_of([msgpack.packb(message)])


def _adds_below(rank: int, size: int, folder: str, endpoints: list[str], job: str, trees: dict[int, Any]) -> None:
    endpoint = endpoints[rank % len(endpoints)]
    path = control.query_path_to_root(**fields(rank, size, endpoint, job=job))
    member = join(rank, size, endpoint, job=job, tree=trees[path["switches"][0][0]])
    for turn, count in enumerate((1, 5000, 300_001), 1):
        array = part(rank, count, turn)
        add(member, array, turn)
        np.testing.assert_array_equal(array, total(size, count, turn))
    member.leave("it is done")


@pytest.mark.parametrize("size", [2, 3, 7])
def test_native_ranks_below_different_switches_add(size: int) -> None:
    with two_leaves() as (root, one, other):
        endpoints = [one.endpoint, other.endpoint, root.endpoint]
        job = secrets.token_hex(16)
        paths = [control.query_path_to_root(**fields(rank, size, endpoints[rank % 3], job=job)) for rank in range(size)]
        assert [address for _, address in paths[0]["switches"]] == [endpoints[0], endpoints[2]]
        trees = control.trees_of([msgpack.packb(path) for path in paths])
        values(run_threads(_adds_below, size, endpoints, job, trees))
