"""The measured rate of a switch may be wrong: no job hangs, all ranks choose alike, and sums stay right."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import RunningSwitch, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import shares
from netfold.bootstrap import capacity
from netfold.bootstrap.capacity import Measurement
from netfold.tuning import DEFAULT_LINKS, Topology, build_table

WRONG = "what the switch at 127.0.0.1:"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_cache", {})


def join(rank: int, size: int, folder: str, switch: str, **how: Any) -> Communicator:
    how = {"algorithm": "auto", "transport": "tcp", "probe": "on", **how}
    options = Options(switch=switch, **how)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=60, join_timeout_s=60)


def adds(group: Communicator, counts: tuple[int, ...] = (7, 40_000, 400_009), turns: int = 1) -> None:
    for turn in range(turns):
        for count in counts:
            values = np.arange(count, dtype=np.float64) * (group.rank + 1) + turn
            group.all_reduce(values)
            size = group.size
            np.testing.assert_array_equal(values, np.arange(count) * (size * (size + 1) / 2) + turn * size)


def chosen(rank: int, size: int, folder: str, switch: str) -> Any:
    with join(rank, size, folder, switch) as group:
        adds(group, turns=12)
        found = group.group.shares
        return group.group.table, group.group.links, found.paths, found.balanced


def all_alike(found: list[Any]) -> Any:
    assert all(each == found[0] for each in found), found
    return found[0]


@contextlib.contextmanager
def measures(monkeypatch: pytest.MonkeyPatch, change: Callable[[Measurement, int], Measurement]) -> Iterator[None]:
    """Ranks measure, and use the result of `change`; each call gets another number."""
    measure, numbers = capacity.measure, iter(range(1000))
    monkeypatch.setattr(capacity, "measure", lambda *args, **how: change(measure(*args, **how), next(numbers)))
    yield


LIES = {
    "nothing": 0.0,
    "less than nothing": -5e6,
    "no number": float("nan"),
    "no end": float("inf"),
    "more than any link": 1e30,
    "a hundred times too much": 1e11,
    "a byte a day": 1e-5,
}


@pytest.mark.parametrize("lie", LIES)
def test_with_a_wrong_measured_rate_all_ranks_still_choose_alike(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rate = LIES[lie]
    with running_switch() as switch, measures(monkeypatch, lambda *_: Measurement((rate,))):
        table, links, ways, _ = all_alike(values(run_threads(chosen, 4, switch.endpoint, timeout_s=90)))
    assert all(0 < each < 1e13 for way in ways for each in way)
    if lie != "a byte a day":  # with which no switch is used at all
        assert table.choose("all_reduce", 4 << 20).algorithm == "split", "which corrects it in use"
    reasons = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"rank 0: {WRONG}")]
    if 0 < rate < float("inf"):
        assert links.switches == (min(rate, links.network.bytes_per_s),) and not reasons
    else:
        assert links.switches == () and len(reasons) == 1
        assert f"was not measured: {rate:g} bytes per second is no rate" in reasons[0]


def test_ranks_with_different_measurements_use_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    lied: list[float] = []

    def change(_: Measurement, number: int) -> Measurement:
        lied.append(1e5 * 10.0**number)
        return Measurement((lied[-1],)) if number != 2 else Measurement(why_not="this rank has seen nothing")

    with running_switch() as switch, measures(monkeypatch, change):
        _, links, *_ = all_alike(values(run_threads(chosen, 4, switch.endpoint, timeout_s=90)))
    assert links.switches == () or min(abs(links.switches[0] - each) for each in [*lied, links.network.bytes_per_s]) < 1
    assert all(rates in ((), links.switches) or rates for rates, _ in capacity._cache.values())


@contextlib.contextmanager
def during_the_measurement(monkeypatch: pytest.MonkeyPatch, event: Callable[[], None]) -> Iterator[None]:
    """Act once, when rank 0 has finished the first measuring operation."""
    time_of = capacity._Clock.time
    once = threading.Lock()

    def time_and_more(self: Any, size: int) -> float:
        if size > 4096 and once.acquire(blocking=False):
            event()
        return time_of(self, size)

    monkeypatch.setattr(capacity._Clock, "time", time_and_more)
    yield


def signals(switch: RunningSwitch, number: int) -> Callable[[], None]:
    return lambda: os.kill(switch.process.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_switch_that_ends_during_its_measurement_costs_seconds_and_no_sum(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_switch() as switch, during_the_measurement(monkeypatch, signals(switch, number)):
        began = time.monotonic()
        _, links, *_ = all_alike(values(run_threads(chosen, 3, switch.endpoint, timeout_s=60)))
        assert time.monotonic() - began < seconds(15)
        switch.process.kill()
        switch.process.wait()
    assert links.switches == () and capacity._cache == {}
    (reason,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"rank 0: {WRONG}")]
    assert "was not measured: " in reason and "link like a rank's" in reason


def test_a_pause_of_the_switch_is_not_taken_for_its_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_switch() as switch:

        def pause() -> None:
            signals(switch, signal.SIGSTOP)()
            threading.Timer(2.6, signals(switch, signal.SIGCONT)).start()

        with during_the_measurement(monkeypatch, pause):
            _, links, *_ = all_alike(values(run_threads(chosen, 3, switch.endpoint, timeout_s=60)))
    assert links.switches == ()
    assert any("it took longer with" in record.getMessage() for record in caplog.records)


def test_a_switch_under_another_jobs_flood_is_measured_in_time_and_all_choose_alike() -> None:
    over, floods = threading.Event(), threading.Barrier(3)

    def flood(rank: int, size: int, folder: str, switch: str) -> int:
        turns = 0
        with join(rank, size, folder, switch, algorithm="all_reduce=in_network") as group:
            while True:
                flag = np.full(1 << 18, over.is_set(), np.float32)
                group.all_reduce(flag, op="min")
                turns += 1
                if turns == 3:
                    floods.wait(seconds(30))
                if flag[0]:
                    return turns

    with running_switch() as switch:
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.extend(run_threads(flood, 2, switch.endpoint, timeout_s=120)))
        thread.start()
        try:
            floods.wait(seconds(30))
            _, links, *_ = all_alike(values(run_threads(chosen, 3, switch.endpoint, timeout_s=90)))
        finally:
            over.set()
            thread.join()
        assert values(other)[0] == values(other)[1]
    assert links.switches == () or links.switches[0] > 0


@pytest.mark.parametrize("parts", [[1], [15], [4095], [4096], [1, 4095], [4000, 1]])
def test_a_part_below_one_chunk_does_not_go_through_the_switch(parts: list[int]) -> None:
    def rank(rank: int, size: int, folder: str, switch: str) -> list[int]:
        with join(rank, size, folder, switch, algorithm="all_reduce=split", probe="off") as group:
            group.group._native.set_shares(shares.Shares([1] * len(parts), 1, 1, parts))
            adds(group, (1, 3, 8191, 40_000, 140_001))
            found = group.group.shares.parts
            return list(found)

    with running_switch() as first, running_switch() as second:
        endpoints = ",".join([first.endpoint, second.endpoint][: len(parts)])
        found = all_alike(values(run_threads(rank, 3, endpoints, timeout_s=60)))
    assert found == [*parts, shares.WHOLE - sum(parts)]


def test_a_switch_named_twice_is_measured_as_one_link() -> None:
    with running_switch("--threads", "2") as switch:
        twice = f"{switch.endpoint},{switch.endpoint}"
        _, links, ways, _ = all_alike(values(run_threads(chosen, 3, twice, timeout_s=90)))
        assert len(switch.wait_for("event=started")) == 2
    assert len(ways) == 3
    assert links.switches == () or links.switches[0] == links.switches[1] > 0


# The measurement, with a virtual clock.


def measured(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], switches: int = 1) -> Any:
    """The result, the sizes in bytes, and the time at the end; an operation takes `seconds_of` its size."""
    clock, sizes = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(kind: str, dtype: str, reduce: str, array: Any) -> None:
        if dtype == "i32":
            sizes.append(array.nbytes)
            clock[0] += seconds_of(array.nbytes)

    return capacity.measure(run, switches), sizes, clock[0]


def test_a_measurement_stops_before_a_size_that_would_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, sizes, took_s = measured(monkeypatch, lambda size: size / 10_000)
    assert found.rates == () and "32768 bytes would take 3.28 s, and it may take 2.05 s in all" in found.why_not
    assert sizes == [4096] and took_s < 0.5


def test_only_a_large_operation_that_would_go_through_the_switch_alone_is_split() -> None:
    network = replace(DEFAULT_LINKS.network, bytes_per_s=23.5e6)
    links = replace(DEFAULT_LINKS, network=network, switches=(23.5e6,), measured=True)
    table = build_table(ranks=8, switch="s:1", links=links)
    assert table.choose("all_reduce", 16 << 20).algorithm == "in_network"
    learns = capacity.with_learned_split(table, 8)
    below, above = learns.choose("all_reduce", (1 << 20) - 1), learns.choose("all_reduce", 1 << 20)
    assert (below.algorithm, above.algorithm) == ("in_network", "split")
    assert above.reason == below.reason + "; by split, which notices where a switch takes less"
    assert [row for row in learns.rows if row != above] == list(table.rows)
    assert capacity.with_learned_split(table, 2) == table, "between two hosts nothing is split"
    slow = replace(links, switches=(5e6,))
    by_parts = build_table(ranks=8, switch="s:1", links=slow)
    assert capacity.with_learned_split(by_parts, 8) == by_parts
    on_hosts = build_table(ranks=8, switch="s:1", links=links, topology=Topology.even(8, 4))
    between = capacity.with_learned_split(on_hosts, 4).choose("all_reduce", 16 << 20)
    assert (between.algorithm, between.between) == ("hierarchical", "split")


def test_each_of_several_switches_has_a_part_of_every_measured_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found, sizes, _ = measured(monkeypatch, lambda size: size / 25e6, switches=4)
    assert sizes[1] == 4 * (64 << 10) and len(found.rates) == 4
    assert sum(found.rates) == pytest.approx(25e6, rel=0.01)


def test_a_loss_on_one_rank_ends_the_measurement_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(kind: str, dtype: str, reduce: str, array: Any) -> None:
        if dtype == "f64":
            array[1] = 0.0  # another rank's

    assert capacity.measure(run, 1) == Measurement(why_not="another rank has lost a switch")
    lost = capacity.measure(run, 1, lost=lambda: "the switch is gone")
    assert lost.rates == () and lost.why_not == "the switch is gone"


def test_the_next_group_repeats_an_abandoned_measurement(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    results = iter([Measurement(why_not="the first time")] * 3)
    measure = capacity.measure

    def once(*args: Any, **how: Any) -> Measurement:
        real = measure(*args, **how)
        return next(results, real)

    monkeypatch.setattr(capacity, "measure", once)
    with running_switch() as switch, caplog.at_level(logging.WARNING, "netfold"):
        first = all_alike(values(run_threads(chosen, 3, switch.endpoint, timeout_s=60)))
        capacity._cache.clear()  # rates learned from operations
        second = all_alike(values(run_threads(chosen, 3, switch.endpoint, timeout_s=60)))
    assert first[1].switches == () and second[1].switches != ()
    assert sum("was not measured: the first time" in record.getMessage() for record in caplog.records) == 1
