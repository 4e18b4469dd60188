"""What a rack's wire does to a plain TCP connection, and the least time that a collective can take over it.

That is the alpha-beta limit (Hockney 1994; Thakur, Rabenseifner, Gropp 2005, table 1): the fewest steps that any
algorithm needs, each with half a round trip, and the fewest bytes a rank.
"""

import math
from dataclasses import dataclass

from netfold.bench.collectives import COLLECTIVES
from netfold.rack import Rack
from netfold.rack.measure import measure, payload_share


@dataclass(frozen=True)
class LinkMeasurement:
    """round_trip_s: of 4 bytes, warm; rate_bits: the link's, headers included; mss: payload bytes of a full packet;
    stream_bits: payload a second that one TCP stream reached."""

    round_trip_s: float
    rate_bits: int
    mss: int
    stream_bits: float

    @property
    def payload_bits(self) -> float:
        """Payload a second at line rate: what is left when every full packet has its headers."""
        return self.rate_bits * payload_share(self.mss)


def lower_bound_s(wire: LinkMeasurement, collective: str, size_bytes: int, ranks: int) -> float:
    """The alpha-beta limit. A reduction over all ranks and its way back: two times log2 P steps; else one time."""
    there_and_back = 2 if collective == "all_reduce" else 1
    steps = there_and_back * math.ceil(math.log2(ranks))
    moved = size_bytes * COLLECTIVES[collective].bus_factor(ranks)
    return steps * wire.round_trip_s / 2 + moved * 8 / wire.payload_bits


def probe_rack(rate: str) -> LinkMeasurement:
    """Measure a rack of two hosts. Raises RackError."""
    with Rack(2, rate) as rack:
        found = measure(rack, 0, 1, rack.link.rate_bits)
    return LinkMeasurement(found.round_trip_s, rack.link.rate_bits, found.mss, found.stream_bits)
