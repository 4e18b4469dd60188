"""`netfold train` with `[fault_tolerance] elastic`: ranks are killed at random moments, and no step is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from load import seconds, settles
from small_recipe import SMALL_GPT

from netfold_train.runs.metrics import read_metrics

pytestmark = [pytest.mark.torch, pytest.mark.jobs]

RECIPE = (
    SMALL_GPT
    + """
[training]
steps = {steps}
batch = 24
evaluate_every = 25
[optimizer]
name = "sgd"
lr = 0.05
[checkpoint]
every = 20
[fault_tolerance]
elastic = true
restarts = {restarts}
[parallel]
data = {ranks}
[report]
profile = false
tensorboard = false
[run]
folder = "{folder}"
name = "run"
check = false
"""
)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.split("\n")[:-1]]
    return [line for line in found if line["kind"] == kind]


def start(folder: Path, ranks: int, steps: int, restarts: int = 3, *settings: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder, ranks=ranks, steps=steps, restarts=restarts))
    command = [sys.executable, "-m", "netfold.cli", "train", str(recipe)]
    command += [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], timeout_s: float = 120.0) -> tuple[str, str]:
    try:
        return process.communicate(timeout=seconds(timeout_s))
    finally:
        process.kill()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes of the ranks, oldest first."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(word) for word in text.split()]


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + seconds(60)
    while max((line["step"] for line in lines(folder, "step")), default=0) < step:
        assert process.poll() is None and time.monotonic() < deadline, (step, process.communicate())
        time.sleep(0.01)


def wait_for_members(process: subprocess.Popen[str], folder: Path, least: int) -> None:
    """So that one of the members, which have the state, is left when the next one is killed."""
    deadline = time.monotonic() + seconds(60)
    while (sizes := sizes_of(folder)) and sizes[-1] < least:
        assert process.poll() is None and time.monotonic() < deadline, (least, sizes, process.communicate())
        time.sleep(0.01)


def sizes_of(folder: Path) -> list[int]:
    """Of the generations after the first."""
    return [int(found[1]) for line in lines(folder, "note") if (found := re.search(r"has (\d+) ranks", line["text"]))]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(folder, "step")}


def killed(folder: Path, seed: int, ranks: int, kills: int, steps: int) -> None:
    draw = random.Random(seed)
    alone = start(folder / "alone", ranks, steps)
    _, err = ended(alone)
    assert alone.returncode == 0, err
    process = start(folder / "killed", ranks, steps, kills)
    try:
        for number in range(kills):
            wait_for_step(process, folder / "killed", (number + 1) * steps // (kills + 2))
            wait_for_members(process, folder / "killed", ranks - 1)
            time.sleep(draw.uniform(0.0, 0.1))
            victim = draw.choice(ranks_of(process))
            os.kill(victim, signal.SIGKILL)
        _, err = ended(process)
    finally:
        process.kill()
    replay = f"seed {seed}\n{err}"
    assert process.returncode == 0, replay
    assert err.count("was killed by SIGKILL; a new rank takes its place") == kills, replay
    # No step is missing, none was done twice, and the losses are those of the undisturbed run but for rounding.
    steps_of = [line["step"] for line in lines(folder / "killed", "step")]
    assert sorted(set(steps_of)) == list(range(1, steps + 1)), replay
    assert not [line for line in lines(folder / "killed", "step") if line.get("again")], replay
    assert losses(folder / "killed") == pytest.approx(losses(folder / "alone"), rel=1e-3), replay
    evaluations = [
        {line["step"]: line["values"]["bits per byte"] for line in lines(each, "evaluation")}
        for each in (folder / "alone", folder / "killed")
    ]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-3), replay
    saved = sorted(path.name for path in (folder / "killed" / "run" / "checkpoints").iterdir())
    assert f"step-{steps:06d}" in saved and not [name for name in saved if name.endswith(".part")], replay


def test_a_killed_rank_costs_no_step(tmp_path: Path) -> None:
    killed(tmp_path, seed=1, ranks=3, kills=2, steps=120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 8))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    killed(tmp_path, seed=seed, ranks=4, kills=6, steps=1200)


def test_without_restarts_the_ranks_that_are_left_end_the_run(tmp_path: Path) -> None:
    process = start(tmp_path, 3, 80, 0)
    wait_for_step(process, tmp_path, 10)
    os.kill(ranks_of(process)[0], signal.SIGKILL)  # rank 0, which writes the metrics
    out, err = ended(process)
    assert process.returncode == 0 and "80 steps" in out and "on 2 ranks" in out, err
    assert sorted(losses(tmp_path)) == list(range(1, 81)), err
    notes = [line["text"] for line in lines(tmp_path, "note")]
    assert any("generation 2 has 2 ranks, from step" in text for text in notes), notes
    metrics = read_metrics(tmp_path / "run")
    assert [line["ranks"] for line in metrics.starts] == [3, 2] and metrics.restarts == 0


def test_all_ranks_start_again_from_a_checkpoint_if_none_is_left(tmp_path: Path) -> None:
    process = start(tmp_path, 2, 80, 1)
    wait_for_step(process, tmp_path, 45)
    for rank in ranks_of(process):
        os.kill(rank, signal.SIGKILL)
    _, err = ended(process)
    assert process.returncode == 0, err
    assert "continuing after step" in err and max(losses(tmp_path)) == 80, err


def test_the_run_begins_again_from_a_checkpoint_if_only_new_ranks_are_left(tmp_path: Path) -> None:
    process = start(tmp_path, 2, 200, 2)
    wait_for_step(process, tmp_path, 45)
    first, second = ranks_of(process)
    os.kill(first, signal.SIGKILL)
    assert settles(lambda: len(ranks_of(process)) == 2 and first not in ranks_of(process))
    os.kill(second, signal.SIGKILL)
    _, err = ended(process)
    assert process.returncode == 0 and "no rank is left" not in err, err
    assert "continuing after step" in err and sorted(losses(tmp_path)) == list(range(1, 201)), err
    assert read_metrics(tmp_path / "run").cost_of_failures.startswith("cost of failures: 1 restart of all ranks, "), err


def test_a_stop_request_ends_all_ranks_and_the_run_continues(tmp_path: Path) -> None:
    process = start(tmp_path, 2, 2000)
    wait_for_step(process, tmp_path, 10)
    process.send_signal(signal.SIGTERM)
    _, err = ended(process)
    assert process.returncode == 75 and "asked to stop (SIGTERM) after step" in err, err
    done = max(losses(tmp_path))
    again = start(tmp_path, 2, 2000, 3, f"training.steps={done + 5}", "run.resume=changed")
    _, err = ended(again)
    assert again.returncode == 0 and f"continuing after step {done}" in err, err


@pytest.mark.parametrize(
    "settings, text",
    [
        (("parallel.zero=2",), "parallel.zero = 2 does not go with fault_tolerance.elastic = true: a lost rank would"),
        (("run.backend=gloo",), "run.backend = \"gloo\" does not go with fault_tolerance.elastic = true"),
        (("fault_tolerance.elastic=false", "fault_tolerance.min_ranks=2"), "fault_tolerance.min_ranks = 2 does not go"),
    ],
)  # fmt: skip
def test_recipes_whose_ranks_hold_parts_are_refused(tmp_path: Path, settings: tuple[str, ...], text: str) -> None:
    process = start(tmp_path, 2, 10, 3, *settings)
    _, err = ended(process)
    assert process.returncode == 2 and text in " ".join(err.split()), err
