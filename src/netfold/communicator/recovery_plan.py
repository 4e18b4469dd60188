"""What becomes of each chunk when a switch is lost: arithmetic on what all ranks say that they have.

Chunks are numbered along the line of a group's operations (docs/reference/protocol.md). A rank has the result of every
chunk
below its `base`, and of some above. What any rank has, another that lacks it gets from one that has it: once announced,
a result never changes. What no rank has is reduced again. A chunk that some rank never began has no result anywhere,
since a result takes all contributions; so everything from `end` on, the least that all ranks began, starts anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceiveState:
    """What one rank has: bit i of `held` for chunk base + i. It has begun the chunks below `end`."""

    base: int
    end: int
    held: int

    def from_chunk(self, first: int) -> int:
        """The chunks that it has, bit i for chunk first + i; all below its base are set."""
        below = self.base - first
        return (self.held << below) | ((1 << below) - 1) if below >= 0 else self.held >> -below


@dataclass(frozen=True)
class Plan:
    """Bit i stands for chunk base + i everywhere.

    base: the lowest chunk that some rank lacks. end: the lowest that some rank has not begun. held: what somebody has.
    fetches: by rank that lacks something, what it gets from which other.
    """

    base: int
    end: int
    held: int
    fetches: Mapping[int, Mapping[int, int]]


def make_plan(said: Mapping[int, ReceiveState], window: int) -> Plan:
    """From what each rank said, by rank; `window` is W, the chunks that each keeps.

    Work is shared: those who have a chunk take turns in giving it. Raises ValueError for words that cannot all be true.
    """
    base = min(words.base for words in said.values())
    end = min(words.end for words in said.values())
    has = {rank: words.from_chunk(base) for rank, words in said.items()}
    held = 0
    for chunks in has.values():
        held |= chunks
    if base > end:
        raise ValueError(f"a rank lacks nothing up to chunk {base}, and another has not begun chunk {end}")
    if held >> window or held >> (end - base):
        raise ValueError(
            f"a rank has the result of chunk {base + held.bit_length() - 1}; another lacks chunk {base} of a window of "
            f"{window}, or has begun none from {end} on"
        )
    fetches = {rank: _shares(has, held & ~chunks, rank) for rank, chunks in has.items()}
    return Plan(base, end, held, {rank: shares for rank, shares in fetches.items() if shares})


def _shares(has: Mapping[int, int], lacking: int, rank: int) -> dict[int, int]:
    shares: dict[int, int] = {}
    ranks: Sequence[int] = sorted(has)
    while lacking:
        chunk = lacking.bit_length() - 1
        lacking ^= 1 << chunk
        givers = [other for other in ranks if has[other] >> chunk & 1]
        giver = givers[(chunk + rank) % len(givers)]
        shares[giver] = shares.get(giver, 0) | 1 << chunk
    return shares


def chunks_of(bits: int, base: int) -> list[int]:
    """The chunks that a map names, ascending."""
    return [base + i for i in range(bits.bit_length()) if bits >> i & 1]


def pack(bits: int) -> bytes:
    """As it travels, and as the native floor has it: the lowest chunk in the lowest bit of the first byte."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack(packed: bytes) -> int:
    return int.from_bytes(packed, "little")
