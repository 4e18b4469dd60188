"""Many small arrays in few large messages, as Horovod's fusion buffer: latency is paid once a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from netfold.communicator import Work
from netfold.horovod.tree import Array

# Of one fused message; an array that is larger goes alone. Beyond a few MB latency no longer counts, and packing one
# buffer while another travels is all there is to win.
FUSION_BYTES = 16 << 20


def fused(arrays: Sequence[Array], submit: Callable[[Array], Work]) -> list[Array]:
    """Copy the arrays into buffers of one dtype and at most FUSION_BYTES each, submit every buffer, wait for all.

    Returns the arrays' places in the buffers, in order and shape: new memory. Cost: one copy of everything; the packing
    of a buffer overlaps the travel of those before it. All ranks must pass the same shapes and dtypes.
    """
    results: list[Any] = [None] * len(arrays)
    works = []
    for indices in _buffers(arrays):
        dtype = arrays[indices[0]].dtype
        buffer = np.empty(sum(arrays[i].size for i in indices), dtype)
        first = 0
        for i in indices:
            place = buffer[first : first + arrays[i].size].reshape(arrays[i].shape)
            np.copyto(place, arrays[i])
            results[i] = place
            first += arrays[i].size
        works.append(submit(buffer))
    for work in works:
        work.wait()
    return results


def _buffers(arrays: Sequence[Array]) -> Iterator[list[int]]:
    """Indices of arrays that go together: in order of appearance within a dtype."""
    open_: dict[Any, tuple[list[int], int]] = {}
    for i, array in enumerate(arrays):
        indices, used_bytes = open_.get(array.dtype, ([], 0))
        if indices and used_bytes + array.nbytes > FUSION_BYTES:
            yield indices
            indices, used_bytes = [], 0
        indices.append(i)
        open_[array.dtype] = (indices, used_bytes + array.nbytes)
    for indices, _ in open_.values():
        yield indices
