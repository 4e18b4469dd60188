"""DDP's buckets in shared memory, or registered with a fabric, without a change to the script.

DDP's reducer passes the same few buckets to all_reduce in every step. (DDP rebuilds its buckets after the first step.)
After enough calls from the same address, netfold moves the bucket's storage to shared memory in place. All tensors that
are views of the storage follow. From then on the ranks of one machine reduce the bucket in place.

Memory must not move while other code holds its address. The reducer holds none: it computes addresses from its tensors
in each call. So netfold moves a tensor only when the reducer calls, on the thread of `backward`. A script that keeps a
NumPy view of `parameter.grad`, taken under gradient_as_bucket_view before the third step, must set
NETFOLD_SHARE_BUCKETS=off.

Over a fabric nothing moves: the bucket stays registered, which saves a registration in each step. netfold keeps the
storage alive meanwhile, so no other tensor can take the address. It releases a storage that has no other owner.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from netfold._native import engine
from netfold.torch.autograd_frame import is_autograds

log = logging.getLogger("netfold")

# Below this size, a copy costs less than the risk of a move.
_MIN_BYTES = 1 << 20
# Smaller buckets do not travel by RMA.
_MIN_REGISTERED_BYTES = 64 << 10
# Earlier steps with the bucket at the same address.
_SIGHTINGS = 2
_MAX_CANDIDATES = 1024


def shm_shortage(wanted_bytes: int) -> str | None:
    """Return why /dev/shm cannot take `wanted_bytes` and keep an eighth of its size free; None if it can."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return f"there is no /dev/shm ({error.strerror})"
    if stat.f_flag & os.ST_RDONLY:
        return "/dev/shm is read-only"
    if stat.f_bavail * stat.f_frsize - wanted_bytes < stat.f_blocks * stat.f_frsize // 8:
        return f"/dev/shm has no room for {wanted_bytes} bytes while an eighth of it stays free"
    return None


class BucketDetector:
    """Detects buckets: tensors that DDP's reducer passes repeatedly from the same address."""

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], int] = {}

    def is_bucket(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        """Return the storage of a tensor that came often enough, else None.

        The frame third from here must be torch's: torch calls a method, the method calls the caller of this.
        """
        if not is_autograds(3) or not tensor.is_contiguous():
            return None
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        times = self._times.get(place, 0) + 1
        if times > _SIGHTINGS:
            return storage
        if len(self._times) >= _MAX_CANDIDATES:
            self._times.clear()  # so many different addresses are not buckets
        self._times[place] = times
        return None


def _has_no_other_owner(storage: torch.UntypedStorage) -> bool:
    return bool(torch._C._storage_Use_Count(storage._cdata) == 1)


class RegisteredBuckets:
    """The buckets that one group keeps registered with its fabric, by address."""

    def __init__(self, lease: Callable[[tuple[int, int]], Any]) -> None:
        """lease: registers (address, bytes); the registration lasts as long as the result."""
        self._lease = lease
        self._detector = BucketDetector()
        self._leases: dict[int, tuple[torch.UntypedStorage, int, Any]] = {}

    def consider(self, tensor: torch.Tensor) -> None:
        """Register the tensor's storage if it is a bucket. The method that torch calls must call this directly."""
        if tensor.nbytes < _MIN_REGISTERED_BYTES:
            return
        # A storage may have been given other memory since. A stale registration would yield wrong sums.
        for address, (storage, size, _) in list(self._leases.items()):
            if (storage.data_ptr(), storage.nbytes()) != (address, size):
                self._release(address)
        bucket = self._detector.is_bucket(tensor)
        if bucket is None or bucket.data_ptr() in self._leases:
            return
        for address, (storage, _, _) in list(self._leases.items()):
            if _has_no_other_owner(storage):
                self._release(address)
        region = (bucket.data_ptr(), bucket.nbytes())
        self._leases[region[0]] = (bucket, region[1], self._lease(region))
        log.debug("a bucket of %d bytes stays registered from now on", region[1])

    def _release(self, address: int) -> None:
        storage, _, lease = self._leases.pop(address)
        # End the registration before the storage may free the memory.
        del lease
        del storage

    def close(self) -> None:
        for address in list(self._leases):
            self._release(address)


class SharedBuckets:
    """The buckets that one group has moved to shared memory. Kept alive, since peers use their addresses."""

    def __init__(self, *, enabled: bool, ranks: int) -> None:
        """ranks: the ranks of this machine. All move their buckets at the same time, to one /dev/shm."""
        self._enabled = enabled
        self._ranks = ranks
        self._detector = BucketDetector()
        self._moved: dict[int, torch.UntypedStorage] = {}

    def consider(self, tensor: torch.Tensor) -> None:
        """Move the tensor's storage if it is a bucket. The method that torch calls must call this directly."""
        if not self._enabled or tensor.nbytes < _MIN_BYTES:
            return
        storage = self._detector.is_bucket(tensor)
        if storage is None or storage.data_ptr() in self._moved:
            return
        self._forget_unused()
        # A first write to a page that /dev/shm cannot hold ends the process (SIGBUS); it raises nothing.
        reason = shm_shortage(self._ranks * storage.nbytes())
        if reason is None:
            try:
                fd, size = storage._share_fd_cpu_()
            except RuntimeError as error:  # e.g. no permission to write to /dev/shm; nothing has moved
                reason = str(error).partition("\n")[0]
        if reason is not None:
            log.warning(
                "DDP's buckets stay in private memory: %s (NETFOLD_SHARE_BUCKETS=off avoids this attempt)", reason
            )
            self._enabled = False
            return
        engine.share_memory(storage.data_ptr(), size, fd)
        self._moved[storage.data_ptr()] = storage
        log.debug("a bucket of %d bytes is in shared memory now", size)

    def _forget_unused(self) -> None:
        """Release the buckets that have no other owner."""
        for address, storage in list(self._moved.items()):
            if _has_no_other_owner(storage):
                engine.unshare_memory(address)
                del self._moved[address]

    def close(self) -> None:
        for address in self._moved:
            engine.unshare_memory(address)
        self._moved.clear()
        self._enabled = False
