"""metrics.jsonl: every number is read back, also after the writing process was killed."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from invented_run import (
    BATCH,
    BITS,
    STEPS,
    a_run_that_was_cut_off_and_went_on,
    evaluated,
    goes_through,
    recipe,
    stepped,
    tell,
)

from netfold_train.callbacks.events import Ended, Stepped
from netfold_train.callbacks.metrics_file import MetricsFile
from netfold_train.runs.metrics import read_metrics
from netfold_train.runs.page import write_report


def test_every_number_of_an_event_is_read_back(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    tell([MetricsFile(tmp_path)], [*goes_through(asked, 0, STEPS), Ended(STEPS, "done", 3.5)])
    found = read_metrics(tmp_path)
    assert found.is_finished and found.unreadable == 0
    (start,) = found.starts
    assert (start["steps"], start["batch"], start["ranks"], start["parameters"]) == (STEPS, BATCH, 4, 12_345)
    assert start["metric"] == {
        name: getattr(BITS, name) for name in ("name", "unit", "better", "baseline", "baseline_is")
    }
    assert start["recipe"] == asked.model_dump(mode="json")
    for step, line in enumerate(found.steps, start=1):
        told = {name: value for name, value in asdict(stepped(step)).items() if value not in (None, False)}
        assert {name: line[name] for name in told} == told
        assert set(line) == {*told, "kind", "time"}
        assert line["samples_per_s"] == BATCH / told["seconds"]
    assert [line["values"] for line in found.evaluations] == [evaluated(step).values for step in (5, 10, 15, 20)]


def test_a_killed_run_leaves_all_its_lines(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    child = os.fork()
    if child == 0:
        tell([MetricsFile(tmp_path)], goes_through(asked, 0, 13))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found.steps] == list(range(1, 14))
    assert found.ended is None and not found.is_finished


def test_the_last_line_of_a_repeated_step_counts_and_is_marked(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    for events in a_run_that_was_cut_off_and_went_on(asked):
        writer = MetricsFile(tmp_path)
        tell([writer], events)
        del writer
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found.steps] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in found.steps[10:]] == [stepped(step, 1).loss for step in range(11, STEPS + 1)]
    assert [line["step"] for line in found.steps if line.get("again")] == [11, 12, 13]
    # Evaluations are before step 13 and after it. Step 10 has one line, because it was not repeated.
    assert [line["values"]["loss"] for line in found.evaluations] == [
        *(evaluated(step).values["loss"] for step in (5, 10)),
        *(evaluated(step, 1).values["loss"] for step in (15, 20)),
    ]
    assert len(found.starts) == 2 and len(found.notes) == 2 and found.is_finished
    # The run continued after step 10: steps 11 to 13 were done twice.
    assert found.cost_of_failures.startswith("cost of failures: 1 restart of all ranks, 3 steps repeated, ")


def test_steps_after_a_new_start_do_not_count_even_before_they_are_repeated(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    for first, last in ((0, 13), (6, 8)):
        writer = MetricsFile(tmp_path)
        tell([writer], goes_through(asked, first, last))
        del writer
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found.steps] == list(range(1, 9))
    assert [line["step"] for line in found.evaluations] == [5]


def test_an_incomplete_line_loses_no_other_line(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    writer = MetricsFile(tmp_path)
    tell([writer], goes_through(asked, 0, 4))
    del writer
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    writer = MetricsFile(tmp_path)
    tell([writer], goes_through(asked, 3, 5))
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found.steps] == [1, 2, 3, 4, 5] and found.unreadable == 1
    assert "Incomplete lines of metrics.jsonl, not shown here: 1." in write_report(tmp_path).read_text()


def test_a_full_disk_is_an_error_and_the_file_stays_readable(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    writer = MetricsFile(tmp_path)
    tell([writer], goes_through(asked, 0, 2))
    whole = writer._file

    class Full:
        def write(self, raw: bytes) -> int:
            return whole.write(raw[:11])

    writer._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="11 of"):
        writer.on_step(stepped(3))
    writer._file = whole
    tell([writer], [stepped(4)])
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found.steps] == [1, 2, 4] and found.unreadable == 1


def test_only_json_is_written_and_always_the_last_step(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    tell([MetricsFile(tmp_path, every=6)], a_run_that_was_cut_off_and_went_on(asked)[0])
    nan = Stepped(STEPS, float("nan"), 1e-3, float("inf"), 0.5, 0.0, STEPS * BATCH, BATCH / 0.5)
    tell([MetricsFile(tmp_path, every=6)], [*goes_through(asked, 13, 13), nan])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = [json.loads(row, parse_constant=refuse) for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [6, 12, STEPS]
    assert steps[-1]["loss"] is None and steps[-1]["gradient_norm"] is None
