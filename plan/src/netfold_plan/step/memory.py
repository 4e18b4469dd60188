"""The memory that a rank needs: weights, gradients, optimizer state, and the activations that a schedule keeps."""

from __future__ import annotations

from netfold_plan.job import OPTIMIZERS, Job
from netfold_plan.shared_rules import waiting_passes, zero_bytes
from netfold_plan.step.prediction import Memory
from netfold_plan.step.stages import Stage


def memory_of(stage: Stage, index: int, microbatches: int, job: Job) -> Memory:
    """Bytes of one rank of pipeline stage `index`.

    Some of what ZeRO splits is whole for a while, and counts as activations: gradients of one layer, and weights of one
    layer and, with prefetch, of the next one. So does what one layer of one microbatch recomputes. The gradients of a
    layer arrive while its activations are freed: unless they are reduced beside computing, only the larger counts.
    """
    split = job.split
    layer = stage.layer_parameters if split.data > 1 else 0.0
    gathered = (2 if job.prefetch else 1) * layer * job.item_bytes if split.zero == 3 else 0.0
    reduced = layer * job.gradient_bytes if split.zero >= 2 else 0.0
    recomputed = max(0.0, stage.peak_bytes - stage.kept_bytes)
    is_beside = job.prefetch if split.zero == 3 else job.overlap
    whole = gathered + (recomputed + reduced if is_beside else max(recomputed, reduced))
    # The optimizer updates a copy of 32 bits of weights of 16 bits.
    state = OPTIMIZERS[job.optimizer] + (4 if job.item_bytes == 2 else 0)
    a_parameter = zero_bytes(job.item_bytes, job.gradient_bytes, state, zero=split.zero, data=split.data)
    weights, gradients, optimizer = (stage.parameters * size for size in a_parameter)
    return Memory(weights, gradients, optimizer, waiting(index, microbatches, job) * stage.kept_bytes + whole)


def waiting(index: int, microbatches: int, job: Job) -> float:
    """The largest number of microbatches whose activations a stage keeps; interleaved stages count them in parts."""
    pipeline, interleave = job.split.pipeline, job.split.interleave
    passes = waiting_passes(job.schedule, index, pipeline=pipeline, interleave=interleave, microbatches=microbatches)
    return passes / interleave
