"""Send a rank's state to ranks that lack it: over the group, without a disk.

Part by part, in the order of the names in `State`. Of each part the structure (its state_dict without the tensors, by
pickle) goes first, then the bytes of each tensor. The receiver loads a part before the next one arrives, so beside its
own state it needs the memory of one part. A tensor that a part has under several names is sent once.

The peers have proved that they are ranks of the job before the group formed, so their pickles are trusted, as torch's
object collectives trust them.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.torch.memory import outgoing

# The structure of one part. A larger one is refused: its tensors should be tensors.
MAX_STRUCTURE_BYTES = 1 << 28
# Tensors under way at once: enough to fill a link, and no more than this beside the state.
WINDOW_BYTES = 1 << 26


class Peer(Protocol):
    """The other side, or sides, of a transfer. Both sides call the same methods in the same order."""

    def start(self, tensor: Tensor) -> Any:
        """tensor: contiguous u8, borrowed until the returned Work is done."""
        ...


class SendTo:
    """This rank sends to `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def start(self, tensor: Tensor) -> Any:
        return dist.isend(tensor, self._rank)


class ReceiveFrom:
    """This rank receives from `rank`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def start(self, tensor: Tensor) -> Any:
        return dist.irecv(tensor, self._rank)


class Broadcast:
    """Rank 0 sends to all other ranks."""

    def start(self, tensor: Tensor) -> Any:
        return dist.broadcast(tensor, 0, async_op=True)


def send(parts: dict[str, Any], peer: Peer) -> int:
    """Send every part's state_dict; returns the bytes of the tensors. ValueError for a structure over the bound."""
    total = 0
    for name, part in parts.items():
        structure, tensors = pack(part.state_dict())
        if len(structure) > MAX_STRUCTURE_BYTES:
            raise ValueError(
                f"elastic.State: the state of {name} without its tensors is {len(structure)} bytes; at most "
                f"{MAX_STRUCTURE_BYTES} are sent; keep large values in tensors"
            )
        packed = torch.frombuffer(bytearray(structure), dtype=torch.uint8)
        _exchange([_as_bytes(torch.tensor([len(structure)], device="cpu")), packed], peer)
        total += _exchange(map(_as_bytes, tensors), peer)
    return total


def receive(parts: dict[str, Any], peer: Peer) -> int:
    """Load every part from the state that the other side sends; returns the bytes of the tensors.

    ValueError where that is not the state of this part.
    """
    total = 0
    for name, part in parts.items():
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        _exchange([_as_bytes(length)], peer)
        if not 0 < int(length) <= MAX_STRUCTURE_BYTES:
            raise ValueError(f"elastic.State: {name} arrives with a structure of {int(length)} bytes")
        structure = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        _exchange([structure], peer)
        unpacking = Unpacking(structure.numpy().tobytes())
        total += _exchange(map(_as_bytes, unpacking.tensors), peer)
        try:
            part.load_state_dict(unpacking.state())
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"elastic.State: the state of {name} that another rank sent does not fit the one here: {error}"
            ) from error
    return total


def pack(state: Any) -> tuple[bytes, list[Tensor]]:
    """Divide a state_dict into its structure and its tensors. The tensors are borrowed."""
    tensors: list[Tensor] = []
    numbers: dict[Any, int] = {}
    body = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
                return None
            # A state_dict has new tensors over the same memory for each name of a shared weight.
            key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
            number = numbers.get(key) if value.numel() else None
            if number is None:
                number = len(tensors)
                numbers[key] = number
                tensors.append(outgoing(value.detach()))
            return number

    Pickler(body, pickle.HIGHEST_PROTOCOL).dump(state)
    metas = [(each.dtype, tuple(each.shape), each.device.type) for each in tensors]
    return pickle.dumps((metas, body.getvalue())), tensors


class Unpacking:
    """A structure that has arrived, and memory for its tensors."""

    def __init__(self, structure: bytes) -> None:
        metas, self._body = pickle.loads(structure)
        self.tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, device in metas]

    def state(self) -> Any:
        """The state_dict. The caller owns its tensors."""
        tensors = self.tensors

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, number: Any) -> Tensor:
                tensor: Tensor = tensors[number]
                return tensor

        return Unpickler(io.BytesIO(self._body)).load()


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as u8 [n]."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _exchange(tensors: Iterable[Tensor], peer: Peer) -> int:
    """Send or receive these one after the other, with at most WINDOW_BYTES under way, or one tensor; the bytes."""
    under_way: deque[tuple[int, Any]] = deque()
    waiting, total = 0, 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        while under_way and waiting + tensor.numel() > WINDOW_BYTES:
            size, work = under_way.popleft()
            work.wait()
            waiting -= size
        under_way.append((tensor.numel(), peer.start(tensor)))
        waiting += tensor.numel()
        total += tensor.numel()
    for _, work in under_way:
        work.wait()
    return total
