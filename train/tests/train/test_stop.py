"""Processes that get SIGTERM once or twice, and do or do not stop."""

from __future__ import annotations

import subprocess
import sys
import time

from load import seconds

SCRIPT = """
import os, signal, sys, time
from netfold_train.fault_tolerance.stop import StopRequest

request = StopRequest(grace_s=float(sys.argv[1]))
if sys.argv[3] == "listens":
    request.listen()
with request as stop:
    for _ in range(int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        print("asked", stop.asked, flush=True)
    if sys.argv[3] == "hangs":
        time.sleep(60)
if sys.argv[3] == "listens":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
print("left in order", flush=True)
"""


def asked(grace_s: float, times: int, then: str) -> tuple[int, list[str], str, float]:
    """The process's status (negative after a signal), its output, and its duration."""
    began_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(grace_s), str(times), then],
        capture_output=True,
        text=True,
        timeout=seconds(30),
    )
    return ended.returncode, ended.stdout.splitlines(), ended.stderr, time.monotonic() - began_s


def test_a_process_that_gets_sigterm_finishes_its_step_and_leaves() -> None:
    status, printed, _, _ = asked(20.0, 1, "leaves")
    assert (status, printed) == (0, ["asked True", "left in order"])


def test_a_signal_after_the_vote_does_not_end_a_leaving_rank() -> None:
    # This rank itself got no signal while it trained.
    status, printed, _, _ = asked(20.0, 0, "listens")
    assert (status, printed) == (0, ["left in order"])
    status, printed, _, _ = asked(20.0, 1, "listens")
    assert (status, printed) == (-15, ["asked True"]), "the second one of its own"


def test_the_second_sigterm_ends_a_process_at_once() -> None:
    status, printed, _, _ = asked(20.0, 2, "leaves")
    assert (status, printed) == (-15, ["asked True"])


def test_the_end_of_the_grace_time_ends_a_process_and_shows_where_it_was() -> None:
    status, printed, errors, took_s = asked(0.3, 1, "hangs")
    assert (status, printed) == (1, ["asked True"])
    assert "Timeout" in errors and "line 14" in errors
    assert took_s < seconds(20), "it hangs for 60 s"
