"""Whether a rack is what was asked for: each kind of way through it, measured and judged."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from netfold.rack.link import Link
from netfold.rack.measure import Measurement, measure, payload_share
from netfold.rack.rack import Rack
from netfold.rack.topology import Layout

# A shaper may be below its rate by what a busy machine costs; TCP pays for losses besides.
LEAST_RATE, LEAST_RATE_LOSSY = 0.85, 0.5
# What four crossings of a busy machine's kernel, and waking two processes, may take.
MOST_EXTRA_S = 2e-3
# Binomial: four standard deviations are passed once in 16,000 measurements.
DEVIATIONS = 4


class Finding(NamedTuple):
    """One quantity of one way: what was asked for and what was measured, as words, and whether they agree."""

    route: str
    what: str
    asked: str
    measured: str
    passed: bool


def check(rack: Rack) -> Iterator[Finding]:
    """Measure a rack that stands, some 6 s a way. Raises RackError."""
    for way, host, other in routes(rack.layout):
        links = rack.layout.path(host, other)
        found = measure(rack, host, other, min(link.rate_bits for link in links))
        yield from evaluate(way, links, rack.layout.mtu, found)


def routes(layout: Layout) -> list[tuple[str, int, int | None]]:
    """A way of each kind: to the aggregator, to a neighbour, to another rack."""
    found: list[tuple[str, int, int | None]] = [("h0 to the aggregator", 0, None)]
    if layout.hosts > 1 and layout.rack_of(1) == 0:
        found.append(("h0 to h1", 0, 1))
    if layout.racks > 1:
        last = layout.hosts - 1
        found.append((f"h0 to h{last}, in another rack", 0, last))
    return found


def evaluate(way: str, links: list[Link], mtu: int, found: Measurement) -> list[Finding]:
    """Pure: what `links`, in a row, should do to packets of `mtu`, against what was found."""
    rate = min(link.rate_bits for link in links)
    delay_s = sum(link.delay_ns for link in links) / 1e9
    loss = 1 - math.prod(1 - link.loss_ratio for link in links)
    payload = rate * payload_share(found.mss)
    share = found.stream_bits / payload
    one_way_s = found.round_trip_s / 2
    allowed = DEVIATIONS * math.sqrt(found.sent * loss * (1 - loss)) + 1e-9
    lost = [found.sent - came for came in (found.there, found.back)]
    least = LEAST_RATE if loss == 0 else LEAST_RATE_LOSSY
    return [
        Finding(
            way,
            "rate, of payload",
            f"{payload / 1e6:.0f} Mbit/s",
            f"{found.stream_bits / 1e6:.0f} Mbit/s",
            least <= share < 1.1,
        ),
        Finding(
            way,
            "delay, one way",
            f"{delay_s * 1e6:.0f} us, and the machine's own",
            f"{one_way_s * 1e6:.0f} us",
            delay_s <= one_way_s <= delay_s + MOST_EXTRA_S,
        ),
        Finding(
            way,
            "loss, each way",
            f"{loss:.4%}",
            ", ".join(f"{count / found.sent:.4%}" for count in lost) + f" of {found.sent}",
            all(abs(count - found.sent * loss) <= allowed for count in lost),
        ),
        # Less IPv4's header, TCP's, and its timestamps.
        Finding(way, "MTU", f"{mtu}", f"{found.mss + 52}", found.mss + 52 == mtu),
    ]
