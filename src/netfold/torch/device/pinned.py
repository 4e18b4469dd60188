"""Bounded pinned host memory: a group's slots for chunks, and its memory for messages."""

from __future__ import annotations

import logging
import threading
import weakref

import torch

from netfold.errors import NetfoldError
from netfold.torch.device.device_api import DeviceApi

log = logging.getLogger("netfold")

Tensor = torch.Tensor

# One chunk is copied from the device, one is in the collective, one is copied back.
SLOTS = 3
# Regions begin at cache lines.
ALIGN_BYTES = 64
# The most memory that a group's messages pin at a time. Messages beyond it use ordinary memory, which a thread copies
# instead of a copy engine. They never wait for pinned memory: a waiting receive could block the send that frees some.
TRANSFER_BYTES = 64 << 20


def slots(device_api: DeviceApi, pinned_bytes: int, rank: int) -> list[Tensor]:
    """Allocate `SLOTS` buffers of `pinned_bytes` together. NetfoldError if the host refuses."""
    try:
        return [device_api.pinned(pinned_bytes // SLOTS) for _ in range(SLOTS)]
    except RuntimeError as error:
        raise NetfoldError(
            f"rank {rank}: the host gave no {pinned_bytes} bytes of pinned memory: {error}; set NETFOLD_PINNED_BYTES "
            "to less on every rank, or let this process lock more memory",
            rank=rank,
        ) from error


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
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            memory = self._device_api.pinned(nbytes)
        except RuntimeError as error:
            self._give_back(nbytes)
            if not self._refused:
                self._refused = True
                log.warning("messages go through ordinary memory: the host pins no %d bytes: %s", nbytes, error)
            return torch.empty(nbytes, dtype=torch.uint8)
        weakref.finalize(memory, self._give_back, nbytes).atexit = False
        return memory

    def _give_back(self, nbytes: int) -> None:
        with self._lock:
            self._left += nbytes
