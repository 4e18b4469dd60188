"""A step written out for `play`: each stage's tasks, how long they take on each lane, what goes over which link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from netfold.plan.cluster import Cluster
from netfold.plan.events.conditions import Conditions
from netfold.plan.events.links import Uses
from netfold.plan.events.mesh import Mesh
from netfold.plan.events.play import Step, Task
from netfold.plan.events.schedule import BACKWARD, FORWARD, SPLIT_BACKWARD, WEIGHTS, Turn, order
from netfold.plan.job import Job
from netfold.plan.model import Layer, Model, Share
from netfold.plan.step import Costs, Stage

# Into how many parts the last backward pass of a piece is cut at most, one a bucket; beyond that, buckets go together.
MOST_PARTS = 32

_Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Act:
    """A task in words. part, of parts: a backward pass that completes buckets as it goes on is several tasks.

    seconds: on a rank as it should be. tensor_s: of these, in collectives among tensor ranks.
    """

    turn: Turn
    part: int
    parts: int
    seconds: float
    tensor_s: float

    @property
    def is_last(self) -> bool:
        return self.part == self.parts - 1


@dataclass(frozen=True)
class Script:
    """acts: by stage; one a task of the step. collectives: among tensor ranks, in one pass of a piece."""

    step: Step
    mesh: Mesh
    acts: tuple[tuple[Act, ...], ...]
    collectives: int


def write_script(
    model: Model, cluster: Cluster, job: Job, parts: Costs, conditions: Conditions, *, folded: bool
) -> Script:
    """Raises ValueError, in a sentence, where the schedule cannot be had."""
    split = job.split
    mesh = Mesh(cluster, split, folded=folded, contention=conditions.contention)
    layers = model.layers(Share(job.micro_batch, split.tensor, split.sequence, job.recomputation, job.item_bytes))
    collectives = _collectives(layers, split.pipeline * split.interleave)
    weights = _part_of_weights(layers) if job.schedule in SPLIT_BACKWARD else 0.0
    most = max(stage.parameters for stage in parts.stages)
    shares = [stage.parameters / most if most else 0.0 for stage in parts.stages]
    acts: list[tuple[Act, ...]] = []
    tasks: list[list[Task]] = []
    buckets: list[list[float]] = []
    uses = [mesh.gradients(stage) for stage in range(split.pipeline)]
    for index, (stage, share) in enumerate(zip(parts.stages, shares, strict=True)):
        turns = order(job.schedule, index, split.pipeline, parts.microbatches, split.interleave)
        each = _buckets_a_piece(stage, job) if split.data > 1 and parts.data_s > 0 else 0
        acts.append(_acts(turns, stage, split.interleave, weights, each if job.overlap else 0))
        tasks.append(_tasks(acts[-1], index, job, each))
        # Crowded links are the player's to share; alone on them, a collective takes as long as it was said to.
        data_s = parts.data_s * share / mesh.crowding(uses[index])
        count = each * split.interleave
        buckets.append([data_s / count for _ in range(count)])
    pace = _Pace(mesh, conditions, collectives)
    lanes = [lane // mesh.replicas for lane in range(mesh.lanes)]
    step = Step(
        replicas=mesh.replicas,
        tasks=tasks,
        seconds=[row for stage in range(split.pipeline) for row in pace.seconds(stage, acts[stage])],
        flags=2 * split.interleave * parts.microbatches,
        send_s=[parts.stages[stage].send_s for stage in lanes],
        send_uses=[_messages(mesh, lane, split.pipeline) for lane in range(mesh.lanes)],
        bucket_s=buckets,
        bucket_uses=uses,
        update_s=[parts.optimizer_s * shares[stage] for stage in lanes],
        capacity=mesh.capacity,
        slowed=conditions.interference,
    )
    return Script(step, mesh, tuple(acts), collectives)


class _Pace:
    """How long tasks take on lanes whose ranks differ."""

    def __init__(self, mesh: Mesh, conditions: Conditions, collectives: int) -> None:
        self._mesh = mesh
        self._jitter = conditions.jitter
        self._chance = np.random.default_rng(conditions.seed)
        self._waits = max(1, collectives)
        self._slow: dict[int, dict[int, float]] = {}
        for rank, factor in conditions.stragglers.items():
            self._slow.setdefault(mesh.lane_of(rank), {})[rank] = factor

    def seconds(self, stage: int, acts: Sequence[Act]) -> list[list[float]]:
        """By lane of the stage."""
        tensor = np.array([act.tensor_s for act in acts])
        computing = np.array([act.seconds for act in acts]) - tensor
        replicas = self._mesh.replicas
        rows = []
        for lane in range(stage * replicas, (stage + 1) * replicas):
            rows.append((computing * self._factors(lane, len(acts)) + tensor).tolist())
        return rows

    def _factors(self, lane: int, tasks: int) -> _Seconds | float:
        """By task. Tensor ranks go on together from each of their collectives, so the slowest sets the pace."""
        ranks = self._mesh.ranks(lane)
        slow = self._slow.get(lane, {})
        factors = np.array([slow.get(rank, 1.0) for rank in ranks])
        if not self._jitter:
            return float(factors.max())
        waits = self._waits if len(ranks) > 1 else 1
        # Lognormal, of mean 1: never below 0, now and then much longer, as measured kernels are.
        width = math.sqrt(math.log1p(self._jitter**2))
        drawn = self._chance.lognormal(-(width**2) / 2, width, (tasks, waits, len(ranks)))
        slowest: _Seconds = (drawn * factors).max(axis=2).mean(axis=1)
        return slowest


def _collectives(layers: tuple[Layer, ...], pieces: int) -> int:
    """Of a forward pass through one piece, about."""
    return round(sum(layer.count * len(layer.forward.collectives) for layer in layers) / pieces)


def _part_of_weights(layers: tuple[Layer, ...]) -> float:
    """Of a backward pass, what computes gradients of weights: half of its matmuls, where one of the two is a weight.

    Batched ones multiply activations by each other.
    """
    whole = sum(layer.count * (layer.backward.flops + layer.again.flops) for layer in layers)
    matmuls = [(layer.count, matmul) for layer in layers for matmul in layer.backward.matmuls if matmul.count == 1]
    return sum(count * matmul.flops for count, matmul in matmuls) / 2 / whole if whole else 0.0


def _buckets_a_piece(stage: Stage, job: Job) -> int:
    gradients = stage.parameters * job.gradient_bytes / job.split.interleave
    return max(1, min(MOST_PARTS, math.ceil(gradients / job.bucket_bytes)))


def _acts(turns: Sequence[Turn], stage: Stage, pieces: int, weights: float, parts: int) -> tuple[Act, ...]:
    """parts: those that the last backward pass of a piece is cut into; 0: none is."""
    times = {
        FORWARD: (stage.forward_s / pieces, stage.forward_tensor_s / pieces),
        BACKWARD: (stage.backward_s * (1 - weights) / pieces, stage.backward_tensor_s / pieces),
        WEIGHTS: (stage.backward_s * weights / pieces, 0.0),
    }
    last = _last(turns)
    acts = []
    for turn in turns:
        alone_s, tensor_s = times[turn.kind]
        count = parts if parts and turn in last else 1
        acts += [Act(turn, part, count, (alone_s + tensor_s) / count, tensor_s / count) for part in range(count)]
    return tuple(acts)


def _last(turns: Sequence[Turn]) -> set[Turn]:
    """By piece, the turn that completes its gradients."""
    kind = WEIGHTS if any(turn.kind == WEIGHTS for turn in turns) else BACKWARD
    return set({turn.piece: turn for turn in turns if turn.kind == kind}.values())


def _tasks(acts: Sequence[Act], stage: int, job: Job, buckets: int) -> list[Task]:
    """buckets: of a piece. With overlap a part completes one; else they all wait for the last pass."""
    split = job.split
    last = _last([act.turn for act in acts])
    tasks, released = [], 0
    for at, act in enumerate(acts):
        kind, piece, microbatch = act.turn
        needs, gives = -1, None
        if kind != WEIGHTS:
            place = piece * split.pipeline + stage
            end = split.pipeline * split.interleave - 1
            forward = kind == FORWARD
            if act.part == 0 and place != (0 if forward else end):
                needs = _flag(job, piece, microbatch, forward)
            to = place + (1 if forward else -1)
            if act.is_last and 0 <= to <= end:
                gives = (to % split.pipeline, _flag(job, to // split.pipeline, microbatch, forward))
        count = 0
        if buckets and job.overlap and act.turn in last:
            count = 1
        elif buckets and not job.overlap and at == len(acts) - 1:
            count = buckets * split.interleave
        tasks.append(Task(needs, gives, kind == FORWARD, tuple(range(released, released + count))))
        released += count
    return tasks


def _flag(job: Job, piece: int, microbatch: int, forward: bool) -> int:
    return (2 * piece + (0 if forward else 1)) * job.microbatches + microbatch


def _messages(mesh: Mesh, lane: int, stages: int) -> tuple[Uses, Uses]:
    """To the next stage and to the one before, round from the last to the first."""
    if stages == 1:
        return (), ()
    count = mesh.lanes
    return mesh.message(lane, (lane + mesh.replicas) % count), mesh.message(lane, (lane - mesh.replicas) % count)
