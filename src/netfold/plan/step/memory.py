"""What a rank must hold: weights, gradients, optimizer state, and the activations that a schedule keeps waiting."""

from __future__ import annotations

from netfold.plan.job import OPTIMIZERS, Job
from netfold.plan.step.prediction import Memory
from netfold.plan.step.stages import Stage


def memory_of(stage: Stage, index: int, microbatches: int, job: Job) -> Memory:
    """Of one rank of a pipeline's stage `index`. ZeRO splits state from its level on over the data-parallel ranks.

    What it splits is whole for a while, counted as activations: gradients of one layer, weights of one and, where they
    are prefetched, of the next. So is what is recomputed, of one layer of one microbatch. Gradients of a layer come
    while its activations go, so where nothing is reduced beside computing only the larger of both counts.
    """
    split = job.split
    layer = stage.layer_parameters if split.data > 1 else 0.0
    gathered = (2 if job.prefetch else 1) * layer * job.item_bytes if split.zero == 3 else 0.0
    reduced = layer * job.gradient_bytes if split.zero >= 2 else 0.0
    parts = [split.data if split.zero >= level else 1 for level in (3, 2, 1)]
    recomputed = max(0.0, stage.peak_bytes - stage.kept_bytes)
    beside = job.prefetch if split.zero == 3 else job.overlap
    whole = gathered + (recomputed + reduced if beside else max(recomputed, reduced))
    # Weights of 16 bits have a copy of 32 that the optimizer updates.
    state = OPTIMIZERS[job.optimizer] + (4 if job.item_bytes == 2 else 0)
    return Memory(
        weights=stage.parameters * job.item_bytes / parts[0],
        gradients=stage.parameters * job.gradient_bytes / parts[1],
        optimizer=stage.parameters * state / parts[2],
        activations=waiting(index, microbatches, job) * stage.kept_bytes + whole,
    )


def waiting(index: int, microbatches: int, job: Job) -> float:
    """Microbatches whose activations a stage keeps at once: all of them where every forward pass comes first.

    Else as many as stages from here on (Narayanan et al. 2021, section 2.2). With v interleaved pieces, each a v-th of
    a microbatch's: v-1 groups of p, two for each stage from the next one on, and one more; for the first stage that is
    1 + (p-1)/pv times as many as stages (Korthikanti et al. 2022, section 4.2.3).
    """
    split = job.split
    if job.schedule == "zero-bubble":
        # Kept until the gradients of weights are computed: as many as stages, on each of them (Qi et al. 2024).
        return float(min(microbatches, split.pipeline))
    if job.schedule == "gpipe":
        return float(microbatches)
    after = split.pipeline - index
    if split.interleave > 1:
        group = microbatches // max(1, microbatches // split.pipeline)
        pieces = (split.interleave - 1) * group + 2 * (after - 1) + 1
        return min(float(microbatches), pieces / split.interleave)
    return float(min(microbatches, after))
