"""The parts of a step that was played: the same Prediction as in closed form, of the lane that has most to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster
from netfold.plan.events.build import BuiltStep, build_step
from netfold.plan.events.conditions import Conditions
from netfold.plan.events.event_loop import EventTimes, run_event_loop
from netfold.plan.events.timed_step import build_timed_step
from netfold.plan.job import Job
from netfold.plan.model import Model, TimedStep
from netfold.plan.step import FITTED, Constants, Prediction, costs, limit_of, predict


@dataclass(frozen=True)
class Simulated:
    """prediction: of the step as a whole. script, played: every task and when it was; `timeline` has them by rank."""

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
    """One step. folded: ranks that do the same at the same time are one; by default wherever they do.

    Cost: of a step of 10,240 ranks, hundredths of a second folded, seconds else. Raises ValueError, in a sentence, for
    a split or a schedule that cannot be, and for folding where jitter or stragglers tell ranks apart.
    """
    conditions = conditions or Conditions()
    takes_turns = isinstance(model, TimedStep) and cluster.shared is not None
    if folded is None:
        folded = conditions.symmetric and not takes_turns
    if folded and takes_turns:
        raise ValueError(f"hosts of {cluster.name} share cores, so none can stand for others; leave folded out")
    if folded and not conditions.symmetric:
        raise ValueError("jitter and stragglers tell ranks apart, so none can stand for others; leave folded out")
    outside = [rank for rank in conditions.stragglers if not 0 <= rank < job.split.ranks]
    if outside:
        raise ValueError(f"there is no rank {outside[0]} to be slow; there are {job.split.ranks}, from 0")
    closed = predict(model, cluster, job, constants)
    if isinstance(model, TimedStep):
        script = build_timed_step(model, cluster, job, conditions, constants, folded=folded)
    else:
        script = build_step(model, cluster, job, costs(model, cluster, job, constants), conditions, folded=folded)
    played = run_event_loop(script.step)
    return Simulated(job, _prediction(closed, job, script, played), script, played)


def _prediction(closed: Prediction, job: Job, script: BuiltStep, played: EventTimes) -> Prediction:
    """Of the lane that computes longest; memory and bands are those of the closed form."""
    lane = max(range(script.step.lanes), key=lambda lane: sum(script.step.seconds[lane]))
    stage, step_s = lane // script.step.replicas, played.end_s
    acts = script.task_info[stage]
    busy_s = sum(ended - began for began, ended in zip(played.began_s[lane], played.ended_s[lane], strict=True))
    tensor_s, tables_s = sum(act.tensor_s for act in acts), sum(act.tables_s for act in acts)
    turns_end_s = played.ended_s[lane][-1]
    update_began_s, update_ended_s = played.update_s[lane]
    lane_ended_s = max(update_ended_s, played.gather_s[stage][1])
    idle_s = turns_end_s - busy_s
    messages_s, gathers_s = _waited_for(script, played, lane)
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


def _waited_for(script: BuiltStep, played: EventTimes, lane: int) -> tuple[float, float]:
    """Of the time until a lane's last pass ends, what messages between stages and what gathers of weights take: those
    that nothing else hid.

    Back from that end: each task began when the one before it on its lane ended, when a message had come, or when the
    weights had.
    """
    step = script.step
    givers: list[dict[int, tuple[int, int]]] = [{} for _ in step.tasks]
    for stage, tasks in enumerate(step.tasks):
        for at, task in enumerate(tasks):
            if task.gives is not None:
                givers[task.gives[0]][task.gives[1]] = (stage, at)
    messages_s, gathers_s, at = 0.0, 0.0, len(step.tasks[lane // step.replicas]) - 1
    while at >= 0:
        stage, replica = divmod(lane, step.replicas)
        began_s = played.began_s[lane][at]
        before_s = played.ended_s[lane][at - 1] if at > 0 else 0.0
        came_s = {flag: _bucket_end(script, played, stage, flag) for flag in step.tasks[stage][at].needs}
        message = next((flag for flag in came_s if flag in givers[stage]), None)
        if began_s <= before_s or not came_s:
            at -= 1
        elif began_s in came_s.values() or message is None:
            gathers_s += began_s - before_s
            at -= 1
        else:
            stage, at = givers[stage][message]
            lane = stage * step.replicas + replica
            if played.sent_s[lane][at] >= 0:
                messages_s += played.arrived_s[lane][at] - played.sent_s[lane][at]
    return messages_s, gathers_s


def _bucket_end(script: BuiltStep, played: EventTimes, stage: int, flag: int) -> float | None:
    """None where the flag is not a bucket's."""
    first = script.step.bucket_flag
    return None if first is None or flag < first else played.buckets_s[stage][flag - first][1]
