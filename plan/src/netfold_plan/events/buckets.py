"""The collectives of data-parallel ranks in a step: the buckets, and the task that each bucket waits for. Pure.

Without overlap all gradients are reduced after the last pass. With overlap, the last backward pass of a virtual stage
completes one bucket after the other. With ZeRO-2 the same happens in every microbatch: ranks keep parts of gradients,
so the next pass waits until they are reduced. With ZeRO-1 and 2 all weights are gathered after the update. With ZeRO-3
every pass gathers its weights bucket by bucket, each while the bucket before computes, and every backward pass reduces
its gradients (Rajbhandari et al. 2020; PyTorch FSDP, Zhao et al. 2023, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from netfold_plan.events.schedule import BACKWARD, WEIGHTS, Turn
from netfold_plan.job import Job
from netfold_plan.step import Costs, Stage

# The parameters of a virtual stage are cut into at most so many buckets.
MOST_BUCKETS = 32


@dataclass(frozen=True)
class TaskInfo:
    """One task of a stage: part `part` of the `parts` tasks of a turn, which waits for buckets or completes them.

    computing_s: on a rank without jitter.
    tensor_s: in collectives among tensor ranks.
    tables_s: in exchanges with tables that are spread over all ranks.
    """

    turn: Turn
    part: int
    parts: int
    computing_s: float
    tensor_s: float
    tables_s: float

    @property
    def is_last(self) -> bool:
        return self.part == self.parts - 1


class Bucket(NamedTuple):
    """operation: as a profile names it. seconds: alone on its links."""

    operation: str
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class BucketSchedule:
    """buckets: in order. releases: by task, the buckets that are ready when the task ends.

    first: how many buckets are ready at the beginning. awaited: by task, the bucket that it waits for.
    """

    buckets: tuple[Bucket, ...] = ()
    releases: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    first: int = 0
    awaited: Mapping[int, int] = field(default_factory=dict)


class BucketPlanner:
    """The buckets of one stage.

    share: the stage's parameters, over those of the stage with most parameters, which `parts` is of.
    updated: the gather of all weights after the update; None without one.
    """

    def __init__(self, job: Job, stage: Stage, parts: Costs, share: float) -> None:
        self._job = job
        self._gathers = job.split.zero == 3 and job.split.data > 1
        self._communicates = job.split.data > 1 and parts.data_s > 0 and share > 0
        item_bytes = job.item_bytes if self._gathers else job.gradient_bytes
        interleave = job.split.interleave
        needed = math.ceil(stage.parameters * item_bytes / interleave / job.bucket_bytes)
        self._count = max(1, min(MOST_BUCKETS, needed))
        of_a_bucket = share / (self._count * interleave)
        elements = stage.parameters / (self._count * interleave)
        operation = "reduce_scatter" if job.split.zero else "all_reduce"
        self._reduced = Bucket(operation, elements * job.gradient_bytes, parts.data_s * of_a_bucket)
        self._gathered = Bucket("all_gather", elements * job.item_bytes, parts.gathered_s * of_a_bucket)
        self._travels, self._backward_s = parts.travels, stage.backward_s
        self.updated: Bucket | None = None
        if self._communicates and job.split.zero in (1, 2):
            self.updated = Bucket("all_gather", stage.parameters * job.item_bytes, parts.gathered_s * share)

    def shares(self, turn: Turn, *, is_last: bool) -> tuple[float, ...]:
        """The tasks of a turn, each as a part of the turn's time. is_last: the turn completes gradients."""
        if not self._communicates or (self._gathers and turn.kind == WEIGHTS):
            return (1.0,)
        if self._travels and is_last and self._backward_s > 0:
            left = [1.0, *(each.left_s / self._backward_s for each in self._travels), 0.0]
            return tuple(before - after for before, after in pairwise(left))
        count = self._count if self._gathers or (self._job.overlap and is_last) else 1
        return (1 / count,) * count

    def plan(self, tasks: Sequence[TaskInfo]) -> BucketSchedule:
        if not self._communicates:
            return BucketSchedule()
        if self._gathers:
            return self._plan_gathers(tasks)
        last = last_backward_turns([task.turn for task in tasks], self._job.split.zero)
        if self._job.split.zero == 2:
            return self._plan_microbatches(tasks, last)
        if not self._job.overlap:
            every = self._count * self._job.split.interleave
            return BucketSchedule((self._reduced,) * every, {len(tasks) - 1: tuple(range(every))})
        done = [at for at, task in enumerate(tasks) if task.turn in last]
        if self._travels:
            buckets = tuple(Bucket("all_reduce", each.size_bytes, each.taken_s) for each in self._travels)
            return BucketSchedule(buckets, {done[0] + number: (number,) for number in range(len(buckets))})
        return BucketSchedule((self._reduced,) * len(done), {at: (number,) for number, at in enumerate(done)})

    def _plan_microbatches(self, tasks: Sequence[TaskInfo], reduced: set[Turn]) -> BucketSchedule:
        """Reduce the gradients of every microbatch during or after its backward pass; the next pass waits for them."""
        releases: dict[int, tuple[int, ...]] = {}
        awaited: dict[int, int] = {}
        sent = 0
        for at, task in enumerate(tasks):
            if task.turn not in reduced:
                continue
            more = self._count // task.parts
            releases[at] = tuple(range(sent, sent + more))
            sent += more
            if task.is_last and at + 1 < len(tasks):
                awaited[at + 1] = sent - 1
        return BucketSchedule((self._reduced,) * sent, releases, 0, awaited)

    def _plan_gathers(self, tasks: Sequence[TaskInfo]) -> BucketSchedule:
        """A gather starts when the task before the one that needs it begins.

        Only when a pass begins is it known which weights come next. So the first gather of a pass, or every gather
        without prefetch, starts when the needing task is next. Gradients are reduced after that gather. Without
        prefetch they are reduced before it: then nothing overlaps.
        """
        buckets: list[Bucket] = []
        releases: dict[int, tuple[int, ...]] = {}
        awaited: dict[int, int] = {}
        first = 0
        for ended in range(-1, len(tasks)):
            began = len(buckets)
            reduced = [self._reduced] if ended >= 0 and tasks[ended].turn.kind == BACKWARD else []
            if not self._job.prefetch:
                buckets += reduced
            for needs, is_late in ((ended + 1, True), (ended + 2, False)):
                if needs >= len(tasks) or tasks[needs].turn.kind == WEIGHTS:
                    continue
                if (tasks[needs].part == 0 or not self._job.prefetch) == is_late:
                    awaited[needs] = len(buckets)
                    buckets.append(self._gathered)
            if self._job.prefetch:
                buckets += reduced
            released = tuple(range(began, len(buckets)))
            if ended < 0:
                first = len(released)
            elif released:
                releases[ended] = released
        return BucketSchedule(tuple(buckets), releases, first, awaited)


def last_backward_turns(turns: Sequence[Turn], zero: int) -> set[Turn]:
    """The turns that complete the gradients of each virtual stage; with ZeRO-2, of every microbatch."""
    kind = WEIGHTS if any(turn.kind == WEIGHTS for turn in turns) else BACKWARD
    ends = [turn for turn in turns if turn.kind == kind]
    return set(ends) if zero == 2 else set({turn.virtual_stage: turn for turn in ends}.values())
