"""Every pair of different calls: what the other ranks call, and what one rank calls. No pair passes unnoticed.

Over shared memory a rank learns of the difference in the call itself. Over sockets two ranks that only send may both
finish before; then each learns in its next calls.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator import Mismatch, PeerLost
from netfold.communicator.group import region

pytestmark = pytest.mark.native

Call = Callable[[Communicator, int], Any]
SIZE = 3
ODD = 1  # the rank that makes another call


def _one(count: int) -> Any:
    return np.ones(count, np.float32)


def _blocks(count: int) -> Any:
    return [_one(count) for _ in range(SIZE)]


def _rooted(root: int) -> dict[str, Call]:
    return {
        f"broadcast {root}": lambda group, count: group.broadcast(_one(count), root),
        f"reduce {root}": lambda group, count: group.reduce(_one(count), root),
        f"gather {root}": lambda group, count: group.gather(_one(count), _blocks(count), root),
        f"scatter {root}": lambda group, count: group.scatter(_blocks(count), _one(count), root),
    }


CALLS: dict[str, Call] = {
    "all_reduce": lambda group, count: group.all_reduce(_one(count)),
    "all_reduce max": lambda group, count: group.all_reduce(_one(count), op="max"),
    "all_gather": lambda group, count: group.all_gather(_one(count), _blocks(count)),
    "reduce_scatter": lambda group, count: group.reduce_scatter(_blocks(count), _one(count)),
    "all_to_all": lambda group, count: group.all_to_all(_blocks(count), _blocks(count)),
    "barrier": lambda group, count: group.barrier(),
    **_rooted(0),
    **_rooted(1),
    **_rooted(2),
}


class Pair:
    """One group of threads in which rank ODD makes another call. `errors`: of each rank's call, and of later ones."""

    def __init__(self, calls: list[Call], count: int, options: Options) -> None:
        self.errors: list[list[str]] = [[] for _ in calls]
        self._ended = threading.Barrier(len(calls))
        with tempfile.TemporaryDirectory() as folder:
            threads = [
                threading.Thread(target=self._run, args=(rank, call, count, FileStore(folder), options), daemon=True)
                for rank, call in enumerate(calls)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(seconds(60))

    def _run(self, rank: int, call: Call, count: int, store: FileStore, options: Options) -> None:
        with Communicator(store, rank, SIZE, options=options, timeout_s=seconds(20), join_timeout_s=60) as group:
            for each in (lambda: call(group, count), group.barrier, group.barrier):
                try:
                    each()
                    self.errors[rank].append("")
                except (Mismatch, PeerLost) as error:
                    self.errors[rank].append(f"{type(error).__name__}: {error}")
                if len(self.errors[rank]) == 1:
                    self._ended.wait(seconds(40))

    def fault(self, at_once: bool) -> str:
        """A fault of the errors, as text; empty where the difference was noticed as it must be."""
        if not all(errors and errors[-1] for errors in self.errors):
            return f"unnoticed: {self.errors}"
        if not any(error.startswith("Mismatch") for errors in self.errors for error in errors):
            return f"no rank has a Mismatch: {self.errors}"
        if at_once and not any(errors[0] for errors in self.errors):
            return f"noticed only later: {self.errors}"
        return ""


def _faults(pairs: list[tuple[str, str]], calls: dict[str, Call], count: int, options: Options, at_once: bool) -> Any:
    def of(pair: tuple[str, str]) -> str:
        usual, odd = pair
        made = [calls[odd if rank == ODD else usual] for rank in range(SIZE)]
        fault = Pair(made, count, options).fault(at_once)
        return f"{usual} / {odd}: {fault}" if fault else ""

    with ThreadPoolExecutor(8) as pool:
        return [fault for fault in pool.map(of, pairs) if fault]


@pytest.mark.parametrize("count", [8, 40_000])
@pytest.mark.parametrize(
    ("transport", "layout"),
    [
        pytest.param("auto", (0, 0, 0), id="memory"),
        pytest.param("tcp", (0, 0, 0), id="sockets"),
        pytest.param("auto", (0, 0, 1), id="two hosts"),
        pytest.param("auto", (0, 1, 1), id="two hosts, odd rank led"),
    ],
)
def test_no_pair_of_calls_passes_unnoticed(
    monkeypatch: pytest.MonkeyPatch, transport: str, layout: tuple[int, ...], count: int
) -> None:
    monkeypatch.setattr(*apart(layout))
    in_memory = transport == "auto" and len(set(layout)) == 1
    options = Options(algorithm="hierarchical" if len(set(layout)) > 1 else "auto", transport=transport, probe="off")
    pairs = list(itertools.permutations(CALLS, 2))
    if not in_memory:  # failed sockets take longer to end: the pairs in which ranks may not wait for each other
        pairs = [pair for pair in pairs if all(" " in call for call in pair)]
    assert _faults(pairs, CALLS, count, options, in_memory) == []


ELEMENTS = ("u8", "i8", "f32", "f64", *sorted(set(engine.ELEMENTS) - set(engine.DTYPES)))


def _moving(kind: str, element: str) -> Call:
    def call(group: Communicator, count: int) -> None:
        buffers = [np.ones(count * 16, np.uint8) for _ in range(2 * SIZE)]
        regions = [region(buffer) for buffer in buffers]
        inputs = {"broadcast": 0, "all_gather": 1, "all_to_all": SIZE, "send": 1}[kind]
        outputs = {"broadcast": 1, "all_gather": SIZE, "all_to_all": SIZE, "send": 0}[kind]
        root = 0
        if kind == "send":
            if group.rank == 2:
                return
            root = 1 - group.rank
            inputs, outputs = (1, 0) if group.rank == 0 else (0, 1)
        operation = group.group.submit(
            "receive" if outputs and kind == "send" else kind,
            dtype=element,
            root=root,
            inputs=regions[:inputs],
            outputs=regions[SIZE : SIZE + outputs],
            wait_here=True,
        )
        group.group.wait(operation)

    return call


@pytest.mark.parametrize("kind", ["broadcast", "all_gather", "all_to_all", "send"])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_no_pair_of_element_types_passes_unnoticed(transport: str, kind: str) -> None:
    calls = {element: _moving(kind, element) for element in ELEMENTS}
    pairs = list(itertools.combinations(ELEMENTS, 2))[:: 1 if transport == "auto" else 4]
    options = Options(transport=transport, probe="off")
    assert _faults(pairs, calls, 8, options, transport == "auto" and kind != "send") == []
