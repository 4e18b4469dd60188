"""A collective as a row of smaller ones, each small enough for a slot of host memory. Arithmetic, no device.

Every rank cuts alike: by the operation, the sizes that all ranks know, and the slots' size, which they agreed on.
Pieces begin at multiples of the i32 and i8 wires' block, so that the bits of such a sum do not depend on the cut.
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
    """One collective. Tensors are flat bytes on the device; those `out` go to the host first, those `back` return."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    out: Sequence[Tensor]
    back: Sequence[Tensor]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def chunk_elements(call: Prepared, ranks: int, slot_bytes: int) -> int:
    """How many elements of each tensor are one piece; ValueError where the slots are too small for any."""
    tensors = _tensors(call, ranks)
    element_bytes = [*call.inputs, *call.outputs][0].element_size()
    room = (slot_bytes - tensors * ALIGN_BYTES) // (tensors * element_bytes)
    elements = room // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    if elements <= 0:
        raise ValueError(
            f"{call.kind} among {ranks} ranks: {slot_bytes} bytes of pinned memory a slot are too few for {tensors} x "
            f"{BLOCK_ELEMENTS} elements of {element_bytes} bytes; set NETFOLD_PINNED_BYTES to more, on every rank"
        )
    return elements


def count_chunks(call: Prepared, elements: int) -> int:
    """By what this rank knows. Of all_to_all the others may need more: the greatest count of all ranks is used."""
    largest = max((tensor.numel() for tensor in (*call.inputs, *call.outputs)), default=0)
    return max(1, -(-largest // elements))


def split_into_chunks(call: Prepared, rank: int, elements: int, count: int) -> Iterator[Chunk]:
    """`count` pieces of up to `elements` of each tensor, in order; tensors that are shorter end earlier."""
    inputs = [(as_bytes(tensor), tensor.element_size()) for tensor in call.inputs]
    outputs = [(as_bytes(tensor), tensor.element_size()) for tensor in call.outputs]
    for number in range(count):
        at = number * elements
        ins = [_part(flat, at * each, (at + elements) * each) for flat, each in inputs]
        outs = [_part(flat, at * each, (at + elements) * each) for flat, each in outputs]
        yield Chunk(ins, outs, *_ways(call, rank, ins, outs))


def _ways(
    call: Prepared, rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What leaves the device, and what returns to it."""
    at_root = call.root == rank
    if call.kind == "all_reduce":  # an input is the residual of i8, which is rewritten
        return [*inputs, *outputs], [*inputs, *outputs]
    if call.kind == "reduce":
        return outputs, outputs if at_root else ()
    if call.kind == "broadcast":
        return (outputs, ()) if at_root else ((), outputs)
    return inputs, outputs


def _part(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat[min(begin, flat.numel()) : min(end, flat.numel())]


def _tensors(call: Prepared, ranks: int) -> int:
    """The most that any rank stages of each piece: the cut is the same at a root and elsewhere."""
    if call.kind in ("reduce_scatter", "all_gather", "gather", "scatter"):
        return ranks + 1
    if call.kind == "all_to_all":
        return 2 * ranks
    return 2 if call.kind == "all_reduce" and call.inputs else 1
