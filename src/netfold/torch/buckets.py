"""DDP's buckets in shared memory, or registered with a fabric, without a change to the script.

The reducer hands the same few buckets to all_reduce in every step. Once a bucket has come again from where it was
before (DDP lays its buckets out anew after the first step), its storage is moved to shared memory in place: every
tensor that is a view of it follows, and from then on ranks of one machine add it up where it lies.

What must not happen is that memory moves under somebody who holds a bare address of it. The reducer does not; it
computes addresses from its tensors each time. A NumPy view of `parameter.grad`, taken under gradient_as_bucket_view
before the third step and kept, would: NETFOLD_SHARE_BUCKETS=off is for such scripts. So a tensor is moved only when the
reducer itself calls, on the thread of `backward`.

Over a fabric nothing moves: the bucket stays registered from then on, which spares each step to register it. It is kept
alive as long, so its memory cannot come to mean something else; one that only we still have is let go.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from netfold._native import engine

log = logging.getLogger("netfold")

# Below, a second copy costs less than what could go wrong.
_MIN_BYTES = 1 << 20
# Smaller ones go in no large pieces.
_MIN_REGISTERED_BYTES = 64 << 10
# As many steps must have brought the bucket at the same place before.
_SIGHTINGS = 2
_MAX_CANDIDATES = 1024

_backward = graph._engine_run_backward.__code__


def shm_shortage(wanted_bytes: int) -> str | None:
    """Why /dev/shm cannot take so much and keep an eighth of itself free; None where it can."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return f"there is no /dev/shm ({error.strerror})"
    if found.f_flag & os.ST_RDONLY:
        return "/dev/shm is read-only"
    if found.f_bavail * found.f_frsize - wanted_bytes < found.f_blocks * found.f_frsize // 8:
        return f"/dev/shm has no room for {wanted_bytes} bytes and an eighth of itself"
    return None


class BucketDetector:
    """Which tensors are buckets: those that the reducer brings again and again from the same place."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], int] = {}

    def is_bucket(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """The storage of one that was seen often enough. To be called by what the function that torch calls, calls."""
        caller = sys._getframe(3)
        if caller.f_code is not _backward or not tensor.is_contiguous():
            return None
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        times = self._times.get(place, 0) + 1
        if times > _SIGHTINGS:
            return storage
        if len(self._times) >= _MAX_CANDIDATES:
            self._times.clear()  # these are no buckets
        self._times[place] = times
        return None


def _is_only_ours(storage: torch.UntypedStorage) -> bool:
    return bool(torch._C._storage_Use_Count(storage._cdata) == 1)


class RegisteredBuckets:
    """The buckets that one group keeps registered with its fabric, by address."""

    def __init__(self, hold: Callable[[tuple[int, int]], Any]) -> None:
        self._hold = hold
        self._sightings = BucketDetector()
        self._held: dict[int, tuple[torch.UntypedStorage, int, Any]] = {}

    def consider(self, tensor: torch.Tensor) -> None:
        """Called for each tensor to reduce, by the function that torch calls."""
        if tensor.nbytes < _MIN_REGISTERED_BYTES:
            return
        # A storage that was given other memory is no bucket of the reducer's, but would be a wrong sum here.
        for address, (storage, size, _) in list(self._held.items()):
            if (storage.data_ptr(), storage.nbytes()) != (address, size):
                self._let_go(address)
        found = self._sightings.is_bucket(tensor)
        if found is None or found.data_ptr() in self._held:
            return
        for address, (storage, _, _) in list(self._held.items()):
            if _is_only_ours(storage):
                self._let_go(address)
        place = (found.data_ptr(), found.nbytes())
        self._held[place[0]] = (found, place[1], self._hold(place))
        log.debug("a bucket of %d bytes stays registered from now on", place[1])

    def _let_go(self, address: int) -> None:
        storage, _, hold = self._held.pop(address)
        # The memory may go with the storage, so the registration goes first.
        del hold
        del storage

    def close(self) -> None:
        for address in list(self._held):
            self._let_go(address)


class SharedBuckets:
    """The buckets that one group has moved. They are kept alive here, since their address is what peers know."""

    def __init__(self, *, enabled: bool, ranks: int) -> None:
        """`ranks` of one machine do the same at the same time, and share its /dev/shm."""
        self._enabled = enabled
        self._ranks = ranks
        self._sightings = BucketDetector()
        self._moved: dict[int, torch.UntypedStorage] = {}

    def consider(self, tensor: torch.Tensor) -> None:
        """Called for each tensor to reduce, by the function that torch calls. Moves it when it is due."""
        if not self._enabled or tensor.nbytes < _MIN_BYTES:
            return
        storage = self._sightings.is_bucket(tensor)
        if storage is None or storage.data_ptr() in self._moved:
            return
        place = (storage.data_ptr(), storage.nbytes())
        self._forget_unused()
        # A page for which there is no room when it is touched would end the process, not raise.
        reason = shm_shortage(self._ranks * place[1])
        if reason is None:
            try:
                fd, size = storage._share_fd_cpu_()
            except RuntimeError as error:  # /dev/shm is not this user's to write, for one; nothing has moved
                reason = str(error).partition("\n")[0]
        if reason is not None:
            log.warning("DDP's buckets stay where they are: %s (NETFOLD_SHARE_BUCKETS=off keeps them there)", reason)
            self._enabled = False
            return
        engine.share_memory(storage.data_ptr(), size, fd)
        self._moved[storage.data_ptr()] = storage
        log.debug("a bucket of %d bytes is in shared memory now", size)

    def _forget_unused(self) -> None:
        """Let go of buckets that nobody but us still has."""
        for address, storage in list(self._moved.items()):
            if _is_only_ours(storage):
                engine.unshare_memory(address)
                del self._moved[address]

    def close(self) -> None:
        for address in self._moved:
            engine.unshare_memory(address)
        self._moved.clear()
        self._enabled = False
