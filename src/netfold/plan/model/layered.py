"""The catalogue's models as the planner takes them: convolutions and linear layers as matmuls, the rest as memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from netfold.plan.model.catalogue import Model, find_model
from netfold.plan.model.catalogue.layers import Layer as Listed
from netfold.plan.model.layer_cost import Collective, Layer, Matmul, Pass, ShardSpec


@dataclass(frozen=True)
class Layered:
    """A model of the catalogue. measured: one device's time is the published one, spread over layers by their FLOPs;
    else it follows from the device.

    Splits of layers over tensor ranks are not known for these: data and pipeline parallel only.
    """

    name: str
    measured: bool = False

    @property
    def listed(self) -> Model:
        return find_model(self.name)

    @property
    def parameters(self) -> float:
        return float(self.listed.parameters)

    @property
    def flops(self) -> float:
        """Backward twice the forward pass, less what is frozen."""
        return float(sum(layer.flops * (1 if layer.frozen else 3) for layer in self.listed.layers))

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """Raises ValueError for tensor ranks."""
        return _layers(self, share)


@lru_cache(maxsize=256)
def _layers(model: Layered, share: ShardSpec) -> tuple[Layer, ...]:
    if share.tensor > 1:
        raise ValueError(f"{model.name}: its layers are not split over tensor ranks; tensor = 1 is the only way")
    listed = model.listed
    a_flop = 0.0
    if model.measured:
        a_flop = share.micro_batch / listed.speed.samples_per_s / (model.flops * share.micro_batch)
    tables: dict[str, tuple[Collective, ...]] = {}
    if listed.exchange is not None:
        size = float(listed.exchange.values_a_sample * share.micro_batch * share.item_bytes)
        tables[listed.exchange.before] = (Collective("all_to_all", size, "tables"),)
    made = []
    before = 0.0
    for layer in listed.layers:
        one = _layer(layer, share, before, a_flop, tables.get(layer.name, ()))
        made.append(one)
        before = _output_bytes(layer, share) or before
    return tuple(made)


def _layer(layer: Listed, share: ShardSpec, before: float, a_flop: float, talks: tuple[Collective, ...]) -> Layer:
    """before: bytes of what comes in. a_flop: seconds of one, where they are known."""
    batch, item = share.micro_batch, share.item_bytes
    output = _output_bytes(layer, share)
    matmuls = _matmuls(layer, batch)
    parameters = float(sum(layer.counts))
    # A norm reads what comes in twice and writes it with its ReLU; what is no matmul moves its in- and outputs.
    moved = 3 * output if not matmuls else output
    work = layer.flops * batch
    forward = Pass(matmuls, moved, 1 + len(matmuls), talks, measured_s=work * a_flop)
    if layer.frozen:
        backward = Pass()
    else:
        both = tuple(
            each
            for matmul in matmuls
            for each in (Matmul(matmul.m, matmul.k, matmul.n), Matmul(matmul.k, matmul.n, matmul.m))
        )
        backward = Pass(both, 2 * moved + 3 * item * parameters, 2 + len(both), talks, measured_s=2 * work * a_flop)
    # Where it is recomputed, what comes in is kept, and what goes out is there during its backward pass.
    full, kept = share.recomputation == "full", 0.0 if layer.frozen else output
    return Layer(
        layer.name,
        forward,
        backward,
        again=forward if full else Pass(),
        parameters=parameters,
        kept_bytes=before if full and not layer.frozen else kept,
        input_bytes=before,
        live_bytes=kept if full else 0.0,
    )


def _matmuls(layer: Listed, batch: int) -> tuple[Matmul, ...]:
    """A kernel of [outputs, inputs, ...] at every place that it is put, as one product."""
    if not layer.flops or not layer.shapes or len(layer.shapes[0]) < 2:
        return ()
    shape = layer.shapes[0]
    places = max(1, layer.flops // (2 * prod(shape)))
    return (Matmul(batch * places, shape[0], prod(shape[1:])),)


def _output_bytes(layer: Listed, share: ShardSpec) -> float:
    """What a layer hands on, for a microbatch; a norm's is counted from its two operations an element."""
    if not layer.flops:
        return 0.0
    if layer.shapes and len(layer.shapes[0]) >= 2:
        (matmul,) = _matmuls(layer, 1)
        elements = matmul.m * matmul.n
    else:
        elements = layer.flops // 2
    return float(elements * share.micro_batch * share.item_bytes)
