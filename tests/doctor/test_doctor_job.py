"""Who keeps a job: verdicts on pictures made by hand, and on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold.doctor import Rank, diagnose, find_ranks

S = 1_000_000_000
NOW = 100 * S


def rank(number: int, **fields: object) -> Rank:
    """Rank `number` of 3, asleep, that has finished #4 two seconds ago."""
    plain = Rank(
        pid=1000 + number,
        process_state="S",
        command="python train.py",
        group=1,
        job="a",
        rank=number,
        size=3,
        joined_ns=NOW - 50 * S,
        sequence=0,
        operation="all_reduce",
        dtype="f32",
        reduce="sum",
        algorithm="ring",
        bytes=4000,
        queued_ns=0,
        waiting=0,
        awaited=(),
        done_sequence=4,
        done_operation="barrier",
        done_ns=NOW - 2 * S,
        failure="",
        site="",
        done_site="",
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def waiting(number: int, *awaited: int, **fields: object) -> Rank:
    return rank(number, **{"sequence": 5, "queued_ns": NOW - 2 * S, "waiting": 1, "awaited": awaited, **fields})


def test_a_rank_that_has_not_called_is_named_with_what_it_did_last() -> None:
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


def test_a_rank_that_is_through_already_keeps_nobody() -> None:
    (verdict,) = diagnose([waiting(0), waiting(1), rank(2, done_sequence=5)], NOW)
    assert verdict.at_fault == ()


def test_different_calls_at_the_same_place_are_shown_side_by_side() -> None:
    (verdict,) = diagnose([waiting(0), waiting(1, bytes=8), waiting(2)], NOW)
    (finding,) = verdict.findings
    assert "rank 0 all_reduce of 4000 bytes f32 (sum) by ring; rank 1 all_reduce of 8 bytes" in finding


def test_a_stopped_process_and_an_absent_rank_are_named() -> None:
    (verdict,) = diagnose([waiting(0, 1, 2), waiting(1, process_state="T")], NOW)
    assert verdict.at_fault == (1, 2)
    assert "rank 1 (process 1001) is stopped" in verdict.findings
    assert any(finding.startswith("rank 2 of 3: no process of this machine") for finding in verdict.findings)


def test_a_failure_is_told_and_groups_are_kept_apart() -> None:
    verdicts = diagnose([rank(0, failure="rank 0: all_reduce #4 failed: rank 2 died"), rank(0, job="b", size=1)], NOW)
    assert [verdict.job for verdict in verdicts] == ["a", "b"]
    assert "rank 0 has failed: rank 0: all_reduce #4 failed: rank 2 died" in verdicts[0].findings
    assert verdicts[1].findings == ("nothing keeps it",)


def hang(number: int, size: int, folder: str, transport: str) -> tuple[list[tuple[int, str]], tuple[int, ...]]:
    """Rank 2 comes late; rank 0 looks meanwhile."""
    options = Options(transport=transport)
    with Communicator(FileStore(folder), number, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = np.ones(1000, np.float32)
        group.all_reduce(buffer)
        for _ in range(5):  # messages are counted apart, and must not make rank 2 look further than it is
            if number == 2:
                group.send(buffer, 0)
            elif number == 0:
                group.receive(buffer, 2)
        looked = Path(folder, "looked")
        if number == 2:
            ours = {each.job for each in find_ranks(os.getpid())}
            deadline = time.monotonic() + 10
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
    assert at_fault == (2,)
    assert [line.split(";")[-1] for _, line in lines[:2]] == [" waits for rank 2"] * 2, lines
    assert all(f"(called at {__file__}:" in line for _, line in lines), lines


SLEEPER = """
import sys
from netfold import Communicator, FileStore
with Communicator(FileStore(sys.argv[1]), 0, 1) as group:
    print("joined", flush=True)
    sys.stdin.read()
"""


def test_the_command_shows_a_stopped_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "joined\n"
            process.send_signal(signal.SIGSTOP)
            command = [str(Path(sys.executable).with_name("netfold")), "doctor", "job", "--pid", str(process.pid)]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60)
        finally:
            process.send_signal(signal.SIGCONT)
            process.stdin.close()
    assert said.returncode == 1, said.stderr
    assert f"rank 0 (process {process.pid}) is stopped" in said.stdout
    assert not find_ranks(process.pid)
