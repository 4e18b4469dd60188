"""Measure each layer's weights, activations and messages on fake tensors: shapes and bytes without memory.

Tensor parallelism runs over torch's fake process group, and its collectives are recorded, for any plan of the model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from netfold.train.examples import Batch
from netfold.train.model import Chain, Model
from netfold.train.optimizers.norms import local
from netfold.train.parallel.embeddings import Embeddings
from netfold.train.parallel.tensor import cut_along, localise
from netfold.train.precision import DTYPES, keeps_statistics
from netfold.train.trace.tracer import matrix_products

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective inside a layer, in each pass of a microbatch."""

    operation: str
    bytes: int
    """Of the whole tensor."""
    backward: bool


@dataclass(frozen=True)
class Layer:
    """One layer on one rank, before ZeRO or `parallel.embeddings` divide it."""

    name: str
    weights: tuple[Shape, ...]
    """Without tables and batch norms."""
    norms: tuple[int, ...] = ()
    """Channels of each batch norm. It has a weight and a bias for each channel, always in f32."""
    tables: tuple[Shape, ...] = ()
    """[rows, width] of each embedding table that `parallel.embeddings` can divide."""
    cut_matrices: int = 0
    """The number of weights of two dimensions or more that tensor parallelism has cut."""
    saved_bytes: int | None = None
    """Kept from the forward to the backward pass, for one microbatch; None: could not be measured."""
    handed_bytes: tuple[int, ...] = ()
    """Of each output."""
    handed_back_bytes: tuple[int, ...] = ()
    """Of each output that has a gradient."""
    calls: tuple[Call, ...] = ()
    operations: int = 0
    """Of a forward and a backward pass: in matrix products, convolutions and attention."""

    @property
    def parameters(self) -> int:
        """Elements."""
        return sum(map(math.prod, self.weights)) + 2 * sum(self.norms) + self.table_parameters

    @property
    def table_parameters(self) -> int:
        return sum(map(math.prod, self.tables))


def measure(
    model: Model,
    fake: FakeTensorMode | None,
    example: Batch,
    *,
    samples: int,
    precision: str = "f32",
    tensor: int = 1,
    styles: Mapping[str, Any] | None = None,
    fsdp: bool = False,
) -> tuple[list[Layer], str]:
    """Measure the layers of `model` for passes of `samples` samples. Takes the model over, and cuts it in place.

    Returns the layers, and why activations and collectives could not be measured, or "".
    fake: the mode of the model's fake tensors. styles: the cuts of tensor parallelism. fsdp: ZeRO 2 or 3 keeps cut
    weights as DTensors. No process group may exist: with tensor > 1 this call makes one, and destroys it.
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
            if not fsdp:
                localise(model.module)
            _lower(model.module, DTYPES[precision])
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
    """Cast the parameters, except in modules with running statistics."""
    for part in module.modules():
        if getattr(part, "running_mean", None) is None:
            for name, parameter in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(parameter.detach().to(dtype)))


def _held(name: str, layer: nn.Module) -> Layer:
    norms = [part for part in layer.modules() if keeps_statistics(part)]
    tables = [weight for part in layer.modules() if isinstance(part, Embeddings) for weight in part.parameters()]
    apart = {id(weight) for weight in (*tables, *(weight for norm in norms for weight in norm.parameters()))}
    weights = [weight for weight in layer.parameters() if id(weight) not in apart]
    return Layer(
        name,
        tuple(tuple(local(weight).shape) for weight in weights),
        tuple(norm.num_features for norm in norms),  # type: ignore[misc]
        tuple(tuple(table.shape) for table in tables),
        sum(weight.ndim > 1 and _is_cut(weight) for weight in weights),
    )


def _is_cut(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and not all(each.is_replicate() for each in weight.placements)


def _run(
    model: Model,
    layers: Sequence[tuple[str, nn.Module]],
    held: Sequence[Layer],
    example: Batch,
    samples: int,
    dtype: torch.dtype,
) -> list[Layer]:
    # Parameters do not count as kept, and a tensor that two layers keep counts once.
    seen = {_storage(parameter) for parameter in model.module.parameters()}
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(local(saved))
        return saved

    values = tuple(_like(each, samples, dtype) for each in example.inputs)
    found: list[Layer] = []
    for (_, layer), before in zip(layers, held, strict=True):
        # A separate backward pass for each layer attributes its collectives to the layer.
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
                handed_bytes=tuple(_bytes(value) for value in values),
                handed_back_bytes=tuple(_bytes(value) for value in back),
                calls=tuple(calls),
                operations=forward.operations + backward.operations,
            )
        )
    return found


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record collectives, and count operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # DTensor dispatches the local operation, which reaches this method again.
            return NotImplemented
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        if func.namespace.startswith("_c10d_functional") and name in _OPERATIONS:
            operation, size = _OPERATIONS[name]
            self.calls.append((operation, size(args[0], result)))
        else:
            self.operations += round(sum(each.flops for each in matrix_products(name, args, result) or ()))
        return result


def _like(example: Tensor, samples: int, dtype: torch.dtype) -> Tensor:
    kind = dtype if example.is_floating_point() else example.dtype
    return torch.zeros((samples, *example.shape[1:]), dtype=kind)


def _bytes(values: Tensor | Sequence[Tensor]) -> int:
    tensors = [values] if isinstance(values, Tensor) else values
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _storage(value: Tensor) -> int:
    number: int = local(value).untyped_storage()._cdata
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
