"""Processes that end together, and an aggregator that must print its address. No root."""

import os
import signal
import sys
import time
from collections.abc import Sequence

import pytest
from endings import has_ended
from load import seconds
from typer.testing import CliRunner

from netfold_lab.cli.rack import app
from netfold_lab.rack import RackError
from netfold_lab.rack.aggregator import start_aggregator
from netfold_lab.rack.processes import Process, follow, spawn, stop, supervise

SLEEP = "import time; time.sleep(60)"


def python(code: str) -> Process:
    return spawn([sys.executable, "-c", code], os.environ)


def spawn_here(argv: Sequence[str]) -> Process:
    return spawn(argv, os.environ)


def test_exit_codes_of_0_give_exit_code_0() -> None:
    assert supervise([python("pass"), python("pass")]).exit_code == 0


def test_the_first_failure_ends_all_processes_and_is_the_exit_code() -> None:
    processes = [python(SLEEP), python("raise SystemExit(7)"), python(SLEEP)]
    outcome = supervise(processes)
    assert (outcome.exit_code, outcome.first_failed, outcome.timed_out) == (7, 1, False)
    assert [process.poll() for process in processes] == [-signal.SIGTERM, 7, -signal.SIGTERM]


def test_a_process_killed_by_a_signal_has_the_exit_code_of_a_shell() -> None:
    assert supervise([python("import os; os.kill(os.getpid(), 9)")]).exit_code == 128 + 9


def test_the_deadline_ends_all() -> None:
    process = python(SLEEP)
    outcome = supervise([process], deadline_s=0.2)
    assert (outcome.exit_code, outcome.timed_out, process.poll()) == (124, True, -signal.SIGTERM)


def test_a_process_that_ignores_sigterm_is_killed_with_its_children() -> None:
    process = spawn(["sh", "-c", "trap '' TERM; sleep 60 & echo $!; wait"], os.environ)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    stop([process])
    assert process.poll() == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while not has_ended(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert has_ended(child)


def test_lines_of_output_and_errors_arrive_in_order_without_their_ends() -> None:
    lines: list[str] = []
    process = python("import sys; print('one', flush=True); print('two', file=sys.stderr); print('three')")
    follow(process, lines.append).join(seconds(10))
    process.wait()
    assert lines == ["one", "two", "three"]


def test_an_aggregator_is_ready_when_it_prints_its_address() -> None:
    lines: list[str] = []
    code = f"print('a word before'); print('netfold switch listening on 127.0.0.1:4711', flush=True); {SLEEP}"
    aggregator = start_aggregator(spawn_here, [sys.executable, "-c", code], lines.append)
    assert aggregator.address == "127.0.0.1:4711"
    assert aggregator.process.poll() is None
    stop([aggregator.process])
    assert lines[0] == "a word before"


def test_an_aggregator_that_ends_is_an_error_with_its_output() -> None:
    code = "raise SystemExit('address already in use')"
    with pytest.raises(RackError, match=r"ended before it listened; it said: address already in use"):
        start_aggregator(spawn_here, [sys.executable, "-c", code], lambda line: None)


def test_an_aggregator_that_prints_no_address_is_stopped() -> None:
    started: list[Process] = []

    def spawn_and_keep(argv: Sequence[str]) -> Process:
        started.append(spawn_here(argv))
        return started[0]

    with pytest.raises(RackError, match=r"silent for 0\.3 s"):
        start_aggregator(spawn_and_keep, [sys.executable, "-c", SLEEP], lambda line: None, timeout_s=0.3)
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    "arguments", [["run", "--hosts", "2", "--rate", "1gbit", "--no-switch", "--", "true"], ["down"]]
)
def test_without_root_the_commands_fail_with_one_sentence(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "needs root" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
