"""The analytical model: the parts of a step in closed form."""

from __future__ import annotations

import math

from netfold_plan.cluster import Cluster
from netfold_plan.job import Job
from netfold_plan.model import Measured, Model
from netfold_plan.step.constants import FITTED, Constants
from netfold_plan.step.memory import memory_of
from netfold_plan.step.prediction import Prediction
from netfold_plan.step.stages import Costs, Stage, costs


def predict(model: Model, cluster: Cluster, job: Job, constants: Constants = FITTED) -> Prediction:
    """Predict one step. Raises ValueError, in one sentence, for a split that the model or the cluster cannot have.

    The slowest stage works through all microbatches. The time of the other stages for one microbatch is the bubble,
    divided by the virtual stages where stages are interleaved (Narayanan et al. 2021, section 2.2). Gradients are
    reduced last, or during the last backward pass.
    """
    split, device = job.split, cluster.device
    parts = costs(model, cluster, job, constants)
    slowest = max(parts.stages, key=lambda stage: stage.total_s)
    exposed = {
        "tensor": parts.microbatches * (slowest.forward_tensor_s + slowest.backward_tensor_s),
        "pipeline": _waited_messages(parts, slowest, job),
        "data": _exposed_data(parts, slowest, job),
        "tables": parts.microbatches * slowest.tables_s,
    }
    compute = parts.microbatches * (slowest.forward_s + slowest.backward_s)
    bubble = (sum(_filled(stage, job) for stage in parts.stages) - _filled(slowest, job)) / split.interleave
    step = compute + bubble + parts.optimizer_s + sum(exposed.values())
    memory = max(
        (memory_of(stage, index, parts.microbatches, job) for index, stage in enumerate(parts.stages)),
        key=lambda each: each.total,
    )
    return Prediction(
        step_s=step,
        low_s=step * (1 - constants.spread),
        high_s=step * (1 + constants.spread),
        compute_s=compute,
        bubble_s=bubble,
        optimizer_s=parts.optimizer_s,
        exposed_s=exposed,
        memory=memory,
        memory_bytes=math.inf if isinstance(model, Measured) else device.usable_bytes,
        samples_per_s=job.global_batch / step,
        mfu=job.global_batch * model.flops / (step * split.ranks * device.peak(job.precision)),
        limit=limit_of(step, compute, bubble, parts.optimizer_s, exposed),
        stages=parts.stages,
    )


def limit_of(step_s: float, compute_s: float, bubble_s: float, optimizer_s: float, exposed_s: dict[str, float]) -> str:
    """The largest part of a step, and every other part above a tenth of it, as text."""
    parts = {"computing": compute_s, "the pipeline's bubble": bubble_s, "the optimizer": optimizer_s}
    parts |= {f"{kind}-parallel communication": seconds for kind, seconds in exposed_s.items()}
    most = max(parts, key=lambda name: parts[name])
    text = f"{most} takes {100 * parts[most] / step_s:.0f}% of a step"
    others = sorted(
        (name for name in parts if name != most and parts[name] > 0.1 * step_s), key=lambda name: -parts[name]
    )
    return text + "".join(f", {name} {100 * parts[name] / step_s:.0f}%" for name in others)


def _filled(stage: Stage, job: Job) -> float:
    """Seconds that a stage makes other stages wait while the pipeline fills and drains.

    With zero-bubble the gradients of weights are postponed, and fill as much idle time (Qi et al. 2024, ZB-H1).
    """
    return stage.total_s - (2 * stage.weights_s if job.schedule == "zero-bubble" else 0.0)


def _waited_messages(parts: Costs, slowest: Stage, job: Job) -> float:
    """Seconds that stages wait for messages: once along all virtual stages, while the pipeline fills and drains.

    With 1f1b any n neighbouring stages have n microbatches in flight. One microbatch takes them at least an n-th of a
    round: their passes and the 2(n-1) messages between them. Where that is more than the slowest stage takes, every
    microbatch waits. Exact for equal stages and a multiple of them in microbatches: 2c((p-1)m/p + p-2) for messages of
    c seconds. Where c differs between stages, tests compare with the simulated step.
    """
    split = job.split
    *inner, around = (stage.send_s for stage in parts.stages)
    once_s = 2 * (split.interleave * sum(inner) + (split.interleave - 1) * around)
    if job.schedule != "1f1b" or split.interleave > 1 or not once_s:
        return once_s
    pace_s, count = _slowest_round(parts.stages)
    waits_s = pace_s - slowest.total_s
    # The first and the last microbatch do not meet other ones. A round that has begun is waited for as a whole.
    waited_s = max(0, parts.microbatches - 2) * waits_s
    return once_s + waited_s + min(waited_s, waits_s * max(0, count - 2) / max(1, count - 1))


def _slowest_round(stages: tuple[Stage, ...]) -> tuple[float, int]:
    """The run of neighbouring stages whose round takes longest per microbatch: seconds, and the number of stages."""
    pace_s, count = max(stage.total_s for stage in stages), 1
    while True:
        # Find the run that is furthest behind this pace, until no run is behind.
        behind_s = sent_s = 0.0
        length = 0
        best: tuple[float, int] = (0.0, 0)
        for stage in stages:
            if behind_s + sent_s > 0:
                behind_s, length = behind_s + sent_s, length + 1
            else:
                behind_s, length = 0.0, 1
            behind_s, sent_s = behind_s + stage.total_s - pace_s, 2 * stage.send_s
            best = max(best, (behind_s, length))
        if best[0] <= 1e-9 * pace_s:
            return pace_s, count
        pace_s, count = pace_s + best[0] / best[1], best[1]


def _exposed_data(parts: Costs, stage: Stage, job: Job) -> float:
    """Seconds of data-parallel communication that computing does not hide."""
    if job.split.zero < 3:
        # ZeRO-1 and 2 gather the updated weights at the end of the step, and nothing hides that.
        reductions = parts.microbatches if job.split.zero == 2 else 1
        return reductions * _exposed_reduction(parts, stage, job) + parts.gathered_s
    if not job.prefetch:
        return parts.microbatches * (2 * parts.gathered_s + parts.data_s)
    # With ZeRO-3 a pass hides the gathers of the next layers. Nothing hides the gather of its first layer.
    forward = max(0.0, parts.gathered_s - stage.forward_s)
    backward = max(0.0, parts.gathered_s + parts.data_s - stage.backward_s)
    first = parts.gathered_s * min(1.0, job.bucket_bytes / max(1.0, stage.parameters * job.item_bytes))
    return parts.microbatches * (max(forward, first) + max(backward, first))


def _exposed_reduction(parts: Costs, stage: Stage, job: Job) -> float:
    """Seconds of one reduction of all gradients that the backward pass does not hide."""
    if not job.overlap:
        return parts.data_s
    if parts.travels:
        ended = 0.0
        for travel in parts.travels:
            ended = max(ended, stage.backward_s - travel.left_s) + travel.taken_s
        return max(0.0, ended - stage.backward_s)
    # The last bucket is ready when the backward pass ends.
    last = parts.data_s * min(1.0, job.bucket_bytes / max(1.0, stage.parameters * job.gradient_bytes))
    return max(last, parts.data_s - stage.backward_s)
