"""The interval of checkpoints, and the keys that may change in a resumed run: one process, several attempts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch


def killed_by_default(rank: int, folder: Path, world: World) -> list[Any]:
    """A recipe without [checkpoint] is interrupted after step 25 of 40, and started again."""
    from surviving import Recorder, interrupt_at, run

    first, second = Recorder(interrupt_at(25)), Recorder()
    with world(1):
        for recorder in (first, second):
            run(folder, recorder=recorder, training={"steps": 40}, checkpoint={"asynchronous": False})
        end = Recorder()
        run(folder / "end", recorder=end, checkpoint={"every": "end"})
    return [first.notes, second.notes, second.steps[0].step, end.notes]


def gone_on_with(rank: int, folder: Path, world: World) -> list[Any]:
    """Keys other than those of the checkpoint of step 3; under "auto", then under "changed"."""
    import shutil

    from surviving import Recorder, interrupt_at, run

    found: list[Any] = []
    with world(1):
        run(folder / "8", noisy=False, checkpoint={"every": 3}, recorder=Recorder(interrupt_at(5)))
        constant = {"schedule": {"shape": "constant"}, "checkpoint": {"every": 3}}
        run(folder / "longer", noisy=False, recorder=Recorder(interrupt_at(5)), **constant)
        for changes in CHANGES:
            into = folder / str(len(found))
            shutil.copytree(folder / "8", into)
            try:
                run(into, noisy=False, **changes)
                found.append("not refused")
            except ValueError as error:
                recorder = Recorder()
                run(into, noisy=False, recorder=recorder, run={"resume": "changed"}, **changes)
                found.append((str(error), recorder.notes))
        recorder = Recorder()
        run(folder / "longer", noisy=False, recorder=recorder, training={"steps": 9}, schedule={"shape": "constant"})
        found.append(recorder.notes)
    return found


CHANGES: list[dict[str, dict[str, Any]]] = [
    {"optimizer": {"lr": 0.02}},
    {"optimizer": {"weight_decay": 0.5}},
    {"schedule": {"warmup": 4}},
    {"training": {"steps": 9}},
    {"training": {"batch": 16}},
    {"training": {"clip": 1.0}},
]
SAID = [
    "optimizer.lr is 0.02 and was 0.01",
    "optimizer.weight_decay is 0.5 and was 0.0",
    "schedule.warmup is 4 and was 0",
    "training.steps is 9 and was 8",
    "training.batch is 16 and was 8",
    "training.clip is 1.0 and was not given",
]
FOUND = Cases(1, 100, [killed_by_default, gone_on_with])


def test_a_change_of_steps_of_a_resumed_run_is_an_error_with_both_values_or_a_note() -> None:
    *changed, longer = FOUND[gone_on_with][0]
    for sentence, found in zip(SAID, changed, strict=True):
        assert found != "not refused", sentence
        refused, notes = found
        assert sentence in refused and "run.resume = 'changed'" in refused
        assert f"info: changed since the checkpoint: {sentence}" in notes
    assert "info: changed since the checkpoint: training.steps is 9 and was 8" in longer


def test_by_default_a_run_has_a_checkpoint_every_10_steps_and_notes_it() -> None:
    first, second, step, end = FOUND[killed_by_default][0]
    assert first[:1] == ["info: a checkpoint every 10 steps (checkpoint.every)"]
    assert second[0].startswith("info: continues from the checkpoint of step 20") and step == 21
    assert end == ["info: no checkpoint before the end (checkpoint.every): a restart begins at step 0"]


def test_the_default_interval_is_a_tenth_of_the_run_within_bounds_and_ends_with_a_round() -> None:
    from surviving import toy_recipe

    for steps, every in ((8, 10), (300, 30), (5000, 500), (10**6, 500)):
        assert toy_recipe().checkpoint_every(steps) == every
    assert toy_recipe(diloco={"every": 32}).checkpoint_every(300) == 32
    assert toy_recipe(diloco={"every": 32}).checkpoint_every(5000) == 512
    assert toy_recipe(checkpoint={"every": 7}).checkpoint_every(300) == 7
    assert toy_recipe(checkpoint={"every": "end"}).checkpoint_every(300) is None
