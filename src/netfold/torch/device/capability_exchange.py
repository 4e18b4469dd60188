"""What the ranks of a group tell each other when the first collective on device memory comes: the first thing that it
sends, so that the order of calls is kept. Whatever all must do alike is decided here, from the same letters by all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgpack
import torch

from netfold.communicator import Group
from netfold.errors import Mismatch, NetfoldError
from netfold.torch.device.host_staging import seconds_until

# A letter: its length, then msgpack. The largest has the handles of a window, some 300 bytes for each of up to 50 ranks
# of a host.
_LETTER_BYTES = 16384


@dataclass(frozen=True)
class Capabilities:
    """One rank's."""

    kind: str
    device: str
    uuid: str
    intra_host: str
    pinned_bytes: int
    problem: str = ""


def capabilities_of(group: Group, layer: Any, device: torch.device, problem: str) -> Capabilities:
    options = group.options
    try:
        uuid = layer.uuid(device)
    except RuntimeError as error:
        uuid, problem = "", problem or f"rank {group.rank}: {device} does not answer: {error}"
    return Capabilities(
        layer.kind,
        str(device),
        uuid,
        str(options.intra_host),
        int(options.pinned_bytes or 0),
        problem,
    )


def exchange_capabilities(group: Group, mine: Capabilities, deadline: float) -> list[Capabilities]:
    """Every rank's facts. NetfoldError, on all ranks, where one has a problem; ValueError where options differ."""
    try:
        letters = exchange_messages(group, asdict(mine), deadline)
    except Mismatch as error:
        raise Mismatch(
            f"{error}; this rank's tensor is on {mine.device}: those of all ranks must be on devices of one kind, "
            "not some on the CPU",
            rank=error.rank,
        ) from error
    found = [Capabilities(**letter) for letter in letters]
    for rank, theirs in enumerate(found):
        if theirs.problem:
            raise NetfoldError(theirs.problem, rank=rank)
        if theirs.kind != found[0].kind:
            raise NetfoldError(
                f"rank 0's tensor is on {found[0].device}, rank {rank}'s on {theirs.device}: a collective takes "
                "tensors on devices of one kind",
                rank=rank,
            )
        for name in ("intra_host", "pinned_bytes"):
            if getattr(theirs, name) != getattr(found[0], name):
                raise ValueError(
                    f"rank {rank} has NETFOLD_{name.upper()}={getattr(theirs, name)}, rank 0 "
                    f"{getattr(found[0], name)}; set it alike on every rank"
                )
    return found


def exchange_messages(group: Group, letter: Any, deadline: float) -> list[Any]:
    """Every rank's letter, by rank; each of up to some 16000 bytes of msgpack."""
    packed = msgpack.packb(letter)
    if len(packed) > _LETTER_BYTES - 4:
        raise ValueError(f"rank {group.rank}: {len(packed)} bytes are no letter of up to {_LETTER_BYTES - 4}")
    mine = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)
    sealed = len(packed).to_bytes(4, "big") + packed
    mine[: len(sealed)] = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(group.size)]
    operation = group.submit(
        "all_gather",
        inputs=[(mine.data_ptr(), mine.nbytes)],
        outputs=[(each.data_ptr(), each.nbytes) for each in theirs],
        timeout_s=seconds_until(deadline),
        wait_here=True,
    )
    group.wait(operation)
    texts = [bytes(each.tolist()) for each in theirs]
    return [msgpack.unpackb(text[4 : 4 + int.from_bytes(text[:4], "big")]) for text in texts]
