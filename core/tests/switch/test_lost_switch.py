"""A lost switch costs no step: every operation ends with the same result on all ranks.

The group warns once, continues by host algorithms, and returns to the switch when it is back.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from mortal_switch import MortalSwitch
from ranks import run_ranks, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.diagnostics.status_segment import find_ranks

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")
REDUCE = {"sum": lambda parts: parts.sum(0), "avg": lambda parts: parts.mean(0), "max": lambda parts: parts.max(0)}
IN_NETWORK = engine.ALGORITHMS["in_network"]
TIMEOUT_S = 15.0


def join(
    rank: int, size: int, folder: str, endpoint: str | None, timeout_s: float = TIMEOUT_S, **options: Any
) -> Communicator:
    settings = Options(**{"switch": endpoint, "probe": "off", "rejoin_s": 0, **options})
    return Communicator(FileStore(folder), rank, size, options=settings, timeout_s=timeout_s, join_timeout_s=20)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The operations of a group: sizes in elements, the number in progress at once, and their kind."""

    seed: int
    size: int
    counts: tuple[int, ...]
    at_once: int
    dtype: str
    wire: str
    op: str
    kinds: tuple[str, ...] = ()  # of each; none: all_reduces

    @classmethod
    def of(cls, seed: int) -> Stream:
        draw = random.Random(seed)
        dtype, wire = draw.choice([("float32", "auto"), ("float32", "bf16"), ("float32", "i32"), ("int32", "auto"),
                                   ("float64", "auto"), ("float16", "auto")])  # fmt: skip
        drawn = cls(
            seed=seed,
            size=draw.choice([2, 2, 3, 4]),
            counts=tuple(draw.choice([1, 7, 16, 100, 500, 2000]) for _ in range(draw.randrange(1, 8))),
            at_once=draw.choice([1, 2, 4]),
            dtype=dtype,
            wire=wire,
            op=draw.choice(["sum", "avg"] if dtype.startswith("float") else ["sum", "max"]),
        )
        # Only all_reduce has a narrow wire format.
        mixed = wire == "auto" and draw.random() < 0.7
        return dataclasses.replace(drawn, kinds=tuple(draw.choice(KINDS) for _ in drawn.counts)) if mixed else drawn

    def kind(self, index: int) -> str:
        return self.kinds[index] if self.kinds else "all_reduce"

    def root(self, index: int) -> int:
        return (self.seed + index) % self.size

    def part(self, rank: int, index: int) -> Any:
        generator = np.random.default_rng([self.seed, rank, index])
        if self.dtype == "int32":
            return generator.integers(-1000, 1000, self.counts[index]).astype(np.int32)
        return generator.standard_normal(self.counts[index]).astype(self.dtype)

    def run(
        self,
        rank: int,
        size: int,
        folder: str,
        endpoint: str | None,
        through: Callable[[int], None] = lambda rank: None,
        **options: Any,
    ) -> list[Any]:
        """Run the operations; return the results. Each buffer is overwritten as soon as it is returned.

        through: called with a rank's number when that rank has all its results, before it leaves the group.
        """
        draw = random.Random(self.seed * 1000 + rank)
        results: list[Any] = []
        if endpoint is not None:
            options = {"algorithm": "in_network", **options}
        with join(rank, size, folder, endpoint, wire_dtype=self.wire, **options) as group:
            under_way: list[tuple[Any, Any]] = []
            for index in range(len(self.counts)):
                if len(under_way) == self.at_once:
                    results.append(taken(under_way))
                if draw.random() < 0.3:
                    time.sleep(draw.random() * 0.01)
                under_way.append(self.start(group, index, self.part(rank, index)))
            while under_way:
                results.append(taken(under_way))
            through(rank)
            # Only a rank that stays can forward the results that no other rank kept.
            Path(folder, f"through{rank}").touch()
            deadline = time.monotonic() + seconds(TIMEOUT_S)
            while any(not Path(folder, f"through{other}").exists() for other in range(size)):
                assert time.monotonic() < deadline
                time.sleep(0.002)
        return results

    def start(self, group: Communicator, index: int, part: Any) -> tuple[Any, Any]:
        """Start an operation; return its work, and the array that it fills."""
        kind, root = self.kind(index), self.root(index)
        if kind == "all_gather":
            into = np.zeros((self.size, len(part)), part.dtype)
            return group.all_gather(part, into, asynchronous=True), into
        if kind == "reduce_scatter":
            into = np.zeros_like(part)
            # The block for rank r is the part rolled by r, so that all blocks differ.
            return group.reduce_scatter(
                [np.roll(part, to) for to in range(self.size)], into, op=self.op, asynchronous=True
            ), into
        if kind == "reduce":
            return group.reduce(part, root, op=self.op, asynchronous=True), part
        if kind == "broadcast":
            return group.broadcast(part, root, asynchronous=True), part
        return group.all_reduce(part, op=self.op, asynchronous=True), part

    def wanted(self, rank: int, index: int) -> tuple[list[Any], bool]:
        """The contributions to this rank's result, and whether they are reduced or copied."""
        kind, parts = self.kind(index), [self.part(each, index) for each in range(self.size)]
        if kind == "all_gather":
            return [np.array(parts)], False
        if kind == "broadcast":
            return [parts[self.root(index)]], False
        if kind == "reduce" and rank != self.root(index):
            return [parts[rank]], False
        return [np.roll(part, rank) if kind == "reduce_scatter" else part for part in parts], True

    def check(self, results: list[list[Any]]) -> None:
        # i32: the same bits as a group that never had a switch.
        without = values(run_threads(self.run, self.size, None))[0] if self.wire == "i32" else None
        for index in range(len(self.counts)):
            of_ranks = [each[index] for each in results]
            if self.kind(index) == "all_reduce":
                assert all(each.tobytes() == of_ranks[0].tobytes() for each in of_ranks), f"index {index}: ranks differ"
            for rank, found in enumerate(of_ranks):
                where = f"index {index}, {self.kind(index)}, rank {rank}"
                if without is not None:
                    assert found.tobytes() == without[index].tobytes(), where
                    continue
                parts, reduced = self.wanted(rank, index)
                if not reduced:
                    assert found.tobytes() == parts[0].tobytes(), where
                    continue
                exact = REDUCE[self.op](np.array(parts).astype(np.float64))
                if self.dtype == "int32":
                    assert (found == exact).all(), where
                    continue
                # At most P + 1 roundings, each by at most half a unit in the last place of the sum of magnitudes.
                bits = {"bf16": 8, "f16": 11}.get(self.wire, {"float16": 11, "float32": 24, "float64": 53}[self.dtype])
                bound = (self.size + 1) * np.abs(np.array(parts).astype(np.float64)).sum(0) * 2.0**-bits
                assert (np.abs(found - exact) <= bound + 1e-30).all(), where


def taken(under_way: list[tuple[Any, Any]]) -> Any:
    work, buffer = under_way.pop(0)
    work.wait()
    result = buffer.copy()
    buffer.view(np.uint8).fill(0xA5)
    return result


def warnings_of(caplog: pytest.LogCaptureFixture, endpoint: str) -> list[str]:
    """The warnings about that switch; a thread of an earlier test's group may still log about another one."""
    warnings = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    return [text for text in warnings if endpoint in text]


def lost_while(stream: Stream) -> MortalSwitch:
    """A switch that dies after some chunks; each worker never gets some results of the last window."""
    draw = random.Random(-stream.seed - 1)
    chunks = sum(-(-count * np.dtype(stream.dtype).itemsize // 64) for count in stream.counts)
    loss, first = draw.choice([0.0, 0.1, 0.5]), draw.randrange(1, chunks + 1)
    seed = draw.getrandbits(32)

    def answers(worker: int, chunk: int) -> bool:
        return chunk < first or random.Random(f"{seed} {worker} {chunk}").random() >= loss

    lives_for, window = draw.randrange(1, chunks + 1), draw.choice([1, 3, 16, 100])
    return MortalSwitch(lives_for=lives_for, answers=answers, stalls_at=1, window=window)


SEEDS = range(int(os.environ.get("LOST_SWITCH_FIRST", "0")), int(os.environ.get("LOST_SWITCH_LAST", "24")))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_switch_that_dies_at_any_moment_costs_no_step(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Repeat a seed: LOST_SWITCH_FIRST=7 LOST_SWITCH_LAST=8, and `-k any_moment`."""
    stream = Stream.of(seed)
    print(stream)
    with lost_while(stream) as switch:
        stream.check(values(run_threads(stream.run, stream.size, switch.endpoint)))
        assert switch.complete > 0, "nothing went through the switch"
        died = switch.dead.is_set()
    warnings = warnings_of(caplog, switch.endpoint)
    # A group with all its results before the switch died may close without a warning.
    assert len(warnings) <= 1 and (died or not warnings), warnings
    _died.append(died)


_died: list[bool] = []


def test_the_seeds_above_had_switches_that_died_during_operations() -> None:
    if not _died:
        pytest.skip("none of them ran in this process")
    assert sum(_died) >= 0.7 * len(_died), _died


@pytest.mark.parametrize("holder", range(3))
def test_a_result_that_one_rank_has_is_forwarded_and_not_reduced_again(
    holder: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The holder has its sums, and has overwritten them; the contributions to them are gone."""
    stream = Stream(seed=5, size=3, counts=(16, 16, 100), at_once=3, dtype="int32", wire="auto", op="sum")

    def through(rank: int) -> None:
        if rank == holder:
            switch.die()

    with MortalSwitch(window=16, answers=lambda worker, chunk: worker == holder) as switch:
        stream.check(values(run_threads(stream.run, 3, switch.endpoint, through)))
    (warning,) = warnings_of(caplog, switch.endpoint)
    # 16 i32 for each chunk: 1 + 1 + 7 chunks, which two ranks lacked.
    assert re.search(r"all_reduce goes by direct.*18 results are passed on", warning), warning


def test_only_chunks_that_no_rank_has_are_reduced_again(caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(seed=6, size=3, counts=(320,), at_once=1, dtype="float32", wire="bf16", op="avg")
    # 32 bf16 for each chunk, 10 chunks: no rank gets chunk 3, and only rank 2 gets chunk 5.
    some = {3: (), 5: (2,)}
    with MortalSwitch(stalls_at=10, answers=lambda worker, chunk: worker in some.get(chunk, (0, 1, 2))) as switch:
        stream.check(values(run_threads(stream.run, 3, switch.endpoint)))
    assert "2 results are passed on" in warnings_of(caplog, switch.endpoint)[0]


def test_a_rank_that_begins_an_operation_late_runs_it_with_all_ranks() -> None:
    def late(rank: int, size: int, folder: str, endpoint: str, switch: MortalSwitch) -> list[Any]:
        with join(rank, size, folder, endpoint) as group:
            first = np.full(100, rank + 1.0, np.float32)
            group.all_reduce(first)
            if rank == 1:
                time.sleep(0.1)
                switch.die()
                time.sleep(0.2)
            later = [np.full(count, rank + 1.0, np.float32) for count in (10, 1000)]
            works = [group.all_reduce(each, asynchronous=True) for each in later]
            group.broadcast(np.zeros(10), root=0)
            for work in works:
                work.wait()
            return [first, *later]

    with MortalSwitch() as switch:
        for results in values(run_threads(late, 3, switch.endpoint, switch)):
            assert [set(each.tolist()) for each in results] == [{6.0}] * 3


def test_operations_over_the_mesh_go_on_during_recovery_in_any_order() -> None:
    """Rank 0 is in a broadcast when the switch dies; the other ranks call it only after their sum."""

    def call(rank: int, size: int, folder: str, endpoint: str) -> list[float]:
        with join(rank, size, folder, endpoint) as group:
            buffer, word = np.full(2000, rank + 1.0), np.full(1000, float(rank))
            work = group.all_reduce(buffer, asynchronous=True)
            if rank != 0:
                work.wait()
            group.broadcast(word, root=2)
            if rank == 0:
                work.wait()
            return [buffer[0], buffer[-1], word[-1]]

    with MortalSwitch(lives_for=50) as switch:
        assert values(run_threads(call, 3, switch.endpoint)) == [[6.0, 6.0, 2.0]] * 3


def test_one_ranks_lost_connection_takes_the_whole_group_off_the_switch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut = threading.Event()

    def call(rank: int, size: int, folder: str, endpoint: str, switch: MortalSwitch) -> Any:
        with join(rank, size, folder, endpoint) as group:
            for index in range(200):
                buffer = np.full(500, rank + index, np.int64)
                group.all_reduce(buffer)
                assert set(buffer.tolist()) == {3 + 3 * index}, index
                if index == 20 and rank == 0:
                    switch.cut(1)
                    cut.set()
                if index > 20:
                    time.sleep(0.005)
            mine = [each for each in find_ranks(os.getpid()) if each.group == group.group._id]
            assert [each.without_switch for each in mine] == [True]
            assert "its switch is lost" in group.group._native.last_seen()
            return set(group.group.events()["algorithm"][-50:].tolist()), group.group.why("all_reduce", 1000)

    with MortalSwitch() as switch:
        for algorithms, why in values(run_threads(call, 3, switch.endpoint, switch)):
            assert IN_NETWORK not in algorithms
            assert f"the switch at {switch.endpoint} is gone" in why
    (warning,) = warnings_of(caplog, switch.endpoint)
    assert "it closed the connection" in warning


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "it closed the connection"),
        (signal.SIGTERM, "the switch is shutting down: SIGTERM"),
    ],
)
def test_a_real_switch_that_ends_during_an_operation_costs_no_step(
    number: signal.Signals, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def call(rank: int, size: int, folder: str, endpoint: str) -> bool:
        with join(rank, size, folder, endpoint) as group:
            while True:
                buffer = np.array([over.is_set()] + [rank] * 300_000, np.int32)
                group.all_reduce(buffer)
                assert (buffer[1:] == 3).all()
                started.set()
                if buffer[0] == 3:
                    return True

    started, over = threading.Event(), threading.Event()
    with running_switch() as switch:

        def end() -> None:
            assert started.wait(seconds(20))
            time.sleep(0.05)
            switch.process.send_signal(number)
            assert switch.process.wait(seconds(20)) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
            time.sleep(0.2)
            over.set()

        ender = threading.Thread(target=end)
        ender.start()
        values(run_threads(call, 3, switch.endpoint))
        ender.join()
    (warning,) = warnings_of(caplog, switch.endpoint)
    assert f"the switch at {switch.endpoint} is gone ({reason})" in warning
    assert re.search(r"This rank was in .*all_reduce #\d+", warning), warning


def stops(rank: int, size: int, folder: str, endpoint: str, pid: int) -> tuple[float, list[int]]:
    slowest_s = 0.0
    with join(rank, size, folder, endpoint) as group:
        for index in range(40):
            if index == 20 and rank == 0:
                os.kill(pid, signal.SIGSTOP)
            buffer = np.full(100_000, rank + index, np.int32)
            began = time.monotonic()
            group.all_reduce(buffer)
            slowest_s = max(slowest_s, time.monotonic() - began)
            assert set(buffer.tolist()) == {1 + 2 * index}
        return slowest_s, group.group.events()["algorithm"].tolist()


def test_a_stopped_switch_is_lost_when_it_answers_no_query() -> None:
    with running_switch() as switch:
        try:
            found = values(run_ranks(stops, 2, switch.endpoint, switch.process.pid))
        finally:
            switch.process.send_signal(signal.SIGCONT)
    for slowest_s, algorithms in found:
        # The switch counts as lost after 3 s without a reply, long before TIMEOUT_S.
        assert 3.0 < slowest_s < seconds(8.0)
        assert algorithms[0] == IN_NETWORK and algorithms[-1] != IN_NETWORK


def test_a_straggler_is_not_taken_for_a_lost_switch(caplog: pytest.LogCaptureFixture) -> None:
    def call(rank: int, size: int, folder: str, endpoint: str) -> int:
        with join(rank, size, folder, endpoint) as group:
            if rank == 1:
                time.sleep(3.0)
            group.all_reduce(np.ones(1000))
            return int(group.group.events()["algorithm"][-1])

    with running_switch() as switch:
        assert values(run_threads(call, 2, switch.endpoint)) == [IN_NETWORK] * 2
    assert warnings_of(caplog, switch.endpoint) == []


# --- the return to the switch ---------------------------------------------------------------------------------------


def until(rank: int, size: int, folder: str, endpoint: str, over: threading.Event, **options: Any) -> list[int]:
    """Check exact sums until `over`; return the algorithms that ran, in order."""
    with join(rank, size, folder, endpoint, **options) as group:
        index = 0
        while True:
            flag = np.array([over.is_set()], np.int32)
            group.all_reduce(flag, op="min")
            if flag[0]:
                return group.group.events()["algorithm"].tolist()
            buffers = [np.arange(300, dtype=np.int64) * (rank + 1) + index + k for k in range(3)]
            works = [group.all_reduce(each, asynchronous=True) for each in buffers]
            for k, (work, buffer) in enumerate(zip(works, buffers, strict=True)):
                work.wait()
                assert (buffer == np.arange(300) * (size * (size + 1) // 2) + size * (index + k)).all(), (index, k)
            index += 1
            time.sleep(0.005)  # a group remembers its last 8192 operations


def busy(switch: MortalSwitch) -> None:
    """Wait until a group has added 100 chunks through the switch; the tests assert that it did."""
    deadline = time.monotonic() + seconds(20)
    while switch.complete < 100 and time.monotonic() < deadline:
        time.sleep(0.01)


def returns(algorithms: list[int]) -> int:
    """Count how often the group returned to the switch from host algorithms."""
    return sum(before != IN_NETWORK and after == IN_NETWORK for before, after in itertools.pairwise(algorithms))


def test_a_restarted_switch_is_used_again_and_lost_again(caplog: pytest.LogCaptureFixture) -> None:
    over = threading.Event()
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    draw = random.Random(seed)

    def live_and_die(port: int) -> None:
        for _ in range(4):
            with MortalSwitch(port=port) as switch:
                busy(switch)
                time.sleep(draw.random() * 0.1)
            time.sleep(draw.random() * 0.3)
        over.set()

    with MortalSwitch() as first:
        port = first.port
        lives = threading.Thread(target=lambda: (busy(first), first.die(), live_and_die(port)))
        lives.start()
        found = values(run_threads(lambda *rank: until(*rank, first.endpoint, over, rejoin_s=0.1), 3, timeout_s=60))
        lives.join()
    assert all(each == found[0] for each in found)
    assert returns(found[0]) >= 4
    warnings = warnings_of(caplog, first.endpoint)
    assert sum("has the group again" in each for each in warnings) == 4
    assert sum("No step is lost" in each for each in warnings) == 5


def test_a_group_returns_to_a_real_switch_after_sigkill() -> None:
    over = threading.Event()
    with running_switch() as switch:
        port = switch.address[1]

        def restart() -> None:
            switch.wait_for("starts with 2 workers")
            time.sleep(0.5)
            switch.process.kill()
            switch.process.wait()
            with running_switch("--listen", f"127.0.0.1:{port}") as second:
                second.wait_for("starts with 2 workers")
                time.sleep(0.5)
                over.set()
                ended.wait(seconds(10))

        ended = threading.Event()
        restarter = threading.Thread(target=restart)
        restarter.start()
        found = values(run_threads(lambda *rank: until(*rank, switch.endpoint, over, rejoin_s=1), 2, timeout_s=60))
        ended.set()
        restarter.join()
    for algorithms in found:
        assert returns(algorithms) == 1 and algorithms[-1] == IN_NETWORK


def test_with_rejoin_0_a_group_never_joins_again() -> None:
    over = threading.Event()
    with MortalSwitch() as first:
        port = first.port

        def restart() -> None:
            busy(first)
            first.die()
            with MortalSwitch(port=port) as second:
                time.sleep(1.5)
                assert not second.complete
                over.set()

        restarter = threading.Thread(target=restart)
        restarter.start()
        found = values(run_threads(lambda *rank: until(*rank, first.endpoint, over, rejoin_s=0), 2, timeout_s=60))
        restarter.join()
    assert all(returns(each) == 0 for each in found)


# --- together with another failure ------------------------------------------------------------------------------------


def dies_with_the_switch(rank: int, size: int, folder: str, endpoint: str, victim: int, pid: int) -> Any:
    with join(rank, size, folder, endpoint) as group:
        began = time.monotonic()
        try:
            for index in itertools.count():
                if rank == victim and index == 3:
                    os.kill(pid, signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                began = time.monotonic()
                buffer = np.ones(100_000, np.float32)
                group.all_reduce(buffer)
                assert set(buffer.tolist()) == {float(size)}
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began


@pytest.mark.parametrize("victim", range(3))
def test_all_other_ranks_name_a_worker_that_dies_with_the_switch(victim: int) -> None:
    with running_switch() as switch:
        outcomes = run_ranks(dies_with_the_switch, 3, switch.endpoint, victim, switch.process.pid, dies=[victim])
    for rank in set(range(3)) - {victim}:
        assert not outcomes[rank].error, outcomes[rank].text
        error, named, text, took_s = outcomes[rank].value
        assert (error, named) == ("PeerLost", victim), text
        assert took_s < seconds(5.0)


def test_a_stopped_rank_is_named_at_the_deadline_of_the_waiting_ranks() -> None:
    def call(rank: int, size: int, folder: str, endpoint: str, switch: MortalSwitch) -> tuple[str, str, float]:
        with join(rank, size, folder, endpoint) as group:
            group.all_reduce(np.ones(10))
            group.barrier()
            if rank == 2:
                # Its listener does not answer, as that of a stopped process; here the ranks are threads.
                group.group._monitor.handlers["freeze 0"] = lambda _, __: time.sleep(3)  # type: ignore[assignment, func-returns-value]
                ready.set()
                time.sleep(3)
                return "", "", 0.0
            ready.wait(seconds(5))
            if rank == 0:
                switch.die()
            began = time.monotonic()
            try:
                group.all_reduce(np.ones(10), timeout_s=1.5)
            except Exception as error:
                return type(error).__name__, str(error), time.monotonic() - began
        return "", "", 0.0

    ready = threading.Event()
    with MortalSwitch() as switch:
        found = values(run_threads(call, 3, switch.endpoint, switch))
    for error, text, took_s in found[:2]:
        assert error in ("CollectiveTimeout", "PeerLost"), text
        assert "rank 2" in text
        assert took_s < seconds(8.0)
    assert any("rank 2 did not say what it has" in text for _, text, _ in found)


@pytest.fixture(autouse=True)
def _no_thread_failed(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert not [each for each in recwarn if "Exception in thread" in str(each.message)]
