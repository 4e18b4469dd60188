"""Record every operation of a traced module with its shapes, and attribute it to a part of the module.

A forward operation belongs to the innermost module being called. A backward operation belongs to the part that made the
running node of the autograd graph: nodes are numbered in the order of their creation, so each part has a range.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from netfold_plan.model import Collective, Kernels, Matmul, TensorSize
from netfold_plan.model.traced import NONE
from netfold_train.parallel.shards import local

# The number of nodes that add to a parameter's gradient: they are made once, and numbered last.
_ACCUMULATES = 2**64 - 1
# Operations that read as much as they write, and not their whole source.
_LOOKUPS = ("embedding", "index", "index_select", "gather")
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_OURS = ("aten", "prim", "prims", "_c10d_functional", "_c10d_functional_autograd")
# torch's name of a collective -> netfold's.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass
class Ran:
    """The operations of one pass of one part."""

    matmuls: list[Matmul] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    moved: TensorSize = NONE
    count: int = 0

    @property
    def kernels(self) -> Kernels:
        return Kernels(tuple(self.matmuls), self.moved, self.count)


@dataclass
class TracedPart:
    """A stretch of the forward pass inside one module. node: the number of the first node that it made."""

    module: str
    node: int
    forward: Ran = field(default_factory=Ran)
    backward: Ran = field(default_factory=Ran)
    kept: TensorSize = NONE
    kept_bytes: int = 0
    parameters: int = 0

    @property
    def worked(self) -> bool:
        return self.forward.count > 0 or self.backward.count > 0 or self.kept != NONE


class TraceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record a forward and a backward pass, inside `hooked`."""

    def __init__(self, module: nn.Module, keeps: Callable[[str, Any], bool] = lambda module, operation: False) -> None:
        """keeps: whether the results of an operation in a submodule, by its path, stay until the backward pass.

        Autograd's saved tensors always do; selective recomputation keeps others, which no hook of autograd sees.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps = keeps
        self.seen: list[TracedPart] = []
        """Parts, in order. Only the last one may be idle."""
        self.gradients: list[tuple[Tensor, int]] = []
        """(parameter, index of the part that completed its gradient), in the order of the backward pass."""
        self.custom: set[str] = set()
        """Operations that are not torch's."""
        self._module = module
        self._path: list[str] = []
        self._at = 0
        # By storage: the size, the part that made it and the last part that read it. Storages are kept alive, because
        # torch would give the number of a freed one to another.
        self._storages: dict[int, tuple[Tensor, TensorSize]] = {}
        self._made: dict[int, int] = {}
        self._read: dict[int, int] = {}
        # Parameters and buffers do not count as kept.
        self._kept = {self._hold(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.unused: dict[int, int] = {}
        """Elements of parameters that nothing has read, by storage."""
        for tensor in module.parameters():
            self.unused[_number(tensor)] = self.unused.get(_number(tensor), 0) + tensor.numel()

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Inside, record calls of modules, saved tensors, completed gradients and operations."""
        with contextlib.ExitStack() as hooks:
            for name, module in self._module.named_modules():
                # First, since hooks of tensor parallelism communicate.
                enter = module.register_forward_pre_hook(lambda *_, name=name: self._enter(name), prepend=True)
                hooks.enter_context(enter)
                hooks.enter_context(module.register_forward_hook(lambda *_: self._leave()))
            for parameter in self._module.parameters():
                if parameter.requires_grad:
                    hook = parameter.register_post_accumulate_grad_hook
                    hooks.enter_context(hook(lambda each: self.gradients.append((each, self._at))))  # type: ignore[no-untyped-call]
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved), self:
                yield

    def received(self) -> list[tuple[TensorSize, int]]:
        """For each part: the size and number of earlier tensors that the part or a later part reads."""
        found = [(NONE, 0) for _ in self.seen]
        for number, made in self._made.items():
            for part in range(made + 1, self._read.get(number, made) + 1):
                size, count = found[part]
                found[part] = size + self._storages[number][1], count + 1
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # DTensor dispatches the local operation, which reaches this method again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        name = func.overloadpacket.__name__
        given, made = tensors((args, kwargs or {})), tensors(result)
        ran, forward = self._part()
        if func.namespace.startswith("_c10d_functional") and name in _COLLECTIVES:
            # The whole tensor is the result of an all_gather, and what all others are given.
            whole = result if name == "all_gather_into_tensor" else args[0]
            ran.collectives.append(Collective(_COLLECTIVES[name], whole.nbytes))
        numbers = [self._hold(each) for each in given]
        fresh = [each for each in made if self._hold(each) not in numbers]
        if forward:
            for number in numbers:
                self._read[number] = self._at
                self.seen[self._at].parameters += self.unused.pop(number, 0)
            for each in fresh:
                self._made[_number(each)] = self._at
            for each in made if self._keeps(self._path[-1] if self._path else "", func) else ():
                self._keep(each)
        if func.namespace not in _OURS:
            self.custom.add(f"{func.namespace}::{name}")
        # Views and allocations move nothing.
        writes = any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        if name in _ALLOCATIONS or not made or (not fresh and not writes):
            return result
        ran.count += 1
        if (products := matrix_products(name, args, result)) is not None:
            ran.matmuls += products
        else:
            sources = made if name in _LOOKUPS else given
            ran.moved = sum((_bulk(each) for each in (*sources, *made)), ran.moved)
        return result

    def _part(self) -> tuple[Ran, bool]:
        """The record of the running operation, and whether it is in a forward pass."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self.seen[self._at].forward, True
        number: int = node._sequence_nr()
        if number != _ACCUMULATES:
            self._at = bisect.bisect_right(self.seen, number, key=lambda each: each.node) - 1
        return self.seen[self._at].backward, False

    def _enter(self, name: str) -> None:
        if torch._C._current_autograd_node() is None:
            self._path.append(name)
            self._begin()

    def _leave(self) -> None:
        # A recomputation in the backward pass belongs to the node that needs it.
        if torch._C._current_autograd_node() is None:
            self._path.pop()
            if self._path:
                self._begin()

    def _begin(self) -> None:
        node = torch._C._autograd._get_sequence_nr()
        if self.seen and not self.seen[-1].worked:
            # It may have read a parameter through a view.
            idle = self.seen[-1]
            self.seen[-1] = TracedPart(self._path[-1], idle.node, parameters=idle.parameters)
        else:
            self.seen.append(TracedPart(self._path[-1], node))
        self._at = len(self.seen) - 1

    def _keep(self, saved: Tensor) -> Tensor:
        number = self._hold(saved)
        if number not in self._kept and torch._C._current_autograd_node() is None:
            self._kept.add(number)
            self.seen[self._at].kept += self._storages[number][1]
            self.seen[self._at].kept_bytes += local(saved).untyped_storage().nbytes()
        return saved

    def _hold(self, tensor: Tensor) -> int:
        number = _number(tensor)
        if number not in self._storages:
            tensor = local(tensor)
            self._storages[number] = tensor, _bulk(tensor, tensor.untyped_storage().nbytes())
        return number


class OnAnAccelerator(TorchFunctionMode):
    """Run dropout as on an accelerator: one kernel that keeps a byte per element, and none inside attention.

    On a CPU torch keeps a floating-point mask, and runs attention with dropout as separate operations.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, kwargs
            kwargs.pop("dropout_p", None)
        elif func is torch.nn.functional.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def tensors(values: Any) -> list[Tensor]:
    """All tensors inside nested lists, tuples and dictionaries, and other types that torch's pytree knows."""
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def matrix_products(name: str, args: Any, result: Any) -> list[Matmul] | None:
    """The matrix products of a torch operation; None if it is another kind of operation."""
    products = _PRODUCTS.get(name)
    return products(args, result) if products else None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _number(tensor: Tensor) -> int:
    number: int = local(tensor).untyped_storage()._cdata
    return number


def _bulk(tensor: Tensor, size_bytes: int | None = None) -> TensorSize:
    size = tensor.numel() * tensor.element_size() if size_bytes is None else size_bytes
    if tensor.is_floating_point():
        return TensorSize(elements=size / tensor.element_size())
    return TensorSize(other_bytes=float(size))


def _mm(left: Tensor, right: Tensor) -> list[Matmul]:
    return [Matmul(left.shape[-2], right.shape[-1], left.shape[-1], math.prod(left.shape[:-2]))]


def _convolved(x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool, groups: int) -> Matmul:
    """A kernel at every place of the output, or of the input if the convolution is transposed."""
    places = x[0] * math.prod((x if transposed else out)[2:])
    return Matmul(places, weight[0] // groups, math.prod(weight[1:]), groups)


def _convolution(args: Any, result: Any) -> list[Matmul]:
    return [_convolved(args[0].shape, args[1].shape, result.shape, args[6], args[8])]


def _convolution_backward(args: Any, _: Any) -> list[Matmul]:
    given, x, weight = (each.shape for each in args[:3])
    one = _convolved(x, weight, given, args[7], args[9])
    wanted = args[10]
    found = [Matmul(one.m, one.k, one.n, one.count)] if wanted[0] else []
    return found + ([Matmul(one.n, one.k, one.m, one.count)] if wanted[1] else [])


def _attention(query: Tensor, key: Tensor, products: int) -> list[Matmul]:
    """Products of the scores' size in one kernel, which moves no scores; a causal mask does not reduce the count."""
    return [Matmul(query.shape[-2], key.shape[-2], query.shape[-1], math.prod(query.shape[:-2]), float(products))]


# torch's name of an operation -> its matrix products, from arguments and result.
_PRODUCTS: dict[str, Callable[[Any, Any], list[Matmul]]] = {
    "mm": lambda args, _: _mm(args[0], args[1]),
    "bmm": lambda args, _: _mm(args[0], args[1]),
    "addmm": lambda args, _: _mm(args[1], args[2]),
    "baddbmm": lambda args, _: _mm(args[1], args[2]),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": lambda args, _: _attention(args[0], args[1], 2),
    # The backward pass computes the scores again: five products instead of two (Dao et al. 2022).
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args, _: _attention(args[1], args[2], 5),
}
