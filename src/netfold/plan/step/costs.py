"""What a step is put together from: each pipeline stage's work for a microbatch, and what follows once a step.

`predict` adds these up in closed form; a simulator can play them as events.
"""

from __future__ import annotations

from dataclasses import dataclass

from netfold.plan.cluster import Cluster, Tier
from netfold.plan.job import Job
from netfold.plan.model import Layer, Model, Pass, Share


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage, for one microbatch; all of its pieces where they are interleaved.

    forward_s, backward_s: computing, recomputation in the latter. forward_tensor_s, backward_tensor_s: collectives
    among tensor ranks, which computing waits for. sent_bytes: activations to the next stage, a rank; as many come back
    as gradients. send_s: what they take. parameters: held by the rank. kept_bytes: activations of a microbatch.
    """

    forward_s: float
    backward_s: float
    forward_tensor_s: float
    backward_tensor_s: float
    sent_bytes: float
    send_s: float
    parameters: float
    kept_bytes: float

    @property
    def total_s(self) -> float:
        """Forward and backward pass, with what is communicated inside."""
        return self.forward_s + self.backward_s + self.forward_tensor_s + self.backward_tensor_s


@dataclass(frozen=True)
class Costs:
    """data_s: of all gradients among data-parallel ranks, and of weights with ZeRO, were nothing hidden.

    optimizer_s: the update of a rank's weights. Of the stage that takes longest, both.
    """

    stages: tuple[Stage, ...]
    microbatches: int
    data_s: float
    optimizer_s: float


def costs(model: Model, cluster: Cluster, job: Job) -> Costs:
    """Raises ValueError, in a sentence, for a split that the model or the cluster cannot have."""
    split, device = job.split, cluster.device
    if split.ranks > cluster.devices:
        raise ValueError(f"{split.text()} needs {split.ranks} devices; {cluster.name} has {cluster.devices}")
    share = Share(job.micro_batch, split.tensor, split.sequence, job.recomputation, job.item_bytes)
    layers = model.layers(share)
    peak = device.peak(job.precision)
    tier = _tier_of(cluster, split.tensor)

    def computing(work: Pass) -> float:
        return work.flops / (0.5 * peak) + work.moved_bytes / device.memory_bytes_per_s

    def talking(work: Pass) -> float:
        return sum(2 * each.size_bytes / tier.bytes_per_s for each in work.collectives)

    whole = _tier_of(cluster, split.ranks)
    stages = []
    for part in _cut(layers, split.pipeline):
        sent = max(layer.input_bytes for layer, _ in part) if split.pipeline > 1 else 0.0
        stages.append(
            Stage(
                sum(count * computing(layer.forward) for layer, count in part),
                sum(count * (computing(layer.backward) + computing(layer.again)) for layer, count in part),
                sum(count * talking(layer.forward) for layer, count in part),
                sum(count * (talking(layer.backward) + talking(layer.again)) for layer, count in part),
                sent,
                sent / whole.bytes_per_s,
                sum(count * layer.parameters for layer, count in part),
                sum(count * layer.kept_bytes for layer, count in part),
            )
        )
    parameters = max(stage.parameters for stage in stages)
    outer = _tier_of(cluster, split.tensor * split.data)
    data = 0.0 if split.data == 1 else 2 * parameters * job.gradient_bytes / outer.bytes_per_s
    return Costs(tuple(stages), job.microbatches, data, parameters * 20 / device.memory_bytes_per_s)


def _tier_of(cluster: Cluster, devices: int) -> Tier:
    """The innermost that joins so many neighbours."""
    return next(tier for tier in cluster.tiers if tier.devices >= devices)


def _cut(layers: tuple[Layer, ...], stages: int) -> list[list[tuple[Layer, float]]]:
    """Each stage's layers, and how many of each: repeated layers evenly, single ones at the ends they stand at."""
    repeated = [index for index, layer in enumerate(layers) if layer.count > 1]
    first, last = (repeated[0], repeated[-1]) if repeated else (0, len(layers) - 1)
    parts: list[list[tuple[Layer, float]]] = [
        [(layer, layer.count / stages) for layer in layers[first : last + 1]] for _ in range(stages)
    ]
    parts[0] = [(layer, 1.0) for layer in layers[:first]] + parts[0]
    parts[-1] = parts[-1] + [(layer, 1.0) for layer in layers[last + 1 :]]
    return parts
