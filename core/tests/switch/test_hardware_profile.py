"""Ranks whose switch names the hardware profile, and what goes through it. Ranks are threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from load import Deadline
from mortal_switch import MortalSwitch
from ranks import run_threads, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator.membership import Membership
from netfold.errors import SwitchError
from netfold.switch_protocol.control_client import SwitchAccess

IN_NETWORK = engine.ALGORITHMS["in_network"]
DTYPES, OPS = engine.DTYPES, engine.REDUCE_OPS
PROFILE = {
    *((DTYPES[wire], OPS["sum"]) for wire in ("i32", "u32")),
    (DTYPES["i32"], OPS["max"]),
    *((DTYPES[wire], OPS["bor"]) for wire in ("u8", "u16", "u32", "u64")),
}
ALL = ["int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"]


def join(rank: int, size: int, folder: str, endpoint: str, wire: str, **options: Any) -> Communicator:
    settings = Options(switch=endpoint, probe="off", algorithm="in_network", wire_dtype=wire, **options)
    return Communicator(FileStore(folder), rank, size, options=settings, timeout_s=20, join_timeout_s=20)


def parts_of(size: int, dtype: str, count: int = 37) -> list[np.ndarray]:
    return [(np.arange(count) % 5 + rank).astype(dtype) for rank in range(size)]


def run_all(rank: int, size: int, folder: str, endpoint: str, wire: str) -> list[tuple[str, int]]:
    """Reduce and move tensors of all types; return each operation's type and algorithm."""
    with join(rank, size, folder, endpoint, wire) as group:
        for dtype in ALL:
            parts = parts_of(size, dtype)
            for op, expected in (("sum", sum(parts)), ("max", np.max(parts, 0)), ("min", np.min(parts, 0))):
                array = parts[rank].copy()
                group.all_reduce(array, op=op)
                np.testing.assert_array_equal(array, expected, f"{op} of {dtype}")
            array = parts[rank].copy()
            group.broadcast(array, root=1)
            np.testing.assert_array_equal(array, parts[1])
        group.barrier()
        events = group.group.events()
    return [(int(each["dtype"]), int(each["algorithm"])) for each in events]


@pytest.mark.parametrize("wire", ["auto", "i32"])
def test_only_what_the_profile_can_add_goes_through_the_switch(wire: str) -> None:
    with MortalSwitch(hardware=True) as switch:
        found = values(run_threads(run_all, 3, switch.endpoint, wire))
    assert switch.reductions <= PROFILE
    # Sums and maxima of i32, moved bytes of every width, and the barrier.
    assert switch.reductions == PROFILE - {(DTYPES["u32"], OPS["sum"])}
    by_switch = {dtype for dtype, algorithm in found[0] if algorithm == IN_NETWORK}
    by_host = {dtype for dtype, algorithm in found[0] if algorithm != IN_NETWORK}
    assert DTYPES["f64"] in by_host and DTYPES["i32"] in by_switch
    assert found[1] == found[2] == found[0]


def test_a_switch_with_the_full_protocol_adds_everything() -> None:
    with MortalSwitch() as switch:
        found = values(run_threads(run_all, 3, switch.endpoint, "auto"))
    assert {algorithm for _, algorithm in found[0]} == {IN_NETWORK}


def until(rank: int, size: int, folder: str, endpoint: str, over: threading.Event) -> list[int]:
    with join(rank, size, folder, endpoint, "i32", rejoin_s=1) as group:
        stop = np.zeros(1, np.int32)
        while not stop[0]:
            stop[0] = rank == 0 and over.is_set()
            group.all_reduce(stop)
        return [int(each) for each in group.group.events()["algorithm"]]


@pytest.mark.parametrize("again", [True, False])
def test_a_group_returns_to_a_switch_of_the_same_profile_alone(again: bool) -> None:
    over = threading.Event()
    returned = []

    def restart(port: int) -> None:
        with MortalSwitch(port=port, hardware=again) as second:
            deadline = Deadline(20)
            # Another profile: the ranks join, and leave at once; twice shows that they went on.
            while second.complete < 10 and second.joins < 6 and deadline.left():
                over.wait(0.02)
            returned.append((second.complete, second.joins))
            over.set()

    with MortalSwitch(hardware=True) as first:

        def replace() -> None:
            deadline = Deadline(20)
            while first.complete < 10 and deadline.left():
                over.wait(0.02)
            port = first.port
            first.die()
            restart(port)

        replacing = threading.Thread(target=replace)
        replacing.start()
        found = values(run_threads(lambda *rank: until(*rank, first.endpoint, over), 3, timeout_s=60))
        replacing.join()
    ((complete, joins),) = returned
    if again:
        assert complete >= 10
    else:
        assert complete == 0 and joins >= 6
        assert all(algorithms[-1] != IN_NETWORK for algorithms in found)


@pytest.mark.parametrize("payload_bytes", [0, -8, 12, 1 << 20])
def test_a_length_of_packets_that_the_protocol_has_not_is_an_error(payload_bytes: int) -> None:
    with MortalSwitch(hardware=True, payload_bytes=payload_bytes) as switch:
        access = SwitchAccess(switch.endpoint, None, 0, (0,))
        with pytest.raises(SwitchError, match=f"packets of {payload_bytes} bytes of values"):
            Membership.join(access, job="1" * 32, timeout_s=10)
