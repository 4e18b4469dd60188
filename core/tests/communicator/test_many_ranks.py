"""The work of a call, a poll and a sleep does not grow with the number of ranks. It is counted, not timed.

One process is rank 0 of a group whose other ranks do not exist, or are the far ends of socket pairs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from netfold import Options
from netfold.communicator import startup

SHIM = Path(__file__).with_name("counted_work.cpp")

# The words are: what to do, the number of ranks, the shim.
RANK = """
import ctypes, socket, struct, sys, time
import numpy as np
from netfold._native import engine
from netfold.communicator.group import ANY_SOURCE, region

what, size, shim = sys.argv[1], int(sys.argv[2]), ctypes.CDLL(sys.argv[3])
counters = {name: ctypes.c_long.in_dll(shim, name) for name in sys.argv[4:]}
KINDS, ALGORITHMS, DTYPES = engine.KINDS, engine.ALGORITHMS, engine.DTYPES

def make_group(kind, algorithm, between="local", ranks_of_a_host=1, connections=()):
    return engine.add_group(
        rank=0, nodes=[0, *(1 + rank // ranks_of_a_host for rank in range(size - 1))], lanes=2, rails=1,
        connections=list(connections), resumable=False, id=1, job="", spin_us=0, spins_for_sockets=False, yields=False,
        table=[(KINDS[kind], 0, ALGORITHMS[algorithm], -1, ALGORITHMS[between])], table_hash=1, fabric=None,
        rma_min_bytes=0,
    )

def counted():
    return {name: counter.value for name, counter in counters.items()}

value = np.zeros(1, np.float32)
if what == "receive from any":
    ends = [socket.socketpair() for _ in range(size - 1)]
    group = make_group(
        "barrier", "direct", connections=[(1, rank, 0, end.detach(), None) for rank, (end, _) in enumerate(ends, 1)]
    )
    for number in range(24):
        if number == 4:
            before = counted()
        receive = group.submit(
            KINDS["receive"], DTYPES["f32"], 0, False, ANY_SOURCE, [], [region(value)], value, 10**11, False, 3
        )
        time.sleep(0.01)  # the engine's thread takes over, finds nothing, and sleeps
        sender = 1 + number * 37 % (size - 1)
        eager = struct.pack("<IBBBBiiQQ", 0x4E465031, 1, DTYPES["f32"], 0, 0, 3, 0, number, 4)
        ends[sender - 1][1].sendall(eager + struct.pack("<f", number))
        assert group.wait(receive, 10**11) and receive.failure is None, receive.failure
        assert receive.peer == sender and value[0] == number
    after = counted()
else:
    kind, algorithm, between = what.split()
    group = make_group(kind, algorithm, between, ranks_of_a_host=2)
    outputs = [] if kind == "barrier" else [region(value)]
    before = counted()
    group.submit(KINDS[kind], DTYPES["f32"], 0, False, 0, [], outputs, value, 10**11, False)
    after = counted()
print(*(after[name] - before[name] for name in counters))
engine.remove_group(group)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shim = tmp_path_factory.mktemp("counted") / "counted_work.so"
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", shim, SHIM, "-ldl"], check=True)
    return shim


def counts(shim: Path, what: str, size: int, *names: str) -> list[int]:
    command = [sys.executable, "-c", RANK, what, str(size), str(shim), *names]
    run = subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [int(word) for word in run.stdout.split()]


# Not marked native: the sanitizers must come first among preloaded libraries.
def test_a_receive_from_any_rank_looks_only_at_the_ranks_that_sent_something(shim: Path) -> None:
    names = "receive_calls", "awaited_descriptors"
    few, many = (counts(shim, "receive from any", size, *names) for size in (8, 256))
    for of_few, of_many, name in zip(few, many, names, strict=True):
        assert of_many <= 2 * of_few, f"{name}: {of_few} among 8 ranks, {of_many} among 256"


@pytest.mark.parametrize(
    "what",
    ["all_reduce tree local", "barrier bruck local", "all_reduce hierarchical tree", "barrier hierarchical bruck"],
)
def test_a_call_allocates_as_little_among_4096_ranks_as_among_16(shim: Path, what: str) -> None:
    few, many = (counts(shim, what, size, "allocated_bytes")[0] for size in (16, 4096))
    # A call has log2 P messages, 12 instead of 4, each over a connection that it makes.
    assert many <= 4 * few, f"{few} bytes among 16 ranks, {many} among 4096"


def test_a_start_gives_the_native_group_only_the_connections_that_are_made() -> None:
    def started(size: int) -> int:
        group = SimpleNamespace(lanes=2, rails=4, rank=0, size=size, accepted={})
        memory = SimpleNamespace(node=None, nodes=tuple(range(size)), peer_memory=None)
        connections: Any = SimpleNamespace(
            job=SimpleNamespace(name="", secret=b"", security="none"),
            options=Options(),
            memory=memory,
            registered_group=group,
            rank=0,
            choice=SimpleNamespace(table=SimpleNamespace(rows=(), hash16=0)),
            fabric=startup.Fabric(),
        )
        with mock.patch.object(startup, "engine", mock.Mock()):
            tracemalloc.start()
            startup.start_native(connections, 1, mock.Mock())
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return peak

    # The hosts of all ranks are a list of 8 bytes a rank.
    assert started(4096) - started(16) < 16 * 4096
