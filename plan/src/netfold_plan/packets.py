"""One all_reduce through switches, packet by packet: the production protocol on links with a rate, a delay and losses.

Workers and switches are those of netfold_plan.sim, which drives the same native machines as a job does; only the links
are modelled. A link carries one packet after the other in each direction, and loses some. Hosts and switches take no
time.

Larger cases are composed from the simulated one. More bytes: the pace of the middle of the run continues. More workers:
each link stands for several links and has the losses of all of them, so a chunk is as likely to be hit. A repair is
then lost more often than on separate links, so the time is rather too long. More levels of switches: the delay of one
more hop in each direction.

A job's first all_reduce opens its congestion windows (core/native/protocol/include/netfold/protocol/worker.hpp). The
result is of a later one: where the windows matter, another all_reduce goes before without losses, and is not counted.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np

from netfold.tuning.cost import predict
from netfold.tuning.topology import DEFAULT_LINKS, Link, Topology
from netfold_plan.sim.harness import Operation
from netfold_plan.sim.network import LOST, Copy, Delivery, Packet
from netfold_plan.sim.simulation import Record, Simulation

# The most workers or switches below one switch (core/native/protocol/include/netfold/protocol/packet.hpp).
MOST_BELOW = 256
# At most so many workers are simulated, and by default so many packets, which takes some seconds.
MOST_WORKERS, MOST_PACKETS = 256, 200_000
# Chunks in flight at a worker's start: kLeastWindow in worker.hpp. The window doubles in each round trip.
_FIRST_WINDOW = 32
_HEADER_BYTES = 48
# Ethernet's header, checksum, preamble and gap; IPv4's and UDP's headers.
_BELOW_BYTES = 14 + 4 + 8 + 12 + 20 + 8


@dataclass(frozen=True)
class Fabric:
    """workers: in all. racks: one switch in each, below one root; 1: one switch for all workers.

    bytes_per_s: of every link and direction, including all headers.
    uplink_bytes_per_s: of a rack's link to the root; 0: as the other links.
    latency_s: of one link. loss: ratio of packets, on each link and direction.
    payload_bytes, window_bytes: of the job. frame_bytes: around a packet of the protocol.
    Raises ValueError for a fabric that no switch supports.
    """

    workers: int
    bytes_per_s: float
    latency_s: float
    racks: int = 1
    uplink_bytes_per_s: float = 0.0
    loss: float = 0.0
    payload_bytes: int = 1408
    window_bytes: int = 1 << 20
    frame_bytes: int = _BELOW_BYTES

    def __post_init__(self) -> None:
        if self.workers < 2 or self.racks < 1 or self.workers % self.racks:
            raise ValueError(f"{self.workers} workers cannot be spread evenly over {self.racks} racks; use at least 2")
        if self.workers // self.racks > MOST_BELOW:
            raise ValueError(
                f"{self.workers // self.racks} workers are too many for one switch, which takes {MOST_BELOW}; "
                f"spread them over {-(-self.workers // MOST_BELOW)} racks or more"
            )
        if not 0 <= self.loss < 0.1:
            raise ValueError(f"a loss of {self.loss:g} is too high; give a ratio from 0 to below 0.1")
        if self.bytes_per_s <= 0 or self.latency_s < 0:
            raise ValueError("a link has a rate above 0 and a latency of 0 or more")

    @property
    def levels(self) -> int:
        """Levels of switches: as many links are between a worker and the root."""
        return 1 if self.racks == 1 else 1 + math.ceil(math.log(self.racks, MOST_BELOW) - 1e-12)

    @property
    def wire_bytes(self) -> int:
        """Of a whole packet on a link."""
        return self.payload_bytes + _HEADER_BYTES + self.frame_bytes

    @property
    def tensor_bytes_per_s(self) -> float:
        """Of values, through the narrowest link."""
        return min(self.bytes_per_s, self.uplink_bytes_per_s or self.bytes_per_s) * self.payload_bytes / self.wire_bytes

    @property
    def chunk_window(self) -> int:
        return max(8, self.window_bytes // self.payload_bytes)


@dataclass(frozen=True)
class PacketTime:
    """time_s: until the last worker has the whole result. closed_s: by netfold.tuning.cost, without losses.

    sent_again: contributions sent again, over those that were needed. timeouts: of all simulated workers.
    said: what was simulated, and what was composed from that, as text.
    """

    time_s: float
    closed_s: float
    sent_again: float
    timeouts: int
    said: str


def all_reduce(fabric: Fabric, size_bytes: float, *, seed: int = 0, most_packets: int = MOST_PACKETS) -> PacketTime:
    """Simulate one all_reduce of f32. The same seed loses the same packets.

    Cost: some 10 us per packet; about `most_packets` are simulated, and more with many losses. Losses are rare and
    their
    repairs differ: use several seeds where losses matter.
    """
    small = _smaller(fabric)
    chunks = max(1, math.ceil(size_bytes / fabric.payload_bytes))
    simulated = min(chunks, max(4, most_packets // (2 * small.workers)))
    opening = 2 * min(simulated, fabric.chunk_window) if min(simulated, fabric.chunk_window) > _FIRST_WINDOW else 0
    sizes = [count * fabric.payload_bytes // 4 for count in (opening, simulated) if count]
    # By then every window is open, even with one chunk per round trip.
    round_trip_s = 2 * fabric.levels * (fabric.latency_s + fabric.wire_bytes / fabric.tensor_bytes_per_s)
    begins_ns = round(1e9 * opening * round_trip_s)
    links = _Links(fabric, small, seed, begins_ns)
    arrivals: list[int] = []

    def watch(record: Record) -> None:
        if record.verdict is not None and record.verdict.outcome == "received" and record.when_ns >= begins_ns:
            arrivals.append(record.when_ns - begins_ns)

    run = Simulation(
        workers=small.workers,
        window=fabric.chunk_window,
        payload_bytes=fabric.payload_bytes,
        operations=[Operation(number, elements) for number, elements in enumerate(sizes)],
        calls_ns=[[0, begins_ns][-len(sizes) :]] * small.workers,
        deliveries=links,
        contributions=lambda operation, worker: np.full(operation.elements, worker, np.float32),
        latency_ns=round(fabric.latency_s * 1e9),
        compare_machines=False,
        leaves=[small.workers // small.racks] * small.racks if small.racks > 1 else (),
        watch=watch,
    )
    links.run = run
    summary = run.run()
    pace_ns = _pace_ns(arrivals, small.workers)
    hops = 2 * (fabric.levels - small.levels)
    further_s = hops * (fabric.latency_s + fabric.wire_bytes / fabric.bytes_per_s)
    network = Link(fabric.levels * fabric.latency_s, fabric.tensor_bytes_per_s)
    return PacketTime(
        time_s=(arrivals[-1] + (chunks - simulated) * pace_ns) / 1e9 + further_s,
        closed_s=predict(
            "all_reduce",
            "in_network",
            size_bytes,
            Topology.apart(2),
            replace(DEFAULT_LINKS, network=network, switches=(network.bytes_per_s,)),
            switch=1,
        ),
        sent_again=summary.retransmissions / (fabric.workers * simulated),
        timeouts=summary.timeouts,
        said=_describe(fabric, small, chunks, simulated),
    )


class _Links:
    """The fate of a packet: it waits for the packets before it on its link, and may be lost there."""

    run: Simulation

    def __init__(self, fabric: Fabric, small: Fabric, seed: int, loses_from_ns: int) -> None:
        self._chance = random.Random(seed)
        self._loses_from_ns = loses_from_ns
        self._free_ns: dict[tuple[int, int], float] = {}
        up = fabric.uplink_bytes_per_s or fabric.bytes_per_s
        # By whether a worker is at one end of the link: nanoseconds per packet, and the loss of all links it stands
        # for.
        self._packet_ns = {
            end: 1e9 * fabric.wire_bytes / rate for end, rate in ((True, fabric.bytes_per_s), (False, up))
        }
        self._loss = {
            end: 1 - (1 - fabric.loss) ** links
            for end, links in ((True, fabric.workers / small.workers), (False, fabric.racks / small.racks))
        }

    def __call__(self, packet: Packet) -> Delivery:
        now_ns = self.run.clock.now_ns
        link, end = (packet.source, packet.to), packet.source >= 0 or packet.to >= 0
        left_ns = max(self._free_ns.get(link, 0.0), now_ns) + self._packet_ns[end]
        self._free_ns[link] = left_ns
        # A lost packet has used the link, too.
        if now_ns >= self._loses_from_ns and self._chance.random() < self._loss[end]:
            return LOST
        return Delivery((Copy(extra_delay_ns=round(left_ns - now_ns)),))


def _smaller(fabric: Fabric) -> Fabric:
    """The part of a fabric that is simulated: all of it, or fewer racks, with fewer workers if necessary."""
    if fabric.workers <= MOST_WORKERS and fabric.levels <= 2:
        return fabric
    below = fabric.workers // fabric.racks
    racks = min(fabric.racks, max(2, MOST_WORKERS // below))
    below = min(below, MOST_WORKERS // racks)
    return replace(fabric, workers=racks * below, racks=racks)


def _pace_ns(arrivals: list[int], workers: int) -> float:
    """Nanoseconds per chunk between a quarter and three quarters of the run, without its start and end."""
    by_chunk = arrivals[workers - 1 :: workers]
    first, last = len(by_chunk) // 4, 3 * len(by_chunk) // 4
    return (by_chunk[last] - by_chunk[first]) / max(1, last - first)


def _describe(fabric: Fabric, small: Fabric, chunks: int, simulated: int) -> str:
    text = f"{small.workers} workers in {small.racks} rack{'s' if small.racks > 1 else ''}, {simulated} packets each"
    if small.workers < fabric.workers:
        text += f"; each stands for {fabric.workers / small.workers:.3g} of {fabric.workers}"
        if fabric.loss:
            text += ", with the losses of all of them, so the time is rather too long"
    if simulated < chunks:
        text += f"; the pace of the middle continues for the other {chunks - simulated}"
    if small.levels < fabric.levels:
        text += f"; {fabric.levels - small.levels} more level of switches, by its delay"
    return text
