"""An answer of the planner: the best way to split, what it comes to, and what was asked beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from netfold import units
from netfold.plan.aggregators import AggregatorGain, aggregator_gains, idle_workers
from netfold.plan.cluster import Cluster
from netfold.plan.compare import Variant, compare, parse_comparison
from netfold.plan.cost_of_training import Cost, training_cost
from netfold.plan.events import Conditions, Simulated, simulate
from netfold.plan.failures import Failures, best_interval_s, expected_goodput
from netfold.plan.job import Job
from netfold.plan.model import Chain, Layered, Measured, Model, Profiled, TimedStep, Traced
from netfold.plan.request import Request
from netfold.plan.scaling_curve import SCALINGS, ScalingPoint, scaling_curve
from netfold.plan.search import ZERO_3_RANKS, Choice, SearchResult, search
from netfold.plan.sensitivity import Gain, sensitivity
from netfold.plan.step import Prediction, predict

# Ways beside the best that are shown, and points of the front of time and memory.
FEW, FRONT = 5, 8


@dataclass(frozen=True)
class RankedChoice:
    """One of the best few, and why it is not better than the best."""

    choice: Choice
    reason: str


@dataclass(frozen=True)
class FailureImpact:
    """With failures: a checkpoint every interval_s of computing loses least; `goodput` of the time makes progress."""

    interval_s: float
    goodput: float


@dataclass(frozen=True)
class Result:
    """tried, fitting: ways that were predicted, and that fit. efficiency: throughput a device, against one replica that
    trains alone, with as many samples of its own. few: the fastest of each mesh. front: none of those that fit is
    better in both time and memory. offers: what one more aggregator would buy. curves: by scaling. notes: what to be
    careful with. played: the best way, as events. training_s, training_cost: of the whole training, where its length is
    known, without failures.
    """

    request: Request
    best: Choice
    efficiency: float
    tried: int
    fitting: int
    best_few: tuple[RankedChoice, ...]
    front: tuple[Choice, ...]
    gains: tuple[Gain, ...]
    aggregator_gains: tuple[AggregatorGain, ...]
    curves: dict[str, tuple[ScalingPoint, ...]]
    comparisons: dict[str, tuple[Variant, ...]]
    notes: tuple[str, ...]
    simulated: Simulated | None
    failure_impact: FailureImpact | None
    training_s: float | None
    training_cost: Cost | None
    step_cost: Cost


def solve(
    asked: Request,
    *,
    sizes: tuple[int, ...] = (),
    comparisons: tuple[str, ...] = (),
    conditions: Conditions | None = None,
) -> Result:
    """Raises ValueError, in a sentence, where no way comes out even, or none fits: then by how much.

    sizes: numbers of devices of a curve. comparisons: as `parse_comparison` reads them. conditions: under which the
    best way is played as events too.
    """
    model, cluster, job, space, devices = asked.model, asked.cluster, asked.job, asked.space, asked.devices
    measured = isinstance(model, Measured)
    others = {text: parse_comparison(text, cluster, keep_device=measured) for text in comparisons}
    found = search(model, cluster, devices, job, space)
    try:
        best = found.best
    except ValueError as error:
        raise ValueError(f"{model.name} {error}") from None
    seconds = asked.training.seconds(job.global_batch, best.prediction.samples_per_s)
    return Result(
        asked,
        best,
        efficiency(model, cluster, best),
        found.tried,
        len(found.fitting),
        tuple(RankedChoice(choice, reason(choice, best)) for choice in found.best_few(FEW)),
        _thinned(found),
        sensitivity(model, cluster, found),
        aggregator_gains(model, cluster, found),
        {
            scaling: scaling_curve(
                model, cluster, job, space, devices=devices, sizes=sizes, scaling=scaling, training=asked.training
            )
            # Of another number of samples a rank a profile says nothing.
            for scaling in (("weak",) if measured and sizes else SCALINGS if sizes else ())
        },
        {text: compare(found, model, cluster, clusters) for text, clusters in others.items()},
        notes(asked, best),
        None if conditions is None else simulate(model, cluster, best.job, conditions),
        None if asked.failures is None else _lasting(asked.failures),
        seconds,
        None if seconds is None else training_cost(seconds, devices, cluster, asked.prices),
        training_cost(best.prediction.step_s, devices, cluster, asked.prices),
    )


# Beyond them two frameworks' pipelines took different times for one model (bench/results/plan.md).
_PIPELINE_RANKS = 2000


def notes(asked: Request, best: Choice) -> tuple[str, ...]:
    """Where the answer goes beyond what it was held against."""
    said, split = [], best.job.split
    if split.zero == 3 and split.data > ZERO_3_RANKS:
        said.append(
            f"ZeRO-3 over {split.data:,} ranks: published runs agree up to {ZERO_3_RANKS}; beyond, DeepSpeed's of "
            "early 2021 hid nothing of it and took 1.3 to 1.6 times as long"
        )
    if split.pipeline > 1 and split.ranks > _PIPELINE_RANKS:
        said.append(
            f"pipelines over {split.ranks:,} ranks: Megatron-LM's published runs agree within 4%, DeepSpeed's of "
            "Megatron-Turing took 1.26 to 1.31 times as long as predicted"
        )
    if split.tensor > asked.cluster.node:
        said.append(f"{split.tensor} tensor ranks go beyond a node of {asked.cluster.node}: no published run does that")
    for each in idle_workers(asked.cluster, split.ranks):
        said.append(
            f"{each.text()} adds nothing: its link carries the worker's own traffic, and only what it has beyond "
            "another worker's link is left (docs/how-to/aggregators.md)"
        )
    said += _of_profile(asked, best) if isinstance(asked.model, Profiled) else _of_model(asked.model, best.job)
    return tuple(said)


def _lasting(failures: Failures) -> FailureImpact:
    interval_s = best_interval_s(failures)
    return FailureImpact(interval_s, expected_goodput(failures, interval_s))


def _of_model(model: Model, job: Job) -> list[str]:
    if isinstance(model, Chain):
        return [f"{model.name}: layers are taken as matrix products; nothing measured was held against that"]
    if isinstance(model, Traced):
        return [
            *model.notes,
            f"{model.name}: traced with {model.samples} samples; its kernels are taken as they are issued one by one, "
            "and nothing measured was held against that",
        ]
    if isinstance(model, TimedStep):
        return [
            f"{model.name}: what a rank computes is as it was timed on one host, with {model.samples} samples a rank",
            "what a rank holds in memory was not measured",
        ]
    if not isinstance(model, Layered):
        return []
    if not model.measured:
        return [
            f"{model.name}: convolutions are taken as matrix products; in f32 libraries need half to a quarter of that "
            f"time (Winograd); {model.name}:measured=true takes a published speed instead"
        ]
    batch = model.listed.speed.batch
    if job.micro_batch == batch:
        return []
    return [f"microbatches of {job.micro_batch}: {model.name}'s published speed is of {batch}, smaller ones are slower"]


def _of_profile(asked: Request, best: Choice) -> list[str]:
    """What was measured, beside what is predicted; and what stays as it was there."""
    model, split = asked.model, best.job.split
    assert isinstance(model, Profiled)
    said = [
        f"{model.name}: there {model.ranks} ranks took {units.seconds(model.step_s)} a step, of which "
        f"{units.seconds(model.exposed_s)} waited for communication"
    ]
    if split.ranks == model.ranks:
        off = best.prediction.step_s / model.step_s - 1
        said[0] += f"; predicted for as many on {asked.cluster.name}, {100 * off:+.1f}%"
    share = (
        "as many samples a rank (1 stands for all of them)" if model.samples == 1 else f"{model.samples} samples a rank"
    )
    said.append(f"what a rank computes is as it was measured: on the same device, with {share}")
    if split.ranks > model.ranks:
        said.append("more ranks wait longer for the slowest of them; that is not in it")
    return [*said, "what a rank holds in memory is not known from a profile", *model.notes]


def efficiency(model: Model, cluster: Cluster, choice: Choice) -> float:
    """Of scaling out by data parallelism: 1 where replicas cost one another nothing."""
    job, data = choice.job, choice.job.split.data
    alone = replace(job, global_batch=job.global_batch // data, split=replace(job.split, data=1, zero=0))
    return predict(model, cluster, alone).step_s / choice.prediction.step_s


def stage_ranks(job: Job) -> list[int]:
    """The first rank of each pipeline stage: who shows what all do."""
    split = job.split
    return [stage * split.tensor * split.data for stage in range(split.pipeline)]


def parts(prediction: Prediction) -> dict[str, float]:
    """What a step's seconds go to; together they are the step."""
    found = {"computing": prediction.compute_s}
    found |= {f"communication, {kind}": seconds for kind, seconds in prediction.exposed_s.items() if seconds > 0}
    found |= {"bubble": prediction.bubble_s} if prediction.bubble_s > 0 else {}
    return found | {"optimizer": prediction.optimizer_s}


def reason(choice: Choice, best: Choice) -> str:
    """What limits a way; of one that is not the best, what it pays more for."""
    if choice is best:
        return choice.prediction.limit
    here, there = parts(choice.prediction), parts(best.prediction)
    more = {name: here.get(name, 0.0) - there.get(name, 0.0) for name in {**here, **there}}
    name = max(more, key=lambda each: more[each])
    if more[name] <= 0:
        return "as fast"
    return f"{name} takes {100 * more[name] / best.prediction.step_s:.1f}% of a step more"


def _thinned(found: SearchResult) -> tuple[Choice, ...]:
    """The front's ends, and what lies evenly between them."""
    front = found.front
    if len(front) <= FRONT:
        return front
    return tuple(front[round(index * (len(front) - 1) / (FRONT - 1))] for index in range(FRONT))
