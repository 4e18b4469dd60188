"""Bounded pinned host memory: a group's slots for chunks, and its memory for messages."""

from __future__ import annotations

import logging
import threading
import weakref

import numpy as np
import torch

from netfold.communicator import shared_arrays
from netfold.errors import NetfoldError
from netfold.torch.device.device_api import DeviceApi

log = logging.getLogger("netfold")

Tensor = torch.Tensor

# One chunk is copied from the device, one is in the collective, one is copied back.
SLOTS = 3
# The default size of all slots. A slot of gather and scatter holds a part of every rank: with more ranks in the same
# bytes, copies become small.
_DEFAULT_BYTES, _MOST_BYTES, _DEFAULT_RANKS = 12 << 20, 96 << 20, 8
# Regions begin at cache lines.
ALIGN_BYTES = 64
# The most memory that a group's messages pin at a time. Messages beyond it use ordinary memory, which a thread copies
# instead of a copy engine. They never wait for pinned memory: a waiting receive could block the send that frees some.
TRANSFER_BYTES = 64 << 20
# Slots that a hanging device may still use: kept until the process ends.
_never_released: list[Tensor] = []


def default_bytes(ranks: int) -> int:
    """The bytes of all slots of a group whose NETFOLD_PINNED_BYTES is 0."""
    return min(_MOST_BYTES, max(_DEFAULT_BYTES, _DEFAULT_BYTES * ranks // _DEFAULT_RANKS))


class Slots:
    """A group's slots: `SLOTS` buffers of pinned host memory.

    The slots of ranks on one host are in shared memory that is registered with the device. So collectives
    read and write the slots of other ranks in place, and copy nothing. CUDA pins no memory of its own that other
    processes can map.
    """

    def __init__(self, device_api: DeviceApi, pinned_bytes: int, rank: int, *, shared: bool) -> None:
        """Allocate `pinned_bytes` in all. Raises NetfoldError if the host refuses."""
        self._device_api = device_api
        self._registered: list[Tensor] = []
        self.memory: list[Tensor] = []
        try:
            self.memory = [self._slot(pinned_bytes // SLOTS, shared=shared) for _ in range(SLOTS)]
        except RuntimeError as error:
            self.release(settled=True)
            raise NetfoldError(
                f"rank {rank}: the host gave no {pinned_bytes} bytes of pinned memory: {error}; set "
                "NETFOLD_PINNED_BYTES to less on every rank, or let this process lock more memory",
                rank=rank,
            ) from error

    @property
    def registered(self) -> bool:
        """Whether ranks of this host map the slots."""
        return bool(self._registered)

    def release(self, *, settled: bool) -> None:
        """End the registrations. settled: the device has finished all copies; else the memory is never freed.

        torch does not know the copies: its allocator would give the memory to another tensor meanwhile.
        """
        registered, self._registered = self._registered, []
        if not settled:
            _never_released.extend(self.memory)
            return
        for memory in registered:
            self._device_api.unregister(memory)

    def _slot(self, nbytes: int, *, shared: bool) -> Tensor:
        if shared and nbytes > 0:
            try:
                memory = torch.from_numpy(shared_arrays.empty(nbytes, np.uint8))
                if self._device_api.register(memory):
                    self._registered.append(memory)
                    return memory
            except (RuntimeError, OSError) as error:
                log.debug("slots are not in shared memory: %s", error)
        return self._device_api.pinned(nbytes)


class TransferMemory:
    """The memory in which messages are staged. Thread-safe."""

    def __init__(self, device_api: DeviceApi, budget_bytes: int = TRANSFER_BYTES) -> None:
        self._device_api = device_api
        self._left = budget_bytes
        self._refused = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Allocate [nbytes] u8: pinned if the budget and the host allow it, else ordinary memory.

        Copies of ordinary memory block the calling thread. The last reference to the tensor frees it.
        """
        with self._lock:
            fits = nbytes <= self._left
            if fits:
                self._left -= nbytes
        if not fits:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        try:
            memory = self._device_api.pinned(nbytes)
        except RuntimeError as error:
            self._give_back(nbytes)
            if not self._refused:
                self._refused = True
                log.warning("messages go through ordinary memory: the host pins no %d bytes: %s", nbytes, error)
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        weakref.finalize(memory, self._give_back, nbytes).atexit = False
        return memory

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes
