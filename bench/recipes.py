"""What each recipe of recipes/ reaches from several seeds, as `netfold train` runs it on this machine:

    .venv/bin/python bench/recipes.py [--seeds 0,1,2] [recipe ...]

A recipe is taken as it is, but for the seed. Ten minutes a seed for all of them. A run that does not beat the baseline
of its metric ends the bench. Each run's results go to bench/results/recipes.json; of all that is there recipes.md is
made, and recipe_profiles.md: the communication of the stretch of steps that each run records, from the last seed.
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
KEPT = RESULTS / "recipes.json"
DEADLINE_S = 900

Found = dict[str, dict[str, Any]]
"""Of a recipe, by seed, as JSON has it: what a run reached, and where."""


def run(recipe: Path, seed: int) -> dict[str, Any]:
    """The run's last evaluation, its metric with baseline, and how long it took from start to end."""
    load = os.getloadavg()[0]
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
    found["machine"] = spoken((load, os.getloadavg()[0]))
    gain = (value - started["metric"]["baseline"]) * (1 if started["metric"]["better"] == "higher" else -1)
    if not gain > 0:
        raise RuntimeError(f"{recipe.name} from seed {seed} reaches {value}, no better than {started['metric']}")
    print(f"{recipe.stem}, seed {seed}: {value:.4f} in {found['seconds']:.0f} s", file=sys.stderr)
    return found


def render(kept: dict[str, Found]) -> str:
    lines = [
        "What each recipe reaches, as `netfold train` runs it: median (lowest..highest) over the seeds.",
        "",
        "| recipe | ranks | steps x batch | metric | baseline | reached | seconds | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, of_seeds in kept.items():
        runs = list(of_seeds.values())
        metric, values = runs[0]["metric"], [each["value"] for each in runs]
        seconds = [each["seconds"] for each in runs]
        lines.append(
            f"| {name} | {runs[0]['ranks']} | {runs[0]['steps']} x {runs[0]['batch']} | "
            f"{metric['name']}{', ' + metric['unit'] if metric['unit'] else ''} | "
            f"{metric['baseline']:.4g}, {metric['baseline_is']} | "
            f"{statistics.median(values):.4g} ({min(values):.4g}..{max(values):.4g}) | "
            f"{statistics.median(seconds):.0f} ({min(seconds):.0f}..{max(seconds):.0f}) | {', '.join(of_seeds)} |"
        )
    lines += [
        "",
        "`bench/recipes.py`. Seconds from the first step to the end; a recipe's own ranks make a load of 2.",
        "",
        *(f"- {name}, seed {seed}: {each['machine']}" for name, of in kept.items() for seed, each in of.items()),
    ]
    return "\n".join(lines) + "\n"


def profiles(kept: dict[str, Found]) -> str:
    lines = ["What each recipe communicates on this machine, in the steps that its run records (11 to 60).", ""]
    for name, of_seeds in kept.items():
        seed, last = max(of_seeds.items())
        lines += [f"**{name}**, seed {seed}; {last['machine']}", "", "```", last["profile"], "```", ""]
    return "\n".join([*lines, "`bench/recipes.py`"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What each recipe reaches.")
    parser.add_argument("recipes", nargs="*", choices=[[], *(path.stem for path in RECIPES)])
    parser.add_argument("--seeds", default="0,1,2")
    asked = parser.parse_args()
    kept: dict[str, Found] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in asked.seeds.split(","):
        for path in RECIPES:
            if asked.recipes and path.stem not in asked.recipes:
                continue
            of_seeds = {**kept.get(path.stem, {}), seed: run(path, int(seed))}
            kept = dict(sorted({**kept, path.stem: dict(sorted(of_seeds.items()))}.items()))
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
            (RESULTS / "recipes.md").write_text(render(kept))
            (RESULTS / "recipe_profiles.md").write_text(profiles(kept))
    print(render(kept))


if __name__ == "__main__":
    main()
