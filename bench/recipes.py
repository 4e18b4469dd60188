"""What each recipe of recipes/ reaches from several seeds, as `netfold train` runs it on this machine:

    .venv/bin/python bench/recipes.py [--seeds 3] [recipe ...]

A recipe is taken as it is, but for the seed. Half an hour for all of them and three seeds. A run that does not beat
the baseline of its metric ends the bench. Writes bench/results/recipes.md when it ran them all, and
recipe_profiles.md: the communication of the stretch of steps that each run records, from the last seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from netfold.bench.machine import spoken

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.toml"))
RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 900


def run(recipe: Path, seed: int) -> dict[str, Any]:
    """The run's last evaluation, its metric with baseline, and how long it took from start to end."""
    with tempfile.TemporaryDirectory(prefix="netfold-recipes-") as folder:
        netfold = [sys.executable, "-m", "netfold.cli"]
        command = [*netfold, "train", str(recipe)]
        settings = (f"training.seed={seed}", f"run.folder={folder}", "run.name=run")
        command += [word for setting in settings for word in ("--set", setting)]
        ended = subprocess.run(command, timeout=DEADLINE_S, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(f"{recipe.name} from seed {seed} ended with {ended.returncode}:\n{ended.stderr}")
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        report = [*netfold, "profile", "report", str(Path(folder, "run", "profile"))]
        recorded = subprocess.run(report, timeout=DEADLINE_S, capture_output=True, text=True, check=True).stdout
    started = next(line for line in lines if line["kind"] == "started")
    value = [line for line in lines if line["kind"] == "evaluation"][-1]["values"][started["metric"]["name"]]
    found = {"metric": started["metric"], "value": value, "seconds": lines[-1]["seconds"], "ranks": started["ranks"]}
    # Its first words are the command, its last the place of a page: both of a folder that is gone.
    profile = recorded.partition(": ")[2].partition("\nthe page: ")[0].strip()
    found |= {"steps": started["steps"], "batch": started["batch"], "profile": profile}
    gain = (value - started["metric"]["baseline"]) * (1 if started["metric"]["better"] == "higher" else -1)
    if not gain > 0:
        raise RuntimeError(f"{recipe.name} from seed {seed} reaches {value}, no better than {started['metric']}")
    print(f"{recipe.stem}, seed {seed}: {value:.4f} in {found['seconds']:.0f} s", file=sys.stderr)
    return found


def render(found: dict[str, list[dict[str, Any]]], load: tuple[float, float]) -> str:
    lines = [
        "What each recipe reaches, as `netfold train` runs it: median (lowest..highest) over the seeds.",
        "",
        "| recipe | ranks | steps x batch | metric | baseline | reached | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        metric, values = runs[0]["metric"], [each["value"] for each in runs]
        seconds = [each["seconds"] for each in runs]
        lines.append(
            f"| {name} | {runs[0]['ranks']} | {runs[0]['steps']} x {runs[0]['batch']} | "
            f"{metric['name']}{', ' + metric['unit'] if metric['unit'] else ''} | "
            f"{metric['baseline']:.4g}, {metric['baseline_is']} | "
            f"{statistics.median(values):.4g} ({min(values):.4g}..{max(values):.4g}) | "
            f"{statistics.median(seconds):.0f} ({min(seconds):.0f}..{max(seconds):.0f}) |"
        )
    seeds = len(next(iter(found.values())))
    lines += [
        "",
        f"`bench/recipes.py --seeds {seeds}`. Seconds on the clock, from the first step to the end; a recipe's own two "
        f"ranks make a load of 2. {spoken(load)}",
    ]
    return "\n".join(lines) + "\n"


def profiles(found: dict[str, list[dict[str, Any]]], load: tuple[float, float]) -> str:
    lines = ["What each recipe communicates on this machine, in the steps that its run records (11 to 60).", ""]
    for name, runs in found.items():
        lines += [f"**{name}**", "", "```", runs[-1]["profile"], "```", ""]
    return "\n".join([*lines, f"`bench/recipes.py`. {spoken(load)}"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each recipe reaches.")
    parser.add_argument("recipes", nargs="*", choices=[[], *(path.stem for path in RECIPES)])
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    chosen = [path for path in RECIPES if not asked.recipes or path.stem in asked.recipes]
    found: dict[str, list[dict[str, Any]]] = {path.stem: [] for path in chosen}
    load = os.getloadavg()[0]
    for seed in range(asked.seeds):
        for path in chosen:
            found[path.stem].append(run(path, seed))
    loads = load, os.getloadavg()[0]
    text = render(found, loads)
    if chosen == RECIPES:
        (RESULTS / "recipes.md").write_text(text)
        (RESULTS / "recipe_profiles.md").write_text(profiles(found, loads))
    print(text)


if __name__ == "__main__":
    main()
