"""The result of each recipe of netfold-train from several seeds, as `netfold train` runs it on this machine:

    .venv/bin/python lab/bench/recipes.py [RECIPE ...]      # about two minutes a recipe and seed

Only the seed of a recipe is changed. A run that does not beat the weak baseline of its metric ends the bench. Strong
baselines are those of lab/bench/baselines.py, which must have run before. The results of each run go to
lab/bench/results/recipes.json, from which recipes.md and recipe_profiles.md are made. recipe_profiles.md has the
communication of the steps that each run records, from the last seed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import baselines
import driver
import typer

from netfold_train.recipe.load import load
from netfold_train.runs.machine import spoken

RECIPES = baselines.RECIPES
KEPT = driver.RESULTS / "recipes.json"
DEADLINE_S = 1800
# Why a recipe misses a strong baseline; printed only where it does.
_SHORT_TEXT = "It sees a small part of the training text once, and an n-gram or xz counts all of it"
WHY = {
    "bert": "It sees 8 of 10 MB of the training text once, through 0.1 million weights; the n-grams count all of it",
    "bert-classes": "It starts from random weights, and sees 2 MB of text once",
    "bert-classes from bert": "It knows 10 MB of text, and sees its own 2 MB once",
    "dlrm": "It learns single days: with more steps the loss of training falls, and the held-out loss rises",
    "edsr-large": "80 steps of four patches of 12 x 12 train 41 million weights; the filter has 1776",
    "gpt": "It sees 1 of 3 million tokens once, through 4 million weights; n-grams and xz count all of the text",
    "gpt-3d": _SHORT_TEXT,
    "gpt-diloco": _SHORT_TEXT,
    "gpt-tensor": _SHORT_TEXT,
    "gpt-zero3": _SHORT_TEXT,
    "resnet18": "It sees each picture once; boosting fits every picture in each of its rounds",
    "resnet18-lars": "It sees each picture less than once; boosting fits every picture in each of its rounds",
    "resnet50": "It sees each picture once; boosting fits every picture in each of its rounds",
}
# Recipes that begin with the weights that another one has reached, without its head.
TUNED = {"bert-classes from bert": ("bert-classes", "bert")}
HEAD = '["layers.head."]'


def train(recipe: Path, seed: int, before: Path | None = None) -> dict[str, Any]:
    """The run's last evaluation, its metric with baseline, and how long it took from start to end.

    before: a recipe to run first, with whose weights this one begins.
    """
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="netfold-recipes-") as folder:
        netfold = [sys.executable, "-m", "netfold.cli"]
        first = f"{folder}/first"
        runs: list[tuple[Path, str, list[str]]] = [(recipe, "run", [])]
        if before is not None:
            runs = [
                (before, "first", []),
                (recipe, "run", [f"training.initial={first}", f"training.initial_except={HEAD}"]),
            ]
        for path, name, settings in runs:
            command = [*netfold, "train", str(path)]
            for setting in (f"training.seed={seed}", f"run.folder={folder}", f"run.name={name}", *settings):
                command += ["--set", setting]
            ended = subprocess.run(command, timeout=DEADLINE_S, capture_output=True, text=True)
            if ended.returncode:
                raise RuntimeError(f"{path.name} from seed {seed} ended with {ended.returncode}:\n{ended.stderr}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        report = [*netfold, "profile", "report", str(Path(folder, "run", "profile"))]
        recorded = subprocess.run(report, timeout=DEADLINE_S, capture_output=True, text=True, check=True).stdout
    started = next(line for line in lines if line["kind"] == "started")
    metric = started["metric"]
    value = [line for line in lines if line["kind"] == "evaluation"][-1]["values"][metric["name"]]
    if not gain(value, metric["baseline"], metric["better"]) > 0:
        raise RuntimeError(f"{recipe.name} from seed {seed} reaches {value}, no better than {metric}")
    print(f"{recipe.stem}, seed {seed}: {value:.4f} in {lines[-1]['seconds']:.0f} s", file=sys.stderr)
    made, _ = load(recipe)
    return {
        "data": baselines.key(made),
        "command": f"netfold train {recipe.stem} --set training.seed={seed}"
        + (f" --set training.initial=runs/{before.stem} --set 'training.initial_except={HEAD}'" if before else ""),
        "precision": made.training.precision,
        "metric": metric,
        "value": value,
        "seconds": lines[-1]["seconds"],
        "ranks": started["ranks"],
        "steps": started["steps"],
        "batch": started["batch"],
        # The report begins with the command and ends with the address of a page: both of a folder that is gone.
        "profile": recorded.partition(": ")[2].partition("\nthe page: ")[0].strip(),
        "machine": spoken(load_before),
    }


def gain(value: float, baseline: float, better: str) -> float:
    return value - baseline if better == "higher" else baseline - value


def profiles(kept: dict[str, Any]) -> str:
    lines = ["What each recipe communicates on this machine, in the steps that its run records (11 to 60).", ""]
    for name, of_seeds in kept.items():
        seed, last = max(of_seeds.items())
        lines += [f"**{name}**, seed {seed}; {last['machine']}", "", "```", last["profile"], "```", ""]
    return "\n".join([*lines, "`lab/bench/recipes.py`"]) + "\n"


def missed(name: str, runs: list[dict[str, Any]], strong: dict[str, float]) -> list[str]:
    """A line of the strong baselines that the mean over the seeds does not beat; no line if it beats all."""
    metric = runs[0]["metric"]
    unit = f" {metric['unit']}" if metric["unit"] else ""
    mean = statistics.mean(run["value"] for run in runs)
    by = {what: gain(mean, value, metric["better"]) for what, value in strong.items()}
    found = "; ".join(f"{what} by {-each:.2g}{unit}" for what, each in by.items() if each <= 0)
    return [f"- {name} misses {found}. {WHY.get(name, 'No reason is known')}."] if found else []


def recipes(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...")] = None, seeds: str = "0,1,2"
) -> str:
    """The recipes"""
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    paths = {path.stem: path for path in RECIPES}
    jobs: dict[str, tuple[Path, Path | None]] = {name: (path, None) for name, path in paths.items()}
    jobs |= {name: (paths[of], paths[before]) for name, (of, before) in TUNED.items()}
    for seed in filter(None, seeds.split(",")):
        for name, (path, before) in jobs.items():
            if not names or name in names:
                of_seeds = {**kept.get(name, {}), seed: train(path, int(seed), before)}
                kept = driver.keep(KEPT, {name: dict(sorted(of_seeds.items()))})
    (driver.RESULTS / "recipe_profiles.md").write_text(profiles(kept))
    rows, misses = [], []
    for name, of_seeds in kept.items():
        runs = list(of_seeds.values())
        metric, values, took = runs[0]["metric"], [run["value"] for run in runs], [run["seconds"] for run in runs]
        strong = baselines.kept().get(runs[0]["data"], {"strong": {}})["strong"]
        misses += missed(name, runs, strong)
        rows.append(
            [
                *(name, runs[0]["ranks"], f"{runs[0]['steps']} x {runs[0]['batch']}, {runs[0]['precision']}"),
                metric["name"] + (f", {metric['unit']}" if metric["unit"] else ""),
                f"{metric['baseline']:.4g}, {metric['baseline_is']}",
                "; ".join(f"{value:.4g}, {what}" for what, value in strong.items()) or "not computed yet",
                f"{statistics.mean(values):.4g} ({min(values):.4g}..{max(values):.4g})",
                f"{statistics.median(took):.0f} ({min(took):.0f}..{max(took):.0f})",
                ", ".join(of_seeds),
            ]
        )
    absent = [name for name in jobs if name not in kept]
    machines = "\n".join(f"- `{run['command']}`: {run['machine']}" for of in kept.values() for run in of.values())
    head = "recipe | ranks | steps x batch | metric | weak baseline | strong baselines | reached | seconds | seeds"
    return f"""The result of each recipe, as `netfold train` runs it: mean (lowest..highest) over the seeds. Strong
baselines are computed from the same training examples and scored on the same held-out ones: [baselines](baselines.md).

{driver.table(head, rows)}

Seconds from the first step to the end, median (lowest..highest). The machine ran other work at the same time: see the
loads below. A recipe's own ranks make a load of 2.

{chr(10).join(misses) or "Every recipe beats the strong baselines that were computed."}

{f"Not run: {', '.join(absent)}." if absent else "Every recipe was run."}

{machines}"""


if __name__ == "__main__":
    driver.run(recipes)
