"""Check a rack against its parameters: measure each kind of path through it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from netfold_lab.rack.link import Link
from netfold_lab.rack.measure import Measurement, measure, payload_share
from netfold_lab.rack.rack import Rack
from netfold_lab.rack.topology import Layout

# The least share of its rate that a link must reach on a busy machine; TCP also slows down after losses.
MIN_RATE, MIN_RATE_LOSSY = 0.85, 0.5
# Time that four crossings of a busy machine's kernel, and waking two processes, may add to a delay.
MAX_EXTRA_S = 2e-3
# Binomial: one measurement in 16,000 is further than four standard deviations from the mean.
DEVIATIONS = 4


class Finding(NamedTuple):
    """One quantity of one path: the expected and the measured value, as text, and whether they agree."""

    route: str
    what: str
    asked: str
    measured: str
    passed: bool


def check(rack: Rack) -> Iterator[Finding]:
    """Measure a running rack; each path takes about 6 s. Raises RackError."""
    for route, host, other in routes(rack.layout):
        links = rack.layout.path(host, other)
        found = measure(rack, host, other, min(link.rate_bits for link in links))
        yield from evaluate(route, links, rack.layout.mtu, found)


def routes(layout: Layout) -> list[tuple[str, int, int | None]]:
    """Return a path of each kind: to the aggregator, to a neighbour, to another rack.

    Each has its name and the two hosts; None for the aggregator.
    """
    found: list[tuple[str, int, int | None]] = [("h0 to the aggregator", 0, None)]
    if layout.hosts > 1 and layout.rack_of(1) == 0:
        found.append(("h0 to h1", 0, 1))
    if layout.racks > 1:
        last = layout.hosts - 1
        found.append((f"h0 to h{last}, in another rack", 0, last))
    return found


def evaluate(route: str, links: list[Link], mtu: int, found: Measurement) -> list[Finding]:
    """Compare what `links`, in a row, should do to packets of `mtu` bytes with a measurement. Pure."""
    rate = min(link.rate_bits for link in links)
    delay_s = sum(link.delay_ns for link in links) / 1e9
    loss = 1 - math.prod(1 - link.loss_ratio for link in links)
    payload = rate * payload_share(found.mss)
    share = found.stream_bits / payload
    one_way_s = found.round_trip_s / 2
    allowed = DEVIATIONS * math.sqrt(found.sent * loss * (1 - loss)) + 1e-9
    lost = [found.sent - arrived for arrived in (found.there, found.back)]
    least = MIN_RATE if loss == 0 else MIN_RATE_LOSSY
    return [
        Finding(
            route,
            "rate, of payload",
            f"{payload / 1e6:.0f} Mbit/s",
            f"{found.stream_bits / 1e6:.0f} Mbit/s",
            least <= share < 1.1,
        ),
        Finding(
            route,
            "delay, one way",
            f"{delay_s * 1e6:.0f} us, and the machine's own delay",
            f"{one_way_s * 1e6:.0f} us",
            delay_s <= one_way_s <= delay_s + MAX_EXTRA_S,
        ),
        Finding(
            route,
            "loss, each way",
            f"{loss:.4%}",
            ", ".join(f"{count / found.sent:.4%}" for count in lost) + f" of {found.sent}",
            all(abs(count - found.sent * loss) <= allowed for count in lost),
        ),
        # The MSS lacks 52 bytes: the IPv4 header, the TCP header, and TCP's timestamps.
        Finding(route, "MTU", f"{mtu}", f"{found.mss + 52}", found.mss + 52 == mtu),
    ]
