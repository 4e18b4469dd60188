"""Simulated hosts of several ranks and a switch: one rank of each joins, the others reduce through memory."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds
from ranks import run_ranks, run_threads, running_switch, values
from reductions import by_rank, contribution

from netfold import Communicator, FileStore, Options
from netfold.communicator import group as group_module
from netfold.communicator import startup

SOON_S = 3.0
TIMEOUT_S = 1.0
BY_SWITCH = "all_reduce=hierarchical:in_network"
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 2, 2, 1)]
COUNTS = (0, 1, 3, 1009, 300_007)
CALLS = (("sum", "float32"), ("avg", "float64"), ("max", "int16"), ("sum", "float16"), ("product", "float32"))


def leaders(layout: tuple[int, ...]) -> list[int]:
    return [layout.index(host) for host in sorted(set(layout), key=layout.index)]


def join(rank: int, size: int, folder: str, endpoint: str, timeout_s: float = 30.0, **options: str) -> Communicator:
    settings = Options(switch=endpoint, probe="off", **{"algorithm": BY_SWITCH, **options})  # type: ignore[arg-type]
    return Communicator(FileStore(folder), rank, size, options=settings, timeout_s=timeout_s, join_timeout_s=20)


def by_host(op: str, parts: list[Any], layout: tuple[int, ...], wire: str = "f32") -> Any:
    """Reduced in rank order inside each host, then in the order of the hosts' first ranks."""
    folded = "sum" if op == "avg" else op
    hosts = [
        [part for part, host in zip(parts, layout, strict=True) if host == layout[first]] for first in leaders(layout)
    ]
    total = by_rank(folded, [by_rank(folded, host) for host in hosts], wire)
    return by_rank("avg", [total] + [np.zeros_like(total)] * (len(parts) - 1)) if op == "avg" else total


def every_sum(rank: int, size: int, folder: str, endpoint: str, layout: tuple[int, ...]) -> dict[str, Any]:
    with join(rank, size, folder, endpoint) as group:
        for count in COUNTS:
            for op, dtype in CALLS:
                parts = [contribution(other, count, dtype) for other in range(size)]
                buffer = parts[rank].copy()
                group.all_reduce(buffer, op=op)
                np.testing.assert_array_equal(buffer, by_host(op, parts, layout), strict=True, err_msg=f"{op} {count}")
        group.barrier()
        events = group.group.events()
        return {
            "nodes": group.group.nodes,
            "why": group.group.why("all_reduce", 1 << 20),
            "algorithms": {int(event["algorithm"]) for event in events if event["operation"] == 0},
            "traffic": group.group.traffic(),
            "sent": sum(int(event["wire_bytes"]) for event in events if event["operation"] == 0),
        }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_rank_a_host_joins_and_every_rank_gets_the_sum(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...]
) -> None:
    monkeypatch.setattr(*apart(layout))
    with running_switch() as switch:
        found = values(run_threads(every_sum, len(layout), switch.endpoint, layout, timeout_s=60))
        switch.wait_for(rf"starts with {len(set(layout))} workers")
    for rank, each in enumerate(found):
        assert each["nodes"] == tuple(leaders(layout).index(layout.index(host)) for host in layout)
        assert each["why"].startswith(f"hierarchical (NETFOLD_ALGORITHM={BY_SWITCH}")
        assert each["algorithms"] == {group_module.engine.ALGORITHMS["hierarchical"]}
        assert (each["traffic"] is not None) == (rank in leaders(layout))
        assert (each["sent"] > 0) == (rank in leaders(layout))


def plainly(rank: int, size: int, folder: str, endpoint: str, algorithm: str) -> tuple[str, bool]:
    with join(rank, size, folder, endpoint, algorithm=algorithm) as group:
        buffer = np.full(1000, rank + 1.0)
        group.all_reduce(buffer)
        assert (buffer == size * (size + 1) / 2).all()
        return group.group.why("all_reduce", 1000), group.group.traffic() is not None


@pytest.mark.parametrize(
    ("layout", "algorithm", "chosen", "workers"),
    [
        ((0, 0, 1, 1), "in_network", "in_network (NETFOLD_ALGORITHM=in_network)", 4),
        ((0, 0, 1, 1), BY_SWITCH, f"hierarchical (NETFOLD_ALGORITHM={BY_SWITCH}", 2),
        ((0, 0, 1, 1), "hierarchical:in_network", "hierarchical (NETFOLD_ALGORITHM=hierarchical:in_network", 2),
        ((0, 0, 0), "auto", "in_network (NETFOLD_SWITCH=", 3),
        ((0, 1, 2), "auto", "direct (predicted for ", 3),
    ],
    ids=str,
)
def test_the_algorithm_decides_which_ranks_join(
    monkeypatch: pytest.MonkeyPatch, layout: tuple[int, ...], algorithm: str, chosen: str, workers: int
) -> None:
    monkeypatch.setattr(*apart(layout))
    with running_switch() as switch:
        for why, joined in values(run_threads(plainly, len(layout), switch.endpoint, algorithm)):
            assert why.startswith(chosen), why
            assert joined or workers < len(layout)
        switch.wait_for(rf"starts with {workers} workers")


def narrow(rank: int, size: int, folder: str, endpoint: str, wire: str, layout: tuple[int, ...]) -> None:
    with join(rank, size, folder, endpoint, wire_dtype=wire) as group:
        for count in (1, 353, 40_009):
            parts = [contribution(other, count, "float32") for other in range(size)]
            mine = parts[rank].copy()
            group.all_reduce(mine)
            np.testing.assert_array_equal(mine, by_host("sum", parts, layout, wire), strict=True)


@pytest.mark.parametrize("wire", ["bf16", "f16"])
def test_a_narrower_wire_rounds_between_hosts_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    layout = (0, 0, 1, 1)
    monkeypatch.setattr(*apart(layout))
    with running_switch() as switch:
        values(run_threads(narrow, 4, switch.endpoint, wire, layout))


def dies(rank: int, size: int, folder: str, endpoint: str, layout: tuple[int, ...], victim: int, count: int) -> Any:
    setattr(*apart(layout))
    with join(rank, size, folder, endpoint) as group:
        for _ in range(3):
            group.all_reduce(np.ones(count, np.float32))
        if rank == victim:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        began = time.monotonic()
        try:
            while True:
                began = time.monotonic()
                group.all_reduce(np.ones(count, np.float32))
        except Exception as error:
            found = type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began
        # Keep the group open until all survivors have their error, since closing it would be another reason.
        Path(folder, f"failed{rank}").touch()
        others = [Path(folder, f"failed{other}") for other in range(size) if other != victim]
        while not all(other.exists() for other in others) and time.monotonic() - began < seconds(20):
            time.sleep(0.01)
        return found


@pytest.mark.parametrize("count", [100, 1_000_000])
@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_named_by_all_others_whether_it_had_joined_or_not(victim: int, count: int) -> None:
    layout = (0, 0, 1, 1)
    with running_switch() as switch:
        outcomes = run_ranks(dies, 4, switch.endpoint, layout, victim, count, dies=[victim])
        for rank in set(range(4)) - {victim}:
            assert not outcomes[rank].error, outcomes[rank].text
            error, named, text, took = outcomes[rank].value
            assert error == "PeerLost", text
            assert named == victim, text
            assert f"rank {victim}" in text
            assert re.match(rf"rank {rank}: all_reduce #\d+ of {count} f32", text)
            assert took < seconds(SOON_S)


def adds_on(rank: int, size: int, folder: str, endpoint: str, started: threading.Event, wire: str) -> Any:
    with join(rank, size, folder, endpoint, wire_dtype=wire) as group:
        for turn in range(60):
            buffer = (np.arange(50_000) * (rank + 1) % 1000 + turn).astype(np.float32)
            expected = sum(np.arange(50_000) * (other + 1) % 1000 + turn for other in range(size))
            group.all_reduce(buffer)
            np.testing.assert_allclose(buffer, expected, rtol=2**-20 if wire != "bf16" else 2**-5)
            if turn == 5:
                started.set()
        return buffer.tobytes(), group.group.why("all_reduce", 1 << 20)


@pytest.mark.parametrize("wire", ["f32", "bf16", "i32"])
def test_a_switch_that_dies_costs_no_step_between_hosts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wire: str
) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    started = threading.Event()
    with running_switch() as switch:

        def end() -> None:
            assert started.wait(seconds(20))
            time.sleep(0.02)
            switch.process.kill()

        ender = threading.Thread(target=end)
        ender.start()
        found = values(run_threads(adds_on, 4, switch.endpoint, started, wire))
        ender.join()
        switch.process.wait(seconds(20))
    assert len({result for result, _ in found}) == 1
    for rank in (0, 2):  # the ranks that joined
        assert f"the switch at {switch.endpoint} is gone (it closed the connection)" in found[rank][1]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "No step is lost" in warning


def one_is_absent(rank: int, size: int, folder: str, endpoint: str, absent: int, over: threading.Event) -> Any:
    with join(rank, size, folder, endpoint, TIMEOUT_S) as group:
        group.all_reduce(np.ones(10))
        if rank == absent:
            over.wait(seconds(30))
            return None
        began = time.monotonic()
        try:
            group.all_reduce(np.ones(100_000))
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began
        finally:
            time.sleep(0.5)
            over.set()


@pytest.mark.parametrize("absent", range(4))
def test_a_rank_that_never_calls_is_named_across_hosts(monkeypatch: pytest.MonkeyPatch, absent: int) -> None:
    monkeypatch.setattr(*apart((0, 1, 0, 1)))
    with running_switch() as switch:
        found = values(run_threads(one_is_absent, 4, switch.endpoint, absent, threading.Event()))
    for rank in set(range(4)) - {absent}:
        error, named, text, took = found[rank]
        assert error in ("CollectiveTimeout", "PeerLost"), text
        assert TIMEOUT_S * 0.9 < took < TIMEOUT_S + seconds(SOON_S)
        # A rank that waits in memory for its host's worker cannot know for which rank the switch waits.
        own_worker = {2: 0, 3: 1}.get(rank)
        assert named == absent or (absent in (0, 1) and named == own_worker), (rank, text)


def different(rank: int, size: int, folder: str, endpoint: str) -> tuple[str, str]:
    with join(rank, size, folder, endpoint) as group:
        try:
            group.all_reduce(np.ones(101 if rank in (1, 3) else 100, np.float32))
        except Exception as error:
            return type(error).__name__, str(error)
        return "", ""


def test_hosts_that_make_different_calls_are_named_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 1, 0, 1, 0)))
    with running_switch() as switch:
        found = values(run_threads(different, 5, switch.endpoint))
    assert all(error in ("Mismatch", "PeerLost") for error, _ in found), found
    told = [text for error, text in found if error == "Mismatch"]
    said = r"a step of all_reduce #\d+ of 10[01] f32 \(sum\), wire f32"
    assert told and all(re.search(f"rank [01] is in {said}, this rank [01] in {said}; ", text) for text in told), told


def refused(rank: int, size: int, folder: str, endpoint: str) -> None:
    join(rank, size, folder, endpoint).close()


def test_a_refusal_reaches_every_rank_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1)))
    with running_switch("--memory", "64K") as switch:
        for rank, outcome in enumerate(run_threads(refused, 4, switch.endpoint)):
            assert outcome.error == "SwitchError", outcome.text
            assert outcome.text.startswith(f"rank {rank}: ")
            assert "this switch is full: the job needs" in outcome.text


def late(rank: int, size: int, folder: str, endpoint: str) -> None:
    options = Options(switch=endpoint, probe="off", algorithm=BY_SWITCH)
    if rank == 2:  # it connects to the others, and does not join the switch in time
        join_for_host = startup.join_for_host

        def stay_away(*arguments: Any, **named: Any) -> Any:
            time.sleep(10.0)
            return join_for_host(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(startup, "join_for_host", stay_away)
            Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=4).close()
    Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=4).close()


def test_a_worker_that_does_not_come_is_named_by_its_rank() -> None:
    with running_switch() as switch:
        outcomes = run_ranks(_apart_late, 4, switch.endpoint)
    for rank in (0, 1):
        assert outcomes[rank].error == "RendezvousError", outcomes[rank].text
        assert re.search(r"rank 2 did not answer in time while its workers said", outcomes[rank].text)


def _apart_late(rank: int, size: int, folder: str, endpoint: str) -> None:
    setattr(*apart((0, 0, 1, 1)))
    late(rank, size, folder, endpoint)
