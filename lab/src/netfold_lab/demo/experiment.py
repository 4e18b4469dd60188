"""The demo, in order: train over netfold, over gloo, over gloo with permuted ranks; then compare quality and losses.

Both backends have the same seeds, photographs, global batches and worker code. Each has processes of its own.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from netfold_lab.demo import launch
from netfold_lab.demo.agreement import Agreement, compare
from netfold_lab.demo.batches import batch
from netfold_lab.demo.settings import SCALE, Job, Run, Training, permuted_orders, straight
from netfold_lab.demo.worker import RankResult, result_path, weights_path
from netfold_lab.rack.processes import exit_on_signals
from netfold_train.zoo.data.resolution import bicubic, psnr, to_8_bits
from netfold_train.zoo.data.super_resolution import HELD_OUT, TRAINING, Pair, photograph
from netfold_train.zoo.models.edsr import edsr

# Enough steps for rounding to grow from the last bit to 1000 times that. Later, all differences grow alike.
COMPARED_STEPS = 20
PERMUTATIONS = 3


@dataclass(frozen=True)
class Outcome:
    """The result of one run, over all its workers."""

    run: Run
    losses: list[float]
    """The mean L1 over the global batch in each step."""
    images_per_s: float
    wire_bytes_per_step: float
    """Bytes sent and received by one worker in a median step, counted at the `lo` interface, headers included."""
    collective_s_per_step: float
    step_s: float
    replicas_equal: bool
    """Whether all workers ended with bitwise equal weights."""


@dataclass(frozen=True)
class HeldOut:
    """One held-out photograph and its enlargements. Pictures are [3, height, width], 0..1, in 8-bit steps."""

    name: str
    pair: Pair
    bicubic: Tensor
    netfold: Tensor
    psnr: dict[str, float]
    """PSNR in dB by row of the table: bicubic, netfold, gloo."""


@dataclass(frozen=True)
class Experiment:
    training: Training
    parameters: int
    netfold: Outcome
    gloo: Outcome
    agreement: Agreement
    bicubic_losses: list[float]
    """The loss of plain bicubic on the same batches."""
    held_out: list[HeldOut]

    def mean_psnr(self, row: str) -> float:
        return float(np.mean([photograph.psnr[row] for photograph in self.held_out]))

    def failures(self) -> list[str]:
        """Sentences on what failed; empty if the demo succeeded."""
        found = []
        for outcome in (self.netfold, self.gloo):
            gain = self.mean_psnr(outcome.run.backend) - self.mean_psnr("bicubic")
            if not gain > 0:
                found.append(
                    f"EDSR trained over {outcome.run.backend} is {-gain:.2f} dB worse than bicubic on the "
                    f"held-out photographs; with --steps below the default it may need more steps"
                )
            if not outcome.replicas_equal:
                found.append(
                    f"the workers of {outcome.run.backend} ended with different weights: at least one "
                    f"all-reduce gave different sums on different ranks"
                )
        if not self.agreement.within_rounding:
            found.append(
                f"the losses over netfold differ from gloo's by more than rounding in the first "
                f"{self.agreement.steps} steps: {self.agreement.in_words()}"
            )
        return found


def runs_over_netfold(training: Training) -> tuple[Run, ...]:
    return (Run("netfold", "netfold", straight(training.workers), training.steps),)


def runs_over_gloo(training: Training) -> tuple[Run, ...]:
    """The same run as over netfold, then its first steps with the ranks in other orders."""
    compared = min(COMPARED_STEPS, training.steps)
    return (
        Run("gloo", "gloo", straight(training.workers), training.steps),
        *(
            Run(f"gloo, ranks {' '.join(map(str, order))}", "gloo", order, compared)
            for order in permuted_orders(training.workers, PERMUTATIONS)
        ),
    )


def run_experiment(training: Training, stepped: Callable[[str, int, float], None]) -> Experiment:
    """Run the demo. `stepped(run name, step, loss)` is called after each step. Raises launch.LaunchError."""
    with tempfile.TemporaryDirectory(prefix="netfold-demo-") as name, exit_on_signals():
        folder = Path(name)
        over_netfold = Job(training, runs_over_netfold(training), _made(folder / "netfold"))
        with launch.switch() as address:
            # The named algorithm has no substitute, so the demo uses the switch or fails.
            in_network = {"NETFOLD_SWITCH": address, "NETFOLD_ALGORITHM": "in_network"}
            launch.train(over_netfold, in_network, stepped)
        over_gloo = Job(training, runs_over_gloo(training), _made(folder / "gloo"))
        launch.train(over_gloo, {}, stepped)

        netfold = _outcome(over_netfold, over_netfold.runs[0])
        gloo, *permuted = (_outcome(over_gloo, run) for run in over_gloo.runs)
        models = {
            "netfold": _trained(over_netfold, over_netfold.runs[0]),
            "gloo": _trained(over_gloo, over_gloo.runs[0]),
        }
    return Experiment(
        training=training,
        parameters=sum(parameter.numel() for parameter in models["netfold"].parameters()),
        netfold=netfold,
        gloo=gloo,
        agreement=compare(netfold.losses, gloo.losses, [outcome.losses for outcome in permuted]),
        bicubic_losses=_bicubic_losses(training),
        held_out=[_held_out(name, models) for name in HELD_OUT],
    )


def _made(folder: Path) -> str:
    folder.mkdir()
    return str(folder)


def _outcome(job: Job, run: Run) -> Outcome:
    ranks = [RankResult(**json.loads(result_path(job, run, rank).read_text())) for rank in range(len(run.order))]
    # In the order of shares, not of ranks: permuting ranks must not change the rounding of this mean.
    by_share = sorted(range(len(ranks)), key=lambda rank: run.order[rank])
    losses = np.array([ranks[rank].losses for rank in by_share]).mean(axis=0).tolist()
    steps, seconds = ranks[0].measured_steps, max(rank.seconds for rank in ranks)
    # From rank to rank, a byte on `lo` leaves one worker and reaches another worker. Through the switch, one end of
    # each transfer is the switch.
    ends = 1 if run.backend == "netfold" else 2
    return Outcome(
        run=run,
        losses=losses,
        images_per_s=job.training.patches * steps / seconds,
        wire_bytes_per_step=ends * ranks[0].loopback_bytes_per_step / len(ranks),
        collective_s_per_step=float(np.mean([rank.collective_s for rank in ranks])) / steps,
        step_s=seconds / steps,
        replicas_equal=len({rank.weights_sha256 for rank in ranks}) == 1,
    )


def _trained(job: Job, run: Run) -> nn.Module:
    model = edsr(job.training.features, job.training.blocks, SCALE).module
    model.load_state_dict(torch.load(weights_path(job, run), weights_only=True))
    return model.eval()


def _bicubic_losses(training: Training) -> list[float]:
    pairs = [photograph(name, SCALE) for name in TRAINING]
    losses = []
    for step in range(training.steps):
        low, truth = batch(training, pairs, step, range(training.patches))
        losses.append(float((bicubic(low, SCALE) - truth).abs().mean()))
    return losses


@torch.no_grad()
def _held_out(name: str, models: dict[str, nn.Module]) -> HeldOut:
    pair = photograph(name, SCALE)
    pictures = {"bicubic": bicubic(pair.low, SCALE)}
    pictures |= {backend: model(pair.low[None])[0] for backend, model in models.items()}
    return HeldOut(
        name=Path(name).stem,
        pair=pair,
        bicubic=to_8_bits(pictures["bicubic"]),
        netfold=to_8_bits(pictures["netfold"]),
        psnr={row: float(psnr(picture, pair.truth)) for row, picture in pictures.items()},
    )
