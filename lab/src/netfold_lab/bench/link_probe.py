"""Measures a rack's links by plain TCP, and computes the least time that a collective can take over them.

That is the alpha-beta limit (Hockney 1994; Thakur, Rabenseifner, Gropp 2005, table 1): the fewest steps that any
algorithm needs, each with half a round trip, and the fewest bytes per rank.
"""

import math
from dataclasses import dataclass

from netfold_lab.bench.collectives import COLLECTIVES
from netfold_lab.rack import Rack
from netfold_lab.rack.measure import measure, payload_share


@dataclass(frozen=True)
class LinkMeasurement:
    round_trip_s: float  # of 4 bytes on a warm connection
    rate_bits: int  # the link's, headers included
    mss: int  # payload bytes of a full packet
    stream_bits: float  # payload per second of one TCP stream

    @property
    def payload_bits(self) -> float:
        """Payload per second at line rate, when every packet is full and has its headers."""
        return self.rate_bits * payload_share(self.mss)


def lower_bound_s(wire: LinkMeasurement, collective: str, size_bytes: int, ranks: int) -> float:
    """Return the alpha-beta limit. An all_reduce is a reduction and its way back: twice log2 P steps, else once."""
    steps = (2 if collective == "all_reduce" else 1) * math.ceil(math.log2(ranks))
    moved = size_bytes * COLLECTIVES[collective].bus_factor(ranks)
    return steps * wire.round_trip_s / 2 + moved * 8 / wire.payload_bits


def probe_rack(rate: str) -> LinkMeasurement:
    """Measure a rack of two hosts. Raises RackError."""
    with Rack(2, rate) as rack:
        found = measure(rack, 0, 1, rack.link.rate_bits)
    return LinkMeasurement(found.round_trip_s, rack.link.rate_bits, found.mss, found.stream_bits)
