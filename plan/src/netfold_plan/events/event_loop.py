"""A step as events: what each lane computes, sends and waits for, in the order of time.

A lane is the tensor ranks of one stage and one replica. They wait for one another several times per layer, so they have
one pace. Lanes of a stage are next to each other: lane = stage * replicas + replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from netfold_plan.events.resources import Cores, EventQueue, SharedLinks, Uses


class Task(NamedTuple):
    """A turn of a stage, or a part of a turn. A flag is the number of something that arrives at a lane.

    needs: the flags that the task waits for.
    gives: the stage and the flag that the result of the task raises; None: nothing waits for the result.
    releases: buckets that the lane has ready when the task ends.
    """

    needs: tuple[int, ...]
    gives: tuple[int, int] | None
    forward: bool
    releases: tuple[int, ...]


@dataclass(frozen=True)
class Hosts:
    """The work of lanes on cores that they share, in seconds of one core.

    tasks_s: by stage, before each task.
    buckets_s: by stage, for each bucket on each lane, while the bucket is under way. switch_s: the same on a switch.
    update_s: of a lane's update. beside_s: of a lane's other threads, from the beginning of the step.
    crowded: as in `Cores`.
    burst_s: what a link that was idle for that long, or longer, can send at once.
    sent_s: by stage, the part of each bucket that a burst can save.
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
    """tasks: by stage, in order. seconds: by lane, of each task. flags: how many flags a lane has.

    send_s, send_uses: by lane, of a message to another stage, forwards and backwards.
    bucket_s: by stage, of each bucket among its replicas. bucket_uses: by stage.
    first_buckets: by stage, how many buckets are ready at the beginning.
    bucket_flag: the end of a stage's bucket i raises flag bucket_flag + i on all lanes of the stage; None: only the
    update waits for buckets.
    update_s: by lane.
    gather_s: by stage, to gather all weights over the links of buckets after the last update of the stage; 0: none.
    capacity: by link.
    slowed: how many times as long tasks take while a bucket of their stage is under way.
    hosts: None: each lane has enough cores of its own.
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
    """Begin and end of everything: by lane and task, or (buckets, gathers) by stage; -1 where nothing was sent."""

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
    """Simulate a step. Cost: some microseconds per task and message, times the logarithm of those under way at once."""
    return _Loop(step).run()


class _Loop:
    """The parts that lanes and stages share."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.events = EventQueue()
        self.links = SharedLinks(self.events, step.capacity)
        hosts = step.hosts
        self.cores = Cores(self.events, hosts.cores if hosts else 1, hosts.crowded if hosts else 1.0)

        def by_task() -> list[list[float]]:
            return [[-1.0] * len(tasks) for tasks in step.tasks for _ in range(step.replicas)]

        self.times = EventTimes(
            began_s=by_task(),
            ended_s=by_task(),
            sent_s=by_task(),
            arrived_s=by_task(),
            buckets_s=[[] for _ in step.tasks],
            update_s=[(-1.0, -1.0)] * step.lanes,
            gather_s=[(-1.0, -1.0)] * len(step.tasks),
        )
        self.stages = [_Stage(self, index) for index in range(len(step.tasks))]

    def run(self) -> EventTimes:
        for stage in self.stages:
            stage.begin_next_bucket()
        for stage in self.stages:
            for lane in stage.lanes:
                lane.start()
        self.events.run()
        assert all(ended >= 0 for _, ended in self.times.update_s), "a lane waits for a flag that no task raises"
        return self.times


class _Stage:
    """All replicas of one stage: their buckets go one after the other, each when every replica has it ready."""

    def __init__(self, loop: _Loop, index: int) -> None:
        step = loop.step
        self.loop, self.index = loop, index
        self.seconds = step.bucket_s[index]
        # By bucket, how many replicas have it ready.
        first = step.first_buckets[index]
        self.ready = [step.replicas] * first + [0] * (len(self.seconds) - first)
        self.next_bucket = 0
        self.is_reducing = False
        # Of the bucket under way: its flow, and its work on cores.
        self.unfinished = 0
        self.idle_since_s = -math.inf
        self.updating = step.replicas
        self.lanes = [_Lane(loop, self, replica) for replica in range(step.replicas)]

    @property
    def is_reduced(self) -> bool:
        return self.next_bucket == len(self.seconds)

    def begin_next_bucket(self) -> None:
        loop, step, bucket = self.loop, self.loop.step, self.next_bucket
        if self.is_reducing or self.is_reduced or self.ready[bucket] < step.replicas:
            return
        now_s, work_s = loop.events.now_s, self.seconds[bucket]
        loop.times.buckets_s[self.index].append((now_s, -1.0))
        self.unfinished = 1
        if step.hosts is not None:
            burst_s = min(step.hosts.burst_s, now_s - self.idle_since_s)
            work_s -= min(burst_s, step.hosts.sent_s[self.index][bucket])
            on_lanes = [step.hosts.buckets_s[self.index][bucket]] * step.replicas
            for busy_s in (*on_lanes, step.hosts.switch_s[self.index][bucket]):
                if busy_s:
                    self.unfinished += 1
                    loop.cores.run(busy_s, self._part_ended)
        loop.links.start(work_s, step.bucket_uses[self.index], self._flow_ended)
        self._set_reducing(True)

    def _flow_ended(self) -> None:
        self.idle_since_s = self.loop.events.now_s
        self._part_ended()

    def _part_ended(self) -> None:
        self.unfinished -= 1
        if self.unfinished:
            return
        step, bucket, times = self.loop.step, self.next_bucket, self.loop.times.buckets_s[self.index]
        times[bucket] = (times[bucket][0], self.loop.events.now_s)
        self.next_bucket += 1
        self._set_reducing(False)
        self.begin_next_bucket()
        if step.bucket_flag is not None:
            for lane in self.lanes:
                lane.arrive(step.bucket_flag + bucket)
        if self.is_reduced:
            for lane in self.lanes:
                lane.update_if_complete()

    def _set_reducing(self, is_reducing: bool) -> None:
        self.is_reducing = is_reducing
        if self.loop.step.slowed != 1.0:
            for lane in self.lanes:
                lane.change_rate()

    def lane_updated(self) -> None:
        """After the last replica's update, gather the updated weights."""
        self.updating -= 1
        gather_s = self.loop.step.gather_s[self.index]
        if self.updating == 0 and gather_s > 0:
            self.loop.times.gather_s[self.index] = (self.loop.events.now_s, -1.0)
            self.loop.links.start(gather_s, self.loop.step.bucket_uses[self.index], self._gathered)

    def _gathered(self) -> None:
        times = self.loop.times.gather_s
        times[self.index] = (times[self.index][0], self.loop.events.now_s)


class _Lane:
    """One stage of one replica: its tasks in order, each when its flags have arrived, then the update."""

    def __init__(self, loop: _Loop, stage: _Stage, replica: int) -> None:
        step = loop.step
        self.loop, self.stage, self.replica = loop, stage, replica
        self.index = stage.index * step.replicas + replica
        self.tasks = step.tasks[stage.index]
        self.seconds = step.seconds[self.index]
        self.host_s = step.hosts.tasks_s[stage.index] if step.hosts else [0.0] * len(self.tasks)
        self.arrived = bytearray(step.flags)
        self.next_task = 0
        # A task is under way unless the lane is waiting; on a core first, then on the lane's device.
        self.is_waiting = True
        self.is_on_core = False
        self.has_other_threads = False
        # The task on the device: work left, its rate, since when, and the version of its scheduled end.
        self.left_s, self.rate, self.since_s, self.version = 0.0, 1.0, 0.0, 0

    def start(self) -> None:
        self.begin_next_task()
        hosts = self.loop.step.hosts
        if hosts is not None and hosts.beside_s > 0:
            self.has_other_threads = True
            self.loop.cores.run(hosts.beside_s, self._other_threads_ended)

    def _other_threads_ended(self) -> None:
        self.has_other_threads = False
        self.update_if_complete()

    def arrive(self, flag: int) -> None:
        self.arrived[flag] = 1
        if self.is_waiting:
            self.begin_next_task()

    def begin_next_task(self) -> None:
        """Begin the lane's next task if its flags have arrived; after the last task, the update."""
        at = self.next_task
        if at == len(self.tasks):
            self.update_if_complete()
            return
        for flag in self.tasks[at].needs:
            if not self.arrived[flag]:
                return
        self.is_waiting = False
        self.loop.times.began_s[self.index][at] = self.loop.events.now_s
        if self.host_s[at] > 0:
            self.is_on_core = True
            self.loop.cores.run(self.host_s[at], self._compute)
        else:
            self._compute()

    def _compute(self) -> None:
        self.is_on_core = False
        self.left_s = self.seconds[self.next_task]
        self._schedule_end()

    def change_rate(self) -> None:
        """Continue at the rate that the stage's reduction leaves."""
        if not self.is_waiting and not self.is_on_core:
            self.left_s = max(0.0, self.left_s - self.rate * (self.loop.events.now_s - self.since_s))
            self._schedule_end()

    def _schedule_end(self) -> None:
        events = self.loop.events
        self.rate = 1 / self.loop.step.slowed if self.stage.is_reducing else 1.0
        self.since_s = events.now_s
        self.version += 1
        events.at(events.now_s + self.left_s / self.rate, self._task_ended, self.version)

    def _task_ended(self, version: int) -> None:
        if version != self.version:
            return
        at, task = self.next_task, self.tasks[self.next_task]
        self.loop.times.ended_s[self.index][at] = self.loop.events.now_s
        self.next_task, self.is_waiting = at + 1, True
        if task.gives is not None:
            self._send(at, task.forward, *task.gives)
        for bucket in task.releases:
            self.stage.ready[bucket] += 1
        if task.releases:
            self.stage.begin_next_bucket()
        if self.is_waiting:
            self.begin_next_task()

    def _send(self, at: int, forward: bool, stage: int, flag: int) -> None:
        step, direction = self.loop.step, 0 if forward else 1
        receiver, send_s = self.loop.stages[stage].lanes[self.replica], step.send_s[self.index][direction]
        if receiver.stage is self.stage or send_s <= 0:
            receiver.arrive(flag)
            return
        self.loop.times.sent_s[self.index][at] = self.loop.events.now_s
        delivered = partial(self._delivered, at, receiver, flag)
        self.loop.links.start(send_s, step.send_uses[self.index][direction], delivered)

    def _delivered(self, at: int, receiver: _Lane, flag: int) -> None:
        self.loop.times.arrived_s[self.index][at] = self.loop.events.now_s
        receiver.arrive(flag)

    def update_if_complete(self) -> None:
        loop, hosts = self.loop, self.loop.step.hosts
        is_complete = self.next_task == len(self.tasks) and self.stage.is_reduced and not self.has_other_threads
        if not is_complete or loop.times.update_s[self.index][0] >= 0:
            return
        loop.times.update_s[self.index] = (loop.events.now_s, -1.0)
        if hosts is not None and hosts.update_s > 0:
            loop.cores.run(hosts.update_s, self._updated)
        else:
            loop.events.at(loop.events.now_s + loop.step.update_s[self.index], self._updated)

    def _updated(self) -> None:
        times = self.loop.times.update_s
        times[self.index] = (times[self.index][0], self.loop.events.now_s)
        self.stage.lane_updated()
