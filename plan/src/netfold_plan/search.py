"""Every split of a job over a number of devices that divides evenly, and the best of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from netfold_plan.cluster import Cluster
from netfold_plan.job import RECOMPUTATIONS, Job, Split
from netfold_plan.model import Model, ShardSpec
from netfold_plan.step import Prediction, predict

# The largest microbatch that is tried, beside the whole of a rank's share, and the most virtual stages per rank.
MOST_MICRO_BATCH, MOST_VIRTUAL_STAGES = 64, 8
# ZeRO-3 is tried over at most so many ranks unless it is fixed. Published runs agree so far (llm-foundry's FSDP).
# Larger runs are DeepSpeed's of early 2021, which hid nothing and took 1.3 to 1.6 times as long as with prefetch.
ZERO_3_RANKS = 128
# With more candidates the search stops, and asks for a fixed value.
MAX_CANDIDATES = 60_000
# A cluster that changes a little gets new predictions for the fastest so many candidates of all, and of each mesh. Any
# other candidate would have to overtake all of these.
SHORTLIST, OF_A_MESH = 50, 4


@dataclass(frozen=True)
class Space:
    """The fixed part of a split; None is free."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    interleave: int | None = None
    sequence: bool | None = None
    zero: int | None = None
    recomputation: str | None = None


@dataclass(frozen=True)
class PredictedJob:
    """A job with a split, and its prediction."""

    job: Job
    prediction: Prediction

    @property
    def mesh(self) -> tuple[int, int, int]:
        split = self.job.split
        return split.tensor, split.pipeline, split.data


@dataclass(frozen=True)
class SearchResult:
    """candidates: all that were predicted, ordered by `rank_by_time`. fitting: those that fit a device's memory.

    front: the fitting candidates that no other one beats in both time and memory.
    """

    candidates: tuple[PredictedJob, ...]
    fitting: tuple[PredictedJob, ...]
    front: tuple[PredictedJob, ...]

    @property
    def least(self) -> PredictedJob:
        """The candidate that needs least memory, whether it fits or not."""
        return min(self.candidates, key=lambda choice: choice.prediction.memory.total)

    @property
    def best(self) -> PredictedJob:
        """Raises ValueError where no candidate fits: one sentence that says how much memory is missing."""
        if not self.fitting:
            raise ValueError(self._too_large())
        return self.fitting[0]

    def best_few(self, count: int) -> tuple[PredictedJob, ...]:
        """The fastest of each mesh, so that they differ."""
        meshes: dict[tuple[int, int, int], PredictedJob] = {}
        for choice in self.fitting:
            meshes.setdefault(choice.mesh, choice)
        return tuple(meshes.values())[:count]

    def shortlist(self, memory_bytes: float) -> tuple[PredictedJob, ...]:
        """The fastest of all and of each mesh that fit into so much memory; the fastest first."""
        kept: list[PredictedJob] = []
        meshes: Counter[tuple[int, int, int]] = Counter()
        for choice in self.candidates:
            if choice.prediction.memory.total > memory_bytes:
                continue
            meshes[choice.mesh] += 1
            if len(kept) < SHORTLIST or meshes[choice.mesh] <= OF_A_MESH:
                kept.append(choice)
        return tuple(kept)

    def _too_large(self) -> str:
        job, found = self.least.job, self.least.prediction
        need, there = found.memory.total / 2**30, found.memory_bytes / 2**30
        however = f", however split ({len(self.candidates):,} ways)" if len(self.candidates) > 1 else ""
        return (
            f"does not fit{however}: it needs at least {need:.1f} GB per device, which has {there:.1f} GB, "
            f"{need - there:.1f} GB too little ({describe_split(job)}); use more devices, or devices with more memory"
        )


def search(model: Model, cluster: Cluster, devices: int, job: Job, space: Space | None = None) -> SearchResult:
    """Predict every candidate. job: its split, microbatch and recomputation are replaced.

    Raises ValueError, in one sentence, where no split divides evenly, or more than MAX_CANDIDATES do.
    """
    space = space or Space()
    if devices > cluster.devices:
        raise ValueError(f"{devices} devices are asked for, and {cluster.name} has {cluster.devices}")
    candidates: list[PredictedJob] = []
    refused = ""
    for candidate in _candidates(model, devices, job, space):
        if len(candidates) == MAX_CANDIDATES:
            raise ValueError(
                f"there are more than {MAX_CANDIDATES:,} ways to split over {devices} devices; fix one value, such as "
                "tensor, pipeline or micro_batch"
            )
        try:
            candidates.append(PredictedJob(candidate, predict(model, cluster, candidate)))
        except ValueError as error:
            refused = str(error)
    if not candidates:
        raise ValueError(refused or _none_even(model, devices, job, space))
    candidates.sort(key=rank_by_time)
    fitting = [choice for choice in candidates if choice.prediction.fits]
    return SearchResult(tuple(candidates), tuple(fitting), _front(fitting))


def fastest(model: Model, cluster: Cluster, jobs: Iterable[Job]) -> PredictedJob:
    """Predict the jobs on a cluster, and choose by `rank_by_time`."""
    return min((PredictedJob(job, predict(model, cluster, job)) for job in jobs), key=rank_by_time)


def rank_by_time(choice: PredictedJob) -> tuple[float, ...]:
    """By time; among times that are equal to three digits, the simplest split first."""
    job, step_s = choice.job, choice.prediction.step_s
    effort = (job.split.zero, RECOMPUTATIONS.index(job.recomputation), job.split.interleave)
    return float(f"{step_s:.3g}"), *effort, step_s, choice.prediction.memory.total


def describe_split(job: Job) -> str:
    said = [job.split.text(), f"microbatches of {job.micro_batch}"]
    if job.recomputation != "none":
        said.append(f"{job.recomputation} recomputation")
    return ", ".join(said)


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _front(fitting: list[PredictedJob]) -> tuple[PredictedJob, ...]:
    front: list[PredictedJob] = []
    for choice in fitting:
        if not front or choice.prediction.memory.total < 0.999 * front[-1].prediction.memory.total:
            front.append(choice)
    return tuple(front)


def _candidates(model: Model, devices: int, job: Job, space: Space) -> Iterator[Job]:
    for tensor in _free(divisors(devices), space.tensor):
        try:
            layers = model.layers(ShardSpec(space.micro_batch or 1, tensor))
        except ValueError:
            continue
        depth = max(layer.count for layer in layers)
        # A chain of single layers is cut anywhere; equal blocks are divided evenly.
        even, depth = (True, depth) if depth > 1 else (False, len(layers))
        for pipeline in _free(divisors(devices // tensor), space.pipeline):
            data = devices // (tensor * pipeline)
            if tensor * pipeline * data != devices or pipeline > depth or (even and depth % pipeline):
                continue
            if space.data not in (None, data) or job.global_batch % data:
                continue
            yield from _of_mesh(job, space, Split(data, tensor, pipeline), depth if even else pipeline)


def _free(values: list[int], fixed: int | None) -> list[int]:
    return values if fixed is None else [fixed]


def _of_mesh(job: Job, space: Space, mesh: Split, depth: int) -> Iterator[Job]:
    """The candidates that share a mesh. depth: the number of equal layers.

    A fixed value without effect is ignored: virtual stages without a pipeline, ZeRO without data-parallel ranks.
    """
    local = job.global_batch // mesh.data
    sizes = {2**power for power in range(MOST_MICRO_BATCH.bit_length())} | {local}
    for micro_batch in _free(sorted(sizes), space.micro_batch):
        if local % micro_batch:
            continue
        for interleave in _virtual_stages(job, mesh, local // micro_batch, depth, space.interleave):
            for sequence in _sequences(mesh, space.sequence):
                for zero in _zeros(mesh, space.zero):
                    for recomputation in RECOMPUTATIONS if space.recomputation is None else [space.recomputation]:
                        yield replace(
                            job,
                            micro_batch=micro_batch,
                            recomputation=recomputation,
                            split=replace(mesh, interleave=interleave, sequence=sequence, zero=zero),
                            schedule="interleaved" if interleave > 1 else job.schedule,
                        )


def _virtual_stages(job: Job, mesh: Split, microbatches: int, depth: int, fixed: int | None) -> list[int]:
    """Interleaving works through groups of as many microbatches as there are stages (Narayanan et al. 2021)."""
    if mesh.pipeline == 1 or job.schedule in ("gpipe", "zero-bubble"):
        return [1]
    even = divisors(depth // mesh.pipeline) if microbatches % mesh.pipeline == 0 else [1]
    return [each for each in even if (each <= MOST_VIRTUAL_STAGES if fixed is None else each == fixed)]


def _sequences(mesh: Split, fixed: bool | None) -> list[bool]:
    return [False] if mesh.tensor == 1 else [False, True] if fixed is None else [fixed]


def _zeros(mesh: Split, fixed: int | None) -> list[int]:
    """ZeRO 2 and 3 reduce gradients after every microbatch, and a pipeline has many: they are not combined."""
    if mesh.data == 1:
        return [0]
    zeros = [0, 1] if mesh.pipeline > 1 else [0, 1, 2, 3]
    if fixed is None:
        return zeros if mesh.data <= ZERO_3_RANKS else zeros[:3]
    return [fixed] if fixed in zeros else []


def _none_even(model: Model, devices: int, job: Job, space: Space) -> str:
    """Return why there is no candidate, as one sentence."""
    fixed = {
        name: value
        for name in ("tensor", "pipeline", "data", "micro_batch", "interleave", "zero")
        if (value := getattr(space, name)) is not None
    }
    asked = ", ".join(f"{name} {value}" for name, value in fixed.items())
    mesh = math.prod(fixed.get(name, 1) for name in ("tensor", "pipeline", "data"))
    layers = model.layers(ShardSpec(space.micro_batch or 1, space.tensor or 1))
    depth = max(layer.count for layer in layers)
    if devices % mesh:
        reason = f"the fixed ranks make {mesh}, which does not divide {devices} devices"
    elif space.zero is not None and space.zero > 1 and (space.pipeline or 1) > 1:
        reason = "ZeRO 2 and 3 are not for pipelines, whose every microbatch would reduce gradients"
    elif space.pipeline is not None and depth > 1 and depth % (space.pipeline * (space.interleave or 1)):
        reason = f"pipeline x interleave does not divide {depth} equal layers"
    else:
        reason = f"a batch of {job.global_batch} must be a multiple of data x micro_batch"
        reason += ", and with interleaving the microbatches a multiple of pipeline" if space.interleave else ""
    return f"no split over {devices} devices divides evenly{f' with {asked}' if asked else ''}: {reason}"
