"""No poll of the engine does more than a slice of an operation: one thread polls all groups of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from load import Deadline
from ranks import running_switch
from sources import HELPERS

SHIM = Path(__file__).with_name("poll_times.cpp")
# An operation moves a tensor or a block of this size.
BYTES = 64 << 20

# The words are: rank, size, folder, shim, host of each rank, bytes, and the cases.
RANK = """
import ctypes, json, sys, time
import numpy as np
from hosts import apart
from netfold import Communicator, FileStore, Options
from netfold.communicator.group import region

rank, size, folder, shim, hosts, total, cases = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
longest = ctypes.c_long.in_dll(ctypes.CDLL(shim), "longest_ns")
setattr(*apart(json.loads(hosts)))
whole = np.ones(int(total), np.uint8)
spare = np.ones(2 * int(total), np.uint8)


def blocks(of, count):
    return [region(each) for each in np.split(of[: of.size // count // 64 * 64 * count], count)]


def buffers(kind, dtype):
    big, root = [region(whole)], rank == 0
    if kind in ("all_reduce", "reduce", "broadcast"):
        return [], big
    if kind == "residual":
        return [region(spare[: whole.size])], big
    parts = blocks(whole, size)
    if kind == "overlapping":
        return parts[::-1], parts
    halves = blocks(spare[: whole.size], size)
    if kind == "reduce_scatter":
        return parts, halves[:1]
    if kind == "all_to_all":
        return parts, halves
    if kind == "all_gather":
        return parts[rank:][:1], halves
    if kind == "gather":
        return parts[rank:][:1], halves if root else []
    if kind == "scatter":
        return parts if root else [], halves[rank:][:1]
    return (big, []) if kind == "send" else ([], big)


def longest_poll(group, kind, dtype, average):
    whole.fill(1)
    inputs, outputs = buffers(kind, dtype)
    peer = 0
    if kind == "send":
        peer = 1 - rank
        kind = "receive" if rank else "send"
        inputs, outputs = buffers(kind, dtype)
    kind = {"residual": "all_reduce", "overlapping": "all_to_all"}.get(kind, kind)
    longest.value = 0
    operation = group.group.submit(
        kind, dtype=dtype, average=average, root=peer, inputs=inputs, outputs=outputs, timeout_s=100, wait_here=False
    )
    while not operation.done:
        time.sleep(0.002)  # the engine's thread does the work
    assert operation.failure is None, operation.failure
    return longest.value


def of_one_pass():
    times = []
    for _ in range(5):
        before = time.thread_time_ns()
        np.copyto(spare[: whole.size], whole)
        times.append(time.thread_time_ns() - before)
    return min(times)


found = {}
for number, (options, kinds) in enumerate(json.loads(cases)):
    store = FileStore(f"{folder}/{number}")
    with Communicator(store, rank, size, options=Options(**options, probe="off"), timeout_s=100) as group:
        for kind, dtype, average in kinds:
            name = f"{kind} {dtype}{' avg' * average} {options.get('wire_dtype', '')}"
            # Other processes lengthen a poll by chance; a pass over a tensor lengthens every one.
            calls = []
            for _ in range(2):
                calls.append(longest_poll(group, kind, dtype, average))
                group.barrier()
            found[name] = min(calls)
print(json.dumps([of_one_pass(), found]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shim = tmp_path_factory.mktemp("shim") / "poll_times.so"
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", shim, SHIM, "-ldl"], check=True)
    return shim


SUMS = [("all_reduce", "f32", False), ("all_reduce", "f32", True), ("all_reduce", "bf16", True)]
MOVES = [(kind, "u8", False) for kind in ("broadcast", "all_gather", "gather", "scatter", "all_to_all")]
REDUCTIONS = [*SUMS, ("reduce", "f32", True), ("reduce_scatter", "f32", True)]
Case = tuple[dict[str, str], list[tuple[str, str, bool]]]


def by(algorithm: str, *kinds: str, **options: str) -> Case:
    """The operations of these kinds by an algorithm. options: of the group."""
    rule = ",".join(f"{kind}={algorithm}" for kind in kinds)
    chosen = [case for case in [*REDUCTIONS, *MOVES] if case[0] in kinds]
    return {"algorithm": rule, **options}, chosen


EVERY = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all")
BETWEEN_HOSTS: list[Case] = [
    by("direct", *EVERY, transport="tcp"),
    by("ring", "all_reduce", "reduce_scatter", "all_gather", transport="tcp"),
    by("halving_doubling", "all_reduce", "reduce_scatter", "all_gather", transport="tcp"),
    by("tree", "all_reduce", "reduce", "broadcast", "gather", "scatter", transport="tcp"),
    by("chain", "broadcast", transport="tcp"),
    by("bruck", "all_gather", "all_to_all", transport="tcp"),
    by("pairwise", "all_to_all", transport="tcp"),
    *(
        ({"algorithm": "all_reduce=ring", "wire_dtype": wire, "transport": "tcp"}, SUMS[:2])
        for wire in ("bf16", "i32", "i8")
    ),
    (
        {"algorithm": "all_reduce=ring", "wire_dtype": "i8", "transport": "tcp"},
        [("residual", "f32", False), ("residual", "f32", True)],
    ),
    ({"transport": "tcp"}, [("overlapping", "u8", False), ("send", "u8", False)]),
]
IN_MEMORY: list[Case] = [
    by("shared_memory", *EVERY),
    ({"algorithm": "all_reduce=shared_memory", "wire_dtype": "i8"}, SUMS[:1]),
    ({}, [("overlapping", "u8", False), ("send", "u8", False)]),
]


def longest_polls(
    shim: Path, folder: Path, cases: list[Case], size: int = 2, hosts: tuple[int, ...] = (0, 0, 0, 0), **more: str
) -> list[str]:
    """The cases with a poll that takes longer than half of one copy of the tensor."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")} | more
    env |= {"LD_PRELOAD": str(shim), "PYTHONPATH": HELPERS}
    # Malloc keeps the memory of a call's scratch: otherwise the kernel takes it back in one piece as the call ends.
    env |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}
    words = [folder, shim, json.dumps(hosts), BYTES, json.dumps(cases)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, [rank, size, *words])], env=env, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    deadline = Deadline(100)
    slow = []
    try:
        for rank, process in enumerate(ranks):
            while process.poll() is None and deadline.left() > 0:
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue
            assert process.returncode == 0 and process.stdout is not None, f"rank {rank}"
            one_pass, polls = json.loads(process.stdout.read())
            print(rank, {case: round(longest / one_pass, 2) for case, longest in polls.items()})
            slow += [f"rank {rank}: {case}" for case, longest in polls.items() if longest > one_pass / 2]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return slow


def named(case: Case) -> str:
    return " ".join([*case[0].values(), case[1][0][0]])


# Not marked native: the sanitizers must come first among preloaded libraries.
@pytest.mark.parametrize("case", BETWEEN_HOSTS, ids=named)
def test_a_poll_between_hosts_is_short(case: Case, shim: Path, tmp_path: Path) -> None:
    assert longest_polls(shim, tmp_path, [case]) == []


@pytest.mark.parametrize("single_copy", ["on", "off"])
def test_a_poll_in_shared_memory_is_short(single_copy: str, shim: Path, tmp_path: Path) -> None:
    assert longest_polls(shim, tmp_path, IN_MEMORY, NETFOLD_SINGLE_COPY=single_copy) == []


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1)], ids=str)
def test_a_poll_of_ranks_on_several_hosts_is_short(hosts: tuple[int, ...], shim: Path, tmp_path: Path) -> None:
    assert longest_polls(shim, tmp_path, [by("hierarchical", *EVERY)], len(hosts), hosts) == []


def test_a_poll_in_a_group_of_one_rank_is_short(shim: Path, tmp_path: Path) -> None:
    assert longest_polls(shim, tmp_path, [by("direct", *EVERY), ({}, [("overlapping", "u8", False)])], 1) == []


def test_a_poll_with_a_switch_is_short(shim: Path, tmp_path: Path) -> None:
    kinds = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
    with running_switch() as switch:
        assert longest_polls(shim, tmp_path, [by("in_network", *kinds, switch=switch.endpoint)]) == []
