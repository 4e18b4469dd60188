"""Pack many small arrays into few large messages, as Horovod's fusion buffer does: each message costs one latency."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from netfold.communicator import Work
from netfold.horovod.tree import Array

# The most bytes of one message, unless a single array is larger. In messages of a few MB latency no longer counts. The
# remaining gain is to pack one buffer while another travels.
FUSION_BYTES = 16 << 20


def batches(
    keys: Sequence[Hashable], sizes: Sequence[int], limit: Callable[[int], int] = lambda _: FUSION_BYTES
) -> list[list[int]]:
    """Group the indices of `keys`: those with equal keys, in their order, up to a number of bytes.

    sizes: bytes of each. limit: from the number of batches so far, the most bytes of a batch; a larger entry goes
    alone.
    """
    found: list[list[int]] = []
    open_: dict[Hashable, list[int]] = {}
    used: dict[Hashable, int] = {}
    for index, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        if key not in open_ or used[key] + size > limit(len(found)):
            open_[key], used[key] = [], 0
            found.append(open_[key])
        open_[key].append(index)
        used[key] += size
    return found


def fused(arrays: Sequence[Array], submit: Callable[[Array], Work]) -> list[Array]:
    """Copy the arrays into buffers of one dtype and at most FUSION_BYTES each, submit every buffer, and wait for all.

    Returns views of the buffers, new memory, in the order and shapes of the arrays. All ranks must pass the same shapes
    and dtypes. Cost: one copy of all arrays. The engine sends the first buffers while later ones are packed.
    """
    results: list[Any] = [None] * len(arrays)
    works = []
    for indices in batches([array.dtype for array in arrays], [array.nbytes for array in arrays]):
        buffer = np.empty(sum(arrays[i].size for i in indices), arrays[indices[0]].dtype)
        first = 0
        for i in indices:
            results[i] = buffer[first : first + arrays[i].size].reshape(arrays[i].shape)
            np.copyto(results[i], arrays[i])
            first += arrays[i].size
        works.append(submit(buffer))
    for work in works:
        work.wait()
    return results
