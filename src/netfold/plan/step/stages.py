"""What a step is put together from: each pipeline stage's work for a microbatch, and what follows once a step.

`predict` adds these up in closed form; a simulator can play them as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from netfold.plan.cluster import Cluster
from netfold.plan.job import OPTIMIZERS, Job
from netfold.plan.model import Bucketed, Layer, Measured, Model, Pass, ShardSpec
from netfold.plan.step.compute import blended, device_s, host_s, moved_s
from netfold.plan.step.constants import FITTED, Constants
from netfold.plan.step.cut import cut
from netfold.plan.step.traffic import Group, collective_s, send_s


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage, for one microbatch; all of its pieces where they are interleaved.

    forward_s, backward_s: computing, recomputation in the latter. forward_tensor_s, backward_tensor_s: collectives
    among tensor ranks, which computing waits for. sent_bytes: activations to the next stage, a rank; as many come back
    as gradients. send_s: what they take, and to gather what tensor ranks sent in parts; of the last stage, to the first
    one's next piece, and 0 where there is none. send_back_s: of gradients to the stage before. alone_s: both, were no
    other rank of the stage sending. parameters: held by the rank. kept_bytes: activations of a microbatch. peak_bytes:
    the most of one microbatch's during its backward pass, what is recomputed of one layer among them. tables_s:
    exchanges of what was looked up in tables that are spread over all ranks, both ways. weights_s: of backward_s, what
    computes gradients of weights, which nothing waits for. layer_parameters: of its largest layer, which ZeRO gathers
    and reduces whole.
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
    send_back_s: float = 0.0
    alone_s: tuple[float, float] = (0.0, 0.0)

    @property
    def total_s(self) -> float:
        """Forward and backward pass, with what is communicated inside."""
        return self.forward_s + self.backward_s + self.forward_tensor_s + self.backward_tensor_s + self.tables_s


@dataclass(frozen=True)
class Travel:
    """A bucket of gradients. size_bytes: on the wire. left_s: of the backward pass, what is still to come when it is
    ready. taken_s: to reduce it."""

    size_bytes: float
    left_s: float
    taken_s: float


@dataclass(frozen=True)
class Costs:
    """What a step does beside its microbatches' passes, of the stage with most parameters.

    data_s: to reduce all gradients among data-parallel ranks once, were nothing hidden. Once a step with ZeRO-0 and 1;
    with ZeRO-2 and 3, whose ranks keep parts of gradients, after every microbatch.
    gathered_s: to gather all weights once; 0 with ZeRO-0. With ZeRO-1 and 2 once a step, after the update; with ZeRO-3
    before each forward and each backward pass.
    optimizer_s: the update of a rank's weights.
    travels: bucket by bucket, where the model knows its buckets and a rank holds all of it; together they are data_s.
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
        raise ValueError(f"{model.name}: what was measured are ranks that hold the whole model; take pipeline 1")
    share = ShardSpec(job.micro_batch, split.tensor, split.sequence, job.recomputation, job.item_bytes)
    layers = model.layers(share)
    times = _layer_times(model, share, cluster, job.precision, constants, job.in_network)
    parts, handed = _cut(layers, times, split.pipeline, split.interleave)
    stages: list[Stage] = []
    before: tuple[object, ...] = ()
    sent = _sent(handed, cluster, job, constants)
    for index, part in enumerate(parts):
        # Most stages hold the same, and send it as fast.
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
    """Of a backward pass: half of its matmuls, where they multiply by a weight, and not activations by each other."""
    whole = layer.backward.flops + layer.again.flops
    of_weights = sum(each.flops for each in layer.backward.matmuls if each.count == 1 and not each.fused)
    return of_weights / 2 / whole if whole else 0.0


def _update_s(model: Model, parameters: float, cluster: Cluster, job: Job, constants: Constants) -> float:
    """Of a rank's weights, or of its part of them."""
    parts = job.split.data if job.split.zero else 1
    if isinstance(model, Measured):
        return model.after_gradients_s / parts
    return moved_s(parameters / parts * _updated_bytes(job, constants), cluster.device, constants)


def _updated_bytes(job: Job, constants: Constants) -> float:
    """An element: what was fitted is Adam's; state that it has and others lack is read and written."""
    return constants.update_bytes - 2 * (OPTIMIZERS["adam"] - OPTIMIZERS[job.optimizer])


def _data_parallel(stage: Stage, cluster: Cluster, job: Job, constants: Constants) -> tuple[float, float]:
    """Seconds to reduce a stage's gradients, and to gather its weights, once: ZeRO-3 does both layer by layer."""
    split = job.split
    group = Group(split.data, split.tensor)
    gradients, weights = stage.parameters * job.gradient_bytes, stage.parameters * job.item_bytes
    times = max(1.0, stage.parameters / stage.layer_parameters) if job.split.zero == 3 else 1.0

    def taken(operation: str, size_bytes: float) -> float:
        # Weights that are gathered layer by layer come by one adapter a node: what FSDP's and ZeRO-3's runs show.
        layered = job.split.zero == 3
        return times * collective_s(
            operation, size_bytes / times, group, cluster, constants, job.in_network, layered, job.wire, split.pipeline
        )

    if job.split.zero == 0:
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
    """Of each layer, once."""
    device, group = cluster.device, Group(share.tensor)

    def both(*passes: Pass) -> tuple[float, float]:
        """Seconds in all that computing and launching take, and what collectives add."""
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
        return alone, max(0.0, blended(busy + talking, host, constants.blend_talking) - alone)

    layers = model.layers(share)
    # A deep model's layers are the same few, over and over.
    met: dict[int, _Times] = {}
    for layer in layers:
        if id(layer) not in met:
            forward, forward_tensor = both(layer.forward)
            backward, backward_tensor = both(layer.again, layer.backward)
            found = (forward, backward, forward_tensor, backward_tensor, backward * _part_of_weights(layer))
            met[id(layer)] = _Times(*(constants.tempo * seconds for seconds in found))
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
    """part: its layers, and how many of each. sent, back: to the next stage, and to the one before."""
    return Stage(
        sum(count * times[index].forward_s for index, count in part),
        sum(count * times[index].backward_s for index, count in part),
        sum(count * times[index].forward_tensor_s for index, count in part),
        sum(count * times[index].backward_tensor_s for index, count in part),
        sent.size_bytes,
        sent.shared_s,
        sum(count * layers[index].parameters for index, count in part),
        sum(count * layers[index].kept_bytes for index, count in part),
        sum(count * _tables_s(layers[index], cluster, job, constants) for index, count in part),
        sum(count * times[index].weights_s for index, count in part),
        max(layers[index].parameters for index, _ in part),
        _peak_bytes(part, layers),
        back.shared_s,
        (sent.alone_s, back.alone_s),
    )


class _Sent(NamedTuple):
    """What a rank sends to the next stage. shared_s: while all ranks of its stage do; alone_s: while it alone does."""

    size_bytes: float
    shared_s: float
    alone_s: float


def _sent(handed: list[float], cluster: Cluster, job: Job, constants: Constants) -> list[_Sent]:
    """By stage. handed: bytes, before tensor ranks share them."""
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
    """While a layer is recomputed, what those after it kept of the same microbatch is gone."""
    kept = peak = 0.0
    for index, count in part:
        kept += count * layers[index].kept_bytes
        if count:
            peak = max(peak, kept + layers[index].live_bytes)
    return peak


def _cut(
    layers: tuple[Layer, ...], times: tuple[_Times, ...], stages: int, pieces: int
) -> tuple[list[list[tuple[int, float]]], list[float]]:
    """By stage, its layers by index and how many of each; and the bytes that it hands on, 0 where nothing comes after.

    Of repeated layers whole ones, the first stages one more where they do not come out even; what stands before and
    after them at its end. A list without repeated layers is cut into runs, as even as whole layers can be, and each
    stage has as many of them as pieces.
    """
    repeated = [index for index, layer in enumerate(layers) if layer.count > 1]
    if not repeated:
        return _runs(layers, times, stages, pieces)
    first, last = repeated[0], repeated[-1]
    whole = sum(layers[index].count for index in repeated)
    if whole < stages:
        raise ValueError(f"{stages} stages of a pipeline are more than its {whole} layers; as many is the most")
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
