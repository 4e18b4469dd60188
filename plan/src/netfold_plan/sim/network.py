"""A virtual network: the caller provides the source that draws the fate of each packet.

Corruption. A UDP checksum or an Ethernet FCS catches nearly every flipped bit, so a flip counts as a loss, except for
the bits whose change the receiver must notice without a checksum (`GUARDED_BITS`). Such a packet reaches the machine,
which must drop it. A flip that passes the checksum in a value, a flag, a low bit of the chunk number or a worker index
is out of scope: an unauthenticated protocol cannot distinguish it from an honest packet.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from netfold_plan.sim.clock import Clock

# The address of the switch, or of the root. A worker's address is its index; leaves have the addresses below SWITCH.
SWITCH = -1


def address_of(leaf: int) -> int:
    return SWITCH - 1 - leaf


def leaf_of(address: int) -> int:
    return SWITCH - 1 - address


LATENCY_NS = 10_000


@dataclass(frozen=True, slots=True)
class Packet:
    """One datagram in flight.

    must_drop: it is damaged or forged, so its receiver has to drop it.
    """

    source: int
    to: int
    data: bytes
    must_drop: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """One arrival of a packet, and what happened to its bytes."""

    extra_delay_ns: int = 0  # beyond the network's latency
    cut_to_bytes: int | None = None
    flipped_bit: int | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """The fate of one packet.

    copies: one for each arrival: none is a loss, two are a duplicate.
    refused: the worker's socket is full, and the worker learns so. A switch that cannot send loses the result.
    """

    copies: tuple[Copy, ...] = (Copy(),)
    refused: bool = False


DELIVERED = Delivery()
LOST = Delivery(copies=())
REFUSED = Delivery(copies=(), refused=True)

DeliverySource = Callable[[Packet], Delivery]


def _guarded_bits() -> tuple[int, ...]:
    # Masks by byte of the header (core/native/protocol/include/netfold/protocol/packet.hpp). The flag mismatch is legal
    # in a result. A flip in the upper half of the chunk number leads far beyond any window.
    masks = {0: 0xFF, 1: 0xFF, 2: 0xFF, 3: 0xFB}
    masks |= dict.fromkeys(range(4, 20), 0xFF)
    masks |= {44: 0xF0, 45: 0xF8}
    return tuple(8 * byte + bit for byte, mask in masks.items() for bit in range(8) if mask >> bit & 1)


GUARDED_BITS = _guarded_bits()
_GUARDED = frozenset(GUARDED_BITS)


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


class Network:
    """Carry packets with one latency, plus the delay of each delivery; count deliveries by fate."""

    def __init__(self, clock: Clock[Any], deliveries: DeliverySource, latency_ns: int = LATENCY_NS) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._deliveries = deliveries
        self._latency_ns = latency_ns

    def send(self, packet: Packet) -> bool:
        """Draw the fate of `packet` and carry it out; return False where the socket refused it."""
        fate = self._deliveries(packet)
        self.counts["sent"] += 1
        if fate.refused:
            self.counts["refused"] += 1
            return False
        if not fate.copies:
            self.counts["lost"] += 1
        if len(fate.copies) > 1:
            self.counts["duplicated"] += 1
        for copy in fate.copies:
            self._arrive(packet, copy)
        return True

    def _arrive(self, packet: Packet, copy: Copy) -> None:
        data, must_drop = packet.data, packet.must_drop
        if copy.extra_delay_ns > 0:
            self.counts["delayed"] += 1
        if copy.flipped_bit is not None:
            self.counts["corrupted"] += 1
            bit = copy.flipped_bit % (8 * len(data))
            if bit not in _GUARDED:
                return  # a checksum catches it
            data, must_drop = flip(data, bit), True
        if copy.cut_to_bytes is not None and copy.cut_to_bytes < len(data):
            self.counts["truncated"] += 1
            data, must_drop = data[: copy.cut_to_bytes], True
        arriving = Packet(packet.source, packet.to, data, must_drop)
        self._clock.at(self._clock.now_ns + self._latency_ns + copy.extra_delay_ns, arriving)


class ListedDeliveries:
    """The n-th packet has the n-th fate; packets after the list are delivered, so every run can end."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = iter(tuple(deliveries))

    def __call__(self, packet: Packet) -> Delivery:
        return next(self._deliveries, DELIVERED)


@dataclass(frozen=True)
class Ratios:
    """The probability of each fate of a packet, drawn independently.

    extra_delay_ns: the longest delay.
    """

    loss: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    truncate: float = 0.0
    corrupt: float = 0.0
    refuse: float = 0.0
    extra_delay_ns: int = 50 * LATENCY_NS

    def __post_init__(self) -> None:
        for name in ("loss", "duplicate", "delay", "truncate", "corrupt", "refuse"):
            # At 1 no packet arrives, and the run could end only at its bound.
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a ratio from 0 to below 1, not {getattr(self, name)}")
        if self.extra_delay_ns < 1:
            raise ValueError(f"extra_delay_ns is at least 1, not {self.extra_delay_ns}")


class SeededDeliveries:
    """Random fates, the same for the same seed."""

    def __init__(self, chance: random.Random, ratios: Ratios) -> None:
        self._chance = chance
        self._ratios = ratios

    def __call__(self, packet: Packet) -> Delivery:
        chance, ratios = self._chance.random, self._ratios
        if chance() < ratios.refuse:
            return REFUSED
        if chance() < ratios.loss:
            return LOST
        copies = 1
        # At most 4, so that the number of copies is bounded.
        while copies < 4 and chance() < ratios.duplicate:
            copies += 1
        return Delivery(tuple(self._copy(packet) for _ in range(copies)))

    def _copy(self, packet: Packet) -> Copy:
        chance, ratios = self._chance, self._ratios
        extra_delay_ns = 0
        if chance.random() < ratios.delay:
            # Squared: most delays are short, and a few last many windows.
            extra_delay_ns = 1 + int(chance.random() ** 2 * ratios.extra_delay_ns)
        cut = chance.randrange(len(packet.data)) if chance.random() < ratios.truncate else None
        bit = chance.choice(GUARDED_BITS) if chance.random() < ratios.corrupt else None
        return Copy(extra_delay_ns, cut, bit)
