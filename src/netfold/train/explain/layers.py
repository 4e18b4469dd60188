"""What each layer holds and moves, measured on fake tensors: shapes and bytes without memory or arithmetic.

Tensor parallelism is played by one rank: its layers get this rank's share of the weights, and where torch would
communicate a hook gives the tensor the shape that it then has, and notes the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from netfold.train.examples import Batch
from netfold.train.model import Chain, Model

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Call:
    """A collective inside a layer, in each pass of a microbatch."""

    operation: str
    bytes: int
    """Of the whole tensor that is reduced, gathered or scattered."""
    backward: bool


@dataclass(frozen=True)
class Layer:
    """One layer, as a rank holds it."""

    name: str
    parameters: int
    """Elements, before ZeRO shares them out."""
    table_parameters: int
    """Of them, in embedding tables."""
    saved_bytes: int | None = None
    """Kept from the forward to the backward pass of one pass; None: could not be measured."""
    handed_bytes: int | None = None
    """What the next layer is given."""
    handed_back_bytes: int | None = None
    """Their gradients."""
    calls: tuple[Call, ...] = ()
    looked_up_bytes: int = 0
    """Rows that one pass takes out of embedding tables."""
    norms: tuple[int, ...] = ()
    """Channels of each batch norm."""


def measure(
    model: Model,
    fake: FakeTensorMode | None,
    example: Batch,
    *,
    samples: int,
    precision: str = "f32",
    tensor: int = 1,
    plan: Any = None,
) -> tuple[list[Layer], str]:
    """Layers of `model` (of fake tensors of `fake`; taken over, cut in place) for passes of `samples` samples, and why
    activations and collectives in layers could not be measured, or ""."""
    calls: list[Call] = []
    why = "" if fake is not None else "the model cannot be made of fake tensors"
    if tensor > 1:
        why = why or _cut(model.module, plan, tensor, calls)
    layers = list(model.module.layers.items()) if isinstance(model.module, Chain) else [("all", model.module)]
    held = [_held(name, layer) for name, layer in layers]
    if fake is None or why:
        return held, why
    try:
        with fake:
            return _run(model, [layer for _, layer in layers], held, example, samples, DTYPES[precision], calls), ""
    except Exception as error:
        return held, f"a pass of fake tensors failed: {type(error).__name__}: {str(error).splitlines()[0]}"


def _held(name: str, layer: nn.Module) -> Layer:
    tables = [each for each in layer.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    norms = [each for each in layer.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return Layer(
        name,
        sum(parameter.numel() for parameter in layer.parameters()),
        sum(table.weight.numel() for table in tables),
        norms=tuple(int(norm.num_features) for norm in norms),
    )


def _run(
    model: Model,
    layers: Sequence[nn.Module],
    held: Sequence[Layer],
    example: Batch,
    samples: int,
    dtype: torch.dtype,
    calls: list[Call],
) -> list[Layer]:
    # A parameter is there anyway; and what two layers keep is kept once.
    seen = {_storage(parameter) for parameter in model.module.parameters()}
    kept: list[Tensor] = []
    looked_up: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    for module in model.module.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_hook(lambda _, __, rows: looked_up.append(_bytes(rows)))
    values: Any = tuple(_like(each, samples) for each in example.inputs)
    found = []
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    for number, (layer, before) in enumerate(zip(layers, held, strict=True)):
        calls.clear()
        looked_up.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            with autocast:
                values = layer(*values) if isinstance(values, tuple) else layer(values)
            if number + 1 == len(layers):
                model.loss(values, _like(example.target, samples))
        fresh = {_storage(each): _storage_bytes(each) for each in kept if _storage(each) not in seen}
        seen |= set(fresh)
        handed = values if isinstance(values, tuple) else (values,)
        found.append(
            Layer(
                before.name,
                before.parameters,
                before.table_parameters,
                sum(fresh.values()),
                _bytes(handed),
                _bytes([each for each in handed if each.requires_grad]),
                tuple(calls),
                sum(looked_up),
                before.norms,
            )
        )
    return found


def _cut(module: nn.Module, plan: Any, tensor: int, calls: list[Call]) -> str:
    """Give the planned layers one rank's share of their weights, and note in `calls` what they then ask of the others.
    Returns why it cannot be done, or ""."""
    for path, style in plan.items():
        if isinstance(style, SequenceParallel):
            continue
        if not isinstance(style, ColwiseParallel | RowwiseParallel) or any(letter in path for letter in "*?["):
            return f"{path} is cut by {type(style).__name__}, whose operations are not known here"
        layer = module.get_submodule(path)
        columns = isinstance(style, ColwiseParallel)
        # A linear weight is [out, in], a table [rows, features]; its columns are what is put out.
        table = isinstance(layer, nn.Embedding)
        _narrow(layer, "weight", 1 if columns == table else 0, tensor)
        if columns and not table and layer.bias is not None:
            _narrow(layer, "bias", 0, tensor)
        given, returned = style.input_layouts[0], style.output_layouts[0]
        if columns:
            _column(layer, given, returned, tensor, calls)
        else:
            _row(layer, given, returned, tensor, calls, table)
    return ""


def _narrow(layer: nn.Module, name: str, dim: int, tensor: int) -> None:
    whole = getattr(layer, name)
    part = whole.detach().narrow(dim, 0, whole.shape[dim] // tensor).clone()
    setattr(layer, name, nn.Parameter(part))


def _column(layer: nn.Module, given: Any, returned: Any, tensor: int, calls: list[Call]) -> None:
    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        if isinstance(given, Shard):
            x = _gathered(x, given.dim, tensor)
            calls.append(Call("all_gather", _bytes(x), False))
        if x.requires_grad:
            calls.append(Call("reduce_scatter" if isinstance(given, Shard) else "all_reduce", _bytes(x), True))
        return (x, *rest)

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if isinstance(returned, Replicate):
            output = _gathered(output, -1, tensor)
            calls.append(Call("all_gather", _bytes(output), False))
        return output

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _row(layer: nn.Module, given: Any, returned: Any, tensor: int, calls: list[Call], table: bool) -> None:
    def before(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, *rest = inputs
        # A table's indices are the same on all ranks, whichever rows they hold.
        if isinstance(given, Replicate) and not table:
            if x.requires_grad:
                calls.append(Call("all_gather", _bytes(x), True))
            x = x.narrow(-1, 0, x.shape[-1] // tensor)
        return (x, *rest)

    def after(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        if isinstance(returned, Shard):
            calls.append(Call("reduce_scatter", _bytes(output), False))
            calls.append(Call("all_gather", _bytes(output), True))
            return output.narrow(returned.dim, 0, output.shape[returned.dim] // tensor)
        calls.append(Call("all_reduce", _bytes(output), False))
        return output

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)


def _gathered(x: Tensor, dim: int, tensor: int) -> Tensor:
    return torch.cat([x] * tensor, dim)


def _like(example: Tensor, samples: int) -> Tensor:
    return torch.zeros((samples, *example.shape[1:]), dtype=example.dtype)


def _bytes(values: Tensor | Sequence[Tensor]) -> int:
    tensors = [values] if isinstance(values, Tensor) else values
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_storage: Callable[[Tensor], int] = lambda tensor: tensor.untyped_storage()._cdata
_storage_bytes: Callable[[Tensor], int] = lambda tensor: tensor.untyped_storage().nbytes()
