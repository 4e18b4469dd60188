"""Build a step for the event loop: each stage's tasks, their durations on each lane, and the links of messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from netfold_plan.cluster import Cluster
from netfold_plan.events.buckets import Bucket, BucketPlanner, BucketSchedule, TaskInfo, last_backward_turns
from netfold_plan.events.conditions import Conditions
from netfold_plan.events.event_loop import Step, Task
from netfold_plan.events.mesh import Mesh
from netfold_plan.events.resources import Uses
from netfold_plan.events.schedule import BACKWARD, FORWARD, WEIGHTS, Turn, turn_order
from netfold_plan.job import Job
from netfold_plan.model import Layer, Model, ShardSpec
from netfold_plan.step import Costs, Stage

_Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BuiltStep:
    """task_info, buckets: by stage. collectives: among tensor ranks, in a pass of a virtual stage.

    updated: by stage, the gather of all weights after the update, or None.
    """

    step: Step
    mesh: Mesh
    task_info: tuple[tuple[TaskInfo, ...], ...]
    buckets: tuple[tuple[Bucket, ...], ...]
    collectives: int
    updated: tuple[Bucket | None, ...]


def build_step(
    model: Model, cluster: Cluster, job: Job, parts: Costs, conditions: Conditions, *, folded: bool
) -> BuiltStep:
    """Raises ValueError, in one sentence, where the schedule is not possible."""
    split = job.split
    mesh = Mesh(cluster, split, folded=folded, contention=conditions.contention)
    layers = model.layers(ShardSpec(job.micro_batch, split.tensor, split.sequence, job.recomputation, job.item_bytes))
    collectives = _collectives(layers, split.pipeline * split.interleave)
    most = max(stage.parameters for stage in parts.stages)
    shares = [stage.parameters / most if most else 0.0 for stage in parts.stages]
    bucket_flag = 2 * split.interleave * parts.microbatches
    uses = [mesh.gradients(stage) for stage in range(split.pipeline)]
    info: list[tuple[TaskInfo, ...]] = []
    plans: list[BucketSchedule] = []
    updated: list[Bucket | None] = []
    tasks: list[list[Task]] = []
    for index, (stage, share) in enumerate(zip(parts.stages, shares, strict=True)):
        turns = turn_order(job.schedule, index, split.pipeline, parts.microbatches, split.interleave)
        planner = BucketPlanner(job, stage, parts, share)
        info.append(_task_info(turns, stage, job, planner))
        updated.append(planner.updated)
        plans.append(planner.plan(info[-1]))
        tasks.append(_tasks(info[-1], plans[-1], index, job, bucket_flag))
    durations = TaskDurations(mesh, conditions, collectives)
    lanes = [lane // mesh.replicas for lane in range(mesh.lanes)]
    step = Step(
        replicas=mesh.replicas,
        tasks=tasks,
        seconds=[row for stage in range(split.pipeline) for row in durations.seconds(stage, info[stage])],
        flags=bucket_flag + max(len(plan.buckets) for plan in plans),
        send_s=[parts.stages[stage].alone_s for stage in lanes],
        send_uses=[_messages(mesh, lane, split.pipeline) for lane in range(mesh.lanes)],
        # The event loop shares crowded links: a bucket alone on its links must take its own seconds there.
        bucket_s=[
            [bucket.seconds / mesh.crowding(used) for bucket in plan.buckets]
            for plan, used in zip(plans, uses, strict=True)
        ],
        bucket_uses=uses,
        first_buckets=[plan.first for plan in plans],
        bucket_flag=bucket_flag if any(plan.awaited for plan in plans) else None,
        update_s=[parts.optimizer_s * shares[stage] for stage in lanes],
        gather_s=[
            gather.seconds / mesh.crowding(used) if gather else 0.0 for gather, used in zip(updated, uses, strict=True)
        ],
        capacity=mesh.capacity,
        slowed=conditions.interference,
    )
    return BuiltStep(step, mesh, tuple(info), tuple(plan.buckets for plan in plans), collectives, tuple(updated))


class TaskDurations:
    """Durations of tasks on lanes whose ranks differ by jitter and stragglers."""

    def __init__(self, mesh: Mesh, conditions: Conditions, collectives: int) -> None:
        self._mesh = mesh
        self._jitter = conditions.jitter
        self._chance = np.random.default_rng(conditions.seed)
        self._waits = max(1, collectives)
        self._slow: dict[int, dict[int, float]] = {}
        for rank, factor in conditions.stragglers.items():
            self._slow.setdefault(mesh.lane_of(rank), {})[rank] = factor

    def seconds(self, stage: int, tasks: Sequence[TaskInfo]) -> list[list[float]]:
        """By lane of the stage, and by task."""
        computing = np.array([task.computing_s for task in tasks])
        communicating = np.array([task.tensor_s + task.tables_s for task in tasks])
        lanes = range(stage * self._mesh.replicas, (stage + 1) * self._mesh.replicas)
        return [(computing * self._factors(lane, len(tasks)) + communicating).tolist() for lane in lanes]

    def _factors(self, lane: int, tasks: int) -> _Seconds | float:
        """By task. Tensor ranks continue together after each of their collectives, so the slowest sets the pace."""
        ranks = self._mesh.ranks(lane)
        slow = self._slow.get(lane, {})
        factors = np.array([slow.get(rank, 1.0) for rank in ranks])
        if not self._jitter:
            return float(factors.max())
        waits = self._waits if len(ranks) > 1 else 1
        # Lognormal with mean 1: never below 0 and with a long tail, as measured kernels have.
        width = math.sqrt(math.log1p(self._jitter**2))
        drawn = self._chance.lognormal(-(width**2) / 2, width, (tasks, waits, len(ranks)))
        slowest: _Seconds = (drawn * factors).max(axis=2).mean(axis=1)
        return slowest


def _collectives(layers: tuple[Layer, ...], virtual_stages: int) -> int:
    """Roughly how many a forward pass through one virtual stage has."""
    found = [layer.count for layer in layers for each in layer.forward.collectives if each.group == "tensor"]
    return round(sum(found) / virtual_stages)


def _task_info(turns: Sequence[Turn], stage: Stage, job: Job, planner: BucketPlanner) -> tuple[TaskInfo, ...]:
    weights_s = stage.weights_s if any(turn.kind == WEIGHTS for turn in turns) else 0.0
    times = {
        FORWARD: (stage.forward_s, stage.forward_tensor_s, stage.tables_s / 2),
        BACKWARD: (stage.backward_s - weights_s, stage.backward_tensor_s, stage.tables_s / 2),
        WEIGHTS: (weights_s, 0.0, 0.0),
    }
    last = last_backward_turns(turns, job.split.zero)
    found = []
    for turn in turns:
        shares = planner.shares(turn, is_last=turn in last)
        whole = [each / job.split.interleave for each in times[turn.kind]]
        found += [
            TaskInfo(turn, part, len(shares), *(share * each for each in whole)) for part, share in enumerate(shares)
        ]
    return tuple(found)


def _tasks(info: Sequence[TaskInfo], plan: BucketSchedule, stage: int, job: Job, bucket_flag: int) -> list[Task]:
    split = job.split
    end = split.pipeline * split.interleave - 1
    tasks = []
    for at, task in enumerate(info):
        kind, virtual_stage, microbatch = task.turn
        needs, gives = [], None
        if kind != WEIGHTS:
            place, forward = virtual_stage * split.pipeline + stage, kind == FORWARD
            if task.part == 0 and place != (0 if forward else end):
                needs.append(_flag(job, virtual_stage, microbatch, forward))
            to = place + (1 if forward else -1)
            if task.is_last and 0 <= to <= end:
                gives = (to % split.pipeline, _flag(job, to // split.pipeline, microbatch, forward))
        if at in plan.awaited:
            needs.append(bucket_flag + plan.awaited[at])
        tasks.append(Task(tuple(needs), gives, kind == FORWARD, plan.releases.get(at, ())))
    return tasks


def _flag(job: Job, virtual_stage: int, microbatch: int, forward: bool) -> int:
    return (2 * virtual_stage + (0 if forward else 1)) * job.microbatches + microbatch


def _messages(mesh: Mesh, lane: int, stages: int) -> tuple[Uses, Uses]:
    """The links of messages to the next stage and to the one before; the first stage follows the last."""
    if stages == 1:
        return (), ()
    count = mesh.lanes
    return mesh.message(lane, (lane + mesh.replicas) % count), mesh.message(lane, (lane - mesh.replicas) % count)
