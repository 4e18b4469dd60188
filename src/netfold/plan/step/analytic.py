"""The analytical model: a step's parts in closed form."""

from __future__ import annotations

from netfold.plan.cluster import Cluster
from netfold.plan.job import OPTIMIZERS, Job
from netfold.plan.model import Model
from netfold.plan.step.constants import FITTED, Constants
from netfold.plan.step.prediction import Memory, Prediction
from netfold.plan.step.stages import Costs, Stage, costs


def predict(model: Model, cluster: Cluster, job: Job, constants: Constants = FITTED) -> Prediction:
    """Raises ValueError, in a sentence, for a split that the model or the cluster cannot have."""
    split, device = job.split, cluster.device
    parts = costs(model, cluster, job, constants)
    slowest = max(parts.stages, key=lambda stage: stage.total_s)
    compute = parts.microbatches * (slowest.forward_s + slowest.backward_s)
    tensor = parts.microbatches * (slowest.forward_tensor_s + slowest.backward_tensor_s)
    bubble = sum(stage.total_s for stage in parts.stages if stage is not slowest) / split.interleave
    pipeline = 2 * sum(stage.send_s for stage in parts.stages[1:])
    step = compute + tensor + bubble + pipeline + parts.data_s + parts.optimizer_s
    return Prediction(
        step_s=step,
        low_s=step * (1 - constants.spread),
        high_s=step * (1 + constants.spread),
        compute_s=compute,
        bubble_s=bubble,
        optimizer_s=parts.optimizer_s,
        exposed_s={"tensor": tensor, "pipeline": pipeline, "data": parts.data_s, "tables": 0.0},
        memory=max(
            (_memory(parts, index, stage, job) for index, stage in enumerate(parts.stages)), key=lambda m: m.total
        ),
        memory_bytes=device.memory_bytes,
        samples_per_s=job.global_batch / step,
        mfu=job.global_batch * model.flops / (step * split.ranks * device.peak(job.precision)),
        limit="computing",
        stages=parts.stages,
    )


def _memory(parts: Costs, index: int, stage: Stage, job: Job) -> Memory:
    in_flight = min(parts.microbatches, job.split.pipeline - index)
    return Memory(
        weights=stage.parameters * job.item_bytes,
        gradients=stage.parameters * job.gradient_bytes,
        optimizer=stage.parameters * (OPTIMIZERS[job.optimizer] + (4 if job.item_bytes == 2 else 0)),
        activations=in_flight * stage.kept_bytes,
    )
