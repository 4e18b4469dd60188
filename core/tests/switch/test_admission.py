"""Admission, the text of refusals, and the release of all grants. Ranks are threads of this process."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest
from load import seconds, settles
from ranks import RunningSwitch, run_command, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold.switch import Switch
from netfold.switch.control_io import PacedReader
from netfold.switch.job_lifecycle import JobLifecycle
from netfold.switch.stragglers import MAX_QUERIES
from netfold.switch_protocol import control_messages


def add(
    rank: int, size: int, folder: str, endpoint: str, count: int = 1000, turns: int = 1, join_timeout_s: float = 30.0
) -> float:
    """All-reduce through the switch; return the last element."""
    buffer = np.zeros(0)
    for turn in range(turns):
        with Communicator(
            FileStore(f"{folder}/{turn}"),
            rank,
            size,
            options=Options(switch=endpoint),
            timeout_s=20,
            join_timeout_s=join_timeout_s,
        ) as group:
            buffer = np.arange(count, dtype=np.float64) + rank
            group.all_reduce(buffer)
    return float(buffer[-1])


def expected(size: int, count: int = 1000) -> list[float]:
    return [size * (count - 1.0) + size * (size - 1) / 2] * size


def serves(switch: RunningSwitch) -> None:
    """Run a job of two ranks, from join to leave."""
    assert values(run_threads(add, 2, switch.endpoint)) == expected(2)


def test_each_job_releases_its_grants() -> None:
    # Memory for one job of this shape and not for two: the second is refused if the first keeps anything.
    with running_switch("--max-jobs", "1", "--memory", "12M") as switch:

        def descriptors() -> int:
            return len(os.listdir(f"/proc/{switch.process.pid}/fd"))

        assert values(run_threads(add, 2, switch.endpoint, 1000, 10, timeout_s=60)) == expected(2)
        switch.wait_for(r"job \w+ closed after", count=10)
        after_ten = descriptors()
        assert values(run_threads(add, 2, switch.endpoint, 1000, 20, timeout_s=60)) == expected(2)
        switch.wait_for(r"job \w+ closed after", count=30)
        # One leaked descriptor per job would be 20. The last job's connections close after its log line.
        assert settles(lambda: descriptors() < after_ten + 5), (descriptors(), after_ten)
        epochs = [int(epoch) for epoch in re.findall(r"epoch (\d+) starts", switch.log())]
        assert epochs == sorted(set(epochs)), "an epoch is never given twice"
        windows = re.findall(r"window=(\d+ payload_bytes=\d+)", switch.log())
        assert len(windows) == 30 and len(set(windows)) == 1, "a later job found less room"


def test_two_jobs_at_a_time_do_not_disturb_each_other() -> None:
    def either(rank: int, size: int, folder: str, endpoint: str) -> float:
        job, place = divmod(rank, 2)
        return add(place, 2, f"{folder}/{job}", endpoint, 200_000 + job, 3)

    with running_switch() as switch:
        found = values(run_threads(either, 4, switch.endpoint))
    assert found == expected(2, 200_000) + expected(2, 200_001)


def test_a_full_switch_refuses_a_job_and_takes_it_once_a_job_has_ended() -> None:
    def hold_then_add(rank: int, size: int, folder: str, endpoint: str) -> list[str]:
        options = Options(switch=endpoint)
        with Communicator(FileStore(f"{folder}/1"), rank, size, options=options, timeout_s=20) as first:
            first.barrier()
            try:
                Communicator(FileStore(f"{folder}/2"), rank, size, options=options, join_timeout_s=5)
                outcome = ["nothing"]
            except Exception as error:
                outcome = [type(error).__name__, str(error)]
            buffer = np.ones(10_000)
            first.all_reduce(buffer)  # the first job goes on
            assert buffer[-1] == size
        return outcome

    with running_switch("--max-jobs", "1") as switch:
        for rank, (kind, text) in enumerate(values(run_threads(hold_then_add, 2, switch.endpoint))):
            assert kind == "SwitchError"
            assert f"rank {rank}: the switch at {switch.endpoint} (NETFOLD_SWITCH) refused: " in text
            assert "this switch is full: it serves 1 jobs (--max-jobs)" in text
        switch.wait_for(r"closed after")
        serves(switch)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--memory", "64K"), "this switch is full: the job needs"),
        (("--max-workers", "2"), "a job has at most 2 workers here (--max-workers), not 3"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_before_it_starts(options: tuple[str, ...], reason: str) -> None:
    with running_switch(*options) as switch:
        for rank, outcome in enumerate(run_threads(add, 3, switch.endpoint, 1000, 1, 5.0)):
            assert outcome.error == "SwitchError"
            assert f"rank {rank}: the switch at {switch.endpoint} (NETFOLD_SWITCH) refused" in outcome.text
            assert reason in outcome.text


def test_a_missing_switch_is_named_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"  # nothing listens there after the close
    for rank, outcome in enumerate(run_threads(add, 2, endpoint, timeout_s=10)):
        assert outcome.error == "SwitchError"
        assert f"rank {rank}: the switch at {endpoint} (NETFOLD_SWITCH) refused the connection" in outcome.text
        assert f"`netfold switch --listen {endpoint}`" in outcome.text


def test_an_unknown_host_is_named() -> None:
    for outcome in run_threads(add, 2, "no-such-host.invalid:7171", timeout_s=30):
        assert outcome.error in ("SwitchError", "RendezvousError")
        assert "NETFOLD_SWITCH names 'no-such-host.invalid', no host that is known here" in outcome.text


def impostor(answer: bytes | None, stop: threading.Event) -> str:
    """A listener that is no switch: it sends nothing (None), disconnects (b""), or sends everyone the same bytes."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)

    def serve() -> None:
        held = []
        with server:
            while not stop.is_set():
                try:
                    stream, _ = server.accept()
                except TimeoutError:
                    continue
                if answer is None:
                    held.append(stream)
                    continue
                stream.recv(1)
                stream.sendall(answer)
                stream.close()
            for stream in held:
                stream.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(None, "did not answer within", id="says nothing"),
        pytest.param(b"", "is no netfold switch, or it stopped", id="hangs up"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no netfold switch", id="speaks HTTP"),
        pytest.param(b"\x00\x00\x00\x04nono", "is no netfold switch", id="is not msgpack"),
        pytest.param(control_messages.encode({"type": "start"}), "is no netfold switch", id="answers out of turn"),
        pytest.param(struct.pack(">I", 1 << 31), "is no netfold switch", id="announces two gigabytes"),
        pytest.param(
            control_messages.encode({"type": "admitted", "version": control_messages.VERSION}),
            "is no netfold switch",
            id="leaves out what belongs in",
        ),
    ],
)
def test_another_service_at_the_switchs_address_is_an_error_in_time(answer: bytes | None, words: str) -> None:
    stop = threading.Event()
    try:
        endpoint = impostor(answer, stop)
        began = time.monotonic()
        for rank, outcome in enumerate(run_threads(add, 2, endpoint, 1000, 1, 1.0, timeout_s=15)):
            assert outcome.error == "SwitchError", outcome.text
            assert f"rank {rank}: the switch at {endpoint} (NETFOLD_SWITCH)" in outcome.text
            assert words in outcome.text
        assert time.monotonic() - began < seconds(6)
    finally:
        stop.set()


JOIN: dict[str, Any] = {
    "type": "join",
    "version": control_messages.VERSION,
    "job": "j",
    "rank": 0,
    "ranks": [0, 1],
    "port": 9,
    "window_bytes": 1 << 20,
    "timeout_s": 5.0,
}
REFUSED = {"type": "refused", "version": control_messages.VERSION}
GARBAGE: dict[str, bytes] = {
    "random bytes": os.urandom(2000),
    "an HTTP request": b"GET / HTTP/1.1\r\n\r\n",
    "a length of 4 GB": b"\xff\xff\xff\xff" + bytes(64),
    "a length of 0": bytes(4),
    "half a message": control_messages.encode(JOIN)[:20],
    "half a length": b"\x00\x00",
    "a message that is a list": struct.pack(">I", 2) + msgpack.packb([1]),
    "no type": control_messages.encode({"no": "type"}),
    "an unknown type": control_messages.encode({"type": "dance"}),
    "nested beyond reason": struct.pack(">I", 60_000) + b"\x91" * 60_000,
    "a join of another version": control_messages.encode({**JOIN, "version": 999}),
    "a join without a name": control_messages.encode({**JOIN, "job": ""}),
    "a join with a name too long": control_messages.encode({**JOIN, "job": "j" * 5000}),
    "a join as a rank that is none": control_messages.encode({**JOIN, "rank": 2}),
    "a join as a negative rank": control_messages.encode({**JOIN, "rank": -1}),
    "a join as a rank in words": control_messages.encode({**JOIN, "rank": "zero"}),
    "a join of a job of many ranks": control_messages.encode({**JOIN, "ranks": list(range(20_000))}),
    "a join of a job of no rank": control_messages.encode({**JOIN, "ranks": []}),
    "a join of a job of one rank twice": control_messages.encode({**JOIN, "ranks": [0, 0]}),
    "a join of a job of ranks in words": control_messages.encode({**JOIN, "ranks": ["zero", "one"]}),
    "a join without a port": control_messages.encode({**JOIN, "port": None}),
    "a join with a port that is none": control_messages.encode({**JOIN, "port": 1 << 16}),
    "a join with a window in words": control_messages.encode({**JOIN, "window_bytes": "large"}),
    "a join with a negative window": control_messages.encode({**JOIN, "window_bytes": -4096}),
    "a join with a timeout in words": control_messages.encode({**JOIN, "timeout_s": "later"}),
    "a join with no time at all": control_messages.encode({**JOIN, "timeout_s": float("nan")}),
    "a join with an endless timeout": control_messages.encode({**JOIN, "timeout_s": float("inf")}),
    "a join, then nonsense": control_messages.encode(JOIN) + os.urandom(64),
    "ready without hello": control_messages.encode(JOIN)
    + control_messages.encode({"type": "ready", "payload_bytes": 1408}),
    "ready with an odd size": control_messages.encode(JOIN)
    + control_messages.encode({"type": "ready", "payload_bytes": 1409}),
    "ready with words": control_messages.encode(JOIN)
    + control_messages.encode({"type": "ready", "payload_bytes": "all"}),
    "asks for a chunk beyond 64 bits": control_messages.encode(JOIN)
    + control_messages.encode({"type": "stragglers", "chunk": 2**64 - 1, "serial": 1}),
    "asks for a negative chunk": control_messages.encode(JOIN)
    + control_messages.encode({"type": "stragglers", "chunk": -1}),
    **{
        f"a capacity of {rate}": control_messages.encode(JOIN)
        + control_messages.encode({"type": "alive", "bytes_per_s": rate})
        for rate in (float("nan"), float("inf"), -1, -0.5, True, "fast", [1.0], None, 1 << 63)
    },
    "another rank's capacity": control_messages.encode({**JOIN, "rank": 1})
    + control_messages.encode({"type": "alive", "bytes_per_s": 1e6}),
    "joins twice": control_messages.encode(JOIN) * 2,
}


def send_raw(address: tuple[str, int], words: bytes) -> None:
    """Send the bytes and wait until the switch disconnects, or for a timeout."""
    with socket.create_connection(address, 5) as stream:
        stream.sendall(words)
        stream.shutdown(socket.SHUT_WR)
        stream.settimeout(seconds(5))
        try:
            while stream.recv(4096):
                pass
        except ConnectionResetError:
            pass


def test_garbage_at_the_control_port_is_dropped_and_a_running_job_goes_on() -> None:
    began = threading.Event()
    over = threading.Event()

    def work(rank: int, size: int, folder: str, endpoint: str) -> int:
        turns = 0
        with Communicator(FileStore(folder), rank, size, options=Options(switch=endpoint), timeout_s=20) as group:
            while True:
                flag = np.array([over.is_set()], np.int32)
                group.all_reduce(flag, op="min")
                if flag[0]:
                    return turns
                buffer = np.arange(50_000, dtype=np.float64) * (rank + 1)
                group.all_reduce(buffer)
                assert (buffer == np.arange(50_000) * 3.0).all()
                turns += 1
                began.set()

    # Quota for one job beside the running one: garbage that opened a job and left it open would fill the switch.
    with running_switch("--max-jobs", "2") as switch:

        def both(rank: int, size: int, folder: str) -> int:
            if rank < 2:
                return work(rank, 2, folder, switch.endpoint)
            try:
                assert began.wait(seconds(10))
                for name, words in GARBAGE.items():
                    send_raw(switch.address, words)
                    assert switch.process.poll() is None, f"the switch died of {name}"
                serves(switch)  # the switch admits a second job
            finally:
                over.set()
            return 0

        turns = values(run_threads(both, 3, timeout_s=60))
        assert turns[0] > 0
        # running_switch fails where the log holds a traceback: all of this was expected.


def test_a_worker_that_stops_within_a_message_delays_its_job_to_the_deadline_at_most() -> None:
    with running_switch() as switch, socket.create_connection(switch.address, 5) as stream:
        stream.sendall(control_messages.encode({**JOIN, "timeout_s": 0.5}))
        stream.settimeout(seconds(5))
        assert control_messages.receive(stream)["type"] == "admitted"
        stream.sendall(b"\x00\x00\x00\x10half")
        refused = control_messages.receive(stream)
        assert (refused["type"], refused["reason"]) == ("refused", "rank 1 did not join within 0 s")
        switch.wait_for("job j closed after")


def test_the_second_of_two_workers_with_one_rank_is_refused_by_the_switch() -> None:
    with running_switch() as switch:
        streams = [socket.create_connection(switch.address, 5) for _ in range(2)]
        replies = []
        for stream in streams:
            stream.settimeout(seconds(5))
            stream.sendall(control_messages.encode(JOIN))
            replies.append(control_messages.receive(stream))
        assert replies[0]["type"] == "admitted"
        assert replies[1]["type"] == "refused"
        assert "rank 0 of this job has joined before, from 127.0.0.1:" in replies[1]["reason"]
        for stream in streams:
            stream.close()


def test_a_refused_first_worker_leaves_no_job() -> None:
    with running_switch("--max-jobs", "1") as switch:
        for _ in range(2):
            with socket.create_connection(switch.address, 5) as stream:
                stream.settimeout(seconds(5))
                # A switch that is in no tree of this job.
                stream.sendall(control_messages.encode({**JOIN, "switch": 5, "timeout_s": 600.0}))
                answer = control_messages.receive(stream)
                assert "a switch joins this switch, but the tree of its job puts it elsewhere" in answer["reason"]
        serves(switch)


def test_a_job_without_a_free_descriptor_is_refused_with_the_reason() -> None:
    with running_switch() as switch:

        def descriptors() -> set[int]:
            return set(map(int, os.listdir(f"/proc/{switch.process.pid}/fd")))

        idle = len(descriptors())
        serves(switch)
        before = resource.prlimit(switch.process.pid, resource.RLIMIT_NOFILE)
        with socket.create_connection(switch.address, 5) as stream:
            stream.settimeout(seconds(5))
            # Wait until the last job has closed its descriptors: then the number of the data port's is known.
            deadline = time.monotonic() + 10
            while len(descriptors()) != idle + 1:
                assert time.monotonic() < deadline, (idle, descriptors())
                time.sleep(0.01)
            free = min(set(range(idle + 2)) - descriptors())
            resource.prlimit(switch.process.pid, resource.RLIMIT_NOFILE, (free, before[1]))
            stream.sendall(control_messages.encode({**JOIN, "timeout_s": 600.0}))
            reason = control_messages.receive(stream)["reason"]
        assert "cannot open a data port" in reason
        assert "Too many open files" in reason
        resource.prlimit(switch.process.pid, resource.RLIMIT_NOFILE, before)
        serves(switch)


def test_a_window_beyond_every_buffer_is_cut_to_what_the_kernel_grants() -> None:
    with running_switch("--window", "2G") as switch:

        def join(rank: int, size: int, folder: str) -> float:
            chosen = Options(switch=switch.endpoint, window_bytes=1 << 31)
            with Communicator(FileStore(folder), rank, size, options=chosen, timeout_s=20) as group:
                buffer = np.full(1000, rank + 1.0)
                group.all_reduce(buffer)
                return float(buffer[-1])

        assert values(run_threads(join, 2)) == [3.0, 3.0]


def test_a_members_messages_are_answered_at_a_bounded_rate() -> None:
    with running_switch() as switch, socket.create_connection(switch.address, 5) as stream:
        stream.settimeout(seconds(5))
        stream.sendall(control_messages.encode({**JOIN, "timeout_s": 300.0}))
        assert control_messages.receive(stream)["type"] == "admitted"
        began = time.monotonic()
        count = 2 * PacedReader.BURST
        for serial in range(count):
            stream.sendall(control_messages.encode({"type": "alive", "serial": serial}))
        for serial in range(count):
            assert control_messages.receive(stream) == {"type": "alive", "serial": serial}
        assert time.monotonic() - began > (count - PacedReader.BURST) / PacedReader.RATE_PER_S - 0.1
        serves(switch)


def test_more_open_queries_than_the_bound_end_the_membership() -> None:
    """Each query costs an iteration of the data-plane thread, and stays open while a neighbour in the tree is asked."""
    sender: Any = SimpleNamespace(open_queries=MAX_QUERIES, asked=0)
    lifecycle = JobLifecycle.__new__(JobLifecycle)
    with pytest.raises(control_messages.ProtocolError, match="more than 8 questions at once"):
        lifecycle.handle_stragglers(mock.Mock(), sender, {"type": "stragglers", "chunk": 0, "serial": 1})


def test_ranks_with_different_sizes_for_one_job_are_refused() -> None:
    with running_switch() as switch:
        with socket.create_connection(switch.address, 5) as first, socket.create_connection(switch.address, 5) as other:
            for stream, join in ((first, JOIN), (other, {**JOIN, "rank": 2, "ranks": [0, 1, 2]})):
                stream.settimeout(seconds(5))
                stream.sendall(control_messages.encode(join))
                answer = control_messages.receive(stream)
        assert answer == {**REFUSED, "reason": "rank 2 has 3 ranks in its job; other ranks have 2"}


def test_a_rank_that_leaves_before_the_start_ends_the_job_with_the_reason() -> None:
    with running_switch() as switch, socket.create_connection(switch.address, 5) as first:
        first.settimeout(seconds(5))
        first.sendall(control_messages.encode(JOIN))
        assert control_messages.receive(first)["type"] == "admitted"
        with socket.create_connection(switch.address, 5) as other:
            other.sendall(control_messages.encode({**JOIN, "rank": 1}))
            assert control_messages.receive(other)["type"] == "admitted"
            other.sendall(control_messages.encode({"type": "leave", "reason": "no UDP here"}))
        assert control_messages.receive(first) == {
            "type": "refused",
            "reason": "rank 1 left before the job started: no UDP here",
        }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_switch_that_gets_a_signal_exits_with_0(number: signal.Signals) -> None:
    with running_switch() as switch:
        switch.process.send_signal(number)
        assert switch.process.wait(seconds(5)) == 0
        assert f"stopped by {number.name}" in switch.log()


def _command(*options: str) -> subprocess.CompletedProcess[str]:
    return run_command("switch", *options)


def test_a_network_address_is_refused_without_open() -> None:
    ended = _command("--listen", "0.0.0.0:0")
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "netfold switch: 0.0.0.0 is not a loopback address: anyone who reaches it could join"
    )
    assert "--open" in ended.stderr
    Switch("0.0.0.0", 0, open_to_all=True)


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:99999"])
def test_a_malformed_address_is_refused(listen: str) -> None:
    ended = _command("--listen", listen)
    assert ended.returncode == 2
    assert f"--listen is {listen!r}; expected host:port" in ended.stderr


def test_an_address_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = _command("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.returncode == 1
    assert "Is another switch running there" in ended.stderr


def test_an_address_of_another_machine_is_reported() -> None:
    ended = _command("--listen", "192.0.2.1:7171", "--open")
    assert ended.returncode == 1
    assert "netfold switch: cannot listen on 192.0.2.1:7171" in ended.stderr


def test_a_switch_serves_ipv6() -> None:
    with running_switch("--listen", "[::1]:0") as switch:
        assert values(run_threads(add, 2, switch.endpoint, 100_000)) == expected(2, 100_000)
