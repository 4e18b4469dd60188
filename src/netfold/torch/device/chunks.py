"""Split a collective into smaller ones that fit into a slot of host memory. Arithmetic only, no device.

Every rank splits alike: by the operation, by sizes that all ranks know, and by the slots' size, on which they agreed.
Chunks begin at multiples of the i32 and i8 wire formats' block, so the bits of such a sum do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from netfold.torch.calls import Prepared
from netfold.torch.device.pinned import ALIGN_BYTES

Tensor = torch.Tensor

# kernels::kQuantiseBlock.
BLOCK_ELEMENTS = 128


@dataclass(frozen=True)
class Chunk:
    """One smaller collective. Tensors are flat bytes on the device.

    out: copied to the host before the collective.
    back: copied to the device after it.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    out: Sequence[Tensor]
    back: Sequence[Tensor]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def chunk_elements(call: Prepared, ranks: int, slot_bytes: int) -> int:
    """The number of elements of each tensor in a chunk; ValueError if the slots are too small for one block."""
    tensors = _tensors(call, ranks)
    element_bytes = [*call.inputs, *call.outputs][0].element_size()
    capacity = (slot_bytes - tensors * ALIGN_BYTES) // (tensors * element_bytes)
    elements = capacity // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    if elements <= 0:
        raise ValueError(
            f"{call.kind} among {ranks} ranks: {slot_bytes} bytes of pinned memory a slot are too few for {tensors} x "
            f"{BLOCK_ELEMENTS} elements of {element_bytes} bytes; set NETFOLD_PINNED_BYTES to more, on every rank"
        )
    return elements


def count_chunks(call: Prepared, elements: int) -> int:
    """The number of chunks by this rank's sizes. For all_to_all other ranks may need more: use the largest count."""
    largest = max((tensor.numel() for tensor in (*call.inputs, *call.outputs)), default=0)
    return max(1, -(-largest // elements))


def split_into_chunks(call: Prepared, rank: int, elements: int, count: int) -> Iterator[Chunk]:
    """Yield `count` chunks of up to `elements` of each tensor, in order. Shorter tensors end earlier."""
    inputs = [(as_bytes(tensor), tensor.element_size()) for tensor in call.inputs]
    outputs = [(as_bytes(tensor), tensor.element_size()) for tensor in call.outputs]
    for number in range(count):
        at = number * elements
        ins = [_part(flat, at * each, (at + elements) * each) for flat, each in inputs]
        outs = [_part(flat, at * each, (at + elements) * each) for flat, each in outputs]
        yield Chunk(ins, outs, *_copied(call, rank, ins, outs))


def _copied(
    call: Prepared, rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The tensors to copy from the device, and those to copy back."""
    at_root = call.root == rank
    if call.kind == "all_reduce":  # an input is the residual of the i8 wire format, which is updated
        return [*inputs, *outputs], [*inputs, *outputs]
    if call.kind == "reduce":
        return outputs, outputs if at_root else ()
    if call.kind == "broadcast":
        return (outputs, ()) if at_root else ((), outputs)
    return inputs, outputs


def _part(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat[min(begin, flat.numel()) : min(end, flat.numel())]


def _tensors(call: Prepared, ranks: int) -> int:
    """The largest number of tensors that any rank stages: a root and other ranks split alike."""
    if call.kind in ("reduce_scatter", "all_gather", "gather", "scatter"):
        return ranks + 1
    if call.kind == "all_to_all":
        return 2 * ranks
    return 2 if call.kind == "all_reduce" and call.inputs else 1
