"""Pinned host memory, bounded: a group's slots for pieces, and its share for messages."""

from __future__ import annotations

import logging
import threading
import weakref

import torch

from netfold.errors import NetfoldError
from netfold.torch.device.device_api import DeviceApi

log = logging.getLogger("netfold")

Tensor = torch.Tensor

# A piece on its way out of the device, one in the collective, one on its way back.
SLOTS = 3
# Regions begin where a cache line does.
ALIGN_BYTES = 64
# All that messages of a group have pinned at a time. What is beyond goes through ordinary memory: copied by a thread
# and not by an engine, but never refused, since a receive that waits for room could hold up the send that frees it.
TRANSFER_BYTES = 64 << 20


def slots(layer: DeviceApi, pinned_bytes: int, rank: int) -> list[Tensor]:
    """`SLOTS` buffers of as many bytes together. NetfoldError where the host does not give them."""
    try:
        return [layer.pinned(pinned_bytes // SLOTS) for _ in range(SLOTS)]
    except RuntimeError as error:
        raise NetfoldError(
            f"rank {rank}: the host gave no {pinned_bytes} bytes of pinned memory: {error}; set NETFOLD_PINNED_BYTES "
            "to less on every rank, or let this process lock more memory",
            rank=rank,
        ) from error


class TransferMemory:
    """What messages are staged in. Thread-safe."""

    def __init__(self, layer: DeviceApi, budget_bytes: int = TRANSFER_BYTES) -> None:
        self._layer = layer
        self._left = budget_bytes
        self._refused = False
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] u8, pinned while there is room and the host gives it; else ordinary memory, whose copies hold the
        thread that asks for them. It is given back when the last reference to it goes."""
        with self._lock:
            fits = nbytes <= self._left
            if fits:
                self._left -= nbytes
        if not fits:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            memory = self._layer.pinned(nbytes)
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
