"""Epochs to a fixed accuracy by batch, with LARS: the curve of the tutorials on large batches, on this machine.

    .venv/bin/python lab/bench/large_batch.py        # about ten minutes a seed

Each run is the recipe resnet18-lars with another batch, with which the rate grows linearly. It is
evaluated every EVERY_SAMPLES samples, asked to stop (SIGTERM) once it reaches the accuracy, and ends without it after
LONGEST_EPOCHS. Every run goes to lab/bench/results/large_batch.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import driver

from netfold_train.runs.machine import spoken

RECIPE = "resnet18-lars"
KEPT = driver.RESULTS / "large_batch.json"
TRAINING_SAMPLES = 60_000
EVERY_SAMPLES = 3_000
LONGEST_EPOCHS = 8
DEADLINE_S = 7200  # a run that is not done by then is an error, not a result


def epochs_to(accuracy: float, batch: int, seed: int) -> dict[str, Any]:
    """Train until an evaluation reaches the accuracy."""
    load_before = os.getloadavg()[0]
    steps, every = LONGEST_EPOCHS * TRAINING_SAMPLES // batch, max(1, EVERY_SAMPLES // batch)
    settings = {
        "training.seed": seed,
        "training.batch": batch,
        "training.steps": steps,
        "training.evaluate_every": every,
        # A rate that does not fall: the curve must not depend on the length that a run would have.
        "schedule.shape": "constant",
        "schedule.warmup": max(1, TRAINING_SAMPLES // 4 // batch),
        "checkpoint.every": "end",
    }
    with tempfile.TemporaryDirectory(prefix="netfold-large-batch-") as folder:
        command = [sys.executable, "-m", "netfold.cli", "train", RECIPE, "--set", f"run.folder={folder}"]
        for name, value in {**settings, "run.name": "run"}.items():
            command += ["--set", f"{name}={value}"]
        log = Path(folder, "run", "metrics.jsonl")
        found: list[tuple[int, float]] = []
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
            until = time.monotonic() + DEADLINE_S
            late = False
            while run.poll() is None and not late:
                time.sleep(0.5)
                late = time.monotonic() >= until
                found = evaluations(log)
                if found and found[-1][1] >= accuracy:
                    break
            with contextlib.suppress(ProcessLookupError):
                run.send_signal(signal.SIGTERM)
            _, said = run.communicate(timeout=120)
        found = evaluations(log)
    if late:
        raise RuntimeError(f"batch {batch} from seed {seed} was not done after {DEADLINE_S} s: {found}")
    if not found:
        raise RuntimeError(f"batch {batch} from seed {seed} ended without an evaluation:\n{said}")
    reached = next((step for step, value in found if value >= accuracy), None)
    epochs = None if reached is None else reached * batch / TRAINING_SAMPLES
    print(f"batch {batch}, seed {seed}: {epochs} epochs; {found}", file=sys.stderr)
    return {
        "accuracy": accuracy,
        "batch": batch,
        "seed": seed,
        "epochs": epochs,
        "steps": reached,
        "best": max(value for _, value in found),
        "machine": spoken(load_before),
    }


def evaluations(log: Path) -> list[tuple[int, float]]:
    """(step, accuracy) of the complete lines of a run's metrics."""
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1] if line]
    return [(line["step"], line["values"]["accuracy"]) for line in lines if line["kind"] == "evaluation"]


def large_batch(accuracy: float = 0.8, batches: str = "128,512,2048,4096", seeds: str = "0,1,2") -> str:
    """Epochs to a fixed accuracy by batch"""
    for seed in filter(None, seeds.split(",")):
        for batch in map(int, batches.split(",")):
            driver.keep(KEPT, {f"{accuracy} {batch} {seed}": epochs_to(accuracy, batch, int(seed))})
    runs = [run for run in json.loads(KEPT.read_text()).values() if run["accuracy"] == accuracy]
    rows = []
    for batch in sorted({run["batch"] for run in runs}):
        of = [run for run in runs if run["batch"] == batch]
        cells = [f"{run['epochs']:.2f}" if run["epochs"] else f"not in {LONGEST_EPOCHS}" for run in of]
        steps = [str(run["steps"] or "-") for run in of]
        rows.append([batch, ", ".join(cells), ", ".join(steps), ", ".join(str(run["seed"]) for run in of)])
    machines = "\n".join(f"- batch {run['batch']}, seed {run['seed']}: {run['machine']}" for run in runs)
    return f"""ResNet-18 on Fashion-MNIST, LARS, {accuracy:.0%} of 2000 held-out pictures right; two ranks. The rate \
is proportional to the batch, and rises over the first quarter of an epoch. A run is evaluated every {EVERY_SAMPLES} \
samples, or every step where a batch is larger.

{driver.table("batch | epochs | steps | seeds", rows)}

{machines}"""


if __name__ == "__main__":
    driver.run(large_batch)
