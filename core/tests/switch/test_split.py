"""An all_reduce that is split between the switch and a ring: right sums, and one split on all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine, shares
from netfold.bootstrap import capacity

SPLIT = engine.ALGORITHMS["split"]
# Below a part's smallest size, about it, and above 1 MB, which is large enough to measure a rate.
COUNTS = (1, 1000, 40_000, 100_003, 400_009)


def join(rank: int, size: int, folder: str, endpoints: Sequence[str], **how: Any) -> Communicator:
    how = {"algorithm": "all_reduce=split", "transport": "tcp", "probe": "off", **how}
    options = Options(switch=",".join(endpoints), **how)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=30, join_timeout_s=30)


def part(rank: int, count: int, dtype: str = "float32") -> Any:
    return np.random.default_rng([rank, count]).integers(-100, 100, count).astype(dtype)


def total(size: int, count: int, dtype: str = "float32") -> Any:
    return np.sum([part(each, count, dtype) for each in range(size)], 0).astype(dtype)


def known(group: Communicator) -> tuple[list[tuple[int, int]], list[int], int]:
    found = group.group.shares
    return found.paths, found.parts, found.operations


def every_sum(rank: int, size: int, folder: str, endpoints: list[str]) -> Any:
    with join(rank, size, folder, endpoints, probe="on") as group:
        for count in COUNTS:
            for dtype in ("float32", "float64", "int32", "float16"):
                buffer = part(rank, count, dtype)
                group.all_reduce(buffer)
                np.testing.assert_array_equal(buffer, total(size, count, dtype), strict=True)
            buffer = part(rank, count, "float64")
            group.all_reduce(buffer, op="avg")
            np.testing.assert_allclose(buffer, total(size, count, "float64") / size)
            buffer = part(rank, count)
            group.all_reduce(buffer, op="max")
            assert (buffer == np.max([part(each, count) for each in range(size)], 0)).all()
        assert set(group.group.events()["algorithm"].tolist()) == {SPLIT}
        sent = [traffic["packets_sent"] for at in range(len(endpoints)) if (traffic := group.group.traffic(at))]
        return known(group), sent


@pytest.mark.parametrize("switches", [1, 2])
@pytest.mark.parametrize("size", [3, 5])
def test_sums_are_right_and_all_ranks_split_alike(size: int, switches: int) -> None:
    with running_switch() as first, running_switch() as second:
        endpoints = [first.endpoint, second.endpoint][:switches]
        found = values(run_threads(every_sum, size, endpoints, timeout_s=60))
    assert all(each[0] == found[0][0] for each in found)
    ways, parts, operations = found[0][0]
    assert len(ways) == len(parts) == switches + 1 and sum(parts) == shares.WHOLE
    # 1 MB and more: those of the last count except f16.
    assert operations == 5
    assert all(packets > 0 for _, sent in found for packets in sent)


def many_at_once(rank: int, size: int, folder: str, endpoints: list[str]) -> Any:
    with join(rank, size, folder, endpoints, probe="on") as group:
        for turn in range(8):
            buffers = [part(rank, count + turn) for count in COUNTS]
            works = [group.all_reduce(buffer, asynchronous=True) for buffer in buffers]
            message = np.full(3, float(rank))
            works.append(group.broadcast(message, root=turn % size, asynchronous=True))
            for work in works:
                work.wait()
            for count, buffer in zip(COUNTS, buffers, strict=True):
                np.testing.assert_array_equal(buffer, total(size, count + turn))
            assert (message == turn % size).all()
        return known(group)


def test_several_splits_at_once_with_other_operations_between_them() -> None:
    with running_switch() as switch:
        found = values(run_threads(many_at_once, 4, [switch.endpoint], timeout_s=60))
    assert all(each == found[0] for each in found)


def through_hosts(rank: int, size: int, folder: str, endpoints: list[str]) -> Any:
    with join(rank, size, folder, endpoints, algorithm="all_reduce=hierarchical:split", transport="auto") as group:
        for count in COUNTS:
            buffer = part(rank, count)
            group.all_reduce(buffer)
            np.testing.assert_array_equal(buffer, total(size, count))
        traffic = group.group.traffic()
        return traffic and traffic["packets_sent"]


def test_one_rank_of_each_host_splits_the_traffic_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1, 2)))
    with running_switch() as switch:
        sent = values(run_threads(through_hosts, 5, [switch.endpoint], timeout_s=60))
        switch.wait_for("starts with 3 workers")
    assert [bool(packets) for packets in sent] == [True, False, True, False, True]


def bits(rank: int, size: int, folder: str, endpoints: list[str]) -> Any:
    with join(rank, size, folder, endpoints) as group:
        sums = []
        for turn in range(12):
            buffer = np.random.default_rng([rank, turn]).standard_normal(400_000).astype(np.float32)
            group.all_reduce(buffer)
            sums.append(buffer.tobytes())
        return sums, known(group)


def test_without_a_probe_the_split_and_every_bit_stay_the_same() -> None:
    found = []
    for _ in range(2):
        with running_switch() as switch:
            found += values(run_threads(bits, 3, [switch.endpoint], timeout_s=60))
    assert all(each == found[0] for each in found)
    # A switch with a link like a rank's, and a ring of 3 ranks: (1/3) / (1/3 + 3/4 * 2/3).
    assert found[0][1][1][0] / shares.WHOLE == pytest.approx(0.4, abs=0.001)


def test_the_parts_are_those_of_the_table() -> None:
    def one(rank: int, size: int, folder: str, endpoints: list[str]) -> list[int]:
        with join(rank, size, folder, endpoints) as group:
            group.group._native.set_shares(shares.Shares([1, 1], 1, 1, [1024, 512]))
            before = [group.group.traffic(at)["packets_sent"] for at in range(2)]  # type: ignore[index]
            buffer = part(rank, 1 << 20)
            group.all_reduce(buffer)
            np.testing.assert_array_equal(buffer, total(size, 1 << 20))
            after = [group.group.traffic(at)["packets_sent"] for at in range(2)]  # type: ignore[index]
            payload_bytes = group.group.membership.payload_bytes  # type: ignore[union-attr]
            return [(b - a) * payload_bytes for a, b in zip(before, after, strict=True)]

    with running_switch() as first, running_switch() as second:
        for quarter, eighth in values(run_threads(one, 3, [first.endpoint, second.endpoint])):
            assert quarter / eighth == pytest.approx(2, rel=0.2)
            assert quarter == pytest.approx(1 << 20, rel=0.2)


def goes_on(rank: int, size: int, folder: str, endpoint: str, dies: threading.Event, back: threading.Event) -> Any:
    with join(rank, size, folder, [endpoint], rejoin_s=1, probe="on") as group:
        for turn in range(60):
            if turn == 10:
                dies.set()
            if turn == 40:
                back.set()
                time.sleep(0.2)
            buffer = part(rank, 400_000 + turn)
            group.all_reduce(buffer)
            np.testing.assert_array_equal(buffer, total(size, 400_000 + turn))
        return known(group)


def test_a_lost_switch_costs_no_step_and_changes_no_measured_rate() -> None:
    dies, back = threading.Event(), threading.Event()
    with running_switch() as switch:

        def kill() -> None:
            dies.wait(seconds(60))
            switch.process.kill()
            switch.process.wait()
            back.wait(seconds(60))
            with running_switch("--listen", f"127.0.0.1:{switch.address[1]}"):
                ended.wait(seconds(60))

        ended = threading.Event()
        thread = threading.Thread(target=kill)
        thread.start()
        found = values(run_threads(goes_on, 3, switch.endpoint, dies, back, timeout_s=90))
        ended.set()
        thread.join()
    assert all(each == found[0] for each in found)


# The measured rate of the switch, before the first operation.


def chosen(rank: int, size: int, folder: str, endpoint: str) -> Any:
    with join(rank, size, folder, [endpoint], algorithm="auto", probe="on") as group:
        buffer = part(rank, 200_000)  # too small to measure a rate, with which the next group would begin
        group.all_reduce(buffer)
        np.testing.assert_array_equal(buffer, total(size, 200_000))
        events = group.group.events()
        with join(rank, size, folder + "again", [endpoint], algorithm="auto", probe="on") as second:
            again = second.group.links.switches
        return group.group.table, group.group.links, len(events), group.group.why("all_reduce", 16 << 20), again


def test_a_group_measures_its_switch_once_and_all_ranks_choose_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    measure = capacity.measure
    monkeypatch.setattr(capacity, "measure", lambda *args, **how: measured.append(1) or measure(*args, **how))
    monkeypatch.setattr(capacity, "_cache", {})
    with running_switch() as switch:
        found = values(run_threads(chosen, 4, switch.endpoint, timeout_s=60))
    table, links, events, why, again = found[0]
    assert len(links.switches) == 1 and links.switches[0] > 0 and again == links.switches
    assert len(measured) == 4  # the first group's ranks; the second group used their result
    assert events == 1  # measuring operations are in no record
    assert all(each[:2] == (table, links) for each in found)
    assert "measured" in why or "split" not in why


def test_a_rate_older_than_an_hour_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = frozenset({"a", "b"})
    now = 10_000.0
    monkeypatch.setattr(capacity, "_cache", {(ends, "s:1,s:2"): ((5.0, 7.0), now)})
    monkeypatch.setattr(time, "monotonic", lambda: now + 3599)
    assert capacity.cached_rates(ends, "s:1,s:2") == (5.0, 7.0)
    assert capacity.cached_rates(ends, "s:1") == capacity.cached_rates(frozenset({"a"}), "s:1,s:2") == ()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3601)
    assert capacity.cached_rates(ends, "s:1,s:2") == ()


@pytest.mark.parametrize(
    ("rate", "at_once", "expected"),
    [(25e6, 0, 25e6), (25e6, 128 << 10, 25e6), (3e6, 0, 3e6), (0.2e6, 0, 0.2e6), (1e9, 1 << 20, 1e9)],
)
def test_a_rate_is_measured_despite_a_links_burst(
    monkeypatch: pytest.MonkeyPatch, rate: float, at_once: int, expected: float
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def run(kind: str, dtype: str, reduce: str, array: Any) -> None:
        if dtype == "i32":
            clock[0] += 200e-6 + max(0, array.nbytes - at_once) / rate + min(array.nbytes, at_once) / 10e9

    assert sum(capacity.measure(run, 2).rates) == pytest.approx(expected, rel=0.5)
    assert clock[0] < 2 * capacity.BUDGET_S or rate < 1e6
