"""Failures during operations through a switch: each is an error in time that names rank, operation and remedy.

The switch goes on serving other jobs.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import RunningSwitch, run_ranks, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import protocol

SOON_S = 3.0
TIMEOUT_S = 1.0

COUNTS = pytest.mark.parametrize("count", [100, 1_000_000])
Call = Callable[[Communicator], None]


def join(rank: int, size: int, folder: str, endpoint: str, timeout_s: float = 30.0) -> Communicator:
    return Communicator(
        FileStore(folder), rank, size, options=Options(switch=endpoint), timeout_s=timeout_s, join_timeout_s=20
    )


def all_reduce(count: int, dtype: str = "float32", op: str = "sum") -> Call:
    return lambda group: group.all_reduce(np.ones(count, dtype), op=op)


def barrier(group: Communicator) -> None:
    group.barrier()


def calls_in_turn(
    rank: int, size: int, folder: str, endpoint: str, calls: list[list[Call]], timeout_s: float
) -> tuple[str, int | None, str, float]:
    with join(rank, size, folder, endpoint, timeout_s) as group:
        began = time.monotonic()
        try:
            for call in calls[rank]:
                call(group)
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began
    return "", None, "", 0.0


def serves(switch: RunningSwitch) -> None:
    def add(rank: int, size: int, folder: str) -> float:
        with join(rank, size, folder, switch.endpoint) as group:
            buffer = np.arange(5000, dtype=np.float64) * (rank + 1)
            group.all_reduce(buffer)
            assert (buffer == np.arange(5000) * 3.0).all()
            return float(buffer[-1])

    assert values(run_threads(add, 2)) == [4999 * 3.0] * 2


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "other"),
    [
        pytest.param(all_reduce(100), all_reduce(101), id="sizes"),
        pytest.param(all_reduce(1_000_000), all_reduce(1_000_001), id="large sizes"),
        pytest.param(all_reduce(1_000_000), all_reduce(100), id="one chunk against many"),
        pytest.param(all_reduce(100), all_reduce(100, "int32"), id="dtypes"),
        pytest.param(all_reduce(100), all_reduce(100, op="max"), id="operators"),
    ],
)
def test_ranks_that_call_different_operations_all_get_an_error(odd: int, usual: Call, other: Call) -> None:
    calls = [[other if rank == odd else usual, barrier] for rank in range(3)]
    with running_switch() as switch:
        found = values(run_threads(calls_in_turn, 3, switch.endpoint, calls, 20.0))
        for rank, (error, _, text, took) in enumerate(found):
            assert error in ("Mismatch", "PeerLost"), (rank, error, text)
            assert took < seconds(SOON_S)
            assert f"rank {rank}: " in text
        mismatches = [text for error, _, text, _ in found if error == "Mismatch"]
        assert mismatches
        for text in mismatches:
            assert re.search(r"all_reduce #1 of \d+ \w+ \(\d+ bytes\) by in_network", text)
            assert "every rank must make the same calls in the same order with the same sizes and dtypes" in text
        serves(switch)


def test_a_rank_in_another_operation_is_named_after_the_timeout() -> None:
    calls = [[all_reduce(100)], [barrier], [all_reduce(100)]]
    with running_switch() as switch:
        found = values(run_threads(calls_in_turn, 3, switch.endpoint, calls, TIMEOUT_S))
        assert any("the switch still waits for rank 1" in text for _, _, text, _ in found)
        for error, _, text, took in found:
            assert error in ("CollectiveTimeout", "PeerLost"), text
            assert took < TIMEOUT_S + seconds(SOON_S)
        serves(switch)


def test_an_operation_that_one_rank_skipped_is_found_at_the_next() -> None:
    calls = [[all_reduce(100), all_reduce(100)], [all_reduce(0), all_reduce(100)]]
    with running_switch() as switch:
        found = values(run_threads(calls_in_turn, 2, switch.endpoint, calls, 20.0))
    assert "Mismatch" in [error for error, *_ in found]
    assert all(error in ("Mismatch", "PeerLost") for error, *_ in found)


@COUNTS
def test_a_rank_that_never_calls_is_named_by_the_switch(count: int) -> None:
    over = threading.Event()

    def absent(group: Communicator) -> None:
        over.wait(seconds(10))

    def call(group: Communicator) -> None:
        try:
            group.all_reduce(np.ones(count, np.float32))
        finally:
            over.set()

    with running_switch() as switch:
        found = values(run_threads(calls_in_turn, 4, switch.endpoint, [[call], [call], [absent], [call]], TIMEOUT_S))
        for rank in (0, 1, 3):
            error, named, text, took = found[rank]
            assert error in ("CollectiveTimeout", "PeerLost"), text
            assert named == 2, text
            assert "rank 2" in text
            assert TIMEOUT_S * 0.9 < took < TIMEOUT_S + seconds(SOON_S)
        # The first rank that gives up ends the absent rank's wait, so other ranks may get its leaving as the error.
        first = next(each for each in found if each[0] == "CollectiveTimeout")
        assert f"all_reduce #1 of {count} f32" in first[2]
        assert "the switch still waits for rank 2. Did every rank make this call?" in first[2]
        serves(switch)


def dies_in_operation(rank: int, size: int, folder: str, endpoint: str, count: int, victim: int) -> Any:
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
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began


@COUNTS
def test_all_other_ranks_name_a_killed_worker_within_seconds(count: int) -> None:
    with running_switch() as switch:
        outcomes = run_ranks(dies_in_operation, 4, switch.endpoint, count, 2, dies=[2])
        for rank in (0, 1, 3):
            assert not outcomes[rank].error, outcomes[rank].text
            error, named, text, took = outcomes[rank].value
            assert error == "PeerLost", text
            assert named == 2, text
            assert re.match(rf"rank {rank}: all_reduce #\d+ of {count} f32", text)
            assert "rank 2 left while its contribution was needed: its connection was lost" in text
            assert took < seconds(SOON_S)
        switch.wait_for(r"closed after")
        serves(switch)


def fails_by_itself(rank: int, size: int, folder: str, endpoint: str) -> None:
    with join(rank, size, folder, endpoint) as group:
        group.all_reduce(np.ones(10, np.float32))
        if rank == 1:
            raise ZeroDivisionError("the learning rate fell to nothing")
        group.all_reduce(np.ones(10, np.float32))


def test_a_failing_rank_sends_its_error_to_all_ranks() -> None:
    with running_switch() as switch:
        outcomes = run_threads(fails_by_itself, 3, switch.endpoint)
    assert outcomes[1].error == "ZeroDivisionError"
    for rank in (0, 2):
        assert outcomes[rank].error == "PeerLost"
        assert "ZeroDivisionError: the learning rate fell to nothing" in outcomes[rank].text


def leaves_early(rank: int, size: int, folder: str, endpoint: str) -> float:
    """Each rank leaves after its last sum."""
    with join(rank, size, folder, endpoint) as group:
        buffer = np.full(300_000, rank + 1.0, np.float32)
        group.all_reduce(buffer)
        return float(buffer[-1])


def test_ranks_that_leave_after_their_last_operation_cause_no_error() -> None:
    with running_switch() as switch:
        for _ in range(5):
            assert values(run_threads(leaves_early, 4, switch.endpoint)) == [10.0] * 4


# --- the data port ---------------------------------------------------------------------------------------------------


def works_until(rank: int, size: int, folder: str, endpoint: str, over: threading.Event) -> dict[str, Any]:
    """Check exact sums until `over`; return their number and the group's counters."""
    turns = 0
    with join(rank, size, folder, endpoint) as group:
        while True:
            flag = np.array([over.is_set()], np.int32)
            group.all_reduce(flag, op="min")
            if flag[0]:
                return {"turns": turns, "traffic": group.group.traffic()}
            buffer = np.arange(100_000, dtype=np.int64) * (rank + 1) + turns
            group.all_reduce(buffer)
            assert (buffer == np.arange(100_000) * (size * (size + 1) // 2) + size * turns).all()
            turns += 1


def header(**fields: int) -> bytes:
    """A packet's header, big-endian, as packet.hpp lays it out."""
    values_of = {
        "magic": 0x4E46, "version": 1, "flags": 0, "job": 0, "epoch": 1, "incarnation": 0, "chunk": 0,
        "packet_number": 0,
        "operation": 1, "elements": 1000, "worker": 0, "count": 1, "wire": 0, "reduce": 0, "table": 0,
    } | fields  # fmt: skip
    return struct.pack(">HBBIIIQQIIHHBBH", *values_of.values())


assert len(header()) == protocol.HEADER_BYTES


def hostile_packets(generator: np.random.Generator, packet_bytes: int) -> list[bytes]:
    payload = bytes(packet_bytes - protocol.HEADER_BYTES)
    packets = [
        b"",
        b"N",
        header()[:47],
        header(),
        header() + payload,
        header() + payload[:-1],
        header() + payload + b"x",
    ]
    packets += [generator.bytes(int(generator.integers(1, packet_bytes))) for _ in range(20)]
    # The right length and magic, and any other fields, as in packets of an earlier job or another job.
    for _ in range(50):
        fields = {
            "flags": int(generator.integers(0, 16)),
            "job": int(generator.integers(0, 1 << 32)),
            "epoch": int(generator.integers(0, 4)),
            "incarnation": int(generator.integers(0, 1 << 32)),
            "chunk": int(generator.integers(0, 1 << 12)),
            "operation": int(generator.integers(0, 100)),
            "worker": int(generator.integers(0, 5)),
            "count": int(generator.integers(0, 1 << 16)),
            "wire": int(generator.integers(0, 14)),
            "reduce": int(generator.integers(0, 9)),
        }
        packets.append(header(**fields) + generator.bytes(len(payload)))
    return packets


def captured(port: int, seconds: float, most: int) -> list[bytes]:
    """Datagrams to a UDP port of this host, as they pass over loopback. Needs CAP_NET_RAW."""
    packets: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as tap:
        tap.settimeout(0.2)
        deadline = time.monotonic() + seconds
        while len(packets) < most and time.monotonic() < deadline:
            try:
                datagram = tap.recv(65536)
            except TimeoutError:
                continue
            header_bytes = (datagram[0] & 15) * 4
            if struct.unpack_from(">H", datagram, header_bytes + 2)[0] == port:
                packets.append(datagram[header_bytes + 8 :])
    return packets


def test_foreign_packets_change_no_sum_and_no_other_job() -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    over = threading.Event()
    with running_switch() as switch:

        def everybody(rank: int, size: int, folder: str) -> dict[str, Any] | None:
            if rank < 4:
                job, place = divmod(rank, 2)
                return works_until(place, 2, f"{folder}/{job}", switch.endpoint, over)
            try:
                generator = np.random.default_rng(seed)
                ports = [int(port) for port in switch.wait_for(r" port=(\d+)", count=2)]
                lengths = [
                    int(each) + protocol.HEADER_BYTES for each in re.findall(r"payload_bytes=(\d+)", switch.log())
                ]
                deadline = time.monotonic() + 2.0
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    while time.monotonic() < deadline:
                        for packet in hostile_packets(generator, lengths[0]):
                            for port in ports:
                                sender.sendto(packet, ("127.0.0.1", port))
                        time.sleep(0.01)
            finally:
                over.set()
            return None

        found = values(run_threads(everybody, 5, timeout_s=60))[:4]
        assert all(each is not None and each["turns"] > 5 for each in found)
        closed = switch.wait_for(r"closed after .*", count=2)
        for line in closed:
            assert "malformed" in line and "source" in line, line


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_NET_RAW to see and replay a job's own packets")
def test_replayed_packets_of_the_job_itself_change_no_sum() -> None:
    over = threading.Event()
    sent = []
    with running_switch() as switch:

        def everybody(rank: int, size: int, folder: str) -> dict[str, Any] | None:
            if rank < 2:
                return works_until(rank, 2, folder, switch.endpoint, over)
            try:
                port = int(switch.wait_for(r" port=(\d+)")[0])
                deadline = time.monotonic() + 2.0
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    while time.monotonic() < deadline:
                        packets = captured(port, 0.2, 50)
                        for packet in packets:
                            sender.sendto(packet, ("127.0.0.1", port))
                            worse = bytearray(packet)
                            worse[-1] ^= 1
                            sender.sendto(bytes(worse), ("127.0.0.1", port))
                        sent.extend(packets)
            finally:
                over.set()
            return None

        found = values(run_threads(everybody, 3, timeout_s=60))[:2]
        assert sent, "nothing was captured: nothing was tested"
        assert all(each is not None and each["turns"] > 5 for each in found)
        (line,) = switch.wait_for(r"closed after .*")
        assert re.search(r"\d+ source", line), line


def test_packets_from_other_addresses_change_no_sum_at_a_worker() -> None:
    """A worker takes results only from the switch's address, and counts all other packets."""
    over = threading.Event()
    ports: list[int] = []

    def watched(rank: int, size: int, folder: str, endpoint: str) -> dict[str, Any] | None:
        if rank < 2:
            return works_until(rank, 2, folder, endpoint, over)
        try:
            deadline = time.monotonic() + seconds(10)
            while len(ports) < 2 and time.monotonic() < deadline:
                ports[:] = _own_udp_ports()
                time.sleep(0.02)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                generator = np.random.default_rng(1)
                stop = time.monotonic() + 1.0
                while time.monotonic() < stop:
                    for packet in hostile_packets(generator, 8944):
                        for port in ports:
                            sender.sendto(packet, ("127.0.0.1", port))
                    time.sleep(0.01)
        finally:
            over.set()
        return None

    with running_switch() as switch:
        found = values(run_threads(watched, 3, switch.endpoint, timeout_s=60))[:2]
    assert len(ports) == 2
    for each in found:
        assert each is not None and each["turns"] > 5
        assert each["traffic"]["drops"]["source"] > 0


def _own_udp_ports() -> list[int]:
    """The loopback UDP ports of this process."""
    inodes = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open("/proc/net/udp") as table:
        lines = [line.split() for line in table.readlines()[1:]]
    return [int(line[1].partition(":")[2], 16) for line in lines if line[9] in inodes]
