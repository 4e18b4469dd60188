"""Simulate a step: the same Prediction as in closed form, of the lane that computes longest."""

from __future__ import annotations

from dataclasses import dataclass, replace

from netfold_plan.cluster import Cluster
from netfold_plan.events.build import BuiltStep, build_step
from netfold_plan.events.conditions import Conditions
from netfold_plan.events.event_loop import EventTimes, run_event_loop
from netfold_plan.events.timed_step import build_timed_step
from netfold_plan.job import Job
from netfold_plan.model import Model, TimedStep
from netfold_plan.step import FITTED, Constants, Prediction, costs, limit_of, predict


@dataclass(frozen=True)
class Simulated:
    """prediction: of the whole step. built, times: every task and its times; `timeline` lists them by rank."""

    job: Job
    prediction: Prediction
    built: BuiltStep
    times: EventTimes


def simulate(
    model: Model,
    cluster: Cluster,
    job: Job,
    conditions: Conditions | None = None,
    constants: Constants = FITTED,
    *,
    folded: bool | None = None,
) -> Simulated:
    """Simulate one step. folded: one lane stands for all replicas; by default wherever replicas do the same.

    Cost for 10,240 ranks: hundredths of a second folded, else some seconds. Raises ValueError, in one sentence, for a
    split or a schedule that is not possible, and for folding where jitter or stragglers make ranks differ.
    """
    conditions = conditions or Conditions()
    takes_turns = isinstance(model, TimedStep) and cluster.shared is not None
    if folded is None:
        folded = conditions.symmetric and not takes_turns
    if folded and takes_turns:
        raise ValueError(f"hosts of {cluster.name} share cores, so one cannot stand for all; leave folded out")
    if folded and not conditions.symmetric:
        raise ValueError("jitter and stragglers make ranks differ, so one cannot stand for all; leave folded out")
    outside = [rank for rank in conditions.stragglers if not 0 <= rank < job.split.ranks]
    if outside:
        raise ValueError(f"there is no rank {outside[0]} to be slow; ranks are 0 to {job.split.ranks - 1}")
    closed = predict(model, cluster, job, constants)
    if isinstance(model, TimedStep):
        built = build_timed_step(model, cluster, job, conditions, constants, folded=folded)
    else:
        built = build_step(model, cluster, job, costs(model, cluster, job, constants), conditions, folded=folded)
    times = run_event_loop(built.step)
    return Simulated(job, _prediction(closed, job, built, times), built, times)


def _prediction(closed: Prediction, job: Job, built: BuiltStep, times: EventTimes) -> Prediction:
    """The prediction for the lane that computes longest; memory and bands are those of the closed form."""
    lane = max(range(built.step.lanes), key=lambda lane: sum(built.step.seconds[lane]))
    stage, step_s = lane // built.step.replicas, times.end_s
    tasks = built.task_info[stage]
    busy_s = sum(ended - began for began, ended in zip(times.began_s[lane], times.ended_s[lane], strict=True))
    tensor_s, tables_s = sum(task.tensor_s for task in tasks), sum(task.tables_s for task in tasks)
    turns_end_s = times.ended_s[lane][-1]
    update_began_s, update_ended_s = times.update_s[lane]
    lane_ended_s = max(update_ended_s, times.gather_s[stage][1])
    idle_s = turns_end_s - busy_s
    messages_s, gathers_s = _waited_for(built, times, lane)
    gathers_s = min(idle_s, gathers_s)
    messages_s = min(idle_s - gathers_s, messages_s)
    ratio = step_s / closed.step_s
    compute_s = busy_s - tensor_s - tables_s
    bubble_s = idle_s - messages_s - gathers_s + step_s - lane_ended_s
    optimizer_s = update_ended_s - update_began_s
    exposed_s = {
        "tensor": tensor_s,
        "pipeline": messages_s,
        "data": gathers_s + update_began_s - turns_end_s + lane_ended_s - update_ended_s,
        "tables": tables_s,
    }
    return replace(
        closed,
        step_s=step_s,
        low_s=closed.low_s * ratio,
        high_s=closed.high_s * ratio,
        compute_s=compute_s,
        bubble_s=bubble_s,
        optimizer_s=optimizer_s,
        exposed_s=exposed_s,
        samples_per_s=job.global_batch / step_s,
        mfu=closed.mfu / ratio,
        limit=limit_of(step_s, compute_s, bubble_s, optimizer_s, exposed_s),
    )


def _waited_for(built: BuiltStep, times: EventTimes, lane: int) -> tuple[float, float]:
    """Seconds until the end of a lane's last pass that messages between stages, and gathers of weights, were not
    hidden.

    Follows the step backwards: each task began when the task before it on its lane ended, or when a message or the
    weights had arrived.
    """
    step = built.step
    givers: list[dict[int, tuple[int, int]]] = [{} for _ in step.tasks]
    for stage, tasks in enumerate(step.tasks):
        for at, task in enumerate(tasks):
            if task.gives is not None:
                givers[task.gives[0]][task.gives[1]] = (stage, at)
    messages_s, gathers_s, at = 0.0, 0.0, len(step.tasks[lane // step.replicas]) - 1
    while at >= 0:
        stage, replica = divmod(lane, step.replicas)
        began_s = times.began_s[lane][at]
        before_s = times.ended_s[lane][at - 1] if at > 0 else 0.0
        came_s = {flag: _bucket_end(built, times, stage, flag) for flag in step.tasks[stage][at].needs}
        message = next((flag for flag in came_s if flag in givers[stage]), None)
        if began_s <= before_s or not came_s:
            at -= 1
        elif began_s in came_s.values() or message is None:
            gathers_s += began_s - before_s
            at -= 1
        else:
            stage, at = givers[stage][message]
            lane = stage * step.replicas + replica
            if times.sent_s[lane][at] >= 0:
                messages_s += times.arrived_s[lane][at] - times.sent_s[lane][at]
    return messages_s, gathers_s


def _bucket_end(built: BuiltStep, times: EventTimes, stage: int, flag: int) -> float | None:
    """Return when the bucket of a flag ended; None for a flag that is not a bucket's."""
    first = built.step.bucket_flag
    return None if first is None or flag < first else times.buckets_s[stage][flag - first][1]
