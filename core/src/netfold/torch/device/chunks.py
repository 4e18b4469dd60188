"""The split of a collective into smaller ones that fit into a slot of host memory. Arithmetic only, no device.

Every rank splits alike: by the operation, by sizes that all ranks know, and by the slots' size, on which they agreed.
Chunks begin at multiples of the i32 and i8 wire formats' block, so the bits of such a sum do not depend on the split.
Chunk k has the elements k * n to (k + 1) * n - 1 of each tensor, n as `chunk_elements` says; shorter tensors end
earlier. core/native/device/host_staging.cpp cuts the chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from netfold.torch.calls import Prepared
from netfold.torch.device.pinned import ALIGN_BYTES

Tensor = torch.Tensor

# kernels::kQuantiseBlock.
BLOCK_ELEMENTS = 128


class Copies(NamedTuple):
    """Whether a call's inputs, or its outputs, are copied."""

    to_host: bool  # before the collective
    to_device: bool  # after it


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


def copies_of(call: Prepared, rank: int) -> tuple[Copies, Copies]:
    """The copies that `rank` makes, of the inputs and of the outputs."""
    at_root = call.root == rank
    if call.kind == "all_reduce":  # an input is the residual of the i8 wire format, which is updated
        return Copies(True, True), Copies(True, True)
    if call.kind == "reduce":
        return Copies(False, False), Copies(True, at_root)
    if call.kind == "broadcast":
        return Copies(False, False), Copies(at_root, not at_root)
    return Copies(True, False), Copies(False, True)


def _tensors(call: Prepared, ranks: int) -> int:
    """The largest number of tensors that any rank stages: a root and other ranks split alike."""
    if call.kind in ("reduce_scatter", "all_gather", "gather", "scatter"):
        return ranks + 1
    if call.kind == "all_to_all":
        return 2 * ranks
    return 2 if call.kind == "all_reduce" and call.inputs else 1
