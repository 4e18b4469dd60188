"""Plan what becomes of each chunk when a switch is lost: arithmetic on the states of all ranks.

Chunks are numbered along the sequence of a group's operations (docs/reference/protocol.md). A rank has the result of
every chunk below its `base`, and of some above. A rank that lacks a result gets it from a rank that has it: a result
never changes once announced. What no rank has is reduced again. A chunk that some rank never began has no result
anywhere, since a result takes all contributions. So all chunks from `end` on start anew, where `end` is the lowest that
some rank has not begun.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReceiveState:
    """The chunks of one rank: bit i of `held` for chunk base + i. The rank has begun the chunks below `end`."""

    base: int
    end: int
    held: int

    def from_chunk(self, first: int) -> int:
        """The chunks that the rank has, bit i for chunk first + i; all below its base are set."""
        below = self.base - first
        return (self.held << below) | ((1 << below) - 1) if below >= 0 else self.held >> -below


@dataclass(frozen=True)
class ResendPlan:
    """Bit i stands for chunk base + i in all maps."""

    base: int
    """The lowest chunk that some rank lacks."""
    end: int
    """The lowest chunk that some rank has not begun."""
    held: int
    """The chunks that some rank has."""
    fetches: Mapping[int, Mapping[int, int]]
    """By rank that lacks something: by source, the chunks to fetch from it."""


def make_plan(states: Mapping[int, ReceiveState], window: int) -> ResendPlan:
    """Plan from the state of each rank. Ranks that have a chunk share the work of passing it on.

    window: W, the chunks that each rank keeps.
    Raises ValueError for states that contradict each other.
    """
    base = min(state.base for state in states.values())
    end = min(state.end for state in states.values())
    has = {rank: state.from_chunk(base) for rank, state in states.items()}
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
    missing = held & ~functools.reduce(int.__and__, has.values())
    sources = {chunk: [rank for rank in sorted(has) if has[rank] >> chunk & 1] for chunk in chunks_of(missing, 0)}
    fetches = {rank: _fetches(sources, held & ~chunks, rank) for rank, chunks in has.items()}
    return ResendPlan(base, end, held, {rank: sources for rank, sources in fetches.items() if sources})


def _fetches(sources: Mapping[int, Sequence[int]], lacking: int, rank: int) -> dict[int, int]:
    """By source, the chunks of `lacking` that `rank` fetches from it. sources: by chunk, the ranks that have it."""
    fetches: dict[int, int] = {}
    while lacking:
        chunk = lacking.bit_length() - 1
        lacking ^= 1 << chunk
        source = sources[chunk][(chunk + rank) % len(sources[chunk])]
        fetches[source] = fetches.get(source, 0) | 1 << chunk
    return fetches


def chunks_of(bits: int, base: int) -> list[int]:
    """The chunks of a map, ascending."""
    return [base + i for i in range(bits.bit_length()) if bits >> i & 1]


def pack(bits: int) -> bytes:
    """As in messages and in native code: the lowest chunk in the lowest bit of the first byte."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack(packed: bytes) -> int:
    return int.from_bytes(packed, "little")
