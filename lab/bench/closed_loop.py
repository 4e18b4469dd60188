"""The planner's closed loop: predict the recipes' steps in an emulated rack, then run them there; as root:

    .venv/bin/python lab/bench/closed_loop.py [RECIPE ...]    # about seventeen minutes, and nothing else on the machine

Without names: all but edsr-large, whose 163 MB of gradients take ten minutes more.

All_reduces between two hosts, by each path at each rate, come first. Then for each recipe its step on one host without
communication (`one_host.py`). From both, `netfold_plan.events` predicts the steps on 2, 4 and 8 hosts. The predictions
are written down before the first run. Paths take turns in the same processes. Results of other recipes stay in
lab/bench/results/closed_loop.json.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any

import driver
import typer
from driver import Place, Rank, cpu_seconds, open_network, start_ranks, take_turns
from one_host import keep_busy, profiler  # noqa: F401 - driver starts ranks by the names in this script
from one_host import measure as measure_alone

from netfold.tuning.fit import fit_link
from netfold_lab.bench.spread import Spread, spread
from netfold_lab.rack.link import BURST_BYTES
from netfold_plan.cluster import Cluster
from netfold_plan.cluster.load import cluster_of
from netfold_plan.events import Conditions, simulate
from netfold_plan.job import Job, Split
from netfold_plan.model import TimedStep, timed_step_of
from netfold_plan.step import FITTED
from netfold_train.runs.machine import spoken

RECIPES = Path(__file__).parents[2] / "train/src/netfold_train/recipes"
KEPT = driver.RESULTS / "closed_loop.json"
HOSTS, RATES = (2, 4, 8), ("200mbit", "1gbit")
# By path: torch's backend and its environment; the switch's address is the rack's.
PATHS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo, ring": ("gloo", {}),
    "netfold, ring": (
        "netfold",
        {"NETFOLD_ALGORITHM": "all_reduce=ring", "NETFOLD_TRANSPORT": "tcp", "NETFOLD_WIRE_DTYPE": "f32"},
    ),
    "in-network, f32": ("netfold", {"NETFOLD_ALGORITHM": "all_reduce=in_network", "NETFOLD_WIRE_DTYPE": "f32"}),
    "in-network, bf16": ("netfold", {"NETFOLD_ALGORITHM": "all_reduce=in_network", "NETFOLD_WIRE_DTYPE": "bf16"}),
}
WIRES = {path: settings.get("NETFOLD_WIRE_DTYPE", "f32") for path, (_, settings) in PATHS.items()}
# The measured latency already contains a collective's start-up.
CONSTANTS = replace(FITTED, collective_s=0.0)
# Bytes of the tensor, and calls: the smallest size shows what a call costs, the larger two show a rate.
PAIR_CALLS = {64: 60, 2 << 20: 5, 8 << 20: 4}
PAIR_SETTLING = 2
# Seconds to measure one place, all paths together: as many steps as fit, within the bounds.
PLACE_S, FEWEST, MOST = 5.0, 2, 12
BY_NAME_ONLY = ("edsr-large",)
# The goal: the largest error.
GOAL = 0.10


def choose(path: str, switch: str) -> str:
    """Set the environment for the groups that are made from now on; returns the backend's name."""
    backend, settings = PATHS[path]
    for name in ("NETFOLD_SWITCH", "NETFOLD_ALGORITHM", "NETFOLD_TRANSPORT", "NETFOLD_WIRE_DTYPE"):
        os.environ.pop(name, None)
    os.environ.update(settings | ({"NETFOLD_SWITCH": switch} if "in-network" in path else {}))
    return backend


def all_reduce(me: Rank, switch: str, switch_pid: int) -> None:
    """A rank of two (one per host), or of four (two per host, which use the network too).

    The four show the core time of a ring's further steps. An order: by size, what a call takes by one path.
    """
    import torch
    import torch.distributed as dist

    def run(path: str) -> list[dict[str, float]]:
        with me.torch_group(choose(path, switch), timeout=timedelta(seconds=60)):
            sizes = list(PAIR_CALLS) if me.size == 2 else [min(PAIR_CALLS)]
            return [measure(size, PAIR_CALLS[size]) for size in sizes]

    def measure(size_bytes: int, calls: int) -> dict[str, float]:
        """Seconds of a call, median and quickest; a core's seconds for it on this rank, and on the switch."""
        tensor = torch.zeros(size_bytes // 4)
        seconds = []
        for call in range(-PAIR_SETTLING, calls):
            if call == 0:
                rank_s, switch_s = time.process_time(), cpu_seconds(switch_pid)
            # Apart from one another, as in training.
            time.sleep(0.005)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if call >= 0:
                seconds.append(time.perf_counter() - began)
        return {
            "size_bytes": size_bytes,
            "seconds": statistics.median(seconds),
            "quickest_s": min(seconds),
            "core_s": (time.process_time() - rank_s) / calls,
            "switch_s": (cpu_seconds(switch_pid) - switch_s) / calls,
        }

    me.serve(run)


def train(me: Rank, switch: str, alone: dict[str, Any]) -> None:
    """A rank that trains with the layers' timers. An order: the seconds of each step by one path.

    A step's time runs from the previous step's vote, in which all ranks meet, to its own.
    """
    from timed_model import LayerTime, recipe_of, timed
    from timed_model import train as train_in_group

    from netfold_train.models import make_model

    times = [LayerTime(**each) for each in alone["times"]]

    def run(path: str, settling: int, steps: int) -> list[float]:
        recipe = recipe_of(alone["path"], me.size, settling + steps)
        ends_s = train_in_group(me, choose(path, switch), recipe, lambda: timed(make_model(recipe.model), times)).ends_s
        return [after - before for before, after in pairwise(ends_s[settling - 1 :])]

    me.serve(run)


def between_two(rate: str) -> dict[str, list[dict[str, float]]]:
    """By path, calls of two ranks by size; the last is a call of four ranks."""
    found: dict[str, list[dict[str, float]]] = {path: [] for path in PATHS}
    with open_network(Place(2, rate, switch=True)) as network:
        assert network.switch is not None
        for hosts in ([0, 1], [0, 0, 1, 1]):
            arguments = (network.switch_address, network.switch.pid)
            with start_ranks(network, all_reduce, *arguments, hosts=hosts) as ranks:
                for path in PATHS:
                    found[path] += ranks.ask(path)[0]
    return found


def place(hosts: int, rate: str) -> str:
    return f"{hosts} hosts, {rate}"


def predictions(model: TimedStep, pairs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds a step, by place and path."""
    return {
        place(hosts, rate): {
            path: predicted_s(model, cluster(path, hosts, pairs[rate][path]), path, hosts) for path in PATHS
        }
        for rate in RATES
        for hosts in HOSTS
    }


def predicted_s(model: TimedStep, rack: Cluster, path: str, hosts: int) -> float:
    job = Job(
        model.samples * hosts,
        model.samples,
        Split(data=hosts),
        precision="f32",
        overlap=True,
        in_network="in-network" in path,
        wire=WIRES[path],
    )
    return simulate(model, rack, job, Conditions(contention=False), CONSTANTS).prediction.step_s


def cluster(path: str, hosts: int, measured: Sequence[dict[str, float]]) -> Cluster:
    """The rack, with the link that two of its hosts showed by that path.

    Two ranks take two steps, in a ring and through the switch, and send as many bytes as the tensor has on the wire.
    """
    *two, four = measured
    call, *_, largest = two
    sent = [each["size_bytes"] / (2 if WIRES[path] == "bf16" else 1) for each in two]
    # The quickest call shows the link's rate. The median shows the latency, which is mostly the processors'.
    took = [call["seconds"], *(each["quickest_s"] for each in two[1:])]
    link = fit_link([(round(size / 2), seconds / 2) for size, seconds in zip(sent, took, strict=True)])
    # A ring of two ranks takes two steps and one of four takes six: four more. The switch always takes two.
    message_s = 0.0 if "in-network" in path else max(0.0, four["core_s"] - call["core_s"]) / 4
    message_s = min(message_s, call["core_s"] / 2)
    of_rank, of_switch = (
        max(1e-12, (largest[whose] - call[whose]) / (sent[-1] - sent[0])) for whose in ("core_s", "switch_s")
    )
    return cluster_of(
        {
            # Layers are timed, so the device only passes buffers on, at once; the cores' share is counted below.
            "device": {
                "flops": {"f32": "1 TFLOP/s"}, "memory": "2 GB", "memory_rate": "10 GB/s", "copy_rate": "1000 TB/s"
            },
            "tier": [
                {
                    "name": "Ethernet",
                    "devices": hosts,
                    "latency": f"{link.latency_s:.9f} s",
                    "rate": f"{link.bytes_per_s:.0f} B/s",
                    "in_network": "in-network" in path,
                    "burst": f"{BURST_BYTES} B",
                }
            ],
            "shared": {
                "cores": os.cpu_count(),
                "operation": f"{call['core_s'] - 2 * message_s:.9f} s",
                "message": f"{message_s:.9f} s",
                "rate": f"{1 / of_rank:.0f} B/s",
                # Two ranks' bytes.
                "switch_rate": f"{2 / of_switch:.0f} B/s",
            },
        },
        f"a rack of {hosts}",
    )  # fmt: skip


def measured(alone: dict[str, Any], hosts: int, rate: str, predicted: dict[str, float]) -> dict[str, list[float]]:
    """By path, rank 0's seconds of each step. Where steps are long, few are measured, in one turn;
    where they are short, more are, in two."""
    steps = max(FEWEST, min(MOST, int(PLACE_S / sum(predicted.values()))))
    # DDP lays its buckets out when a second step begins, which is little of a long step.
    settling = 1 if steps == FEWEST else 2
    with (
        open_network(Place(hosts, rate, switch=True)) as network,
        start_ranks(network, train, network.switch_address, alone) as ranks,
    ):
        rounds = 2 if steps == MOST else 1
        turns = take_turns(list(PATHS), rounds, lambda path: ranks.ask(path, settling, steps)[0], warmups=0)
    return {path: [*chain(*seconds)] for path, seconds in turns.items()}


@dataclass(frozen=True)
class Comparison:
    """A prediction beside its measurement."""

    recipe: str
    hosts: str
    rate: str
    path: str
    predicted_s: float
    measured: Spread

    @property
    def error(self) -> float:
        """A part of the measured median."""
        return self.predicted_s / self.measured.median - 1


def comparisons(kept: dict[str, Any]) -> Iterator[Comparison]:
    for recipe, record in kept.items():
        for where, by_path in record.get("measured", {}).items():
            hosts, _, rate = where.partition(", ")
            for path, seconds in by_path.items():
                yield Comparison(recipe, hosts, rate, path, record["predicted"][where][path], spread(seconds))


def errors(found: Iterable[Comparison]) -> list[str]:
    """Cells: the mean error, the worst, and how many are within the goal."""
    found = list(found)
    if not found:
        return ["-", "-", "-"]
    worst = max(found, key=lambda each: abs(each.error))
    which = f"{worst.recipe}, {worst.hosts}, {worst.rate}, {worst.path}"
    mean = statistics.fmean(abs(each.error) for each in found)
    within = sum(abs(each.error) <= GOAL for each in found)
    return [f"{100 * mean:.1f}%", f"{100 * worst.error:+.1f}% ({which})", f"{within} of {len(found)}"]


def error_table(found: Sequence[Comparison], *keys: str) -> str:
    """The errors by the values of these fields."""
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for each in found:
        groups.setdefault(tuple(getattr(each, key) for key in keys), []).append(each)
    rows = [[*group, *errors(members)] for group, members in groups.items()]
    rows.append([*["all"] * len(keys), *errors(found)])
    return driver.table(" | ".join([*keys, "mean error", "worst", "within 10%"]), rows)


def closed_loop(names: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...")] = None) -> str:
    """The planner's closed loop"""
    pairs = {rate: between_two(rate) for rate in RATES}
    for recipe in names or sorted(path.stem for path in RECIPES.glob("*.toml") if path.stem not in BY_NAME_ONLY):
        load = os.getloadavg()[0]
        alone = measure_alone(str(RECIPES / f"{recipe}.toml"))
        predicted = predictions(timed_step_of(alone["profile"]), pairs)
        record = {"profile": alone["profile"], "pairs": pairs, "predicted_at": now(), "predicted": predicted}
        driver.keep(KEPT, {recipe: record})
        record["measured_at"] = now()
        record["measured"] = {
            place(hosts, rate): measured(alone, hosts, rate, predicted[place(hosts, rate)])
            for rate in RATES
            for hosts in HOSTS
        }
        record["machine"] = spoken(load)
        kept = driver.keep(KEPT, {recipe: record})
    return render(kept)


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def render(kept: dict[str, Any]) -> str:
    found = list(comparisons(kept))
    rows = []
    for each in found:
        ms = each.measured.scaled(1e3)
        around = f"{ms.median:.1f} ({ms.p5:.1f}..{ms.p95:.1f})"
        numbers = [f"{1e3 * each.predicted_s:.1f}", around, ms.n, f"{100 * each.error:+.1f}%"]
        rows.append([each.recipe, each.hosts, each.rate, each.path, *numbers])
    machines = "\n".join(
        f"- {recipe}: predicted {record['predicted_at']}, measured from {record['measured_at']} on; {record['machine']}"
        for recipe, record in kept.items()
        if "machine" in record
    )
    return f"""A step of each recipe in an emulated rack, predicted before it was run there, from its step on one host
without communication and from all_reduces between two hosts. Errors are of the measured median, {len(found)} of them;
the goal is {100 * GOAL:.0f}%. Layers are timers of what they took here; what surrounds them, and what is sent, is real.
All hosts share this machine's cores, which is part of what is predicted. What the planner takes into account, and what
it leaves out: docs/explanation/plan-closed-loop.md.

{error_table(found, "path", "rate")}

{error_table(found, "hosts", "rate")}

{error_table(found, "recipe")}

## Every prediction

Milliseconds a step; measured: median (p5..p95) of so many steps, paths in turn in the same processes.

{driver.table("recipe | hosts | network | path | predicted | measured | steps | error", rows)}

## When, and on what

{machines}"""


if __name__ == "__main__":
    driver.run(closed_loop)
