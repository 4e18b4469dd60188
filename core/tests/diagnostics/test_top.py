"""A running job seen from outside: synthetic samples, and real jobs with known rates, last rank and overlap."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_ranks import NOW, rank, waiting
from load import seconds
from ranks import Outcome, run_ranks, running_switch, values
from rich.console import Console

from netfold import Communicator, FileStore
from netfold.diagnostics.sampler import RankRates, Sampler, Slowest, Snapshot, _Group, _Member, ranks_behind
from netfold.diagnostics.status_segment import find_ranks
from netfold.diagnostics.top import View, jobs

MS = 1_000_000
MB = 1 << 20
STEPS = 8  # between two checks for the end of the job


def test_a_rank_that_has_not_called_the_others_operation_is_behind() -> None:
    assert ranks_behind([rank(0), rank(1), rank(2)]) == []
    assert ranks_behind([waiting(0, 2), waiting(1, 2), rank(2)]) == [2]
    assert ranks_behind([waiting(0, 1), waiting(1, sequence=4), rank(2, done_sequence=5)]) == [1]
    assert ranks_behind([waiting(0, 1), waiting(1, 2), waiting(2, 0)]) == [], "all have called: values are on their way"


def test_a_rank_that_drives_an_unpublished_operation_is_not_behind() -> None:
    looking = replace(rank(2).counters, is_under_way=True)
    assert ranks_behind([waiting(0, 2), waiting(1, 2), rank(2, counters=looking)]) == []


def test_a_rank_of_another_host_is_behind_when_no_local_rank_is() -> None:
    assert ranks_behind([waiting(0, 2), waiting(1, 0)]) == [2]
    assert ranks_behind([waiting(0, 1, 2), rank(1)]) == [1]


@pytest.mark.parametrize(
    ("under_way", "inside", "slept", "exposed"),
    [
        (40, 0, 0, 0),  # computes all the time
        (40, 40, 40, 40),  # sleeps in the operation all the time
        (40, 40, 0, 40),  # the same for a thread that drives the operation itself
        (40, 10, 10, 10),
        (20, 0, 20, 10),  # sleeps elsewhere, with an operation in progress for half of the time
        (0, 0, 40, 0),  # sleeps, with no operation in progress
    ],
)
def test_exposed_time_is_time_in_netfold_and_its_share_of_sleep_elsewhere(
    under_way: int, inside: int, slept: int, exposed: int
) -> None:
    assert _Member(rank(0), 1).exposed(40 * MS, under_way * MS, inside * MS, slept * MS) == exposed * MS


def test_excess_sleep_of_one_sample_is_subtracted_from_the_next() -> None:
    member = _Member(rank(0), 1)
    # CPU time of a thread inside netfold hides no later sleep.
    assert member.exposed(40 * MS, 40 * MS, 40 * MS, 0) == 40 * MS
    jitter = [-4, 4, -4, 4, -4, 4]  # of a thread that always computes
    assert sum(member.exposed(40 * MS, 40 * MS, 0, each * MS) for each in jitter) == 0
    assert member.exposed(40 * MS, 40 * MS, 0, 30 * MS) == 30 * MS


def test_a_remote_rank_is_last_when_the_switch_names_no_local_rank() -> None:
    """Judged 10 times in the interval; ranks 0 and 1 of 4 were last twice and once."""

    def after(number: int, last: int) -> _Member:
        member = _Member(rank(number), 1)
        member.last = rank(number, counters=replace(member.first.counters, judged=10, last=last))
        return member

    group = _Group("a")
    group._members = {0: after(0, 2), 1: after(1, 1)}
    assert group._slowest((2, 3)) == Slowest((2, 3), 7, 10, reported_by_switch=True)
    group._members[1] = after(1, 8)
    assert group._slowest((2, 3)) == Slowest((1,), 8, 10, reported_by_switch=True)


def picture(**fields: Any) -> Snapshot:
    line = RankRates(waiting(0, 2), False, 49.6, 52.1e6, 104.2e6, 3, 0.82, 0.125)
    lines = (line, replace(line, rank=waiting(1, 2)), replace(line, rank=rank(2), exposed_share=None))
    plain = Snapshot("a", 3, 1.0, lines, (), Slowest((2,), 20, 25, False))
    return replace(plain, **fields)


def shown(one: Snapshot, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(View([one], NOW))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_frame_has_rates_shares_and_waiting_ranks() -> None:
    lines = shown(picture(), 200).splitlines()
    assert lines[0].split(":")[0] == "job of process 1000"
    lines = lines[1:]
    assert lines[2].split()[:10] == ["0", "1000", "49.6", "52.1", "M", "104", "M", "3", "82%", "~12%"]
    assert "in all_reduce of 4000 bytes f32 (sum) by ring #5 for 2.0 s; waits for rank 2" in lines[2]
    assert "slowest: rank 2, 20 of 25 times; others waited and it had not called" in lines[5]


def test_groups_stand_under_their_job_and_jobs_in_the_order_of_their_processes() -> None:
    """Processes 10 and 11 share a group, 11 and 12 another one; 20 is a job of its own, with a lower hash."""

    def group(name: str, number: int, *processes: int) -> Snapshot:
        lines = tuple(
            RankRates(replace(rank(at), pid=pid, group=number, job=name), False, 0, 0, 0, 0, 0, None)
            for at, pid in enumerate(processes)
        )
        return Snapshot(name, len(processes), 1.0, lines, (), None)

    found = jobs([group("a", 1, 20), group("b", 7, 11, 12), group("c", 3, 10, 11), group("d", 2, 11, 10)])
    assert [[snapshot.job for snapshot in job] for job in found] == [["d", "c", "b"], ["a"]]


@pytest.mark.parametrize("width", [25, 30, 40, 60, 80, 100])
def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers(width: int) -> None:
    text = shown(picture(absent=(1, 5)), width)
    title, *rest = text.splitlines()
    assert max(len(line.rstrip()) for line in (title, *rest)) <= width
    assert "…" not in "".join(rest)
    words = " ".join(text.split())
    for said in ("49.6", "~12%", "rank 0 in all_reduce", "not seen: ranks 1, 5, on other hosts"):
        assert said in words, text


def job(number: int, size: int, _: str, folder: str, step: Callable[..., None]) -> Any:
    """Run steps until the test stops the job; return the sums of the rank's event records and of its status segment."""
    with Communicator(FileStore(folder), number, size, timeout_s=60, join_timeout_s=60) as group:
        flag = np.zeros(1, np.int32)
        Path(folder, f"pid{number}").write_text(str(os.getpid()))
        while not flag[0]:
            for _ in range(STEPS):
                step(group)
            flag[0] = number == 0 and Path(folder, "enough").exists()
            group.broadcast(flag, 0)
        events = group.group.events()
        (mine,) = find_ranks(os.getpid())
        counted = [events[name].sum() for name in ("bytes", "wire_bytes", "retransmissions")]
        counters = mine.counters
        return (
            [len(events), *map(int, counted)],
            [counters.operations, counters.tensor_bytes, counters.wire_bytes, counters.retransmissions],
        )


@contextmanager
def running(folder: Path, size: int, step: Callable[..., None], **env: str) -> Iterator[tuple[int, list[Outcome]]]:
    """The job in processes of its own; the process of rank 0, and a list that holds the outcomes after the block."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: outcomes.extend(run_ranks(job, size, str(folder), step, env=env, timeout_s=120))
    )
    thread.start()
    try:
        deadline = time.monotonic() + seconds(60)
        while not all((folder / f"pid{number}").exists() for number in range(size)):
            assert thread.is_alive() and time.monotonic() < deadline, outcomes
            time.sleep(0.02)
        time.sleep(0.1)
        yield int((folder / "pid0").read_text()), outcomes
    finally:
        (folder / "enough").touch()
        thread.join()
    for counted, page in values(outcomes):
        assert counted == page


def picture_of(watch: Sampler, operations: int) -> Snapshot:
    """A frame of at least that many operations per rank: of fewer, one that a sample cuts would weigh too much."""
    deadline = time.monotonic() + seconds(60)
    interval_s = 2.0
    while True:
        (seen,) = watch.snapshot(interval_s)
        if min(line.operations_per_s for line in seen.lines) * seen.interval_s >= operations:
            return seen
        assert time.monotonic() < deadline, seen
        interval_s *= 2


def every_20_ms(group: Communicator) -> None:
    time.sleep(0.02)
    group.all_reduce(np.ones(MB // 4, np.float32))


@pytest.mark.native
def test_top_shows_known_rates_and_counters_equal_to_the_event_sums(tmp_path: Path) -> None:
    with running(tmp_path, 3, every_20_ms, NETFOLD_TRANSPORT="tcp") as (pid, _), closing(Sampler(pid)) as watch:
        seen = picture_of(watch, 30)
        rates = [line.operations_per_s for line in seen.lines]
        assert [line.rank.rank for line in seen.lines] == [0, 1, 2] and seen.absent == ()
        # No step is shorter than 20 ms.
        assert all(0 < rate <= 50 * (STEPS + 1) / STEPS + 1 for rate in rates), rates
        for line in seen.lines:
            assert line.tensor_bytes_per_s / line.operations_per_s == pytest.approx(MB * STEPS / (STEPS + 1), rel=0.2)
            assert 0 < line.under_way_share <= 1 and line.exposed_share is not None
            assert line.retransmissions == 0 and not line.rank.with_switch
        # 2 (P-1)/P of the bytes, on average over ranks.
        sent = sum(line.wire_bytes_per_s for line in seen.lines) / sum(line.tensor_bytes_per_s for line in seen.lines)
        assert sent == pytest.approx(4 / 3, rel=0.25)


def late_overlapping_waiting(group: Communicator) -> None:
    """Rank 2 comes 80 ms late; rank 0 computes meanwhile, rank 1 waits."""
    values = np.ones(1000, np.float32)
    if group.rank == 2:
        time.sleep(0.08)
        group.all_reduce(values)
    elif group.rank == 1:
        group.all_reduce(values)
    else:
        work = group.all_reduce(values, asynchronous=True)
        while not work.done:
            sum(range(1000))
        work.wait()


@pytest.mark.native
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_late_rank_is_the_slowest_and_only_waiting_ranks_are_exposed(tmp_path: Path, transport: str) -> None:
    env = {"NETFOLD_TRANSPORT": transport}
    with running(tmp_path, 3, late_overlapping_waiting, **env) as (pid, _), closing(Sampler(pid)) as watch:
        (seen,) = watch.snapshot(2.0)
    assert seen.slowest is not None and seen.slowest.ranks == (2,) and not seen.slowest.reported_by_switch
    assert seen.slowest.count > 0.5 * seen.slowest.of, seen.slowest
    overlapping, waits, _ = (line.exposed_share for line in seen.lines)
    assert overlapping is not None and overlapping < 0.4
    assert waits is not None and waits > 0.8
    assert min(line.under_way_share for line in seen.lines[:2]) > 0.5


@pytest.mark.native
def test_with_a_switch_the_last_rank_is_the_one_that_the_switch_names(tmp_path: Path) -> None:
    with running_switch() as switch:
        env = {"NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": "in_network", "NETFOLD_TRANSPORT": "tcp"}
        with running(tmp_path, 3, late_overlapping_waiting, **env) as (pid, _), closing(Sampler(pid)) as watch:
            (seen,) = watch.snapshot(2.0)
    assert seen.slowest is not None and seen.slowest.ranks == (2,) and seen.slowest.reported_by_switch
    assert all(line.rank.with_switch and not line.rank.without_switch for line in seen.lines)


@pytest.mark.native
def test_top_shows_no_rank_after_the_job_has_ended(tmp_path: Path) -> None:
    with running(tmp_path, 2, every_20_ms) as (pid, _), closing(Sampler(pid)) as watch:
        assert len(watch.snapshot(0.2)) == 1
        (tmp_path / "enough").touch()
        deadline = time.monotonic() + seconds(60)
        while watch.snapshot(0.2):
            assert time.monotonic() < deadline


def netfold(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("netfold")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))


def test_the_command_shows_one_frame_or_reports_that_no_job_runs(tmp_path: Path) -> None:
    nobody = netfold("top", "--pid", "1", "--once", "--interval", "100ms")
    assert (
        nobody.returncode == 0 and nobody.stdout == "no group of netfold on this machine that this user may look at\n"
    )
    with running(tmp_path, 2, every_20_ms) as (pid, _):
        text = netfold("top", "--pid", str(pid), "--once", "--interval", "300ms")
        said = netfold("top", "--pid", str(pid), "--once", "--interval", "300ms", "--output", "json")
        watching = subprocess.Popen(
            [str(Path(sys.executable).with_name("netfold")), "top", "--pid", str(pid), "--interval", "200ms"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watching.stdout is not None
        assert watching.stdout.readline().startswith(f"job of process {pid}: ")
        assert "group of 2" in watching.stdout.readline()
        (tmp_path / "enough").touch()
        assert watching.stdout.read().endswith("the job has ended\n")
        assert watching.wait(seconds(60)) == 0
        watching.stdout.close()
    assert text.returncode == 0 and "group of 2" in text.stdout, text.stderr
    (group,) = json.loads(said.stdout)
    assert [line["rank"]["rank"] for line in group["lines"]] == [0, 1]
    assert group["lines"][0]["operations_per_s"] > 0
