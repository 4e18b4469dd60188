"""The parts of a step that was played: the same Prediction as in closed form, of the lane that has most to do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from netfold.plan.cluster import Cluster
from netfold.plan.events.conditions import Conditions
from netfold.plan.events.play import Played, play
from netfold.plan.events.script import Script, write_script
from netfold.plan.job import Job
from netfold.plan.model import Model
from netfold.plan.step import FITTED, Constants, Prediction, costs, predict


@dataclass(frozen=True)
class Simulated:
    """prediction: of the step as a whole. script, played: every task and when it was; `timeline` has them by rank."""

    job: Job
    prediction: Prediction
    script: Script
    played: Played


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
    if folded is None:
        folded = conditions.symmetric
    if folded and not conditions.symmetric:
        raise ValueError("jitter and stragglers tell ranks apart, so none can stand for others; leave folded out")
    outside = [rank for rank in conditions.stragglers if not 0 <= rank < job.split.ranks]
    if outside:
        raise ValueError(f"there is no rank {outside[0]} to be slow; there are {job.split.ranks}, from 0")
    closed = predict(model, cluster, job, constants)
    script = write_script(model, cluster, job, costs(model, cluster, job, constants), conditions, folded=folded)
    played = play(script.step)
    return Simulated(job, _prediction(closed, job, script, played), script, played)


def _prediction(closed: Prediction, job: Job, script: Script, played: Played) -> Prediction:
    """Of the lane that computes longest; memory and bands are those of the closed form."""
    lane = max(range(script.step.lanes), key=lambda lane: sum(script.step.seconds[lane]))
    stage, step_s = lane // script.step.replicas, played.end_s
    acts = script.acts[stage]
    busy_s = sum(ended - began for began, ended in zip(played.began_s[lane], played.ended_s[lane], strict=True))
    tensor_s = sum(act.tensor_s for act in acts)
    turns_end_s = played.ended_s[lane][-1]
    update_began_s, update_ended_s = played.update_s[lane]
    travelling_s = _travelling(script, played, lane)
    ratio = step_s / closed.step_s
    return replace(
        closed,
        step_s=step_s,
        low_s=closed.low_s * ratio,
        high_s=closed.high_s * ratio,
        compute_s=busy_s - tensor_s,
        bubble_s=turns_end_s - busy_s - travelling_s + step_s - update_ended_s,
        optimizer_s=update_ended_s - update_began_s,
        exposed_s={
            "tensor": tensor_s,
            "pipeline": travelling_s,
            "data": update_began_s - turns_end_s,
            "tables": 0.0,
        },
        samples_per_s=job.global_batch / step_s,
        mfu=closed.mfu / ratio,
    )


def _travelling(script: Script, played: Played, lane: int) -> float:
    """Of the time that a lane waits, the part in which what it waits for is on its way."""
    step = script.step
    stage, replica = divmod(lane, step.replicas)
    stages = len(step.tasks)
    sent = {}
    for other in {(stage + 1) % stages, (stage - 1) % stages}:
        neighbour = other * step.replicas + replica
        for at, task in enumerate(step.tasks[other]):
            if task.gives is not None and task.gives[0] == stage:
                sent[task.gives[1]] = played.sent_s[neighbour][at]
    waited_s, free_s = 0.0, 0.0
    for task, began_s, ended_s in zip(step.tasks[stage], played.began_s[lane], played.ended_s[lane], strict=True):
        if task.needs >= 0 and sent.get(task.needs, -1.0) >= 0:
            waited_s += max(0.0, began_s - max(free_s, sent[task.needs]))
        free_s = ended_s
    return waited_s
