"""A step as events, in the order of time: what each lane computes, sends and waits for.

A lane is the tensor ranks that work on one stage of one replica: they wait for one another several times a layer, so
they go at one pace. Lanes of a stage are next to each other: lane = stage * replicas + replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from netfold.plan.events.cores import Cores
from netfold.plan.events.links import SharedLinks, Uses

_TURN, _FLOW, _UPDATE, _SLICE = range(4)
# What a piece of work on shared cores is for.
_TASK, _BUCKET, _BESIDE = range(3)


class Task(NamedTuple):
    """A turn of a stage, or a part of one. Flags are numbers of what must have come.

    needs: those that it waits for. gives: stage and flag of who waits for its result; None: nobody. releases: buckets
    that are ready to go, for this lane, when it ends.
    """

    needs: tuple[int, ...]
    gives: tuple[int, int] | None
    forward: bool
    releases: tuple[int, ...]


@dataclass(frozen=True)
class Hosts:
    """Seconds of a core. tasks_s: by stage, before each task; update_s, beside_s: of a lane, the latter from the step's
    beginning on. buckets_s: by stage, of each bucket on each lane, while it is under way; switch_s: on a switch.

    crowded: as `Cores` has it. burst_s: what a link that was still for so long, or longer, has in hand; sent_s: by
    stage, of each bucket, what that can save.
    """

    cores: int
    tasks_s: Sequence[Sequence[float]]
    buckets_s: Sequence[Sequence[float]]
    switch_s: Sequence[Sequence[float]]
    update_s: float
    beside_s: float
    crowded: float
    burst_s: float
    sent_s: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Step:
    """tasks: by stage, in order. seconds: by lane, of each task. flags: how many a lane has.

    send_s, send_uses: by lane, of a message to another stage, forwards and backwards. bucket_s: by stage, of each
    bucket among its replicas; bucket_uses: by stage. first_buckets: by stage, how many are ready from the beginning.
    bucket_flag: the flag that the first bucket's end raises on all lanes of its stage, and so on; None: nobody waits
    for buckets but the update. update_s: by lane. gather_s: by stage, of all weights over the links of buckets, once
    all of its replicas have updated theirs; 0: none. capacity: of links. slowed: how many times as long tasks take
    while the lane's buckets are under way. hosts: what lanes do on cores that they share; None: each has enough of its
    own.
    """

    replicas: int
    tasks: Sequence[Sequence[Task]]
    seconds: Sequence[Sequence[float]]
    flags: int
    send_s: Sequence[tuple[float, float]]
    send_uses: Sequence[tuple[Uses, Uses]]
    bucket_s: Sequence[Sequence[float]]
    bucket_uses: Sequence[Uses]
    first_buckets: Sequence[int]
    bucket_flag: int | None
    update_s: Sequence[float]
    gather_s: Sequence[float]
    capacity: Sequence[float]
    slowed: float = 1.0
    hosts: Hosts | None = None

    @property
    def lanes(self) -> int:
        return len(self.tasks) * self.replicas


@dataclass
class EventTimes:
    """When everything began and ended: by lane and task; -1 where nothing was sent. buckets, gathers: by stage."""

    began_s: list[list[float]]
    ended_s: list[list[float]]
    sent_s: list[list[float]]
    arrived_s: list[list[float]]
    buckets_s: list[list[tuple[float, float]]]
    update_s: list[tuple[float, float]]
    gather_s: list[tuple[float, float]]

    @property
    def end_s(self) -> float:
        return max(ended for _, ended in (*self.update_s, *self.gather_s))


def run_event_loop(step: Step) -> EventTimes:
    """Cost: some microseconds a task and message, with the logarithm of how many are under way at once."""
    return _Player(step).run()


class _Player:
    def __init__(self, step: Step) -> None:
        self.step = step
        lanes, stages = step.lanes, len(step.tasks)
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.order = 0
        self.now_s = 0.0
        self.links = SharedLinks(step.capacity, self._flow_due)
        # By flow: lane and task of a message; a lane of -1 and the stage whose bucket it is; a lane of -2 and the stage
        # whose updated weights are gathered.
        self.what: dict[int, tuple[int, int]] = {}
        self.come = [bytearray(step.flags) for _ in range(lanes)]
        self.at = [0] * lanes
        self.waits = [True] * lanes
        # What a lane computes now: work left, its pace, since when; and which of its dates is the valid one.
        self.left_s = [0.0] * lanes
        self.pace = [1.0] * lanes
        self.since_s = [0.0] * lanes
        self.version = [0] * lanes
        self.talking = [False] * lanes
        self.ready = [
            [step.replicas] * first + [0] * (len(buckets) - first)
            for buckets, first in zip(step.bucket_s, step.first_buckets, strict=True)
        ]
        self.next_bucket = [0] * stages
        # By stage, updates that have not ended.
        self.updating = [step.replicas] * stages
        # Work on shared cores: by its number, what it is for; lanes whose task has not come to its device yet; pieces
        # that a stage's bucket waits for beside its flow; and lanes that have still something to do beside all.
        hosts = step.hosts
        self.cores = Cores(hosts.cores, self._slice_due, hosts.crowded) if hosts else Cores(1, self._slice_due)
        self.work: dict[int, tuple[int, int]] = {}
        self.on_core: set[int] = set()
        self.bucket_parts = [0] * stages
        self.beside = [False] * lanes
        # Before a step the links have been still for long.
        self.still_since_s = [-math.inf] * stages
        self.played = EventTimes(
            began_s=self._of_tasks(),
            ended_s=self._of_tasks(),
            sent_s=self._of_tasks(),
            arrived_s=self._of_tasks(),
            buckets_s=[[] for _ in range(stages)],
            update_s=[(-1.0, -1.0)] * lanes,
            gather_s=[(-1.0, -1.0)] * stages,
        )

    def _of_tasks(self) -> list[list[float]]:
        step = self.step
        return [[-1.0] * len(step.tasks[lane // step.replicas]) for lane in range(step.lanes)]

    def run(self) -> EventTimes:
        for stage in range(len(self.step.tasks)):
            self._begin_bucket(stage)
        for lane in range(self.step.lanes):
            self._go_on(lane)
            if self.step.hosts is not None and self.step.hosts.beside_s > 0:
                self.beside[lane] = True
                self._ask(_BESIDE, lane, self.step.hosts.beside_s)
        heap = self.heap
        while heap:
            self.now_s, _, kind, index, version = heappop(heap)
            if kind == _TURN:
                if version == self.version[index]:
                    self._turn_ended(index)
            elif kind == _FLOW:
                if self.links.ended(self.now_s, index, version):
                    self._flow_ended(index)
            elif kind == _SLICE:
                if self.cores.ended(self.now_s, index):
                    self._worked(*self.work.pop(index))
            else:
                self._updated(index)
        assert all(ended >= 0 for _, ended in self.played.update_s), "a lane waits for what nobody gives"
        return self.played

    def _due(self, when_s: float, kind: int, index: int, version: int) -> None:
        # The order of asking keeps events of one instant in the same order in every run.
        self.order += 1
        heappush(self.heap, (when_s, self.order, kind, index, version))

    def _flow_due(self, when_s: float, flow: int, version: int) -> None:
        self._due(when_s, _FLOW, flow, version)

    def _slice_due(self, when_s: float, number: int) -> None:
        self._due(when_s, _SLICE, number, 0)

    def _ask(self, what: int, index: int, work_s: float) -> None:
        self.work[self.cores.ask(self.now_s, work_s)] = (what, index)

    def _worked(self, what: int, index: int) -> None:
        if what == _TASK and self.at[index] < len(self.step.tasks[index // self.step.replicas]):
            self._compute(index)
        elif what == _TASK:
            self._updated(index)
        elif what == _BESIDE:
            self.beside[index] = False
            self._update_if_all_is_there(index)
        else:
            self._bucket_part_ended(index)

    def _go_on(self, lane: int) -> None:
        """Begin the lane's next task if what it needs has come."""
        step, at = self.step, self.at[lane]
        stage = lane // step.replicas
        if at == len(step.tasks[stage]):
            self._update_if_all_is_there(lane)
            return
        task = step.tasks[stage][at]
        for flag in task.needs:
            if not self.come[lane][flag]:
                return
        self.waits[lane] = False
        self.played.began_s[lane][at] = self.now_s
        if step.hosts is not None and step.hosts.tasks_s[stage][at] > 0:
            self.on_core.add(lane)
            self._ask(_TASK, lane, step.hosts.tasks_s[stage][at])
        else:
            self._compute(lane)

    def _compute(self, lane: int) -> None:
        """On the lane's own device."""
        step, at = self.step, self.at[lane]
        self.on_core.discard(lane)
        self.left_s[lane], self.since_s[lane] = step.seconds[lane][at], self.now_s
        self.pace[lane] = 1 / step.slowed if self.talking[lane] else 1.0
        self.version[lane] += 1
        self._due(self.now_s + self.left_s[lane] / self.pace[lane], _TURN, lane, self.version[lane])

    def _turn_ended(self, lane: int) -> None:
        step, at, now_s = self.step, self.at[lane], self.now_s
        stage, replica = divmod(lane, step.replicas)
        task = step.tasks[stage][at]
        self.played.ended_s[lane][at] = now_s
        self.at[lane], self.waits[lane] = at + 1, True
        if task.gives is not None:
            to, flag = task.gives
            way = 0 if task.forward else 1
            if to != stage and step.send_s[lane][way] > 0:
                self.played.sent_s[lane][at] = now_s
                flow = self.links.start(now_s, step.send_s[lane][way], step.send_uses[lane][way])
                self.what[flow] = (lane, at)
            else:
                self._comes(to * step.replicas + replica, flag)
        for bucket in task.releases:
            self.ready[stage][bucket] += 1
        if task.releases:
            self._begin_bucket(stage)
        if self.waits[lane]:
            self._go_on(lane)

    def _comes(self, lane: int, flag: int) -> None:
        self.come[lane][flag] = 1
        if self.waits[lane]:
            self._go_on(lane)

    def _begin_bucket(self, stage: int) -> None:
        """One after the other, each when every replica has it."""
        step, bucket = self.step, self.next_bucket[stage]
        begun = self.played.buckets_s[stage]
        if len(begun) > bucket or bucket == len(step.bucket_s[stage]) or self.ready[stage][bucket] < step.replicas:
            return
        begun.append((self.now_s, -1.0))
        work_s = step.bucket_s[stage][bucket]
        self.bucket_parts[stage] = 1
        if step.hosts is not None:
            in_hand_s = min(step.hosts.burst_s, self.now_s - self.still_since_s[stage])
            work_s -= min(in_hand_s, step.hosts.sent_s[stage][bucket])
            on_cores = [step.hosts.buckets_s[stage][bucket]] * step.replicas + [step.hosts.switch_s[stage][bucket]]
            for busy_s in filter(None, on_cores):
                self.bucket_parts[stage] += 1
                self._ask(_BUCKET, stage, busy_s)
        flow = self.links.start(self.now_s, work_s, step.bucket_uses[stage])
        self.what[flow] = (-1, stage)
        self._talks(stage, talking=True)

    def _flow_ended(self, flow: int) -> None:
        step = self.step
        lane, at = self.what.pop(flow)
        if lane >= 0:
            stage, replica = divmod(lane, step.replicas)
            self.played.arrived_s[lane][at] = self.now_s
            gives = step.tasks[stage][at].gives
            assert gives is not None
            self._comes(gives[0] * step.replicas + replica, gives[1])
            return
        if lane == -2:
            self.played.gather_s[at] = (self.played.gather_s[at][0], self.now_s)
            return
        self.still_since_s[at] = self.now_s
        self._bucket_part_ended(at)

    def _bucket_part_ended(self, stage: int) -> None:
        """Of its flow, and of what its ranks do for it on cores, one is through."""
        self.bucket_parts[stage] -= 1
        if self.bucket_parts[stage]:
            return
        step, bucket = self.step, self.next_bucket[stage]
        began_s, _ = self.played.buckets_s[stage][bucket]
        self.played.buckets_s[stage][bucket] = (began_s, self.now_s)
        self.next_bucket[stage] += 1
        self._talks(stage, talking=False)
        self._begin_bucket(stage)
        lanes = range(stage * step.replicas, (stage + 1) * step.replicas)
        if step.bucket_flag is not None:
            for lane in lanes:
                self._comes(lane, step.bucket_flag + bucket)
        if self.next_bucket[stage] == len(step.bucket_s[stage]):
            for lane in lanes:
                self._update_if_all_is_there(lane)

    def _talks(self, stage: int, *, talking: bool) -> None:
        step = self.step
        if step.slowed == 1.0:
            return
        for lane in range(stage * step.replicas, (stage + 1) * step.replicas):
            self.talking[lane] = talking
            if not self.waits[lane] and lane not in self.on_core:
                self.left_s[lane] -= self.pace[lane] * (self.now_s - self.since_s[lane])
                self.since_s[lane] = self.now_s
                self.pace[lane] = 1 / step.slowed if talking else 1.0
                self.version[lane] += 1
                due_s = self.now_s + max(0.0, self.left_s[lane]) / self.pace[lane]
                self._due(due_s, _TURN, lane, self.version[lane])

    def _update_if_all_is_there(self, lane: int) -> None:
        step = self.step
        stage = lane // step.replicas
        done = self.at[lane] == len(step.tasks[stage]) and self.next_bucket[stage] == len(step.bucket_s[stage])
        if not done or self.beside[lane] or self.played.update_s[lane][0] >= 0:
            return
        self.played.update_s[lane] = (self.now_s, -1.0)
        if step.hosts is not None and step.hosts.update_s > 0:
            self._ask(_TASK, lane, step.hosts.update_s)
        else:
            self._due(self.now_s + step.update_s[lane], _UPDATE, lane, 0)

    def _updated(self, lane: int) -> None:
        """The last of a stage's replicas begins the gather of what all of them have updated."""
        self.played.update_s[lane] = (self.played.update_s[lane][0], self.now_s)
        stage = lane // self.step.replicas
        self.updating[stage] -= 1
        if self.updating[stage] == 0 and self.step.gather_s[stage] > 0:
            self.played.gather_s[stage] = (self.now_s, -1.0)
            flow = self.links.start(self.now_s, self.step.gather_s[stage], self.step.bucket_uses[stage])
            self.what[flow] = (-2, stage)
