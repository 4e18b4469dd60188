"""Exchange the ranks' device capabilities at a group's first collective on device memory.

The exchange is the first operation of that collective, so the order of calls is kept. All ranks decide from the same
messages, so they decide alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import torch

from netfold.communicator import Group
from netfold.errors import Mismatch, NetfoldError
from netfold.torch.calls import Prepared
from netfold.torch.device.host_staging import seconds_until

# A message is its length, then msgpack. The largest holds a window's handles: about 300 bytes for each of up to 50
# ranks of a host.
_MESSAGE_BYTES = 16384


@dataclass(frozen=True)
class Capabilities:
    """One rank's device and options."""

    kind: str
    device: str
    uuid: str
    intra_host: str
    pinned_bytes: int
    problem: str = ""


def capabilities_of(group: Group, device_api: Any, device: torch.device, problem: str) -> Capabilities:
    options = group.options
    try:
        uuid = device_api.uuid(device)
    except RuntimeError as error:
        uuid, problem = "", problem or f"rank {group.rank}: {device} does not answer: {error}"
    pinned_bytes = int(options.pinned_bytes or 0)
    return Capabilities(device_api.kind, str(device), uuid, str(options.intra_host), pinned_bytes, problem)


def exchange_capabilities(group: Group, mine: Capabilities, deadline: float) -> list[Capabilities]:
    """Gather all ranks' capabilities. Raises, on all ranks, NetfoldError for a rank's problem, ValueError for options
    that differ."""
    try:
        messages = exchange_messages(group, asdict(mine), deadline)
    except Mismatch as error:
        raise Mismatch(
            f"{error}; this rank's tensor is on {mine.device}: those of all ranks must be on devices of one kind, "
            "not some on the CPU",
            rank=error.rank,
        ) from error
    by_rank = [Capabilities(**message) for message in messages]
    for rank, each in enumerate(by_rank):
        if each.problem:
            raise NetfoldError(each.problem, rank=rank)
        if each.kind != by_rank[0].kind:
            raise NetfoldError(
                f"rank 0's tensor is on {by_rank[0].device}, rank {rank}'s on {each.device}: a collective takes "
                "tensors on devices of one kind",
                rank=rank,
            )
        for name in ("intra_host", "pinned_bytes"):
            if getattr(each, name) != getattr(by_rank[0], name):
                raise ValueError(
                    f"rank {rank} has NETFOLD_{name.upper()}={getattr(each, name)}, rank 0 "
                    f"{getattr(by_rank[0], name)}; set it alike on every rank"
                )
    return by_rank


def exchange_messages(group: Group, message: Any, deadline: float) -> list[Any]:
    """Gather all ranks' messages, by rank. A message is at most 16380 bytes of msgpack."""
    packed = msgpack.packb(message)
    if len(packed) > _MESSAGE_BYTES - 4:
        raise ValueError(f"rank {group.rank}: a message of {len(packed)} bytes is longer than {_MESSAGE_BYTES - 4}")
    framed = len(packed).to_bytes(4, "big") + packed
    messages = _exchange(group, framed, _MESSAGE_BYTES, deadline)
    return [msgpack.unpackb(each[4 : 4 + int.from_bytes(each[:4], "big")]) for each in messages]


def exchange_texts(group: Group, text: str, nbytes: int, deadline: float) -> list[str]:
    """Gather all ranks' texts, by rank, each cut to `nbytes` of ASCII."""
    return [each.rstrip(b"\0").decode() for each in _exchange(group, text.encode()[:nbytes], nbytes, deadline)]


def _exchange(group: Group, message: bytes, nbytes: int, deadline: float) -> list[bytes]:
    """Gather all ranks' messages, by rank, each filled up to `nbytes` by zeros."""
    own = torch.frombuffer(bytearray(message.ljust(nbytes, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(group.size)]
    call = Prepared("all_gather", inputs=[own], outputs=gathered)
    group.wait(call.submit(group, seconds_until(deadline), wait_here=True))
    return [each.numpy().tobytes() for each in gathered]
