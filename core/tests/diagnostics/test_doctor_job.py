"""The rank that a job waits for: findings from synthetic ranks, and from real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from doctor_ranks import NOW, S, rank, waiting
from load import seconds
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold.diagnostics.job import diagnose
from netfold.diagnostics.status_segment import Transfer, find_ranks


def test_a_rank_that_has_not_called_is_named_with_its_last_operation() -> None:
    (verdict,) = diagnose([waiting(0, 2), waiting(1, 2), rank(2)], NOW)
    assert verdict.at_fault == (2,)
    assert verdict.findings == (
        "rank 2 has not called all_reduce #5, for which others have been waiting for 2.0 s: it last finished #4",
    )
    assert dict(verdict.lines)[0] == "in all_reduce of 4000 bytes f32 (sum) by ring #5 for 2.0 s; waits for rank 2"
    assert dict(verdict.lines)[2] == "outside; finished barrier #4 2.0 s ago"


def test_a_rank_in_an_earlier_operation_is_named() -> None:
    (verdict,) = diagnose([waiting(0, 1), waiting(1, 0, sequence=4, operation="broadcast"), waiting(2, 1)], NOW)
    assert verdict.at_fault == (1,)
    assert "rank 1 is still in broadcast #4, while others have been in #5" in verdict.findings[0]


def test_a_finished_rank_is_not_blamed() -> None:
    (verdict,) = diagnose([waiting(0), waiting(1), rank(2, done_sequence=5)], NOW)
    assert verdict.at_fault == ()


def test_different_calls_at_the_same_place_are_shown_side_by_side() -> None:
    (verdict,) = diagnose([waiting(0), waiting(1, bytes=8), waiting(2)], NOW)
    (finding,) = verdict.findings
    assert "rank 0 all_reduce of 4000 bytes f32 (sum) by ring; rank 1 all_reduce of 8 bytes" in finding


def test_a_rank_that_waits_for_a_message_names_the_sender_in_another_operation() -> None:
    receive = Transfer("receive", 1, 7, 4096, NOW - 3 * S, "train.py:9")
    (verdict,) = diagnose([rank(0, transfer=receive), rank(1), rank(2)], NOW)
    assert verdict.at_fault == (1,)
    assert verdict.findings == (
        "rank 0 waits in a receive of 4096 bytes from rank 1 with tag 7 (called at train.py:9) for 3.0 s",
        "rank 1 is in no operation meanwhile",
    )
    assert dict(verdict.lines)[0].startswith("in a receive of 4096 bytes from rank 1 with tag 7")
    # Both ranks are in messages, so the finding shows both tags.
    crossed = [rank(0, transfer=receive), rank(1, transfer=Transfer("send", 0, 8, 4096, NOW - S, "")), rank(2)]
    (verdict,) = diagnose(crossed, NOW)
    assert verdict.at_fault == ()
    assert "rank 1 waits in a send of 4096 bytes to rank 0 with tag 8 for 1.0 s" in verdict.findings


def test_a_stopped_process_and_an_absent_rank_are_named() -> None:
    (verdict,) = diagnose([waiting(0, 1, 2), waiting(1, process_state="T")], NOW)
    assert verdict.at_fault == (1, 2)
    assert "rank 1 (process 1001) is stopped" in verdict.findings
    assert any(finding.startswith("rank 2 of 3: no process of this machine") for finding in verdict.findings)


def test_failures_are_shown_by_group() -> None:
    verdicts = diagnose([rank(0, failure="rank 0: all_reduce #4 failed: rank 2 died"), rank(0, job="b", size=1)], NOW)
    assert [verdict.job for verdict in verdicts] == ["a", "b"]
    assert "rank 0 has failed: rank 0: all_reduce #4 failed: rank 2 died" in verdicts[0].findings
    assert verdicts[1].findings == ("nothing keeps it",)


IN_A_CONTAINER = """
import os, sys
import numpy as np
from netfold import Communicator, FileStore
with Communicator(FileStore(sys.argv[1]), 0, 1) as group:
    group.all_reduce(np.ones(4, np.float32))
    if os.fork() == 0:  # inherits the page's descriptor
        os.read(0, 1)
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.read(1)
    os.wait()
"""


def test_a_process_of_another_pid_namespace_is_seen_from_the_host(tmp_path: Path) -> None:
    """Run in a PID namespace, as in a container: the process has another number there."""
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may make no PID namespace")
    command = [*apart, sys.executable, "-c", IN_A_CONTAINER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        inside = int(process.stdout.readline())
        (outside,) = psutil.Process(process.pid).children()
        assert inside == 1 != outside.pid
        (found,) = [each for each in find_ranks() if str(tmp_path) in each.command]
        assert (found.pid, found.rank, found.size, found.done_operation) == (outside.pid, 0, 1, "all_reduce")
        assert find_ranks(outside.pid) and not find_ranks(outside.children()[0].pid), "a fork has no groups"
        process.communicate("..")
    assert process.returncode == 0


def hang(number: int, size: int, folder: str, transport: str) -> tuple[list[tuple[int, str]], tuple[int, ...]]:
    """Rank 2 calls late; rank 0 runs the doctor meanwhile."""
    # In a ring, which a slow machine's links may suggest, rank 1 would wait for rank 0 alone.
    options = Options(transport=transport, algorithm="all_reduce=direct" if transport == "tcp" else None)
    with Communicator(FileStore(folder), number, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = np.ones(1000, np.float32)
        group.all_reduce(buffer)
        for _ in range(5):  # messages have their own count, and must not make rank 2 seem further ahead
            if number == 2:
                group.send(buffer, 0)
            elif number == 0:
                group.receive(buffer, 2)
        looked = Path(folder, "looked")
        if number == 2:
            ours = {each.job for each in find_ranks(os.getpid())}
            deadline = time.monotonic() + seconds(10)
            while True:
                ranks = [each for each in find_ranks() if each.job in ours]
                if sum(2 in each.awaited for each in ranks) == 2 or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            (verdict,) = diagnose(ranks, time.monotonic_ns())
            looked.touch()
            group.all_reduce(buffer)
            return list(verdict.lines), verdict.at_fault
        group.all_reduce(buffer)
        return [], ()


@pytest.mark.native
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_rank_that_does_not_call_is_found_from_outside(transport: str) -> None:
    lines, at_fault = values(run_ranks(hang, 3, transport, timeout_s=40))[2]
    assert at_fault == (2,), lines
    assert [line.split(";")[-1] for _, line in lines[:2]] == [" waits for rank 2"] * 2, lines
    assert all(f"(called at {__file__}:" in line for _, line in lines), lines


def waits_for_a_message(number: int, size: int, folder: str, transport: str) -> tuple[Any, str]:
    """Rank 1 sends late; rank 0 looks meanwhile from another thread, and asks it."""
    options = Options(transport=transport)
    with Communicator(FileStore(folder), number, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer, sent = np.zeros(1 << 20, np.uint8), Path(folder, "looked")
        if number == 1:
            while not sent.exists():
                time.sleep(0.01)
            group.send(buffer, 0, tag=7)
            return None, ""
        work = group.receive(buffer, 1, tag=7, asynchronous=True)
        deadline, found = time.monotonic() + 10, None
        while found is None and time.monotonic() < deadline:
            found = next(each.transfer for each in find_ranks(os.getpid()) if each.rank == 0)
            time.sleep(0.01)
        seen = group.group._native.last_seen()
        sent.touch()
        work.wait()
        while find_ranks(os.getpid())[0].transfer is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert find_ranks(os.getpid())[0].transfer is None, "a message that is done is not shown"
        return found, seen


@pytest.mark.native
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_awaited_message_is_shown_by_the_doctor_and_by_other_ranks(transport: str) -> None:
    found, seen = values(run_ranks(waits_for_a_message, 2, transport, timeout_s=40))[0]
    assert (found.kind, found.peer, found.tag, found.bytes) == ("receive", 1, 7, 1 << 20)
    assert found.site.startswith(f"{__file__}:")
    assert "in no collective" in seen and "; in a receive from rank 1 with tag 7 of 1048576 bytes for" in seen, seen


@pytest.mark.native
@pytest.mark.parametrize(("states", "seen"), [("DDS", "S"), ("DDDDDDDDDD", "D")])
def test_only_a_lasting_disk_wait_counts_as_the_process_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: str, seen: str
) -> None:
    letters = iter(states)
    with Communicator(FileStore(str(tmp_path)), 0, 1):
        monkeypatch.setattr(
            "netfold.diagnostics.status_segment._process", lambda folder: (next(letters), "python train.py")
        )
        found = find_ranks(os.getpid())
    # Other tests' groups may live in this process, too.
    assert {rank.process_state for rank in found} == {seen}


SLEEPER = """
import sys
from netfold import Communicator, FileStore
with Communicator(FileStore(sys.argv[1]), 0, 1) as group:
    print("joined", flush=True)
    sys.stdin.read()
"""


def looks_at_itself(number: int, size: int, folder: str) -> tuple[int, int]:
    with Communicator(FileStore(folder), number, size) as group:
        # The lowest number comes first, and is not the page.
        os.close(0)
        assert os.memfd_create("netfold-status") == 0
        return len(find_ranks(os.getpid())), group.size


def test_a_status_segment_is_found_beside_an_empty_descriptor_of_its_name() -> None:
    assert values(run_ranks(looks_at_itself, 1)) == [(1, 1)]


def test_the_command_shows_a_stopped_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "joined\n"
            process.send_signal(signal.SIGSTOP)
            command = [str(Path(sys.executable).with_name("netfold")), "doctor", "job", "--pid", str(process.pid)]
            said = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
        finally:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
    assert said.returncode == 1, said.stderr
    assert f"rank 0 (process {process.pid}) is stopped" in said.stdout
    assert not find_ranks(process.pid)
