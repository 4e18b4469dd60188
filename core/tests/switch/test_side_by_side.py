"""A group over several switches, or over several threads of one: its operations are split into parts."""

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
from ranks import RunningSwitch, run_command, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine

IN_NETWORK = engine.ALGORITHMS["in_network"]
# About a part's smallest size, and unevenly split by three.
COUNTS = (1, 1000, 40_000, 100_003)


def join(rank: int, size: int, folder: str, endpoints: list[str], **how: Any) -> Communicator:
    options = Options(switch=",".join(endpoints) or None, transport="tcp", probe="off", **how)
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)


def part(rank: int, count: int) -> Any:
    return np.random.default_rng([rank, count]).integers(-1000, 1000, count).astype(np.float32)


def everything(rank: int, size: int, folder: str, endpoints: list[str]) -> list[int]:
    """Run each operation at each size; return the packets sent to each switch."""
    with join(rank, size, folder, endpoints, algorithm="in_network") as group:
        for count in COUNTS:
            parts = [part(each, count) for each in range(size)]
            total = np.sum(parts, 0)
            buffer = parts[rank].copy()
            group.all_reduce(buffer)
            assert (buffer == total).all(), count
            buffer = parts[rank].copy()
            group.broadcast(buffer, root=1)
            assert (buffer == parts[1]).all(), count
            buffer = parts[rank].copy()
            group.reduce(buffer, root=size - 1, op="max")
            assert (buffer == (np.max(parts, 0) if rank == size - 1 else parts[rank])).all(), count
            assert (group.all_gather(parts[rank]) == np.array(parts)).all(), count
            # Blocks of different sizes.
            blocks = [np.full(count + to, rank + 1.0, np.float64) for to in range(size)]
            mine = np.zeros(count + rank)
            group.reduce_scatter(blocks, mine, op="avg")
            assert (mine == (size + 1) / 2).all(), count
            group.barrier()
        assert set(group.group.events()["algorithm"].tolist()) == {IN_NETWORK}
        traffic = [group.group.traffic(number) for number in range(len(endpoints))]
        return [each["packets_sent"] for each in traffic if each is not None]


@pytest.mark.parametrize("switches", [2, 3])
def test_every_operation_goes_over_all_switches(switches: int) -> None:
    running = [running_switch() for _ in range(switches)]
    endpoints = [each.__enter__().endpoint for each in running]
    try:
        for sent in values(run_threads(everything, 3, endpoints)):
            assert len(sent) == switches
            assert min(sent) > max(sent) / 2 > 100, sent
    finally:
        for each in running:
            each.__exit__(None, None, None)


def test_a_switch_named_twice_reduces_on_two_threads() -> None:
    with running_switch("--threads", "2") as switch:
        endpoints = [switch.endpoint] * 2

        def busy() -> dict[str, float]:
            """CPU seconds of each thread, by the kernel, except the first, which has the control connections."""
            found = {}
            for task in Path(f"/proc/{switch.process.pid}/task").iterdir():
                if int(task.name) == switch.process.pid:
                    continue
                found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
            return found

        before = busy()
        for sent in values(run_threads(everything, 3, endpoints)):
            assert min(sent) > max(sent) / 2 > 100, sent
        spent = sorted(after - before.get(task, 0) for task, after in busy().items())
        assert spent[-2] > spent[-1] / 4 > 0, spent
        ports = {int(port) for port in re.findall(r"event=started .* port=(\d+)", switch.log())}
        assert len(ports) == 2


def test_a_thread_stays_on_its_core_and_polls_without_sleep() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    with running_switch("--cores", ",".join(map(str, cores)), "--busy-poll", "20ms") as switch:
        tasks = Path(f"/proc/{switch.process.pid}/task").iterdir()
        pinned = [cores for cores in (os.sched_getaffinity(int(task.name)) for task in tasks) if len(cores) == 1]
        assert sorted(core for of in pinned for core in of) == cores
        for sent in values(run_threads(everything, 2, [switch.endpoint] * len(cores))):
            assert min(sent) > 100, sent
        time.sleep(0.5)  # longer than they poll
        spent = cpu_s(switch)
        time.sleep(0.5)
        assert cpu_s(switch) - spent < 0.1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--cores", "0,x"), "write core numbers separated by commas, such as 2,3"),
        (("--cores", "-1"), "write core numbers separated by commas, such as 2,3"),
        (("--cores", "1023"), "core 1023 cannot be used here: "),
        (("--cores", "5000"), "there is no core 5000"),
        (("--cores", "0", "--threads", "3"), "--threads 3 and --cores 0: each core has one thread"),
    ],
)
def test_unavailable_cores_are_named(arguments: tuple[str, ...], reason: str) -> None:
    done = run_command("switch", "--listen", "127.0.0.1:0", *arguments)
    assert done.returncode == 2
    assert reason in done.stdout + done.stderr


def cpu_s(switch: RunningSwitch) -> float:
    """CPU seconds of the switch's threads."""
    fields = Path(f"/proc/{switch.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_i32_sums_have_the_same_bits_with_no_switch_one_or_two() -> None:
    def add(rank: int, size: int, folder: str, endpoints: list[str]) -> bytes:
        with join(rank, size, folder, endpoints, wire_dtype="i32") as group:
            buffer = np.random.default_rng(rank).standard_normal(200_000).astype(np.float32)
            group.all_reduce(buffer)
            return buffer.tobytes()

    with running_switch() as one, running_switch() as other:
        found = [values(run_threads(add, 2, each)) for each in ([], [one.endpoint], [one.endpoint, other.endpoint])]
    assert len({each for bits in found for each in bits}) == 1


def test_a_switch_that_dies_costs_no_step_and_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def add(rank: int, size: int, folder: str, endpoints: list[str]) -> list[list[int]]:
        sent: list[list[int]] = []
        with join(rank, size, folder, endpoints, rejoin_s=0) as group:
            while True:
                buffer = np.full(200_000, rank + 1.0, np.float32)
                group.all_reduce(buffer)
                assert (buffer == size * (size + 1) / 2).all()
                flags = np.array([float(dead.is_set()) + float(over.is_set())], np.float32)
                group.all_reduce(flags)
                traffic = [group.group.traffic(number) or {} for number in range(2)]
                sent.append([each["packets_sent"] for each in traffic])
                if flags[0] == 2 * size:
                    return sent

    dead, over = threading.Event(), threading.Event()
    with running_switch() as one, running_switch() as other:

        def kill(switch: RunningSwitch) -> None:
            switch.wait_for("event=started")
            time.sleep(0.5)
            switch.process.send_signal(signal.SIGKILL)
            switch.process.wait()
            dead.set()
            time.sleep(1.0)
            over.set()

        killer = threading.Thread(target=kill, args=(one,))
        killer.start()
        found = values(run_threads(add, 3, [one.endpoint, other.endpoint], timeout_s=60))
        killer.join()
        endpoint = one.endpoint
    for sent in found:
        first, last = sent[len(sent) * 2 // 3], sent[-1]
        assert last[0] == first[0] and last[1] > first[1] + 100, (first, last)
    warnings = [record.getMessage() for record in caplog.records if "No step is lost" in record.getMessage()]
    assert len(warnings) == 1 and endpoint in warnings[0], warnings


def test_ranks_with_different_numbers_of_switches_get_an_error() -> None:
    with running_switch() as one, running_switch() as other:
        both = [one.endpoint, other.endpoint]
        found = run_threads(lambda rank, *rest: join(rank, *rest, both[: rank + 1]), 2)
    assert "all ranks need as many" in found[1].text
