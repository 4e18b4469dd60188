"""torch's send and recv: one tensor between two ranks, and its Work.

torch implements a blocking call as an asynchronous call and a wait. So a Work requests a completion event only if its
Future is used. The waiting thread itself drives the group: no other thread is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from netfold.communicator import Group
from netfold.communicator.group import ELEMENTS, KINDS
from netfold.torch.calls import DTYPE_CODES, element_name
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.device.transfers import DeviceTransfers, SendWork
from netfold.torch.memory import outgoing, writing_back
from netfold.torch.work import CompletedWork, NetfoldWork, Work

Tensor = torch.Tensor


class Transfers:
    """A group's sends and receives."""

    def __init__(self, group: Group, device_api: DeviceApi | None = None) -> None:
        self.group = group
        self._device = DeviceTransfers(self, device_api) if device_api is not None else None

    def transfer(self, kind: str, tensors: Sequence[Tensor], peer: int, tag: int) -> Work | SendWork:
        """Start a "send" or "receive"."""
        if len(tensors) != 1:
            raise ValueError(f"{kind}: takes one tensor, not {len(tensors)}")
        (tensor,) = tensors
        if self._device is not None and tensor.layout is torch.strided and self._device.takes(tensor):
            if kind == "send":
                return self._device.send(tensor, peer, tag)
            return self._device.receive(tensor, peer, tag)
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            raise ValueError(f"{kind}: netfold takes dense CPU tensors, this one is {tensor.layout} on {tensor.device}")
        staged = outgoing(tensor)
        if kind == "send" and self._device is not None:
            queued = self._device.send_queued(tensor, staged, peer, tag)
            if queued is not None:
                return queued
        operation = self.start(KINDS[kind], tensor, staged, peer, tag)
        finish = writing_back([(tensor, staged)]) if kind == "receive" else None
        if finish is None and operation.done and operation.failure is None:
            return CompletedTransfer(tensors, operation)
        return TransferWork(self, operation, tensors, finish=finish)

    def start(self, kind: int, tensor: Tensor, memory: Tensor, peer: int, tag: int) -> Any:
        """Start the native operation for `tensor`, whose bytes are in `memory`."""
        code = DTYPE_CODES.get(tensor.dtype)
        element = ELEMENTS[element_name(tensor)] if code is None else code
        return self.group.start_transfer(kind, element, peer, tag, (memory.data_ptr(), memory.nbytes), memory)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()


class CompletedTransfer(CompletedWork):
    """A send or receive that completed on submission."""

    def __init__(self, result: Any, operation: Any) -> None:
        super().__init__(result)
        self._operation = operation

    def source_rank(self) -> int:
        """As `TransferWork.source_rank`."""
        return int(self._operation.peer)


class TransferWork(NetfoldWork):
    """One send or receive."""

    def __init__(self, transfers: Transfers, operation: Any, *args: Any, **options: Any) -> None:
        super().__init__(transfers.group, [operation], *args, **options)

    def source_rank(self) -> int:
        """The group rank of the other end. For a receive from any source: valid once the receive is done."""
        return int(self._operations[0].peer)
