"""The planner's simulations: how long they take, and how near they are to what was measured:

.venv/bin/python lab/bench/plan.py plan-events       # a step of 10,240 ranks, played as events
.venv/bin/python lab/bench/plan.py plan-packets      # an all_reduce packet by packet, beside loss.md and tree.md
.venv/bin/python lab/bench/plan.py plan-profile      # `netfold plan --profile` beside measured steps; root
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import driver
from driver import Place, Rank

from netfold_plan.cluster import Cluster, load_cluster
from netfold_plan.events import IDEAL, Conditions, simulate
from netfold_plan.job import Job, Split
from netfold_plan.model import Transformer
from netfold_plan.packets import Fabric, all_reduce
from netfold_plan.request.profile import ProfiledJob, read_profile
from netfold_plan.step import predict

RANKS = 10_240
# Parameters: 117 billion.
MODEL = Transformer("GPT", 12288, 96, 64, 2048)
MICROBATCHES = 32
# tensor, pipeline, virtual stages per rank.
SPLITS = ((8, 16, 1), (8, 32, 1), (8, 16, 4), (4, 16, 1))
CONDITIONS = {
    "calm": IDEAL,
    "links shared": Conditions(),
    "links shared, jitter, a straggler": Conditions(jitter=0.05, stragglers={4321: 1.2}),
}
SIZE = 16 << 20
# The links of the rack: their rate includes a frame's Ethernet header and payload, not preamble and gap. At 16 MB the
# latency of a hop hardly counts.
RACK: dict[str, Any] = {"workers": 4, "bytes_per_s": 25e6, "latency_s": 50e-6, "frame_bytes": 14 + 20 + 8}
ALL_PACKETS = 10**9
FLAT = ((16, 1), (256, 1), (1024, 8), (4096, 16), (16_384, 64), (60_000, 240), (102_400, 400))
RATES, HOSTS, STEPS = ("1gbit", "500mbit", "200mbit"), 2, 60


def job(tensor: int, pipeline: int, virtual_stages: int) -> Job:
    data = RANKS // tensor // pipeline
    return Job(
        MICROBATCHES * data,
        1,
        Split(data, tensor, pipeline, virtual_stages),
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        overlap=True,
    )


def cluster() -> Cluster:
    """DGX A100 nodes, as many as needed, with half as many links above as below."""
    preset = load_cluster("dgx-a100")
    return replace(preset, tiers=(*preset.tiers[:-1], replace(preset.tiers[-1], devices=16_384, oversubscription=2.0)))


def simulated(wanted: Job, conditions: Conditions, rounds: int, *, folded: bool) -> tuple[float, float]:
    """Seconds that the simulation takes, and those of the step."""
    at, least, step_s = cluster(), float("inf"), 0.0
    for _ in range(rounds):
        began = time.process_time()
        step_s = simulate(MODEL, at, wanted, conditions, folded=folded).prediction.step_s
        least = min(least, time.process_time() - began)
    return least, step_s


def plan_events(rounds: int = 3) -> str:
    """The planner's events"""
    rows = []
    for tensor, pipeline, virtual_stages in SPLITS:
        wanted = job(tensor, pipeline, virtual_stages)
        split = f"{tensor} x {pipeline} x {wanted.split.data}"
        for name, conditions in CONDITIONS.items():
            folded = f"{simulated(wanted, conditions, rounds, folded=True)[0]:.3f}" if conditions.symmetric else "-"
            whole, step_s = simulated(wanted, conditions, rounds, folded=False)
            rows.append([split, virtual_stages, name, folded, f"{whole:.2f}", f"{step_s:.3f}"])
    head = "tensor x pipeline x data | virtual stages | conditions | folded: s | rank by rank: s | the step: s"
    return f"""A step of {RANKS:,} ranks ({MODEL.name}, {MODEL.parameters / 1e9:.0f} billion parameters, {MICROBATCHES}
microbatches a pipeline, gradients beside the last backward pass), played as events. Processor time of one thread; the
least of the rounds, because whatever else the machine does only adds to the time.

{driver.table(head, rows)}"""


def measured_losses() -> dict[str, tuple[float, float]]:
    """From loss.md, by loss: the median in ms, and the part that was sent again."""
    found = {}
    for line in (driver.RESULTS / "loss.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(r"[\d.]+%", cells[0]):
            found[cells[0]] = (float(cells[1]), float(cells[6].rstrip("%")) / 100)
    return found


def measured_tree_ms() -> float:
    rows = [line.strip("|").split("|") for line in (driver.RESULTS / "tree.md").read_text().splitlines()]
    return next(float(cells[1]) for cells in rows if cells[0].strip() == "a leaf in each rack, a root")


def plan_packets(seeds: int = 5) -> str:
    """The planner's packets"""
    rows = []
    for loss, (measured_ms, again) in measured_losses().items():
        fabric = Fabric(**RACK, loss=float(loss.rstrip("%")) / 100)
        found = [all_reduce(fabric, SIZE, seed=seed, most_packets=ALL_PACKETS) for seed in range(seeds)]
        ms = 1e3 * median(each.time_s for each in found)
        repeats = f"{median(each.sent_again for each in found):.2%}"
        slowest_ms = f"{1e3 * max(each.time_s for each in found):.0f}"
        off = f"{ms / measured_ms - 1:+.1%}"
        rows.append([loss, f"{measured_ms:.0f}", f"{ms:.0f}", off, f"{again:.2%}", repeats, slowest_ms])
    tree_ms = measured_tree_ms()
    tree = all_reduce(replace(Fabric(**RACK), workers=8, racks=2), SIZE, most_packets=ALL_PACKETS)
    flat = []
    for workers, racks in FLAT:
        fabric = Fabric(workers, 12.5e9, 1e-6, racks)
        began = time.process_time()
        one = all_reduce(fabric, 1 << 16)
        us = [f"{1e6 * seconds:.2f}" for seconds in (one.time_s, one.closed_s)]
        flat.append([f"{workers:,}", racks, fabric.levels, *us, one.said, f"{time.process_time() - began:.1f}"])
    head = "loss, each way | measured: ms | simulated: ms | apart | measured: sent again | simulated | slowest: ms"
    return f"""{SIZE >> 20} MB f32 all_reduce, 4 hosts, 200 Mbit/s, through one switch: measured in the rack (loss.md,
tree.md) and simulated packet by packet; medians, of {seeds} seeds.

{driver.table(head, rows)}

8 hosts in 2 racks, a switch in each and one above, no losses: measured {tree_ms:.0f} ms, simulated
{1e3 * tree.time_s:.0f} ms, {1e3 * tree.time_s / tree_ms - 1:+.1%}.

64 KB, links of 100 Gbit/s and 1 us, no losses: a part of the packets is simulated and scaled up to all.

{driver.table("workers | racks | levels of switches | us | the formula: us | simulated | s it took", flat)}"""


def train(me: Rank) -> None:
    """A rank whose job is recorded. The order is the whole training."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def steps() -> None:
        torch.manual_seed(0)
        hidden = [layer for _ in range(6) for layer in (nn.Linear(768, 768), nn.ReLU())]
        model = DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(768, 10)), bucket_cap_mb=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        pictures, classes = torch.randn(256, 768), torch.randint(0, 10, (256,))
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures), classes).backward()
            optimizer.step()

    with me.torch_group():
        me.serve(steps)


def recorded(rate: str) -> ProfiledJob:
    with tempfile.TemporaryDirectory(prefix="netfold-plan-profile-") as folder:
        with driver.ranks_at(Place(HOSTS, rate), train, environment={"NETFOLD_PROFILE": folder}) as ranks:
            ranks.ask()
        return read_profile(Path(folder))


def plan_profile(rounds: int = 3) -> str:
    """A profile's predictions beside measured steps"""
    rows: list[list[Any]] = []
    errors: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1, rounds + 1):
        found = {rate: recorded(rate) for rate in RATES}
        for rate, profiled in found.items():
            for other, measured in found.items():
                if isinstance(measured.network, str):
                    rows.append([number, rate, other, "-", "-", measured.network])
                    continue
                wanted = Job(HOSTS, split=Split(data=HOSTS), precision=profiled.precision, overlap=True)
                predicted_s = predict(profiled.model, measured.network, wanted).step_s
                step_s = measured.model.step_s
                error = predicted_s / step_s - 1
                errors[rate == other].append(error)
                ms = [f"{1e3 * seconds:.0f} ms" for seconds in (predicted_s, step_s)]
                rows.append([number, rate, other, *ms, f"{100 * error:+.1f}%"])
    return f"""Two hosts of a rack train a perceptron of 3.5 million weights by DDP over netfold, with links of three
rates. *Measured* is a step, the mean of its ranks and the median of some 55. A profile of one rate is put on the
network that another profile's all_reduces show.

- On its own network: mean error {mean_error(errors[True])}.
- On another's: mean error {mean_error(errors[False])}.

{driver.table("round | profile of | on the network of | predicted | measured | error", rows)}"""


def mean_error(errors: list[float]) -> str:
    if not errors:
        return "not known"
    size = fmean(map(abs, errors))
    return f"{100 * size:.1f}% ({100 * min(errors):+.1f} to {100 * max(errors):+.1f}%, {len(errors)} predictions)"


if __name__ == "__main__":
    driver.run(plan_events, plan_packets, plan_profile)
