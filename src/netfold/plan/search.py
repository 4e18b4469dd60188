"""Every way to split a job over so many devices that comes out even, and which of them is best."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster
from netfold.plan.job import RECOMPUTATIONS, Job, Split
from netfold.plan.model import Model, ShardSpec
from netfold.plan.step import Prediction, predict

# Bounds of what is tried where nothing is said: samples of a microbatch but the whole of a rank's, pieces of a stage.
MOST_MICRO_BATCH, MOST_PIECES = 64, 8
# Ranks that ZeRO-3 is tried over where nothing is said: published runs agree so far (llm-foundry's FSDP); those beyond
# are DeepSpeed's of early 2021, which hid nothing and took 1.3 to 1.6 times as long as with prefetch.
ZERO_3_RANKS = 128
# Ways in all. Where there are more, the search says so and asks for a fixed value.
MAX_CANDIDATES = 60_000
# Ways that are predicted anew where a cluster changes a little: so many of all, and of each mesh. One beyond them would
# have to overtake all of these.
SHORTLIST, OF_A_MESH = 50, 4


@dataclass(frozen=True)
class Space:
    """What is fixed of a split; None is free."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    micro_batch: int | None = None
    interleave: int | None = None
    sequence: bool | None = None
    zero: int | None = None
    recomputation: str | None = None


@dataclass(frozen=True)
class Choice:
    """One way to split, and what it comes to."""

    job: Job
    prediction: Prediction

    @property
    def mesh(self) -> tuple[int, int, int]:
        split = self.job.split
        return split.tensor, split.pipeline, split.data


@dataclass(frozen=True)
class SearchResult:
    """ways: all that were predicted, the fastest first; of equal ones, to three digits, the simplest. fitting: those
    that fit a device's memory.

    front: of those that fit, the ones that none beats in both time and memory.
    """

    candidates: tuple[Choice, ...]
    fitting: tuple[Choice, ...]
    front: tuple[Choice, ...]

    @property
    def tried(self) -> int:
        return len(self.candidates)

    @property
    def least(self) -> Choice:
        """The one that needs least memory, whether it fits or not."""
        return min(self.candidates, key=lambda way: way.prediction.memory.total)

    @property
    def best(self) -> Choice:
        """Raises ValueError, in a sentence that says by how much, where none fits."""
        if not self.fitting:
            raise ValueError(self.too_large())
        return self.fitting[0]

    def best_few(self, count: int) -> tuple[Choice, ...]:
        """The fastest of each mesh, so that they tell something of one another."""
        meshes: dict[tuple[int, int, int], Choice] = {}
        for choice in self.fitting:
            meshes.setdefault(choice.mesh, choice)
        return tuple(meshes.values())[:count]

    def shortlist(self, memory_bytes: float) -> tuple[Choice, ...]:
        """The fastest that fit so much memory, of all and of each mesh; the fastest first."""
        kept: list[Choice] = []
        meshes: Counter[tuple[int, int, int]] = Counter()
        for way in self.candidates:
            if way.prediction.memory.total > memory_bytes:
                continue
            meshes[way.mesh] += 1
            if len(kept) < SHORTLIST or meshes[way.mesh] <= OF_A_MESH:
                kept.append(way)
        return tuple(kept)

    def too_large(self) -> str:
        least = self.least
        job, found = least.job, least.prediction
        need, there = found.memory.total / 2**30, found.memory_bytes / 2**30
        however = f", however split ({self.tried:,} ways)" if self.tried > 1 else ""
        return (
            f"does not fit{however}: it needs {need:.1f} GB a device at least, which has {there:.1f} GB, "
            f"{need - there:.1f} GB too little ({describe_split(job)}); try more devices, or devices with more memory"
        )


def search(model: Model, cluster: Cluster, devices: int, job: Job, space: Space | None = None) -> SearchResult:
    """Predict every way. job: as it is but for the split, the microbatch and the recomputation, which are searched.

    Raises ValueError, in a sentence, where no way comes out even, or more than MAX_CANDIDATES do.
    """
    space = space or Space()
    if devices > cluster.devices:
        raise ValueError(f"{devices} devices are asked for, and {cluster.name} has {cluster.devices}")
    ways: list[Choice] = []
    refused = ""
    for way in _ways(model, devices, job, space):
        if len(ways) == MAX_CANDIDATES:
            raise ValueError(
                f"there are more than {MAX_CANDIDATES:,} ways to split over {devices} devices; fix one, such as "
                f"tensor, "
                "pipeline or micro_batch"
            )
        try:
            ways.append(Choice(way, predict(model, cluster, way)))
        except ValueError as error:
            refused = str(error)
    if not ways:
        raise ValueError(refused or _none_even(model, devices, job, space))
    ways.sort(key=rank_by_time)
    fitting = [way for way in ways if way.prediction.fits]
    return SearchResult(tuple(ways), tuple(fitting), _front(fitting))


def rank_by_time(choice: Choice) -> tuple[float, ...]:
    """By time; of ways that are as fast to three digits, the simplest first."""
    job, step_s = choice.job, choice.prediction.step_s
    effort = (job.split.zero, RECOMPUTATIONS.index(job.recomputation), job.split.interleave)
    return float(f"{step_s:.3g}"), *effort, step_s, choice.prediction.memory.total


def describe_split(job: Job) -> str:
    """A way, in words."""
    said = [job.split.text(), f"microbatches of {job.micro_batch}"]
    if job.recomputation != "none":
        said.append(f"{job.recomputation} recomputation")
    return ", ".join(said)


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def _front(fitting: list[Choice]) -> tuple[Choice, ...]:
    front: list[Choice] = []
    for choice in fitting:
        if not front or choice.prediction.memory.total < 0.999 * front[-1].prediction.memory.total:
            front.append(choice)
    return tuple(front)


def _ways(model: Model, devices: int, job: Job, space: Space) -> Iterator[Job]:
    for tensor in divisors(devices) if space.tensor is None else [space.tensor]:
        try:
            layers = model.layers(ShardSpec(space.micro_batch or 1, tensor))
        except ValueError:
            continue
        depth = max(layer.count for layer in layers)
        # A chain of single layers is cut anywhere; equal blocks are shared out evenly.
        even, depth = (True, depth) if depth > 1 else (False, len(layers))
        for pipeline in divisors(devices // tensor) if space.pipeline is None else [space.pipeline]:
            data = devices // (tensor * pipeline)
            if tensor * pipeline * data != devices or pipeline > depth or (even and depth % pipeline):
                continue
            if space.data not in (None, data) or job.global_batch % data:
                continue
            yield from _inside(job, space, Split(data, tensor, pipeline), depth if even else pipeline)


def _inside(job: Job, space: Space, mesh: Split, depth: int) -> Iterator[Job]:
    """The ways that share a mesh. depth: of equal layers.

    What is fixed but means nothing here (pieces without a pipeline, ZeRO without data-parallel ranks) is left out.
    """
    local = job.global_batch // mesh.data
    sizes = {2**power for power in range(MOST_MICRO_BATCH.bit_length())} | {local}
    for micro_batch in sorted(sizes) if space.micro_batch is None else [space.micro_batch]:
        if local % micro_batch:
            continue
        for interleave in _pieces(job, mesh, local // micro_batch, depth, space.interleave):
            for sequence in _either(mesh.tensor > 1, space.sequence):
                for zero in _zeros(mesh, space.zero):
                    for recomputation in RECOMPUTATIONS if space.recomputation is None else [space.recomputation]:
                        yield replace(
                            job,
                            micro_batch=micro_batch,
                            recomputation=recomputation,
                            split=replace(mesh, interleave=interleave, sequence=sequence, zero=zero),
                            schedule="interleaved" if interleave > 1 else job.schedule,
                        )


def _pieces(job: Job, mesh: Split, microbatches: int, depth: int, fixed: int | None) -> list[int]:
    """Interleaving goes round in groups of as many microbatches as there are stages (Narayanan et al. 2021)."""
    if mesh.pipeline == 1 or job.schedule in ("gpipe", "zero-bubble"):
        return [1]
    even = divisors(depth // mesh.pipeline) if microbatches % mesh.pipeline == 0 else [1]
    return [each for each in even if (each <= MOST_PIECES if fixed is None else each == fixed)]


def _either(means: bool, fixed: bool | None) -> list[bool]:
    return [False] if not means else [False, True] if fixed is None else [fixed]


def _zeros(mesh: Split, fixed: int | None) -> list[int]:
    """ZeRO 2 and 3 reduce gradients after every microbatch, which a pipeline has many of: nobody runs them together."""
    if mesh.data == 1:
        return [0]
    zeros = [0, 1] if mesh.pipeline > 1 else [0, 1, 2, 3]
    if fixed is None:
        return zeros if mesh.data <= ZERO_3_RANKS else zeros[:3]
    return [fixed] if fixed in zeros else []


def _none_even(model: Model, devices: int, job: Job, space: Space) -> str:
    """Why there is no way at all, in a sentence."""
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
        reason = f"the ranks that are fixed make {mesh}, which does not divide {devices} devices"
    elif space.zero is not None and space.zero > 1 and (space.pipeline or 1) > 1:
        reason = "ZeRO 2 and 3 are not for pipelines, whose every microbatch would reduce gradients"
    elif space.pipeline is not None and depth > 1 and depth % (space.pipeline * (space.interleave or 1)):
        reason = f"{depth} equal layers are not shared out evenly by pipeline x interleave"
    else:
        reason = f"a batch of {job.global_batch} is not shared out evenly; it must be a multiple of data x micro_batch"
        reason += " and, interleaved, their microbatches of pipeline" if space.interleave else ""
    return f"no way to split over {devices} devices comes out even{f' with {asked}' if asked else ''}: {reason}"
