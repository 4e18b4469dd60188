"""A cluster as the planner sees it: one kind of device, and what joins devices, tier by tier from the inside out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from netfold.plan.cluster.aggregator import Aggregator


@dataclass(frozen=True)
class Device:
    """flops: peak multiply-adds by dtype, as two operations each, dense; of f32, tf32, f16, bf16 those that it has.

    memory_bytes, memory_bytes_per_s: of its own memory. reserved_bytes: of it, what tensors cannot have.
    multiprocessors: parts that work on tiles of a matmul side by side. sustained: of peak, the clock that its power
    leaves to matmuls that go on. copy_bytes_per_s: at which a collective passes its buffer through it; 0 where it is
    not known, and then it is that of V100 and A100. power_w: what it draws at most; 0 where it is not known.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    multiprocessors: int = 1
    sustained: float = 1.0
    copy_bytes_per_s: float = 0.0
    power_w: float = 0.0
    reserved_bytes: float = 0.0

    @property
    def usable_bytes(self) -> float:
        """Memory that tensors can have."""
        return self.memory_bytes - self.reserved_bytes

    def kept_up(self, precision: str) -> float:
        """FLOP/s at the clock that stays."""
        return self.sustained * self.peak(precision)

    def peak(self, precision: str) -> float:
        """FLOP/s. Raises ValueError for a precision that the device has no figure for."""
        if precision not in self.flops:
            raise ValueError(f"device {self.name}: no peak for {precision}; it has {', '.join(sorted(self.flops))}")
        return self.flops[precision]


@dataclass(frozen=True)
class Tier:
    """What joins `devices` devices, all of those of the tiers inside among them.

    latency_s: of one message between two devices.
    bytes_per_s: a device and direction, with all devices at it at once.
    oversubscription: by how much the links above are too few for that; 1 is none.
    in_network: its own switches reduce on the way, at the rate of their ports (SHARP, a Tofino).
    nvls: by NVLink's switches, which reduce what ranks load and spread what they store.
    switch_ports: of one switch, half of them up where there are several levels; 0: one switch joins all.
    switch_latency_s: that each further level of switches adds to a way up.
    burst_bytes: what a link lets through at once after a pause, as those do whose rate a token bucket limits; only a
    timed step, played as events, knows of pauses.
    under_load: of bytes_per_s, what was measured to be kept up while all devices send across at once (flows that meet
    in switches and at receivers); 1 where it was not measured.
    aggregators: hosts beside its devices that reduce (`netfold switch`).
    """

    name: str
    devices: int
    latency_s: float
    bytes_per_s: float
    oversubscription: float = 1.0
    in_network: bool = False
    nvls: bool = False
    switch_ports: int = 0
    switch_latency_s: float = 0.0
    burst_bytes: float = 0.0
    under_load: float = 1.0
    aggregators: tuple[Aggregator, ...] = ()

    def switch_levels(self, joined: int) -> int:
        """Of a fat tree that joins so many: L levels, the uppermost with all its ports down, join 2 (ports/2)^L."""
        if joined <= self.switch_ports or self.switch_ports == 0:
            return 1
        return math.ceil(math.log(joined / 2, self.switch_ports / 2) - 1e-9)

    def way_up_s(self, joined: int) -> float:
        """From a device to the switch above all of so many, without its bytes; as long comes back."""
        return self.latency_s + (self.switch_levels(joined) - 1) * self.switch_latency_s

    @property
    def loaded_bytes_per_s(self) -> float:
        """A device and direction, of its own adapter, while others send too."""
        return self.bytes_per_s * self.under_load

    @property
    def busy_bytes_per_s(self) -> float:
        """A device and direction where all send across at once."""
        return self.loaded_bytes_per_s / self.oversubscription


@dataclass(frozen=True)
class Processors:
    """Cores that all hosts of a cluster share, as those of an emulated rack do.

    Of a core, what a collective takes for each of its ranks: operation_s, whatever it is; message_s, for each of its
    steps; byte_s, for each byte that the rank sends. switch_byte_s: of a switch that is a program, one thread, for each
    byte of each rank.
    """

    cores: int
    operation_s: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0
    switch_byte_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """tiers: from the inside out; the last one joins everything. sources: where the figures come from.

    price_an_hour: of one device, in any one currency; 0 where it is not known. shared: cores that all hosts have
    together; None where each has its own, enough of them. Only a timed step, played as events, knows of
    cores.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    sources: tuple[str, ...] = ()
    price_an_hour: float = 0.0
    shared: Processors | None = None

    @property
    def devices(self) -> int:
        """As many as there are."""
        return self.tiers[-1].devices

    @property
    def aggregates(self) -> bool:
        """Whether anything in its network adds up what ranks send."""
        return any(tier.in_network or tier.aggregators for tier in self.tiers)

    @property
    def node(self) -> int:
        """Devices that the innermost tier joins."""
        return self.tiers[0].devices
