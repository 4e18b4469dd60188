"""DDP's buckets in shared memory, without a change to the script.

The reducer hands the same few buckets to all_reduce in every step. Once a bucket has come again from where it was
before (DDP lays its buckets out anew after the first step), its storage is moved to shared memory in place: every
tensor that is a view of it follows, and from then on ranks of one machine add it up where it lies.

What must not happen is that memory moves under somebody who holds a bare address of it. The reducer does not; it
computes addresses from its tensors each time. A NumPy view of `parameter.grad`, taken under gradient_as_bucket_view
before the third step and kept, would: NETFOLD_SHARE_BUCKETS=off is for such scripts. So a tensor is moved only when the
reducer itself calls, on the thread of `backward`.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from torch.autograd import graph

from netfold._native import engine

log = logging.getLogger("netfold")

# Below, a second copy costs less than what could go wrong.
_MIN_BYTES = 1 << 20
# As many steps must have brought the bucket at the same place before.
_SIGHTINGS = 2
_MAX_CANDIDATES = 1024

_backward = graph._engine_run_backward.__code__


def has_room(wanted_bytes: int) -> bool:
    """Whether /dev/shm can take so much and keep an eighth of itself free."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return False
    return found.f_bavail * found.f_frsize - wanted_bytes >= found.f_blocks * found.f_frsize // 8


class SharedBuckets:
    """The buckets that one group has moved. They are kept alive here, since their address is what peers know."""

    def __init__(self, *, enabled: bool, ranks: int) -> None:
        """`ranks` of one machine do the same at the same time, and share its /dev/shm."""
        self._enabled = enabled
        self._ranks = ranks
        self._sightings: dict[tuple[int, int], int] = {}
        self._moved: dict[int, torch.UntypedStorage] = {}

    def consider(self, tensor: torch.Tensor) -> None:
        """Called for each tensor to reduce, by the function that torch calls. Moves it when it is due."""
        if not self._enabled or tensor.nbytes < _MIN_BYTES:
            return
        caller = sys._getframe(2)
        if caller.f_code is not _backward or not tensor.is_contiguous():
            return
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        if place[0] in self._moved:
            return
        sightings = self._sightings.get(place, 0) + 1
        if sightings <= _SIGHTINGS:
            if len(self._sightings) >= _MAX_CANDIDATES:
                self._sightings.clear()  # these are no buckets
            self._sightings[place] = sightings
            return
        self._forget_unused()
        # A page for which there is no room when it is touched would end the process, not raise.
        if not has_room(self._ranks * place[1]):
            log.warning(
                "DDP's buckets stay where they are: /dev/shm has no room for %d ranks' %d bytes "
                "(NETFOLD_SHARE_BUCKETS=off keeps them there)",
                self._ranks,
                place[1],
            )
            self._enabled = False
            return
        fd, size = storage._share_fd_cpu_()
        engine.share_memory(storage.data_ptr(), size, fd)
        self._moved[storage.data_ptr()] = storage
        log.info("a bucket of %d bytes is in shared memory now", size)

    def _forget_unused(self) -> None:
        """Let go of buckets that nobody but us still has."""
        for address, storage in list(self._moved.items()):
            if torch._C._storage_Use_Count(storage._cdata) == 1:
                engine.unshare_memory(address)
                del self._moved[address]

    def close(self) -> None:
        for address in self._moved:
            engine.unshare_memory(address)
        self._moved.clear()
        self._enabled = False
