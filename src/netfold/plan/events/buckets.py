"""What data-parallel ranks do together in a step: which buckets there are, and which task each waits for. Pure.

Without overlap all gradients go after the last pass. With it, the last backward pass of a piece completes one bucket
after the other. With ZeRO-2 the same happens in every microbatch: ranks keep parts of gradients, so the next pass waits
until they are reduced. With ZeRO-1 and 2 all weights are gathered after the update. With ZeRO-3 every pass gathers its
weights bucket by bucket, each while the one before it computes, and every backward pass gives its gradients away
(Rajbhandari et al. 2020; PyTorch FSDP, Zhao et al. 2023, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from netfold.plan.events.schedule import BACKWARD, WEIGHTS, Turn
from netfold.plan.job import Job
from netfold.plan.step import Costs, Stage

# Into how many buckets the parameters of a piece are cut at most; beyond that, several go together.
MOST_BUCKETS = 32


@dataclass(frozen=True)
class TaskInfo:
    """A task in words. part, of parts: a pass that waits for buckets or completes them is several tasks.

    computing_s: on a rank as it should be. tensor_s: in collectives among tensor ranks. tables_s: in exchanges of what
    was looked up in tables that are spread over all ranks.
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
    """operation: as a profile names it. size_bytes: of all of it. seconds: were it alone on its links."""

    operation: str
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """buckets: in the order in which they go. releases: by task, which are ready when it ends; first: how many are from
    the beginning. awaited: by task, the bucket that it cannot begin without."""

    buckets: tuple[Bucket, ...] = ()
    releases: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    first: int = 0
    awaited: Mapping[int, int] = field(default_factory=dict)


class BucketPlanner:
    """Of one stage. share: its parameters, of those of the stage that has most, which `parts` speaks of.

    updated: the gather of all weights after the update; None where there is none.
    """

    def __init__(self, job: Job, stage: Stage, parts: Costs, share: float) -> None:
        self._job = job
        self._gathers = job.split.zero == 3 and job.split.data > 1
        self._talks = job.split.data > 1 and parts.data_s > 0 and share > 0
        item_bytes = job.item_bytes if self._gathers else job.gradient_bytes
        pieces = job.split.interleave
        self._count = max(1, min(MOST_BUCKETS, math.ceil(stage.parameters * item_bytes / pieces / job.bucket_bytes)))
        of_a_bucket = share / (self._count * pieces)
        elements = stage.parameters / (self._count * pieces)
        operation = "reduce_scatter" if job.split.zero else "all_reduce"
        self._reduced = Bucket(operation, elements * job.gradient_bytes, parts.data_s * of_a_bucket)
        self._gathered = Bucket("all_gather", elements * job.item_bytes, parts.gathered_s * of_a_bucket)
        self._travels, self._backward_s = parts.travels, stage.backward_s
        self.updated: Bucket | None = None
        if self._talks and job.split.zero in (1, 2):
            self.updated = Bucket("all_gather", stage.parameters * job.item_bytes, parts.gathered_s * share)

    def shares(self, turn: Turn, *, is_last: bool) -> tuple[float, ...]:
        """The tasks that a turn is cut into: each one's part of its time. is_last: it completes gradients of its piece
        that are reduced."""
        if not self._talks or (self._gathers and turn.kind == WEIGHTS):
            return (1.0,)
        if self._travels and is_last and self._backward_s > 0:
            left = [1.0, *(each.left_s / self._backward_s for each in self._travels), 0.0]
            return tuple(before - after for before, after in pairwise(left))
        count = self._count if self._gathers or (self._job.overlap and is_last) else 1
        return (1 / count,) * count

    def plan(self, acts: Sequence[TaskInfo]) -> Plan:
        if not self._talks:
            return Plan()
        if self._gathers:
            return self._plan_of_gathers(acts)
        last = last_backward_turns([act.turn for act in acts], self._job.split.zero)
        if self._job.split.zero == 2:
            return self._plan_of_microbatches(acts, last)
        if not self._job.overlap:
            every = self._count * self._job.split.interleave
            return Plan((self._reduced,) * every, {len(acts) - 1: tuple(range(every))})
        if self._travels:
            sent = tuple(Bucket("all_reduce", each.size_bytes, each.taken_s) for each in self._travels)
            first = next(at for at, act in enumerate(acts) if act.turn in last)
            return Plan(sent, {first + number: (number,) for number in range(len(sent))})
        done = [at for at, act in enumerate(acts) if act.turn in last]
        return Plan((self._reduced,) * len(done), {at: (number,) for number, at in enumerate(done)})

    def _plan_of_microbatches(self, acts: Sequence[TaskInfo], reduced: set[Turn]) -> Plan:
        """Every microbatch's gradients go, beside its backward pass or after it; the next pass waits for them."""
        releases: dict[int, tuple[int, ...]] = {}
        awaited: dict[int, int] = {}
        sent = 0
        for at, act in enumerate(acts):
            if act.turn not in reduced:
                continue
            more = self._count // act.parts
            releases[at] = tuple(range(sent, sent + more))
            sent += more
            if act.is_last and at + 1 < len(acts):
                awaited[at + 1] = sent - 1
        return Plan((self._reduced,) * sent, releases, 0, awaited)

    def _plan_of_gathers(self, acts: Sequence[TaskInfo]) -> Plan:
        """A gather goes when the task before the one that needs it begins; the first of a pass, or all of them without
        prefetch, when it is that task's turn, since only then it is known which weights come next. Gradients go after
        it, or before it without prefetch: then nothing is beside anything."""
        buckets: list[Bucket] = []
        releases: dict[int, tuple[int, ...]] = {}
        awaited: dict[int, int] = {}
        first = 0
        for ended in range(-1, len(acts)):
            began = len(buckets)
            reduced = [self._reduced] if ended >= 0 and acts[ended].turn.kind == BACKWARD else []
            if not self._job.prefetch:
                buckets += reduced
            for needs, is_late in ((ended + 1, True), (ended + 2, False)):
                if needs >= len(acts) or acts[needs].turn.kind == WEIGHTS:
                    continue
                if (acts[needs].part == 0 or not self._job.prefetch) == is_late:
                    awaited[needs] = len(buckets)
                    buckets.append(self._gathered)
            if self._job.prefetch:
                buckets += reduced
            released = tuple(range(began, len(buckets)))
            if ended < 0:
                first = len(released)
            elif released:
                releases[ended] = released
        return Plan(tuple(buckets), releases, first, awaited)


def last_backward_turns(turns: Sequence[Turn], zero: int) -> set[Turn]:
    """By piece, the turn that completes its gradients; with ZeRO-2 those of every microbatch."""
    kind = WEIGHTS if any(turn.kind == WEIGHTS for turn in turns) else BACKWARD
    ends = [turn for turn in turns if turn.kind == kind]
    return set(ends) if zero == 2 else set({turn.virtual_stage: turn for turn in ends}.values())
