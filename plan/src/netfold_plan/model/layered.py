"""The catalogue's models for the planner: convolutions and linear layers as matmuls, other layers as memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from netfold_plan.model.catalogue import Model, find_model
from netfold_plan.model.catalogue.layers import Layer as Listed
from netfold_plan.model.layer_cost import Collective, Layer, Matmul, Pass, ShardSpec, backward_matmuls


@dataclass(frozen=True)
class Layered:
    """A model of the catalogue, for data and pipeline parallelism; tensor ranks cannot split its layers.

    measured: take the published time of one device, spread over layers by their FLOPs; else compute the time.
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
        """The forward pass, and twice that backward for layers that are not frozen."""
        return float(sum(layer.flops * (1 if layer.frozen else 3) for layer in self.listed.layers))

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """Raises ValueError for tensor ranks."""
        return _layers(self, share)


@lru_cache(maxsize=256)
def _layers(model: Layered, share: ShardSpec) -> tuple[Layer, ...]:
    if share.tensor > 1:
        raise ValueError(f"{model.name}: tensor ranks cannot split its layers; use tensor 1")
    listed = model.listed
    a_flop = 0.0
    if model.measured:
        a_flop = 1 / (listed.speed.samples_per_s * model.flops)
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


def _layer(layer: Listed, share: ShardSpec, before: float, a_flop: float, collectives: tuple[Collective, ...]) -> Layer:
    """before: bytes of the input. a_flop: measured seconds of one FLOP, or 0."""
    batch, item = share.micro_batch, share.item_bytes
    output = _output_bytes(layer, share)
    matmuls = _matmuls(layer, batch)
    parameters = float(sum(layer.counts))
    # A layer without matmuls is a norm: it reads its input twice and writes the output with its ReLU. A matmul's
    # operands are counted with it; a bias or an activation behind it moves the output once more.
    moved = output if matmuls else 3 * output
    work = layer.flops * batch
    forward = Pass(matmuls, moved, 1 + len(matmuls), collectives, measured_s=work * a_flop)
    if layer.frozen:
        backward = Pass()
    else:
        both = backward_matmuls(matmuls)
        moved_back = 2 * moved + 3 * item * parameters
        backward = Pass(both, moved_back, 2 + len(both), collectives, measured_s=2 * work * a_flop)
    # With recomputation the input is kept, and the output is held during the backward pass.
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
    """A kernel of [outputs, inputs, ...] at all of its positions, as one product."""
    if not layer.flops or not layer.shapes or len(layer.shapes[0]) < 2:
        return ()
    shape = layer.shapes[0]
    places = max(1, layer.flops // (2 * prod(shape)))
    return (Matmul(batch * places, shape[0], prod(shape[1:])),)


def _output_bytes(layer: Listed, share: ShardSpec) -> float:
    """The output of a layer for a microbatch; a norm's is counted from its two operations per element."""
    if not layer.flops:
        return 0.0
    if layer.shapes and len(layer.shapes[0]) >= 2:
        (matmul,) = _matmuls(layer, 1)
        elements = matmul.m * matmul.n
    else:
        elements = layer.flops // 2
    return float(elements * share.micro_batch * share.item_bytes)
