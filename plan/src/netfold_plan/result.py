"""The planner's result: the best split, its prediction, and the comparisons that the request asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from netfold import units
from netfold_plan.cluster import Cluster
from netfold_plan.events import Conditions, Simulated, simulate
from netfold_plan.failures import Failures, best_interval_s, expected_goodput
from netfold_plan.job import Job
from netfold_plan.model import Chain, Layered, Measured, Model, Profiled, TimedStep, Traced
from netfold_plan.request import Request
from netfold_plan.search import ZERO_3_RANKS, PredictedJob, SearchResult, search
from netfold_plan.step import Prediction, predict
from netfold_plan.training import Cost, training_cost
from netfold_plan.variants.compare import Variant, compare, parse_comparison
from netfold_plan.variants.hardware import AggregatorGain, Gain, aggregator_gains, sensitivity, useless_aggregators
from netfold_plan.variants.scaling_curve import SCALINGS, ScalingPoint, scaling_curve

# Candidates that are shown, and points of the front of time and memory.
FEW, FRONT = 5, 8


@dataclass(frozen=True)
class FailureImpact:
    """The best interval of computing between checkpoints, and the part of the time that then makes progress."""

    interval_s: float
    goodput: float


@dataclass(frozen=True)
class Result:
    """efficiency: throughput per device, over that of one replica alone with as many samples of its own.

    tried, fitting: how many candidates were predicted, and how many fit.
    best_few: the fastest of each mesh. front: no fitting candidate is better in both time and memory.
    gains, aggregator_gains: what more of one resource, and one more aggregator, would gain.
    curves: by scaling. notes: where the result goes beyond what was measured.
    simulated: the best split as events.
    training_s, training_cost: of the whole training without failures, where its length is known.
    """

    request: Request
    best: PredictedJob
    efficiency: float
    tried: int
    fitting: int
    best_few: tuple[PredictedJob, ...]
    front: tuple[PredictedJob, ...]
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
    """Answer a request. Raises ValueError, in one sentence, where no split divides evenly, or none fits.

    sizes: numbers of devices of a curve. comparisons: texts for `parse_comparison`.
    conditions: simulate the best split as events, too.
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
        len(found.candidates),
        len(found.fitting),
        found.best_few(FEW),
        _thinned(found),
        sensitivity(model, cluster, found),
        aggregator_gains(model, cluster, found),
        {
            scaling: scaling_curve(
                model, cluster, job, space, devices=devices, sizes=sizes, scaling=scaling, training=asked.training
            )
            # A profile is only of its own number of samples per rank.
            for scaling in (("weak",) if measured and sizes else SCALINGS if sizes else ())
        },
        {text: compare(found, model, cluster, clusters) for text, clusters in others.items()},
        notes(asked, best),
        None if conditions is None else simulate(model, cluster, best.job, conditions),
        None if asked.failures is None else _failure_impact(asked.failures),
        seconds,
        None if seconds is None else training_cost(seconds, devices, cluster, asked.prices),
        training_cost(best.prediction.step_s, devices, cluster, asked.prices),
    )


# Beyond so many ranks two frameworks' pipelines took different times for one model (lab/bench/results/plan.md).
_PIPELINE_RANKS = 2000


def notes(asked: Request, best: PredictedJob) -> tuple[str, ...]:
    """Say where the result goes beyond the measurements that the model was compared with."""
    said, split = [], best.job.split
    if split.zero == 3 and split.data > ZERO_3_RANKS:
        said.append(
            f"ZeRO-3 over {split.data:,} ranks: published runs agree up to {ZERO_3_RANKS}; beyond, DeepSpeed's of "
            "early 2021 hid no gather and took 1.3 to 1.6 times as long"
        )
    if split.pipeline > 1 and split.ranks > _PIPELINE_RANKS:
        said.append(
            f"pipelines over {split.ranks:,} ranks: Megatron-LM's published runs agree within 4%, DeepSpeed's of "
            "Megatron-Turing took 1.26 to 1.31 times as long as predicted"
        )
    if split.tensor > asked.cluster.node:
        said.append(f"{split.tensor} tensor ranks exceed a node of {asked.cluster.node}: no published run does that")
    for each in useless_aggregators(asked.cluster, split.ranks):
        said.append(
            f"{each.text()} aggregates nothing: its link carries the worker's own traffic, and only its rate beyond "
            "another worker's link is left"
        )
    more = _profile_notes(asked, best) if isinstance(asked.model, Profiled) else _model_notes(asked.model, best.job)
    return (*said, *more)


def _failure_impact(failures: Failures) -> FailureImpact:
    interval_s = best_interval_s(failures)
    return FailureImpact(interval_s, expected_goodput(failures, interval_s))


def _model_notes(model: Model, job: Job) -> list[str]:
    if isinstance(model, Chain):
        return [f"{model.name}: layers count as matrix products; this was not compared with measurements"]
    if isinstance(model, Traced):
        return [
            *model.notes,
            f"{model.name}: traced with {model.samples} samples; its kernels count as issued one by one, and this was "
            "not compared with measurements",
        ]
    if isinstance(model, TimedStep):
        return [
            f"{model.name}: a rank computes as timed on one host, with {model.samples} samples per rank",
            "the memory of a rank was not measured",
        ]
    if not isinstance(model, Layered):
        return []
    if not model.measured:
        return [
            f"{model.name}: convolutions count as matrix products; in f32 libraries need half to a quarter of "
            f"that time (Winograd); {model.name}:measured=true uses a published speed instead"
        ]
    batch = model.listed.speed.batch
    if job.micro_batch == batch:
        return []
    return [f"microbatches of {job.micro_batch}: {model.name}'s published speed is of {batch}; smaller ones are slower"]


def _profile_notes(asked: Request, best: PredictedJob) -> list[str]:
    """The measured step beside the predicted one, and what the prediction takes over unchanged."""
    model, split = asked.model, best.job.split
    assert isinstance(model, Profiled)
    said = [
        f"{model.name}: {model.ranks} ranks took {units.seconds(model.step_s)} per step, and waited "
        f"{units.seconds(model.exposed_s)} of it for communication"
    ]
    if split.ranks == model.ranks:
        off = best.prediction.step_s / model.step_s - 1
        said[0] += f"; predicted for as many on {asked.cluster.name}: {100 * off:+.1f}%"
    share = "as many samples per rank (1 stands for all)" if model.samples == 1 else f"{model.samples} samples per rank"
    said.append(f"a rank computes as measured: on the same device, with {share}")
    if split.ranks > model.ranks:
        said.append("more ranks wait longer for the slowest of them; the prediction does not include that")
    return [*said, "a profile does not show the memory of a rank", *model.notes]


def efficiency(model: Model, cluster: Cluster, choice: PredictedJob) -> float:
    """Of scaling out by data parallelism: 1 where replicas cost each other nothing."""
    job, data = choice.job, choice.job.split.data
    alone = replace(job, global_batch=job.global_batch // data, split=replace(job.split, data=1, zero=0))
    return predict(model, cluster, alone).step_s / choice.prediction.step_s


def stage_ranks(job: Job) -> list[int]:
    """The first rank of each pipeline stage, which shows the work of the whole stage."""
    split = job.split
    return [stage * split.tensor * split.data for stage in range(split.pipeline)]


def parts(prediction: Prediction) -> dict[str, float]:
    """The parts of a step in seconds; together they are the step."""
    found = {"computing": prediction.compute_s}
    found |= {f"communication, {kind}": seconds for kind, seconds in prediction.exposed_s.items() if seconds > 0}
    found |= {"bubble": prediction.bubble_s} if prediction.bubble_s > 0 else {}
    return found | {"optimizer": prediction.optimizer_s}


def reason(choice: PredictedJob, best: PredictedJob) -> str:
    """The part that limits the best choice; of another choice, the part that takes most more time than in the best."""
    if choice is best:
        return choice.prediction.limit
    here, there = parts(choice.prediction), parts(best.prediction)
    more = {name: here.get(name, 0.0) - there.get(name, 0.0) for name in {**here, **there}}
    name = max(more, key=lambda each: more[each])
    if more[name] <= 0:
        return "as fast"
    return f"{name} takes {100 * more[name] / best.prediction.step_s:.1f}% of a step more"


def _thinned(found: SearchResult) -> tuple[PredictedJob, ...]:
    """The ends of the front, and evenly spaced points between them."""
    front = found.front
    if len(front) <= FRONT:
        return front
    return tuple(front[round(index * (len(front) - 1) / (FRONT - 1))] for index in range(FRONT))
