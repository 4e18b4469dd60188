"""A rank of 8 hosts is killed at random moments: the time that the other ranks lose, and that a new rank needs.

    .venv/bin/python lab/bench/elastic.py                    # 100 kills, about 40 minutes; root, for the rack
    .venv/bin/python lab/bench/elastic.py --kills 5

8 hosts at 1 Gbit/s train a replayed ResNet-50 by `netfold.elastic` under DDP: layers are timers of what they took on
this machine, since the hosts share its cores (`timed_model`); what they send is real. When all ranks have taken a few
steps, one gets SIGKILL at a random moment, and a new process on its host joins. `netfold store` runs at the switch.

    lost     from the kill to the end of the first step of the ranks that are left, less one step of theirs
    back     from the kill to the end of the new rank's first step: its start, its imports, the state, a step
    joining  the part of `back` after its imports
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import driver

from netfold_lab.bench.spread import spread
from netfold_lab.rack.processes import Process, follow
from netfold_lab.rack.rack import Rack

HOSTS, RATE = 8, "1gbit"
SAMPLES = 8 * HOSTS
# Steps of all ranks before the next kill: the first ones of a generation are slower.
SETTLING = 4
STORE_PORT = 29400
# Until a step of all ranks, after which the benchmark gives up.
LIMIT_S = 120.0


def time_layers(me: driver.Rank) -> None:
    """A process of its own. An order: the layers' times with one rank's share of ResNet-50."""
    from dataclasses import asdict

    from timed_model import layer_times, recipe_of

    recipe = Path(__file__).parents[2] / "train/src/netfold_train/recipes" / "resnet50.toml"
    me.serve(lambda: [asdict(each) for each in layer_times(recipe_of(recipe, 2, 1))])


def replay(folder: Path) -> None:
    """A rank: train until the file `end` is there, and log each step."""
    import torch
    from timed_model import LayerTime, recipe_of, timed
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import netfold.elastic as elastic
    from netfold_train.models import make_model

    torch.set_num_threads(1)
    imported_s = time.monotonic()
    recipe = recipe_of(Path(__file__).parents[2] / "train/src/netfold_train/recipes" / "resnet50.toml", 2, 1)
    times = [LayerTime(**each) for each in json.loads((folder / "times").read_text())]
    net: Any = nn.Module()
    net.layers = timed(make_model(recipe.model), times).module
    net.check = nn.Parameter(torch.zeros(()))
    net.forward = lambda value: net.layers(torch.zeros(1)).sum() * 0 + net.check * value
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    state = elastic.State(model=net, optimizer=optimizer)
    log = (folder / f"log-{os.getpid()}").open("a", buffering=1)
    log.write(json.dumps({"imported": imported_s}) + "\n")
    ended = False
    with elastic.World(state, policy=elastic.Policy(SAMPLES)) as world:
        ddp: list[Any] = []

        def wrap(world: Any) -> None:
            ddp[:] = [DistributedDataParallel(net, init_sync=False)]

        world.on_change(wrap)
        while not ended:
            with world.attempt():
                optimizer.zero_grad()
                # The mean of a function of the samples' numbers: its sum over all steps says which were taken.
                mean = sum(number % 7 for number in world.part) / len(world.part)
                ddp[0](mean * world.weight).backward()
                flag = torch.tensor([float((folder / "end").exists())])
                torch.distributed.all_reduce(flag)
                optimizer.step()
                ended = bool(flag)
            line = {"step": world.step, "time": time.monotonic(), "generation": world.generation, "size": world.size}
            log.write(json.dumps(line) + "\n")
        log.write(json.dumps({"check": float(net.check.detach()), "steps": world.step}) + "\n")


def expected(steps: int) -> float:
    """The value of the checked weight after these steps, by SGD with momentum."""
    value, momentum = 0.0, 0.0
    for step in range(steps):
        numbers = range(step * SAMPLES, (step + 1) * SAMPLES)
        momentum = 0.9 * momentum + sum(number % 7 for number in numbers) / SAMPLES
        value -= 1e-3 * momentum
    return value


class Job:
    """The ranks of the rack, and their logs."""

    def __init__(self, rack: Rack, folder: Path) -> None:
        self._rack, self.folder = rack, folder
        self.ranks: dict[int, Process] = {}  # by host
        self.said: list[str] = []

    def start(self, host: int) -> None:
        argv = [sys.executable, __file__, "replay", str(self.folder)]
        store = {"NETFOLD_STORE": f"{self._rack.address(None)}:{STORE_PORT}"}
        self.ranks[host] = self._rack.popen(host, argv, store)
        follow(self.ranks[host], lambda line: self.said.append(f"h{host}| {line}"))

    def log(self, host: int) -> list[dict[str, Any]]:
        path = self.folder / f"log-{self.ranks[host].pid}"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps(self, host: int) -> list[dict[str, Any]]:
        return [line for line in self.log(host) if "step" in line]

    def until(self, condition: Any, what: str) -> None:
        give_up_s = time.monotonic() + LIMIT_S
        while not condition():
            dead = [host for host, process in self.ranks.items() if process.poll() not in (None, 0)]
            if dead or time.monotonic() > give_up_s:
                raise RuntimeError(
                    f"{what}: not within {LIMIT_S} s, or hosts {dead} ended:\n" + "\n".join(self.said[-40:])
                )
            time.sleep(0.02)

    def settled(self) -> bool:
        """Whether all ranks have taken SETTLING steps in one generation of all hosts."""
        newest = [self.steps(host)[-SETTLING:] for host in self.ranks]
        generations = {line["generation"] for lines in newest for line in lines}
        return all(len(lines) == SETTLING and lines[0]["size"] == HOSTS for lines in newest) and len(generations) == 1


def one_kill(job: Job, draw: random.Random) -> dict[str, float]:
    job.until(job.settled, "all ranks train")
    before = [line["time"] for line in job.steps(0)[-SETTLING:]]
    step_s = statistics.median(b - a for a, b in itertools.pairwise(before))
    time.sleep(draw.uniform(0.0, 2 * step_s))
    victim = draw.randrange(HOSTS)
    generation = job.steps(victim)[-1]["generation"]
    killed_s = time.monotonic()
    job.ranks[victim].kill()
    job.ranks[victim].wait()
    job.start(victim)
    others = [host for host in job.ranks if host != victim]

    def first(host: int) -> list[dict[str, Any]]:
        return [line for line in job.steps(host) if line["generation"] > generation and line["time"] > killed_s]

    job.until(lambda: all(len(first(host)) >= 2 for host in others), "the ranks that are left go on")
    went_on_s = max(first(host)[0]["time"] for host in others)
    smaller = [b["time"] - a["time"] for host in others for a, b in itertools.pairwise(first(host))]
    job.until(lambda: first(victim), "the new rank trains")
    imported_s = job.log(victim)[0]["imported"]
    back_s = first(victim)[0]["time"]
    return {
        "step": step_s,
        "lost": went_on_s - killed_s - min(statistics.median(smaller), step_s),
        "back": back_s - killed_s,
        "joining": back_s - imported_s,
    }


def elastic(kills: int = 100, seed: int = 1) -> str:
    """A lost rank, and a new one"""
    with driver.ranks_at(driver.Place(1), time_layers) as ranks:
        times = ranks.ask()[0]
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, Rack(HOSTS, RATE) as rack:
        folder = Path(name)
        (folder / "times").write_text(json.dumps(times))
        listen = f"{rack.address(None)}:{STORE_PORT}"
        follow(rack.popen_switch([sys.executable, "-m", "netfold.cli", "store", "--listen", listen]), lambda line: None)
        job = Job(rack, folder)
        for host in range(HOSTS):
            job.start(host)
        found = []
        for number in range(kills):
            found.append(one_kill(job, draw))
            print(f"kill {number + 1} of {kills}: {found[-1]}", file=sys.stderr, flush=True)
        job.until(job.settled, "all ranks train")
        (folder / "end").touch()
        job.until(lambda: all("check" in job.log(host)[-1] for host in job.ranks), "the job ends")
        last = [job.log(host)[-1] for host in job.ranks]
    steps, checks = last[0]["steps"], {line["check"] for line in last}
    right = expected(steps)
    if len(checks) != 1 or abs(checks.pop() - right) > 1e-4 * abs(right):
        raise RuntimeError(f"after {steps} steps the ranks' weights are {last}; a job that lost no rank has {right}")
    state_mb = 2 * 4 * sum_of_parameters() / 2**20
    rows = [
        [what, *(f"{getattr(spread([each[key] for each in found]), at):.2f}" for at in ("median", "p5", "p95")),
         f"{max(each[key] for each in found):.2f}"]
        for what, key in (
            ("a step of 8 ranks", "step"), ("lost by the other ranks, beyond one step", "lost"),
            ("new rank, from the kill to the end of its first step", "back"),
            ("of this, after its imports", "joining"),
        )
    ]  # fmt: skip
    return f"""Seconds, of {kills} kills at random moments (seed {seed}) of random ranks of {HOSTS} hosts at 1 Gbit/s,
which replay ResNet-50 under DDP. The state is weights and momentum, {state_mb:.0f} MB:
{state_mb * 2**20 * 8 / 1e9:.2f} s at line rate. After {steps} steps a weight whose gradients depend on the samples'
numbers was the same on all ranks, and equal to that of a job that lost no rank.

{driver.table("| median | 5% | 95% | most", rows)}"""


def sum_of_parameters() -> int:
    from timed_model import recipe_of

    from netfold_train.models import make_model

    recipe = recipe_of(Path(__file__).parents[2] / "train/src/netfold_train/recipes" / "resnet50.toml", 2, 1)
    return sum(each.numel() for each in make_model(recipe.model).module.parameters())


if __name__ == "__main__":
    if sys.argv[1:2] == ["replay"]:
        replay(Path(sys.argv[2]))
    else:
        driver.run(elastic)
