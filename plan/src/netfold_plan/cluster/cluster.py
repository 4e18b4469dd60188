"""A cluster as the planner sees it: one kind of device, and the tiers of links that join devices, from the inside
out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from netfold_plan.cluster.aggregator import Aggregator


@dataclass(frozen=True)
class Device:
    """flops: peak FLOP/s by precision (f32, tf32, f16, bf16), dense, a multiply-add as two operations.

    memory_bytes, memory_bytes_per_s: of its own memory.
    multiprocessors: parts that work on tiles of a matmul side by side.
    sustained: the clock that its power allows for continuous matmuls, as a part of the peak clock.
    copy_bytes_per_s: at which a collective passes its buffer through the device; 0: that of V100 and A100.
    power_w: at most; 0 where unknown.
    reserved_bytes: memory that tensors cannot have.
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
        """FLOP/s at the sustained clock."""
        return self.sustained * self.peak(precision)

    def peak(self, precision: str) -> float:
        """FLOP/s. Raises ValueError for a precision that the device has no figure for."""
        if precision not in self.flops:
            raise ValueError(f"device {self.name}: no peak for {precision}; it has {', '.join(sorted(self.flops))}")
        return self.flops[precision]


@dataclass(frozen=True)
class Tier:
    """Links that join `devices` devices, including all devices of the tiers inside.

    latency_s: of one message between two devices.
    bytes_per_s: per device and direction, with all devices sending at once.
    oversubscription: by how much the links above are too few for that; 1: not at all.
    in_network: its switches reduce on the way, at the rate of their ports (SHARP, a Tofino).
    nvls: NVLink's switches reduce what ranks load, and spread what ranks store.
    switch_ports: of one switch, half of them upwards where there are several levels; 0: one switch joins all devices.
    switch_latency_s: of each further level of switches on a path upwards.
    burst_bytes: what a link lets through at once after a pause, as links with a token bucket do; only a timed step,
    simulated as events, has pauses.
    under_load: the measured part of bytes_per_s while all devices send across at once (flows that meet in switches and
    at receivers); 1 where it was not measured.
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
        """Levels of a fat tree over so many devices.

        L levels, with all ports of the top level downwards, join 2 (ports/2)^L devices.
        """
        if joined <= self.switch_ports or self.switch_ports == 0:
            return 1
        return math.ceil(math.log(joined / 2, self.switch_ports / 2) - 1e-9)

    def up_latency_s(self, joined: int) -> float:
        """Latency from a device to the switch above all of so many devices; the way down takes as long."""
        return self.latency_s + (self.switch_levels(joined) - 1) * self.switch_latency_s

    @property
    def loaded_bytes_per_s(self) -> float:
        """Of a device's own adapter, per direction, while other devices send too."""
        return self.bytes_per_s * self.under_load

    @property
    def busy_bytes_per_s(self) -> float:
        """Per device and direction, while all devices send across at once."""
        return self.loaded_bytes_per_s / self.oversubscription


@dataclass(frozen=True)
class Processors:
    """Cores that all hosts of a cluster share, as in an emulated rack. Times are of one core.

    A collective takes for each of its ranks: operation_s once, message_s for each step, byte_s for each byte that the
    rank sends. switch_byte_s: of a software switch, one thread, for each byte of each rank.
    """

    cores: int
    operation_s: float = 0.0
    message_s: float = 0.0
    byte_s: float = 0.0
    switch_byte_s: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """tiers: from the inside out; the last one joins everything. sources: where the figures come from.

    price_an_hour: of one device, in any one currency; 0 where unknown.
    shared: cores that all hosts share; None: each host has enough cores of its own. Only a timed step, simulated as
    events, depends on cores.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...]
    sources: tuple[str, ...] = ()
    price_an_hour: float = 0.0
    shared: Processors | None = None

    @property
    def devices(self) -> int:
        return self.tiers[-1].devices

    @property
    def aggregates(self) -> bool:
        """Whether its network has switches or hosts that aggregate."""
        return any(tier.in_network or tier.aggregators for tier in self.tiers)

    @property
    def node(self) -> int:
        """Devices that the innermost tier joins."""
        return self.tiers[0].devices

    @property
    def host_devices(self) -> int:
        """Devices of a host: those of the innermost of several tiers, or one."""
        return self.node if len(self.tiers) > 1 else 1

    def with_tier(self, tier: Tier, other: Tier) -> Cluster:
        """The cluster with `other` in place of its tier `tier`."""
        return replace(self, tiers=tuple(other if each is tier else each for each in self.tiers))
