"""The program of each rank: `python -m netfold_lab.demo.worker JOB`, plain torch.distributed code.

JOB is `settings.Job` as JSON; RANK and WORLD_SIZE are in the environment. Rank 0 writes one JSON line for each step on
stdout. At the end of a run every rank writes `<run>.rank<r>.json` into the job's folder, and rank 0 also the trained
weights. The code is the same for every backend.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netfold_lab.demo.batches import batch, share
from netfold_lab.demo.clock import CollectiveClock
from netfold_lab.demo.settings import SCALE, Job, Run, Training
from netfold_train.zoo.data.super_resolution import TRAINING, Pair, photograph
from netfold_train.zoo.models.edsr import edsr

# Steps before the measurement: DDP rebuilds its buckets after the first step; memory and caches become steady.
SETTLING_STEPS = 5
# With this size the gradients (about 1 MB) are sent in a few buckets, like a large model's, not in one bucket at the
# end.
BUCKET_MB = 0.4
# The last layer starts at 0, so the first gradients are about 1e-8. Adam's default of 1e-8 would turn their rounding
# into full steps. This value does not, and the result is as good.
ADAM_EPSILON = 1e-7
LOOPBACK_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")


@dataclass(frozen=True)
class RankResult:
    """One rank's results of a run. All but the losses and the weights are from after the settling steps."""

    losses: list[float]
    """The mean L1 of this rank's share in each step."""
    measured_steps: int
    seconds: float
    collective_s: float
    loopback_bytes_per_step: float
    """Bytes that the whole machine sent over `lo` in a median step."""
    weights_sha256: str


def main() -> None:
    job = Job.from_json(sys.argv[1])
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # With more threads, the workers of one machine would wait for each other's cores.
    torch.set_num_threads(1)
    pairs = [photograph(name, SCALE) for name in TRAINING]
    for number, run in enumerate(job.runs):
        rendezvous = Path(job.folder) / f"meet-{run.backend}-{number}"
        dist.init_process_group(run.backend, init_method=f"file://{rendezvous}", rank=rank, world_size=workers)
        model, result = _train(job.training, run, pairs, rank)
        dist.destroy_process_group()
        if rank == 0:
            torch.save(model.state_dict(), weights_path(job, run))
        result_path(job, run, rank).write_text(json.dumps(asdict(result)))


def result_path(job: Job, run: Run, rank: int) -> Path:
    return Path(job.folder) / f"{job.runs.index(run)}-{run.backend}.rank{rank}.json"


def weights_path(job: Job, run: Run) -> Path:
    return Path(job.folder) / f"{job.runs.index(run)}-{run.backend}.weights.pt"


def learning_rate(training: Training, step: int) -> float:
    """A linear rise, then a half cosine. It depends only on the step, so that short runs have the same rates."""
    rise = min(1.0, (step + 1) / training.ramp_steps)
    return training.learning_rate * rise * 0.5 * (1.0 + math.cos(math.pi * step / training.steps))


def _train(training: Training, run: Run, pairs: Sequence[Pair], rank: int) -> tuple[nn.Module, RankResult]:
    torch.manual_seed(training.seed)
    asked = edsr(training.features, training.blocks, SCALE)
    # This layout is a quarter faster on CPUs.
    model = asked.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    replica = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    clock = CollectiveClock()
    replica.register_comm_hook(None, clock.hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate, eps=ADAM_EPSILON)
    indices = share(training, run.order, rank)

    losses: list[float] = []
    sent_bytes: list[int] = []
    started_s = 0.0
    for step in range(run.steps):
        if step == SETTLING_STEPS:
            clock.reset()
            started_s = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        low, truth = batch(training, pairs, step, indices)
        optimizer.zero_grad()
        loss = asked.losses(replica(low.contiguous(memory_format=torch.channels_last)), truth).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        sent_bytes.append(int(LOOPBACK_SENT.read_text()))
        if rank == 0:
            print(json.dumps({"run": run.name, "step": step + 1, "loss": losses[-1]}), flush=True)
    return model, RankResult(
        losses=losses,
        measured_steps=run.steps - SETTLING_STEPS,
        seconds=time.perf_counter() - started_s,
        collective_s=clock.in_flight_s(),
        loopback_bytes_per_step=_median_growth(sent_bytes[SETTLING_STEPS:]),
        weights_sha256=_weights_sha256(model),
    )


def _median_growth(counter: Sequence[int]) -> float:
    """The median of the growth: the counter is the machine's, and bursts of other programs must not count."""
    return statistics.median(after - before for before, after in itertools.pairwise(counter))


def _weights_sha256(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
