"""Measure each layer's weights, activations and messages on fake tensors: shapes and bytes without memory.

Tensor parallelism runs over torch's fake process group, and its collectives are recorded, for any plan of the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from netfold.dry_run.tracer import Ran, TracedPart, TraceMode, tensors
from netfold.plan.model import Pass
from netfold.train.data.examples import Batch
from netfold.train.models.model import Chain, Model
from netfold.train.parallel.context import ContextModule
from netfold.train.parallel.device import CPU
from netfold.train.parallel.embeddings import Embeddings
from netfold.train.parallel.experts import Experts
from netfold.train.parallel.precision import DTYPES, Precision, keeps_statistics, needs_f32
from netfold.train.parallel.shards import axes, local
from netfold.train.parallel.tensor import cut_along
from netfold.train.recipe import Parallel

Shape = tuple[int, ...]
_NOTHING = Pass()


@dataclass(frozen=True)
class Layer:
    """One layer on one rank, before ZeRO or `parallel.embeddings` and `parallel.experts` divide it."""

    name: str
    weights: tuple[Shape, ...]
    """Without tables, experts and batch norms."""
    norms: tuple[int, ...] = ()
    """Channels of each batch norm. It has a weight and a bias for each channel, always in f32."""
    tables: tuple[Shape, ...] = ()
    """[rows, width] of each embedding table that `parallel.embeddings` can divide."""
    experts: tuple[Shape, ...] = ()
    """Weights that `parallel.experts` can divide."""
    routed: tuple[tuple[int, int], ...] = ()
    """For each module of experts: their number, and the bytes of the tokens of a microbatch, once for each expert."""
    attended: tuple[int, ...] = ()
    """Bytes of the queries of each attention, for a microbatch, where ranks share sequences (`parallel.context`)."""
    exact: tuple[tuple[Shape, ...], ...] = ()
    """Weights of each router and the like, which computes in f32 whatever the recipe says; also among `weights`."""
    cut_matrices: int = 0
    """The number of weights of two dimensions or more that tensor parallelism has cut."""
    saved_bytes: int | None = None
    """Kept from the forward to the backward pass, for one microbatch; None: could not be measured."""
    handed_bytes: tuple[int, ...] = ()
    """Of each output."""
    handed_back_bytes: tuple[int, ...] = ()
    """Of each output that has a gradient."""
    forward: Pass = _NOTHING
    """Matrix products of a microbatch, and collectives inside the layer."""
    backward: Pass = _NOTHING
    summed_bytes: tuple[int, ...] = ()
    """Of each gradient that is summed over the tensor axis after the last pass (`shards.settle`)."""

    def shapes(self, *, owned: Parallel | None = None) -> list[Shape]:
        """Of all parameters. owned: leave out the tables and experts that it divides."""
        channels = [(count,) for count in self.norms for _ in range(2)]
        tables, experts = self.tables, self.experts
        if owned is not None:
            tables = tables if owned.embeddings == "replicated" else ()
            experts = experts if owned.experts == "replicated" else ()
        return [*self.weights, *tables, *experts, *channels]

    @property
    def parameters(self) -> int:
        """Elements."""
        return sum(map(math.prod, self.shapes()))

    def owned_parameters(self, parallel: Parallel) -> int:
        """Elements that are divided among owners: of tables and experts."""
        return self.parameters - sum(map(math.prod, self.shapes(owned=parallel)))

    @property
    def operations(self) -> int:
        """Operations of a forward and a backward pass in matrix products, convolutions and attention."""
        return round(self.forward.flops + self.backward.flops)


def measure(
    model: Model,
    fake: FakeTensorMode | None,
    example: Batch,
    *,
    samples: int,
    precision: Literal["f32", "bf16", "f16"] = "f32",
    tensor: int = 1,
    styles: Mapping[str, Any] | None = None,
    fsdp: bool = False,
    context: int = 1,
) -> tuple[list[Layer], str]:
    """Measure the layers of `model` for passes of `samples` samples. Takes the model over, and cuts it in place.

    Returns the layers, and why activations and collectives could not be measured, or "". fake: the mode of the model's
    fake tensors. styles: the cuts of tensor parallelism. fsdp: ZeRO 2 or 3 keeps cut weights as DTensors. context:
    ranks that share sequences. No process group may exist: with tensor > 1 this call makes one, and destroys it.
    """
    layers = list(model.module.layers.items()) if isinstance(model.module, Chain) else [("all", model.module)]
    whole = [_held(name, layer) for name, layer in layers]
    if fake is None:
        return whole, "the model cannot be made of fake tensors"
    try:
        with _mesh(tensor) as mesh, fake:
            if mesh is not None:
                cut_along(model.module, styles or {}, mesh)
            held = [_held(name, layer) for name, layer in layers]
            if fsdp:
                _lower(model.module, DTYPES[precision])
            return _run(model, layers, held, example, samples, Precision(precision), fsdp, context), ""
    except Exception as error:
        return whole, f"a pass of fake tensors failed: {type(error).__name__}: {str(error).splitlines()[0]}"


@contextlib.contextmanager
def _mesh(tensor: int) -> Iterator[DeviceMesh | None]:
    if tensor == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
    try:
        yield init_device_mesh("cpu", (tensor,))
    finally:
        dist.destroy_process_group()


def _lower(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, except in modules with running statistics."""
    for part in module.modules():
        if not keeps_statistics(part):
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))


def _held(name: str, layer: nn.Module) -> Layer:
    norms = [part for part in layer.modules() if keeps_statistics(part)]
    tables, experts = (
        [weight for part in layer.modules() if isinstance(part, kind) for weight in part.parameters()]
        for kind in (Embeddings, Experts)
    )
    apart = {id(weight) for weight in (*tables, *experts, *(each for norm in norms for each in norm.parameters()))}
    weights = [weight for weight in layer.parameters() if id(weight) not in apart]
    return Layer(
        name,
        tuple(tuple(local(weight).shape) for weight in weights),
        tuple(norm.num_features for norm in norms),  # type: ignore[misc]
        tuple(tuple(table.shape) for table in tables),
        tuple(tuple(weight.shape) for weight in experts),
        exact=tuple(
            tuple(tuple(local(weight).shape) for weight in part.parameters())
            for part in layer.modules()
            if needs_f32(part) and not keeps_statistics(part)
        ),
        cut_matrices=sum(weight.ndim > 1 and bool(axes(weight)) for weight in weights),
    )


def _run(
    model: Model,
    layers: Sequence[tuple[str, nn.Module]],
    held: Sequence[Layer],
    example: Batch,
    samples: int,
    precision: Precision,
    fsdp: bool,
    context: int,
) -> list[Layer]:
    def like(each: Tensor) -> Tensor:
        shape = list(each.shape[1:])
        return torch.zeros((samples, *(count // context for count in shape[:1]), *shape[1:]), dtype=each.dtype)

    batch = example.like([like(each) for each in example.tensors])
    if fsdp:
        # FSDP2's casts.
        given = [each.to(precision.dtype) if each.is_floating_point() else each for each in batch.tensors[:-1]]
        batch = batch.like([*given, batch.target])
    outputs: dict[str, list[Tensor]] = {}
    watch = TraceMode(model.module)
    with watch.hooked(), _routed_evenly() as routed, _attends_whole(context) as attended:
        for name, layer in layers:
            layer.register_forward_hook(lambda *given, name=name: outputs.update({name: tensors(given[-1])}))
        with contextlib.nullcontext() if fsdp else precision.context(model.module, CPU):
            output = model.module(*batch.inputs, **batch.named)
        model.losses(output, batch.target).mean().backward()  # type: ignore[no-untyped-call]
    parts: dict[str, list[TracedPart]] = {name: [] for name, _ in layers}
    name = layers[0][0]
    for part in watch.seen:
        # A chain's own work belongs to the layer before, and so does the loss.
        path = part.module.split(".")
        name = path[1] if isinstance(model.module, Chain) and path[0] == "layers" else name
        parts[name].append(part)
    return [
        replace(
            layer,
            saved_bytes=sum(part.kept_bytes for part in parts[layer.name]),
            handed_bytes=tuple(local(each).nbytes for each in outputs[layer.name]),
            handed_back_bytes=tuple(local(each).nbytes for each in outputs[layer.name] if each.requires_grad),
            forward=_pass([part.forward for part in parts[layer.name]]),
            backward=_pass([part.backward for part in parts[layer.name]]),
            summed_bytes=_summed(module),
            attended=tuple(size for part, size in attended if part in set(module.modules())),
            routed=tuple((count, size) for part, count, size in routed if part in set(module.modules())),
        )
        for layer, (_, module) in zip(held, layers, strict=True)
    ]


@contextlib.contextmanager
def _routed_evenly() -> Iterator[list[tuple[Experts, int, int]]]:
    """Inside, every expert gets equally many tokens, because fake tensors do not say which experts they choose.

    Yields a list that gets (module, number of experts, bytes of tokens) for each call.
    """
    calls: list[tuple[Experts, int, int]] = []

    def forward(self: Experts, tokens: Tensor, chosen: Tensor) -> Tensor:
        count = len(self.experts)
        calls.append((self, count, tokens.nbytes))
        return self._computed(tokens, [len(part) for part in torch.arange(len(tokens)).tensor_split(count)])

    with mock.patch.object(Experts, "forward", forward):
        yield calls


@contextlib.contextmanager
def _attends_whole(context: int) -> Iterator[list[tuple[ContextModule, int]]]:
    """Inside, attention takes a rank's heads of whole sequences, as if other ranks had sent it their tokens.

    Yields a list that gets (module, bytes of queries) for each call, if there are other ranks.
    """
    calls: list[tuple[ContextModule, int]] = []
    alone = ContextModule.attend

    def attend(self: ContextModule, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        calls.append((self, query.nbytes))
        q, k, v = (torch.cat([each.chunk(context, 1)[0]] * context, -2) for each in (query, key, value))
        mixed = alone(self, q, k, v, causal=causal)
        return torch.cat([mixed.chunk(context, -2)[0]] * context, 1)

    with mock.patch.object(ContextModule, "attend", attend) if context > 1 else contextlib.nullcontext():
        yield calls


def _pass(ran: Sequence[Ran]) -> Pass:
    return Pass(
        tuple(matmul for each in ran for matmul in each.matmuls),
        collectives=tuple(call for each in ran for call in each.collectives),
    )


def _summed(layer: nn.Module) -> tuple[int, ...]:
    """The bytes of each gradient that is a term of a sum over the tensor axis."""
    gradients = [parameter.grad for parameter in layer.parameters()]
    return tuple(
        local(gradient).nbytes
        for gradient in gradients
        if isinstance(gradient, DTensor) and any(place.is_partial() for place in gradient.placements)
    )
