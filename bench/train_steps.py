"""What a step of each recipe takes over netfold and over gloo: here, and between the hosts of an emulated rack.

    python bench/train_steps.py [RECIPE ...]            # all: fifty minutes; the rack needs root
    python bench/train_steps.py --links [NAME ...]      # by the switch's link: 25 minutes

Here, two ranks really compute, on a core each. In the rack a layer's computing is a timer of what it took on this
machine (`timed_model`), since its hosts share the cores; what they send is real. Backends take turns in the same
processes, a few steps each, in the other order each time; a step's time is the slowest rank's. In the rack netfold has
the rack's switch. Every rank has the same share of samples whatever the number of hosts. Each recipe's seconds go to
bench/results/train_steps.json, and the table of all that is there to train_steps.md.

With `--links`, of bert, edsr, resnet50 and vgg16, the rack's switch is a host behind a link of c times a worker's, c of
1, 2 and 4, or in the place of the hosts' switch, with a port a worker (c = P). Sides are netfold, netfold by a ring
alone, and gloo. VGG-16 is no recipe: its layers, and what they take, are of the planner's catalogue, and its tensors a
25th of their size. Results: train_steps_by_link.md and .json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import tomllib

from netfold.bench.machine import spoken
from netfold.bench.program import backward_flops
from netfold.bench.spread import spread
from netfold.plan.model.catalogue import find_model
from netfold.rack.link import parse_link

HERE = Path(__file__).parent
RESULT = HERE / "results" / "train_steps.md"
SECONDS = RESULT.with_suffix(".json")
RECIPES = HERE.parent / "recipes"
LINKS_RESULT = HERE / "results" / "train_steps_by_link.md"
LINKS_SECONDS = LINKS_RESULT.with_suffix(".json")
DEADLINE_S = 900
# By its name a side's backend, and what is set for it.
SIDES: dict[str, tuple[str, dict[str, str]]] = {
    "netfold": ("netfold", {}),
    "netfold, ring": ("netfold", {"NETFOLD_ALGORITHM": "ring"}),
    "gloo": ("gloo", {}),
}
# Of the planner's catalogue, and by how much its tensors are smaller; their data and their optimizer are a recipe's.
CATALOGUE, DATA_OF = {"vgg16": 25}, "edsr"
LINKED = ("bert", "edsr", "resnet50", "vgg16")


@dataclass(frozen=True)
class Turns:
    """sides: by name. steps: that count, after `settling` that do not, in a turn. rounds, most_rounds: each side has a
    turn in each, at least and at most; after budget_s no further round begins.
    """

    sides: tuple[str, ...]
    steps: int
    settling: int
    rounds: int
    most_rounds: int
    budget_s: float


RECIPE_TURNS = Turns(("netfold", "gloo"), steps=4, settling=2, rounds=4, most_rounds=4, budget_s=0.0)
# A new group's first four large operations do not overlap, since each cuts the next: a step of most models.
LINK_TURNS = Turns(tuple(SIDES), steps=8, settling=4, rounds=2, most_rounds=8, budget_s=10.0)
BACKENDS = RECIPE_TURNS.sides


@dataclass(frozen=True)
class Place:
    """Where a recipe is run.

    rate: of every link; "" for this machine. c: the rate of the switch's link over a worker's; None: a port a worker.
    """

    hosts: int
    rate: str
    c: int | None = None

    @property
    def name(self) -> str:
        where = f"{self.hosts} hosts, {self.rate}" if self.rate else f"this machine, {self.hosts} ranks"
        return where if self.c is None else f"{where}, c = {self.c}"

    @property
    def switch_rate(self) -> list[str]:
        """As an option of `netfold rack run`."""
        if self.c is None:
            return []
        return ["--switch-rate", f"{self.c * parse_link(self.rate).rate_bits / 1e6:g}mbit"]


PLACES = (
    Place(2, ""),
    Place(4, "1gbit"),
    Place(4, "200mbit"),
    Place(1, "1gbit"),
    Place(2, "1gbit"),
    Place(8, "1gbit"),
)
LINK_PLACES = (
    *(Place(8, "1gbit", c) for c in (1, 2, 4, None)),
    *(Place(4, "200mbit", c) for c in (1, 2, None)),
)


def serve(names: str, folder: str, timed: str, turns_json: str) -> None:
    """A rank: each model in turn; rank 0 writes the seconds of each step, by model and side."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    turns = Turns(**json.loads(turns_json))
    store = dist.FileStore(f"{folder}/store", int(os.environ["WORLD_SIZE"]))
    found = {
        name: play(name, dist.PrefixStore(name, store), Path(timed, f"{name}.json") if timed else None, turns)
        for name in names.split(",")
    }
    if os.environ["RANK"] == "0":
        Path(folder, "seconds.json").write_text(json.dumps(found))


def play(name: str, store: Any, timed_file: Path | None, turns: Turns) -> dict[str, list[float]]:
    """Every round on all sides: by side, the slowest rank's seconds of each step."""
    import torch
    import torch.distributed as dist

    from netfold.train import Recipe, Trainer
    from netfold.train.datasets import make_data
    from netfold.train.models import make_model

    sys.path.insert(0, str(HERE))
    from timed_model import First, LayerTime, timed

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    table = tomllib.loads(recipe_of(name).read_text())
    table["training"] = {
        "steps": turns.settling + turns.steps,
        "batch": share_of(table),
        "scaling": "weak",
    }
    # Of smaller tensors as many buckets as of whole ones.
    table["parallel"] = {"data": size, "bucket_mb": 25 / CATALOGUE.get(name, 1)}
    table["checkpoint"] = {"every": "end"}
    recipe = Recipe.model_validate(table)
    data = make_data(recipe.data)
    few = replace(data, held_out=First(data.held_out, recipe.training.batch * size))
    if name in CATALOGUE:  # its output means nothing, and is no picture
        metric = replace(data.metric, score=lambda output, target: torch.zeros(len(target)))
        few = replace(few, metric=metric, pictures=None)
    times = [LayerTime(**each) for each in json.loads(timed_file.read_text())] if timed_file else None

    class Seconds:
        def __init__(self) -> None:
            self.found: list[float] = []

        def on_start(self, event: Any) -> None: ...
        def on_step(self, event: Any) -> None:
            self.found.append(event.seconds)

        def on_evaluation(self, event: Any) -> None: ...
        def on_note(self, event: Any) -> None: ...
        def on_end(self, event: Any) -> None: ...

    seconds: dict[str, list[float]] = {side: [] for side in turns.sides}
    began, spent_s = time.monotonic(), 0.0
    for turn in range(turns.most_rounds):
        if turn >= turns.rounds and spent_s > turns.budget_s:
            break
        for at in range(len(turns.sides)):
            side = turns.sides[(turn + at) % len(turns.sides)]
            backend, settings = SIDES[side]
            os.environ.update(settings)
            made = dist.PrefixStore(f"{turn}-{side}", store)
            dist.init_process_group(backend, store=made, rank=rank, world_size=size, timeout=timedelta(seconds=120))
            torch.manual_seed(0)
            model = catalogue_model(name) if name in CATALOGUE else make_model(recipe.model)
            listener = Seconds()
            trainer = Trainer(
                recipe, model=timed(model, times) if times is not None else model, data=few, callbacks=[listener]
            )
            trainer.fit()
            # What was spent goes with the times: all ranks must end with the same round.
            took = torch.tensor([*listener.found[turns.settling :], time.monotonic() - began], dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            *steps, spent_s = took.tolist()
            seconds[side] += steps
            dist.destroy_process_group()
            for setting in settings:
                del os.environ[setting]
    return seconds


def share_of(table: dict[str, Any]) -> int:
    """Samples of a rank: of the recipe's batch, which two ranks share, the half."""
    return max(1, int(table["training"].get("batch", 32)) // 2)


def recipe_of(name: str) -> Path:
    return RECIPES / f"{DATA_OF if name in CATALOGUE else name}.toml"


def catalogue_model(name: str) -> Any:
    """The catalogue's parameters, so much smaller, in layers that only `timed` can run."""
    import torch
    from torch import nn

    from netfold.train import Chain, Model

    def layer(counts: list[int]) -> nn.Module:
        return nn.ParameterList(nn.Parameter(torch.zeros(max(1, count // CATALOGUE[name]))) for count in counts)

    layers = [(f"layer{at}", layer(each.counts)) for at, each in enumerate(find_model(name).layers)]
    return Model(Chain(layers), lambda output, target: output.float().mean())


def catalogue_times(name: str, samples: int) -> list[dict[str, Any]]:
    """As LayerTime's fields: the published time of a step, by the layers' arithmetic. Of each sample comes a number."""
    model = find_model(name)
    flops = sum(layer.flops + backward_flops(layer) for layer in model.layers)
    each_s = model.compute_s / flops
    return [
        {
            "forward_s": each_s * layer.flops,
            "backward_s": each_s * backward_flops(layer),
            "outputs": ((samples, 1),),
        }
        for layer in model.layers
    ]


def time_layers(name: str, file: str) -> None:
    """What each layer takes with one rank's share, alone on this machine; into `file`."""
    if name in CATALOGUE:
        samples = share_of(tomllib.loads(recipe_of(name).read_text()))
        Path(file).write_text(json.dumps(catalogue_times(name, samples)))
        return

    import torch

    from netfold.train import Recipe
    from netfold.train.datasets import make_data
    from netfold.train.models import make_model

    sys.path.insert(0, str(HERE))
    from timed_model import layer_times

    torch.set_num_threads(1)
    table = tomllib.loads(recipe_of(name).read_text())
    recipe, share = Recipe.model_validate(table), share_of(table)
    batch = make_data(recipe.data).train.batch(range(share), range(share))
    Path(file).write_text(json.dumps([asdict(took) for took in layer_times(make_model(recipe.model), batch)]))


def run(names: Sequence[str], place: Place, timed: Path, turns: Turns) -> dict[str, dict[str, list[float]]]:
    """By model and side, the seconds of each step; timed: a folder with the layers' times of each model."""
    how, which = json.dumps(asdict(turns)), ",".join(names)
    with tempfile.TemporaryDirectory() as folder:
        mine = [sys.executable, __file__, "--rank", which, folder]
        if place.rate:
            rack = [sys.executable, "-m", "netfold.cli", "rack", "run", "--hosts", str(place.hosts), "--rate"]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"}
            command = [*rack, place.rate, *place.switch_rate, "--", *mine, str(timed), how]
            done = subprocess.run(command, timeout=DEADLINE_S, env=environment, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise RuntimeError(f"a rank of {which} failed:\n{done.stdout}")
        else:
            ranks = [
                subprocess.Popen(
                    [*mine, "", how],
                    env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(place.hosts), "GLOO_SOCKET_IFNAME": "lo"},
                )
                for rank in range(place.hosts)
            ]  # fmt: skip
            try:
                if any(rank.wait(DEADLINE_S) for rank in ranks):
                    raise RuntimeError(f"a rank of {which} failed; see above")
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        found: dict[str, dict[str, list[float]]] = json.loads(Path(folder, "seconds.json").read_text())
        return found


def main(names: list[str]) -> None:
    for name in names or sorted(path.stem for path in RECIPES.glob("*.toml")):
        RESULT.write_text(render(measure([name], PLACES, RECIPE_TURNS, SECONDS)))
        print(name, flush=True)
    print(RESULT.read_text())


def main_by_link(names: list[str]) -> None:
    LINKS_RESULT.write_text(render_by_link(measure(names or LINKED, LINK_PLACES, LINK_TURNS, LINKS_SECONDS)))
    print(LINKS_RESULT.read_text())


def measure(names: Sequence[str], places: Sequence[Place], turns: Turns, file: Path) -> dict[str, Any]:
    """Every place, with all names in the same processes; all that `file` holds then, what was there before among it."""
    with tempfile.TemporaryDirectory() as folder:
        timed, load = Path(folder), os.getloadavg()[0]
        for name in names:
            time_layers_of(name, timed / f"{name}.json")
        seconds = {}
        for place in places:
            seconds[place.name] = run(names, place, timed, turns)
            print(place.name, flush=True)
        found = {
            name: {
                "compute_s": sum(
                    took["forward_s"] + took["backward_s"] for took in json.loads((timed / f"{name}.json").read_text())
                ),
                "seconds": {place: by_name[name] for place, by_name in seconds.items()},
                "turns": {place: [turns.steps, turns.settling] for place in seconds},
                "load": [load, os.getloadavg()[0]],
            }
            for name in names
        }
    kept = (json.loads(file.read_text()) if file.exists() else {}) | found
    kept = {name: kept[name] for name in sorted(kept)}
    file.write_text(json.dumps(kept) + "\n")
    return kept


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
    return f"""# A step of each recipe, over netfold and over gloo

`python bench/train_steps.py`. {circumstances(kept)} Milliseconds a step, the slowest rank's: median
(p5..p95) of {RECIPE_TURNS.rounds * RECIPE_TURNS.steps} steps in {RECIPE_TURNS.rounds} turns of each backend in the same
processes; ratio: gloo's over netfold's, step by step. Every rank has half of the recipe's batch, whatever the number
of ranks. On this machine ranks really compute; in the rack a layer's computing is a timer of what it took here, and
netfold has the rack's switch, with a port a host. Buckets of 25 MB on both sides.

| recipe | where | netfold ms | gloo ms | ratio |
|---|---|---|---|---|
{chr(10).join(rows)}

## Scaling efficiency at 1 Gbit/s

The step of one host over that of 1, 2, 4 and 8, each with the same share of samples and the same timers: 1 is perfect.

| recipe | computing, ms | | 1 | 2 | 4 | 8 |
|---|---|---|---|---|---|---|
{chr(10).join(efficiency)}
"""


def render_by_link(kept: dict[str, Any]) -> str:
    rows = []
    for place in LINK_PLACES:
        for name, found in kept.items():
            by_side = found["seconds"][place.name]
            ms = [spread([1e3 * s for s in by_side[side]]) for side in SIDES]
            cells = [f"{of.median:.0f} ({of.p5:.0f}..{of.p95:.0f})" for of in ms]
            for other in [side for side in SIDES if side != "netfold"]:
                ratio = spread([there / here for there, here in zip(by_side[other], by_side["netfold"], strict=True)])
                cells.append(f"{ratio.median:.2f} ({ratio.p5:.2f}..{ratio.p95:.2f})")
            c = "P" if place.c is None else place.c
            where = f"{place.hosts} hosts, {place.rate}"
            steps, settling = found["turns"][place.name]
            first = [name, where, f"{c}", f"{steps} after {settling}", f"{1e3 * found['compute_s']:.0f}"]
            rows.append(f"| {' | '.join([*first, *cells])} |")
    shrunk = ", ".join(f"{name}'s tensors are 1/{by} of their size" for name, by in CATALOGUE.items())
    sides = " | ".join(f"{side}, ms" for side in SIDES)
    return f"""# A step, by the link of the switch

`python bench/train_steps.py --links`. {circumstances(kept)} c: the rate of the switch's link over a worker's; P: a port
a worker. Milliseconds a step, the slowest rank's: median (p5..p95); ratios step by step. Each side has
{LINK_TURNS.rounds} to {LINK_TURNS.most_rounds} turns in the same processes, as many as {LINK_TURNS.budget_s:.0f} s
suffice for, each with a new group; *steps*: how many of a turn count, after how many that do not. In the rack a layer's
computing is a timer, of what it took here; of a model of the planner's catalogue, of its published speed: {shrunk}.
Buckets of 25 MB, of smaller tensors as many.

| | where | c | steps | computing, ms | {sides} | ring / netfold | gloo / netfold |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def circumstances(kept: dict[str, Any]) -> str:
    loads = [load for found in kept.values() for load in found["load"]]
    return spoken((min(loads), max(loads)))


def time_layers_of(name: str, file: Path) -> None:
    """In a process of its own, so that this one stays small."""
    subprocess.run([sys.executable, __file__, "--times", name, str(file)], check=True, timeout=DEADLINE_S)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["--times"]:
        time_layers(*sys.argv[2:])
    elif sys.argv[1:2] == ["--links"]:
        main_by_link(sys.argv[2:])
    else:
        main(sys.argv[1:])
