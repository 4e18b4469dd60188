"""What a step of each recipe takes over netfold and over gloo: here, and between the hosts of an emulated rack.

    python bench/train_steps.py [RECIPE ...]      # all: fifty minutes; the rack needs root

Here, two ranks really compute, on a core each. In the rack a layer's computing is a timer of what it took on this
machine (`timed_model`), since its hosts share the cores; what they send is real. Backends take turns in the same
processes, a few steps each, in the other order each time; a step's time is the slowest rank's. In the rack netfold has
the rack's switch. Every rank has the same share of samples whatever the number of hosts. Each recipe's seconds go to
bench/results/train_steps.json, and the table of all that is there to train_steps.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomllib

from netfold.bench.machine import spoken
from netfold.bench.spread import spread

HERE = Path(__file__).parent
RESULT = HERE / "results" / "train_steps.md"
SECONDS = RESULT.with_suffix(".json")
RECIPES = HERE.parent / "recipes"
BACKENDS = ("netfold", "gloo")
ROUNDS, STEPS, SETTLING = 4, 4, 2
DEADLINE_S = 900


@dataclass(frozen=True)
class Place:
    """Where a recipe is run."""

    hosts: int
    rate: str
    """Of every link; "" for this machine."""

    @property
    def name(self) -> str:
        return f"{self.hosts} hosts, {self.rate}" if self.rate else f"this machine, {self.hosts} ranks"


PLACES = (
    Place(2, ""),
    Place(4, "1gbit"),
    Place(4, "200mbit"),
    Place(1, "1gbit"),
    Place(2, "1gbit"),
    Place(8, "1gbit"),
)


def serve(recipe_path: str, folder: str, timed_file: str) -> None:
    """A rank: every round on both backends; rank 0 writes the seconds of each step."""
    import torch
    import torch.distributed as dist

    from netfold.train import Recipe, Trainer
    from netfold.train.datasets import make_data
    from netfold.train.models import make_model

    sys.path.insert(0, str(HERE))
    from timed_model import First, LayerTime, timed

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    table = tomllib.loads(Path(recipe_path).read_text())
    # Of the recipe's batch, which two ranks share, each rank here has the half.
    table["training"] = {
        "steps": SETTLING + STEPS, "batch": max(1, table["training"].get("batch", 32) // 2), "scaling": "weak"
    }  # fmt: skip
    table["parallel"] = {"data": size, "bucket_mb": 25}
    table["checkpoint"] = {"every": "end"}
    recipe = Recipe.model_validate(table)
    data = make_data(recipe.data)
    few = replace(data, held_out=First(data.held_out, recipe.training.batch * size))
    times = [LayerTime(**each) for each in json.loads(Path(timed_file).read_text())] if timed_file else None

    class Seconds:
        def __init__(self) -> None:
            self.found: list[float] = []

        def started(self, event: Any) -> None: ...
        def stepped(self, event: Any) -> None:
            self.found.append(event.seconds)

        def evaluated(self, event: Any) -> None: ...
        def noted(self, event: Any) -> None: ...
        def ended(self, event: Any) -> None: ...

    store = dist.FileStore(f"{folder}/store", size)
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for turn in range(ROUNDS):
        for backend in BACKENDS if turn % 2 else BACKENDS[::-1]:
            made = dist.PrefixStore(f"{turn}-{backend}", store)
            dist.init_process_group(backend, store=made, rank=rank, world_size=size, timeout=timedelta(seconds=120))
            torch.manual_seed(0)
            model = make_model(recipe.model)
            listener = Seconds()
            trainer = Trainer(
                recipe, model=timed(model, times) if times is not None else model, data=few, listeners=[listener]
            )
            trainer.fit()
            took = torch.tensor(listener.found[SETTLING:], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[backend] += took.tolist()
            dist.destroy_process_group()
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))


def time_layers(recipe_path: str, file: str) -> None:
    """What each layer takes with one rank's share, alone on this machine; into `file`."""
    import torch

    from netfold.train import Recipe
    from netfold.train.datasets import make_data
    from netfold.train.models import make_model

    sys.path.insert(0, str(HERE))
    from timed_model import layer_times

    torch.set_num_threads(1)
    recipe = Recipe.model_validate(tomllib.loads(Path(recipe_path).read_text()))
    share = max(1, recipe.training.batch // 2)
    batch = make_data(recipe.data).train.batch(range(share), range(share))
    Path(file).write_text(json.dumps([asdict(took) for took in layer_times(make_model(recipe.model), batch)]))


def run(recipe: Path, place: Place, timed_file: Path) -> dict[str, list[float]]:
    """By backend, the seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        mine = [sys.executable, __file__, "--rank", str(recipe), folder]
        if place.rate:
            rack = [sys.executable, "-m", "netfold.cli", "rack", "run", "--hosts", str(place.hosts), "--rate"]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
            command = [*rack, place.rate, "--", *mine, str(timed_file)]
            subprocess.run(command, check=True, timeout=DEADLINE_S, env=environment, stdout=subprocess.DEVNULL)
        else:
            ranks = [
                subprocess.Popen(
                    [*mine, ""],
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(place.hosts), "GLOO_SOCKET_IFNAME": "lo"},
                )
                for rank in range(place.hosts)
            ]  # fmt: skip
            try:
                if any(rank.wait(DEADLINE_S) for rank in ranks):
                    raise RuntimeError(f"a rank of {recipe.stem} failed; see above")
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        found: dict[str, list[float]] = json.loads(Path(folder, "seconds.json").read_text())
        return found


def main(names: list[str]) -> None:
    recipes = [RECIPES / f"{name}.toml" for name in names] or sorted(RECIPES.glob("*.toml"))
    kept: dict[str, Any] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in recipes:
            load = os.getloadavg()[0]
            timed_file = Path(folder, "times.json")
            time_layers_of(recipe, timed_file)
            compute_s = sum(took["forward_s"] + took["backward_s"] for took in json.loads(timed_file.read_text()))
            seconds = {place.name: run(recipe, place, timed_file) for place in PLACES}
            kept[recipe.stem] = {"compute_s": compute_s, "seconds": seconds, "load": [load, os.getloadavg()[0]]}
            SECONDS.write_text(json.dumps({name: kept[name] for name in sorted(kept)}) + "\n")
            RESULT.write_text(render(json.loads(SECONDS.read_text())))
            print(recipe.stem, flush=True)
    print(RESULT.read_text())


def render(kept: dict[str, Any]) -> str:
    rows, efficiency = [], []
    for name, found in kept.items():
        for place in PLACES:
            seconds = found["seconds"][place.name]
            sides = [spread([1e3 * s for s in seconds[backend]]) for backend in BACKENDS]
            ratio = spread([g / n for g, n in zip(seconds["gloo"], seconds["netfold"], strict=True)])
            cells = [f"{side.median:.1f} ({side.p5:.1f}..{side.p95:.1f})" for side in sides]
            cells.append(f"{ratio.median:.2f} ({ratio.p5:.2f}..{ratio.p95:.2f})")
            rows.append(f"| {name} | {place.name} | {' | '.join(cells)} |")
        for backend in BACKENDS:
            places = (found["seconds"][Place(hosts, "1gbit").name] for hosts in (1, 2, 4, 8))
            steps = [spread(seconds[backend]).median for seconds in places]
            cells = [f"{steps[0] / step:.2f}" for step in steps]
            efficiency.append(f"| {name} | {1e3 * found['compute_s']:.1f} | {backend} | {' | '.join(cells)} |")
    loads = [load for found in kept.values() for load in found["load"]]
    return f"""# A step of each recipe, over netfold and over gloo

`python bench/train_steps.py`. {spoken((min(loads), max(loads)))} Milliseconds a step, the slowest rank's: median
(p5..p95) of {ROUNDS * STEPS} steps in {ROUNDS} turns of each backend in the same processes; ratio: gloo's over
netfold's, step by step. Every rank has half of the recipe's batch, whatever the number of ranks. On this machine
ranks really compute; in the rack a layer's computing is a timer of what it took here, and netfold has the rack's
switch. Buckets of 25 MB on both sides.

| recipe | where | netfold ms | gloo ms | ratio |
|---|---|---|---|---|
{chr(10).join(rows)}

## Scaling efficiency at 1 Gbit/s

The step of one host over that of 1, 2, 4 and 8, each with the same share of samples and the same timers: 1 is perfect.

| recipe | computing, ms | | 1 | 2 | 4 | 8 |
|---|---|---|---|---|---|---|
{chr(10).join(efficiency)}
"""


def time_layers_of(recipe: Path, file: Path) -> None:
    """In a process of its own, so that this one stays small."""
    subprocess.run([sys.executable, __file__, "--times", str(recipe), str(file)], check=True, timeout=DEADLINE_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["--times"]:
        time_layers(*sys.argv[2:])
    else:
        main(sys.argv[1:])
