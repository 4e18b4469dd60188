"""The memory of tensors: the only place where tensors enter netfold's native layer, and leave it.

The native layer takes addresses. A tensor's memory may hold its values with gaps or in another order; torch may also
have only noted that the values are negated or conjugated. `outgoing` returns memory that holds the values themselves.
`write` puts a result's values into a tensor of any kind, on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

Tensor = torch.Tensor
_dense: Any = torch._utils  # its functions have no types


def check(tensor: Tensor) -> None:
    """Raise ValueError for a tensor whose memory netfold cannot read: on another device, or not dense."""
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(f"netfold takes CPU tensors and those of CUDA devices, this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"netfold takes dense tensors for this operation, this one is {tensor.layout}")


def with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor; wait for one that a functional collective returned.

    ValueError for a tensor with elements but no memory: the core would read at address 0.
    """
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    if tensor.data_ptr() == 0 and tensor.numel():
        raise ValueError(
            f"netfold takes tensors with memory of their own; this {type(tensor).__name__} of {list(tensor.shape)} has "
            "none: it may be a fake tensor, a DTensor (pass its to_local()), or its storage was freed"
        )
    return tensor


def is_plain(tensor: Tensor) -> bool:
    """Whether the memory of a dense tensor holds its values in order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def outgoing(tensor: Tensor) -> Tensor:
    """Return the tensor if its memory holds its values in order, else a copy whose memory does."""
    tensor = with_memory(tensor)
    if is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def writable() -> torch.inference_mode:
    """A context in which every tensor may be written, a leaf that requires grad and an inference tensor too.

    Modes belong to threads, and the thread that writes a result is often not the caller's. Allocate nothing in this
    context that outlives it: it would be an inference tensor.
    """
    return torch.inference_mode()


def write(tensor: Tensor, values: Tensor) -> None:
    """Replace the tensor's values, on any thread."""
    with writable():
        tensor.copy_(values)


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return new memory that holds the values of all tensors, one tensor after the other."""
    with torch.no_grad():
        whole: Tensor = _dense._flatten_dense_tensors([with_memory(tensor) for tensor in tensors])
        return whole


def unpacking(tensors: Sequence[Tensor], memory: Tensor) -> Callable[[], None]:
    """A function that writes the values of `memory`, which are in the order of `packed`, into all tensors.

    ValueError for a tensor that repeats elements, as `writing_back`.
    """
    into = [with_memory(tensor) for tensor in tensors]
    for tensor in into:
        _refuse_repeated(tensor)

    def write_all() -> None:
        with writable():
            for tensor, values in zip(into, _dense._unflatten_dense_tensors(memory, into), strict=True):
                tensor.copy_(values)  # torch._foreach_copy_ takes no negated tensors

    return write_all


def _refuse_repeated(tensor: Tensor) -> None:
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        raise ValueError(
            f"a tensor of {list(tensor.shape)} repeats elements (expand), so it cannot take results; pass a clone"
        )


def writing_back(pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None] | None:
    """A function that writes each result from its memory into its tensor; None if all are in place.

    pairs: (tensor, memory), where memory is `outgoing(tensor)`.
    ValueError for a tensor that repeats elements: several results would go to one place.
    """
    moved = [(tensor, memory) for tensor, memory in pairs if memory is not tensor]
    if not moved:
        return None
    for tensor, _ in moved:
        _refuse_repeated(tensor)

    def write_all() -> None:
        for tensor, memory in moved:
            write(tensor, memory)

    return write_all
