"""Callbacks: the recipe chooses them, a failing one does not end the run, and each shows its part of the events."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from invented_run import (
    BATCH,
    STEPS,
    Failing,
    a_run_that_was_cut_off_and_went_on,
    evaluated,
    goes_through,
    recipe,
    stepped,
    tell,
)
from rich.console import Console

from netfold_train.callbacks.events import Ended, Noted
from netfold_train.callbacks.progress import ProgressCallback
from netfold_train.callbacks.selection import GuardedCallback, make_callbacks
from netfold_train.callbacks.trackers import MLflow, TensorBoard, Wandb
from netfold_train.runs.metrics import read_metrics


def kinds(chosen: Any) -> list[str]:
    return [type(each._callback).__name__ for each in chosen]


def test_the_recipe_chooses_the_callbacks_and_other_ranks_only_profile(tmp_path: Path) -> None:
    some = {"tensorboard": True, "profile": True}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert kinds(make_callbacks(recipe(tmp_path, report=some), tmp_path / "a", 0)) == [
        *("ProfileCallback", "MetricsFile", "TensorBoard", "ReportCallback", "ProgressCallback"),
    ]
    assert kinds(make_callbacks(recipe(tmp_path, report=some), tmp_path / "a", 1)) == ["ProfileCallback"]
    assert kinds(make_callbacks(recipe(tmp_path), tmp_path / "b", 0)) == [
        "MetricsFile",
        "ReportCallback",
        "ProgressCallback",
    ]
    assert kinds(make_callbacks(recipe(tmp_path), tmp_path / "b", 3)) == []


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_tracker_package_is_an_error_with_its_key(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netfold_train.callbacks.selection.find_spec", lambda name: None)
    wanted = r"'netfold\[train\]'" if tracker == "tensorboard" else tracker
    with pytest.raises(ValueError, match=rf"report\.{tracker} is on.*pip install {wanted}.*report\.{tracker} = false"):
        make_callbacks(recipe(tmp_path, report={"tensorboard": False, tracker: True}), tmp_path, 0)


def test_a_failing_callback_is_noted_once_and_again_when_it_works() -> None:
    failing, other = Failing(OSError("No space left on device")), Failing(None)
    guarded: list[GuardedCallback] = []
    guarded += [GuardedCallback(failing, guarded), GuardedCallback(other, guarded)]
    tell(guarded, [stepped(step) for step in (1, 2, 3)])
    failing.error = None
    tell(guarded, [stepped(4), stepped(5)])
    notes = [event for event in other.told if isinstance(event, Noted)]
    assert [note.step for note in notes] == [1, 4]
    assert notes[0].level == "warning"
    assert "Failing failed (OSError: No space left on device)" in notes[0].text
    # Steps 1, 2 and 3; a callback does not receive the note about itself.
    assert notes[1].text == "Failing works again, without 3 earlier events"
    assert failing.told == [stepped(4), stepped(5)]
    assert [event for event in other.told if not isinstance(event, Noted)] == [stepped(step) for step in range(1, 6)]


def test_nothing_is_raised_if_all_callbacks_fail() -> None:
    guarded: list[GuardedCallback] = []
    guarded += [GuardedCallback(Failing(OSError("gone")), guarded) for _ in range(3)]
    tell(guarded, [stepped(1), evaluated(1)])


def test_the_failure_of_a_single_callback_is_printed_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    guarded: list[GuardedCallback] = []
    guarded.append(GuardedCallback(Failing(OSError("gone")), guarded))
    tell(guarded, [stepped(1), stepped(2)])
    assert capsys.readouterr().err.splitlines() == [
        "netfold train: step 1: Failing failed (OSError: gone); training continues without it"
    ]


def test_without_a_terminal_progress_is_a_plain_line_every_10_seconds(tmp_path: Path) -> None:
    text = io.StringIO()
    progress = ProgressCallback(tmp_path, Console(file=text, width=200))
    events = goes_through(recipe(tmp_path), 0, STEPS)
    events[1] = replace(events[1], exposed=0.125)
    tell([progress], events)
    tell([progress], [Noted(20, "warning", "rank 3 is [slow]"), Ended(STEPS, "done", 61.0)])
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("gpt on source: 12,345 parameters, 20 steps of 16 samples, 4 ranks; in ")
    seconds = stepped(1).seconds
    assert lines[1] == (
        f"step 1/20  loss 4.992  lr 1.00e-03  {BATCH / seconds:.4g} samples/s  exposed ~12%  "
        f"{1e3 * 19 * seconds:.0f} ms left"
    )
    assert (
        lines[2] == "step 5: bits per byte 7.844 bit on held-out samples, how often each byte comes 5.25 bit, in 270 ms"
    )
    assert lines[6:8] == ["step 20: rank 3 is [slow]", "done after step 20, in 61 s"]
    assert len(lines) == 9 and lines[8].endswith("report.html")


def test_an_unknown_share_of_communication_is_a_dash(tmp_path: Path) -> None:
    text = io.StringIO()
    tell(
        [ProgressCallback(tmp_path, Console(file=text, width=200))],
        goes_through(recipe(tmp_path), 0, 1),
    )
    assert "  exposed -  " in text.getvalue()


def test_on_a_terminal_one_line_is_updated_and_then_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netfold_train.callbacks.progress.LIVE_S", 0.0)
    text = io.StringIO()
    console = Console(file=text, width=60, force_terminal=True, color_system=None)
    progress = ProgressCallback(tmp_path, console)
    tell([progress], [*goes_through(recipe(tmp_path), 0, 4), Ended(4, "SIGTERM", 1.0)])
    shown = text.getvalue()
    assert "step 1/20" in shown and "step 4/20" in shown
    # The line is cut and not wrapped, and the hidden cursor is shown again.
    assert "…" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "ended after step 4, in 1 s: SIGTERM" in shown


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    asked = recipe(tmp_path)
    for events in a_run_that_was_cut_off_and_went_on(asked):
        board = TensorBoard(tmp_path, 1)
        tell([board], events)
        board._writer.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    losses = {event.step: event.value for event in read.Scalars("train/loss")}
    assert list(losses) == list(range(1, STEPS + 1))
    for step in (1, 10, 11, 20):
        assert losses[step] == pytest.approx(stepped(step, int(step > 10)).loss, rel=1e-6)
    assert [event.step for event in read.Scalars("held-out/bits per byte")] == [5, 10, 15, 20]
    assert len(read.Scalars("train/gradient_norm")) == STEPS - 2
    assert "warning/text_summary" in read.Tags()["tensors"]


class Calls:
    """A fake package of a tracker, which records its calls and their arguments."""

    def __init__(self, **answers: Any) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.made.append((name, arguments, named))
            return self._answers.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, named) for called, arguments, named in self.made if called == name]


def as_package(calls: Calls, *names: str) -> ModuleType:
    package = ModuleType("tracker")
    for name in names:
        setattr(package, name, getattr(calls, name))
    return package


def test_wandb_gets_its_own_calls_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(tmp_path)
    run = Calls()
    run.id = "abc123"  # type: ignore[attr-defined]
    calls = Calls(init=run)
    monkeypatch.setitem(sys.modules, "wandb", as_package(calls, "init"))
    for events in a_run_that_was_cut_off_and_went_on(asked):
        # A finished run accepts no alert: the real package raises an error.
        late = [Noted(STEPS, "warning", "another failed at the end")] if isinstance(events[-1], Ended) else []
        tell([Wandb(tmp_path, 1)], [*events, *late])
    (_, first), (_, second) = calls.of("init")
    assert (first["id"], second["id"], second["resume"]) == (None, "abc123", "allow")
    assert first["config"] == asked.model_dump(mode="json") and first["dir"] == str(tmp_path)
    logged = run.of("log")
    assert logged[0] == (
        (
            {
                "train/loss": stepped(1).loss,
                "train/lr": stepped(1).lr,
                "train/seconds": stepped(1).seconds,
                "train/data_s": stepped(1).data_s,
                "train/samples": BATCH,
                "train/samples_per_s": BATCH / stepped(1).seconds,
            },
        ),
        {"step": 1},
    )
    assert ({"held-out/bits per byte": 7.84375, "held-out/loss": 5.421875},) in [arguments for arguments, _ in logged]
    assert [named["title"] for _, named in run.of("alert")] == ["step 7"]
    assert run.of("finish") == [((), {"exit_code": 0})]


def test_mlflow_gets_its_own_calls_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(tmp_path)
    run = SimpleNamespace(info=SimpleNamespace(run_id="f00d"))
    calls = Calls(start_run=run, active_run=run)
    names = ("start_run", "active_run", "log_params", "log_metrics", "set_tag", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", as_package(calls, *names))
    for events in a_run_that_was_cut_off_and_went_on(asked):
        tell([MLflow(tmp_path, 1)], events)
    assert [named["run_id"] for _, named in calls.of("start_run")] == [None, "f00d"]
    ((parameters,), _), *more = calls.of("log_params")
    assert not more and parameters["model.width"] == 32 and parameters["training.batch"] == BATCH
    ((metrics,), named), *_ = calls.of("log_metrics")
    assert metrics["train/loss"] == stepped(1).loss and named == {"step": 1, "synchronous": False}
    assert calls.of("set_tag")[0][0] == ("warning at step 7", "the loss of step 7 is <nan>: the step was left out")
    assert calls.of("end_run") == [(("FINISHED",), {})]


def test_an_mlflow_without_a_run_is_noted_once_and_begins_no_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls()
    package = as_package(calls, "active_run", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", package)
    tell(
        [GuardedCallback(MLflow(tmp_path, 1), [])],
        a_run_that_was_cut_off_and_went_on(recipe(tmp_path))[-1],
    )
    (said,) = capsys.readouterr().err.splitlines()
    assert "MLflow failed (AttributeError" in said
    assert not calls.of("log_metrics") and not calls.of("end_run")


def test_a_full_disk_is_shown_on_screen_and_the_run_finishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = recipe(tmp_path)
    chosen = make_callbacks(asked, tmp_path, 0)
    (metrics,) = [each._callback for each in chosen if type(each._callback).__name__ == "MetricsFile"]  # type: ignore[attr-defined]

    class Full:
        def write(self, raw: bytes) -> int:
            raise OSError(28, "No space left on device")

    events = goes_through(asked, 0, STEPS)
    tell(chosen, events[:5])
    whole, metrics._file = metrics._file, Full()
    tell(chosen, events[5:9])
    metrics._file = whole
    tell(chosen, [*events[9:], Ended(STEPS, "done", 1.0)])
    said = capsys.readouterr().err
    assert said.count("MetricsFile failed (OSError: [Errno 28] No space left on device)") == 1
    assert said.count("MetricsFile works again, without 4 earlier events") == 1
    found = read_metrics(tmp_path)
    assert found.is_finished and len(found.steps) < STEPS and (tmp_path / "report.html").exists()
