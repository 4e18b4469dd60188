"""The parts of a step: each pipeline stage's work for one microbatch, and what follows once per step.

`predict` adds these parts up in closed form; `netfold_plan.events` simulates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from netfold_plan.cluster import Cluster
from netfold_plan.job import OPTIMIZERS, Job
from netfold_plan.model import Bucketed, Layer, Measured, Model, Pass, ShardSpec
from netfold_plan.step.compute import blended, device_s, host_s, moved_s
from netfold_plan.step.constants import FITTED, Constants
from netfold_plan.step.cut import cut
from netfold_plan.step.traffic import Group, collective_s, send_s


@dataclass(frozen=True)
class Stage:
    """The work of one rank of a pipeline stage for one microbatch, in all virtual stages that the rank holds.

    forward_s, backward_s: computing; the latter with recomputation.
    forward_tensor_s, backward_tensor_s: collectives among tensor ranks, which computing waits for.
    sent_bytes: activations that a rank sends to the next stage; as many bytes come back as gradients.
    send_s: to send them, and to gather the parts that tensor ranks sent; of the last stage: to the first stage's next
    virtual stage. 0 where nothing is sent.
    parameters: held by the rank. kept_bytes: activations of a microbatch.
    tables_s: exchanges with tables that are spread over all ranks, forward and backward.
    weights_s: the part of backward_s that computes gradients of weights; nothing waits for these.
    layer_parameters: of the largest layer, which ZeRO gathers and reduces as a whole.
    peak_bytes: the most activations of one microbatch during its backward pass, with what one layer recomputes.
    alone_s: to send activations to the next stage, and gradients to the stage before, while no other rank sends.
    """

    forward_s: float
    backward_s: float
    forward_tensor_s: float
    backward_tensor_s: float
    sent_bytes: float
    send_s: float
    parameters: float
    kept_bytes: float
    tables_s: float = 0.0
    weights_s: float = 0.0
    layer_parameters: float = 0.0
    peak_bytes: float = 0.0
    alone_s: tuple[float, float] = (0.0, 0.0)

    @property
    def total_s(self) -> float:
        """Forward and backward pass with the communication inside them."""
        return self.forward_s + self.backward_s + self.forward_tensor_s + self.backward_tensor_s + self.tables_s


@dataclass(frozen=True)
class Travel:
    """A bucket of gradients. left_s: the rest of the backward pass when it is ready. taken_s: to reduce it."""

    size_bytes: float
    left_s: float
    taken_s: float


@dataclass(frozen=True)
class Costs:
    """A step's stages, and the work that follows the passes, of the stage with most parameters.

    data_s: to reduce all gradients among data-parallel ranks once, with nothing hidden: once per step with ZeRO-0 and
    1, after every microbatch with ZeRO-2 and 3.
    gathered_s: to gather all weights once; 0 with ZeRO-0. With ZeRO-1 and 2 after the update; with ZeRO-3 before each
    forward and each backward pass.
    optimizer_s: the update of a rank's weights.
    travels: the buckets that make up data_s, where the model knows its buckets and a rank holds the whole model.
    """

    stages: tuple[Stage, ...]
    microbatches: int
    data_s: float
    gathered_s: float
    optimizer_s: float
    travels: tuple[Travel, ...] = ()


def costs(model: Model, cluster: Cluster, job: Job, constants: Constants = FITTED) -> Costs:
    """Raises ValueError, in a sentence, for a split that the model or the cluster cannot have."""
    split = job.split
    if split.ranks > cluster.devices:
        raise ValueError(f"{split.text()} needs {split.ranks} devices; {cluster.name} has {cluster.devices}")
    if isinstance(model, Measured) and split.pipeline > 1:
        raise ValueError(f"{model.name}: was measured on ranks that hold the whole model; use pipeline 1")
    share = ShardSpec(job.micro_batch, split.tensor, split.sequence, job.recomputation, job.item_bytes)
    layers = model.layers(share)
    times = _layer_times(model, share, cluster, job.precision, constants, job.in_network)
    parts, handed = _cut(layers, times, split.pipeline, split.interleave)
    stages: list[Stage] = []
    before: tuple[object, ...] = ()
    sent = _sent(handed, cluster, job, constants)
    for index, part in enumerate(parts):
        # Most neighbouring stages are equal.
        here = (part, sent[index], sent[index - 1])
        stages.append(stages[-1] if here == before else _stage(part, layers, times, cluster, job, constants, *here[1:]))
        before = here
    data, gathered = _data_parallel(max(stages, key=lambda stage: stage.parameters), cluster, job, constants)
    optimizer = _update_s(model, max(stage.parameters for stage in stages), cluster, job, constants)
    travels = _travels(model, times, cluster, job, constants)
    if travels:
        data = sum(each.taken_s for each in travels)
    return Costs(tuple(stages), job.microbatches, data, gathered, optimizer, travels)


def _tables_s(layer: Layer, cluster: Cluster, job: Job, constants: Constants) -> float:
    group = Group(job.split.ranks)
    return sum(
        collective_s(each.operation, each.size_bytes, group, cluster, constants)
        for work in (layer.forward, layer.backward)
        for each in work.collectives
        if each.group == "tables"
    )


def _part_of_weights(layer: Layer) -> float:
    """The part of a backward pass that computes gradients of weights: half of the matmuls that multiply by a weight."""
    whole = layer.backward.flops + layer.again.flops
    of_weights = sum(each.flops for each in layer.backward.matmuls if each.count == 1 and not each.fused)
    return of_weights / 2 / whole if whole else 0.0


def _update_s(model: Model, parameters: float, cluster: Cluster, job: Job, constants: Constants) -> float:
    """The update of a rank's weights, or of the rank's part of them with ZeRO."""
    parts = job.split.data if job.split.zero else 1
    if isinstance(model, Measured):
        return model.after_gradients_s / parts
    # The fitted constant is Adam's. State that another optimizer lacks is not read and written.
    an_element = constants.update_bytes - 2 * (OPTIMIZERS["adam"] - OPTIMIZERS[job.optimizer])
    return moved_s(parameters / parts * an_element, cluster.device, constants)


def _data_parallel(stage: Stage, cluster: Cluster, job: Job, constants: Constants) -> tuple[float, float]:
    """Seconds to reduce a stage's gradients and to gather its weights, once each; ZeRO-3 does both layer by layer."""
    split = job.split
    group = Group(split.data, split.tensor)
    gradients, weights = stage.parameters * job.gradient_bytes, stage.parameters * job.item_bytes
    layered = split.zero == 3
    times = max(1.0, stage.parameters / stage.layer_parameters) if layered else 1.0

    def taken(operation: str, size_bytes: float) -> float:
        # FSDP's and ZeRO-3's runs show that weights gathered layer by layer enter a node by one adapter.
        return times * collective_s(
            operation, size_bytes / times, group, cluster, constants, job.in_network, layered, job.wire, split.pipeline
        )

    if split.zero == 0:
        return taken("all_reduce", gradients), 0.0
    return taken("reduce_scatter", gradients), taken("all_gather", weights)


def _travels(
    model: Model, times: tuple[_Times, ...], cluster: Cluster, job: Job, constants: Constants
) -> tuple[Travel, ...]:
    if not isinstance(model, Bucketed) or job.split.pipeline > 1 or job.split.zero or not job.overlap:
        return ()
    group = Group(job.split.data, job.split.tensor)
    left = [0.0, *accumulate(each.backward_s for each in times)]
    found = []
    for bucket in model.buckets(job.bucket_bytes, job.gradient_bytes):
        size = bucket.elements * job.gradient_bytes
        taken = collective_s("all_reduce", size, group, cluster, constants, job.in_network, wire=job.wire, alongside=1)
        found.append(Travel(size, left[bucket.layer], taken))
    return tuple(found)


@dataclass(frozen=True)
class _Times:
    forward_s: float
    backward_s: float
    forward_tensor_s: float
    backward_tensor_s: float
    weights_s: float


@lru_cache(maxsize=16384)
def _layer_times(
    model: Model, share: ShardSpec, cluster: Cluster, precision: str, constants: Constants, in_network: bool
) -> tuple[_Times, ...]:
    """The times of each layer, once."""
    device, group = cluster.device, Group(share.tensor)

    def both(*passes: Pass) -> tuple[float, float]:
        """Seconds of computing and launching together, and the seconds that collectives add."""
        busy = sum(device_s(each, device, precision, share.item_bytes, constants) for each in passes)
        talking = sum(
            collective_s(each.operation, each.size_bytes, group, cluster, constants, in_network)
            for work in passes
            for each in work.collectives
            if each.group == "tensor"
        )
        host = sum(host_s(each, constants) for each in passes)
        alone = blended(busy, host, constants.blend)
        if not talking:
            return alone, 0.0
        return alone, max(0.0, blended(busy + talking, host, constants.blend_collective) - alone)

    layers = model.layers(share)
    # A deep model repeats a few layers.
    met: dict[int, _Times] = {}
    for layer in layers:
        if id(layer) not in met:
            forward, forward_tensor = both(layer.forward)
            backward, backward_tensor = both(layer.again, layer.backward)
            found = (forward, backward, forward_tensor, backward_tensor, backward * _part_of_weights(layer))
            met[id(layer)] = _Times(*(constants.layer_factor * seconds for seconds in found))
    return tuple(met[id(layer)] for layer in layers)


def _stage(
    part: list[tuple[int, float]],
    layers: tuple[Layer, ...],
    times: tuple[_Times, ...],
    cluster: Cluster,
    job: Job,
    constants: Constants,
    sent: _Sent,
    back: _Sent,
) -> Stage:
    """part: the stage's layers by index, and how many of each. sent, back: to the next stage, and to the one before."""

    def total(name: str, each: Sequence[object]) -> float:
        return float(sum(count * getattr(each[index], name) for index, count in part))

    return Stage(
        total("forward_s", times),
        total("backward_s", times),
        total("forward_tensor_s", times),
        total("backward_tensor_s", times),
        sent.size_bytes,
        sent.shared_s,
        total("parameters", layers),
        total("kept_bytes", layers),
        sum(count * _tables_s(layers[index], cluster, job, constants) for index, count in part),
        total("weights_s", times),
        max(layers[index].parameters for index, _ in part),
        _peak_bytes(part, layers),
        (sent.alone_s, back.alone_s),
    )


class _Sent(NamedTuple):
    """A rank's messages to the next stage. shared_s: while all ranks of the stage send. alone_s: while it sends
    alone."""

    size_bytes: float
    shared_s: float
    alone_s: float


def _sent(handed: list[float], cluster: Cluster, job: Job, constants: Constants) -> list[_Sent]:
    """By stage. handed: bytes before tensor ranks divide them."""
    split, each = job.split, job.split.tensor * job.split.data
    found = []
    for stage, size in enumerate(handed):
        after, gathered_s = (stage + 1) % split.pipeline, 0.0
        if size and job.scattered and split.tensor > 1 and not split.sequence:
            gathered_s = collective_s("all_gather", size, Group(split.tensor), cluster, constants)
            size /= split.tensor
        ranks = range(min(stage, after) * each, (max(stage, after) + 1) * each)
        shared_s, alone_s = send_s(size, ranks, each, cluster, constants) if size else (0.0, 0.0)
        found.append(_Sent(size, shared_s + gathered_s, alone_s + gathered_s))
    return found


def _peak_bytes(part: list[tuple[int, float]], layers: tuple[Layer, ...]) -> float:
    """While a layer is recomputed, the layers after it have freed their activations of the same microbatch."""
    kept = peak = 0.0
    for index, count in part:
        kept += count * layers[index].kept_bytes
        if count:
            peak = max(peak, kept + layers[index].live_bytes)
    return peak


def _cut(
    layers: tuple[Layer, ...], times: tuple[_Times, ...], stages: int, pieces: int
) -> tuple[list[list[tuple[int, float]]], list[float]]:
    """By stage: its layers by index with their number; and the bytes that it hands on, 0 where nothing comes after.

    Repeated layers are divided whole: the first stages get one more where the division has a remainder. Layers before
    and after the repeated ones are in the first and the last stage. A list without repeated layers is cut into runs
    that are as even as possible, and each stage has as many runs as virtual stages.
    """
    repeated = [index for index, layer in enumerate(layers) if layer.count > 1]
    if not repeated:
        return _runs(layers, times, stages, pieces)
    first, last = repeated[0], repeated[-1]
    whole = sum(layers[index].count for index in repeated)
    if whole < stages:
        raise ValueError(f"{stages} pipeline stages are more than the {whole} layers; use at most {whole}")
    parts: list[list[tuple[int, float]]] = []
    for stage in range(stages):
        counts = [(index, *divmod(layers[index].count, stages)) for index in range(first, last + 1)]
        parts.append([(index, float(each + (stage < more))) for index, each, more in counts])
    parts[0] = [(index, 1.0) for index in range(first)] + parts[0]
    parts[-1] = parts[-1] + [(index, 1.0) for index in range(last + 1, len(layers))]
    size = max(layers[index].input_bytes for index in repeated)
    return parts, [*[size] * (stages - 1), size if pieces > 1 and stages > 1 else 0.0]


def _runs(
    layers: tuple[Layer, ...], times: tuple[_Times, ...], stages: int, pieces: int
) -> tuple[list[list[tuple[int, float]]], list[float]]:
    bounds: tuple[int, ...] = (0, len(layers))
    if stages > 1:
        took = tuple(
            each.forward_s + each.backward_s + each.forward_tensor_s + each.backward_tensor_s for each in times
        )
        bounds = cut(took, stages * pieces)
    parts: list[list[tuple[int, float]]] = [[] for _ in range(stages)]
    handed = [0.0] * stages
    for run, (begin, end) in enumerate(pairwise(bounds)):
        parts[run % stages] += [(index, 1.0) for index in range(begin, end)]
        if end < len(layers):
            handed[run % stages] = max(handed[run % stages], layers[end].input_bytes)
    return parts, handed
