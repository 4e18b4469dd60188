"""What each layer holds and moves, measured on fake tensors: shapes and bytes without memory or arithmetic.

Tensor parallelism is torch's own, over a group whose other ranks are torch's fake: what it issues is noted and counted,
whatever the model's plan is made of.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

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
    activations and collectives in layers could not be measured, or "".

    No process group may be there: with tensor > 1 one is made, and taken away again.
    """
    layers = list(model.module.layers.items()) if isinstance(model.module, Chain) else [("all", model.module)]
    whole = [_held(name, layer) for name, layer in layers]
    if fake is None:
        return whole, "the model cannot be made of fake tensors"
    try:
        with _mesh(tensor) as mesh, fake:
            if mesh is not None:
                # No rank's weights are sent to the others: they have no values.
                parallelize_module(model.module, mesh, dict(plan), src_data_rank=None)
            _lower(model.module, DTYPES[precision])
            held = [_held(name, layer) for name, layer in layers]
            return _run(model, layers, held, example, samples, DTYPES[precision]), ""
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
    """What is computed with is of this kind, but where running statistics are kept."""
    for part in module.modules():
        if getattr(part, "running_mean", None) is None:
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))


def _held(name: str, layer: nn.Module) -> Layer:
    tables = [each for each in layer.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    norms = [each for each in layer.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return Layer(
        name,
        sum(_local(parameter).numel() for parameter in layer.parameters()),
        sum(_local(table.weight).numel() for table in tables),
        norms=tuple(int(norm.num_features) for norm in norms),
    )


def _run(
    model: Model,
    layers: Sequence[tuple[str, nn.Module]],
    held: Sequence[Layer],
    example: Batch,
    samples: int,
    dtype: torch.dtype,
) -> list[Layer]:
    # A parameter is there anyway; and what two layers keep is kept once.
    seen = {_storage(parameter) for parameter in model.module.parameters()}
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(_local(saved))
        return saved

    values = tuple(_like(each, samples, dtype) for each in example.inputs)
    found: list[Layer] = []
    for (_, layer), before in zip(layers, held, strict=True):
        # Each layer has a backward pass of its own, so that what it issues is known to be its.
        given = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved), _Watched() as forward:
            returned = layer(*given)
            values = returned if isinstance(returned, tuple) else (returned,)
            if len(found) + 1 == len(layers):
                (output,) = values
                values = (model.loss(output, _like(example.target, samples, example.target.dtype)),)
        fresh = {_storage(each): each.untyped_storage().nbytes() for each in kept if _storage(each) not in seen}
        seen |= set(fresh)
        back = [value for value in values if value.requires_grad]
        with _Watched() as backward:
            torch.autograd.backward(back, [torch.ones_like(value) for value in back])
        calls = [Call(name, size, False) for name, size in forward.calls]
        calls += [Call(name, size, True) for name, size in backward.calls]
        found.append(
            replace(
                before,
                saved_bytes=sum(fresh.values()),
                handed_bytes=_bytes(values),
                handed_back_bytes=_bytes(back),
                calls=tuple(calls),
                looked_up_bytes=forward.looked_up_bytes,
            )
        )
    return found


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collectives that are issued while it is entered, and the bytes looked up in tables."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []
        self.looked_up_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # First what it comes to on this rank; that passes here again.
            return NotImplemented
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if func.namespace.startswith("_c10d_functional") and name in _OPERATIONS:
            operation, size = _OPERATIONS[name]
            self.calls.append((operation, size(args[0], result)))
        elif func.namespace == "aten" and name in ("embedding", "_embedding_bag"):
            self.looked_up_bytes += _bytes(result if isinstance(result, Tensor) else result[0])
        return result


def _like(example: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
    kind = dtype if example.is_floating_point() else example.dtype
    return torch.zeros((samples, *example.shape[1:]), dtype=kind)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _bytes(values: Tensor | Sequence[Tensor]) -> int:
    tensors = [values] if isinstance(values, Tensor) else values
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _storage(value: Tensor) -> int:
    number: int = _local(value).untyped_storage()._cdata
    return number


_Size = Callable[[Tensor, Tensor], int]
_given: _Size = lambda given, _: _bytes(given)
_made: _Size = lambda _, made: _bytes(made)
# torch's name -> the operation, and the bytes of the whole tensor.
_OPERATIONS: dict[str, tuple[str, _Size]] = {
    "all_reduce": ("all_reduce", _given),
    "all_reduce_": ("all_reduce", _given),
    "all_gather_into_tensor": ("all_gather", _made),
    "reduce_scatter_tensor": ("reduce_scatter", _given),
    "all_to_all_single": ("all_to_all", _given),
}
