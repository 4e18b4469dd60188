"""A link's rate, delay and loss, as users write them and as `tc` and `nft` need them. Pure."""

import re
from dataclasses import dataclass

# tbf splits a GSO packet that is larger than its burst into single packets, which costs a core more than the rest of
# the rack together, so 64 KB and headers must fit. Twice that keeps the rate when a timer is late by 0.5 ms at 1 Gbit/s
# (measured: 950 Mbit/s of TCP goodput at 68 KB, 957 at 128 KB; the line rate is 957). The cost: after a pause the first
# 128 KB pass at once, so the rack does not limit the rate of smaller messages.
BURST_BYTES = 128 << 10

# The queue of one port, as in a top-of-rack switch: 1 MB, which is a sender's whole window, and 4 ms of the line rate,
# so that a fast link does not drop what a slow one would hold. Packets beyond the queue are dropped.
QUEUE_WINDOW_BYTES = 1 << 20
QUEUE_NS = 4_000_000

# nftables compares a random number below this with the loss times this, so 1e-6 is the finest loss ratio.
LOSS_STEPS = 1_000_000

_RATE = re.compile(r"^(?P<number>\d+(\.\d+)?)(?P<unit>[kmg]?)bit$")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_DELAY = re.compile(r"^(?P<number>\d+(\.\d+)?)(?P<unit>us|ms|s)$")
_DELAY_UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9}
_LOSS = re.compile(r"^(?P<percent>\d+(\.\d+)?)%$")


@dataclass(frozen=True)
class Link:
    """A link; every value holds for each direction.

    rate_bits: per second, Ethernet headers included.
    loss_ratio: of IP packets.
    delay_ns: beyond the serialisation time.
    """

    rate_bits: int
    loss_ratio: float = 0.0
    delay_ns: int = 0

    @property
    def queue_bytes(self) -> int:
        return QUEUE_WINDOW_BYTES + self.rate_bits * QUEUE_NS // (8 * 10**9)


def parse_link(rate: str, loss: str = "0%", delay: str = "0us") -> Link:
    """Parse the link of `--rate 1gbit --loss 0.1% --delay 50us`. Raises ValueError with the invalid text."""
    rate_match = _RATE.match(rate)
    if rate_match is None or float(rate_match["number"]) == 0:
        raise ValueError(f"rate {rate!r} is not understood; write it as tc does: 1gbit, 200mbit, 2.5gbit")
    loss_match = _LOSS.match(loss)
    if loss_match is None or float(loss_match["percent"]) >= 100:
        raise ValueError(f"loss {loss!r} is not understood; write a percentage below 100 with its sign: 0.1%")
    delay_match = _DELAY.match(delay)
    if delay_match is None:
        raise ValueError(f"delay {delay!r} is not understood; write it as tc does: 50us, 1.5ms")
    link = Link(
        rate_bits=round(float(rate_match["number"]) * _UNITS[rate_match["unit"]]),
        loss_ratio=float(loss_match["percent"]) / 100,
        delay_ns=round(float(delay_match["number"]) * _DELAY_UNITS[delay_match["unit"]]),
    )
    if 0 < link.loss_ratio < 1 / LOSS_STEPS:
        raise ValueError(f"loss {loss!r} is finer than {100 / LOSS_STEPS}%, the smallest a rack can make")
    return link


def shape_command(namespace: str, interface: str, link: Link) -> list[str]:
    """Return the command that limits the rate out of `interface`; a link is shaped at both its ends."""
    add = ["tc", "-netns", namespace, "qdisc", "add", "dev", interface]
    rate = ["tbf", "rate", f"{link.rate_bits}bit", "burst", f"{BURST_BYTES}b", "limit", f"{link.queue_bytes}b"]
    return [*add, "root", *rate]


def single_packets_command(namespace: str, interface: str) -> list[str]:
    """Return the command that lets only packets of the link's MTU cross the veth, so a loss takes 1 packet and not 45.

    GSO itself stays on: the sender still hands down large packets, and the kernel splits them between the queue and
    the link. Without GSO (or with gso_max_segs 1) BBR paces single packets with a timer each, which halves TCP's rate
    on a virtual machine (measured: 487 instead of 957 Mbit/s).
    """
    offloads = ("tso", "off", "tx-udp-segmentation", "off", "gro", "off")
    return ["ip", "netns", "exec", namespace, "ethtool", "-K", interface, *offloads]


def loss_rules(interface: str, link: Link) -> str:
    """Return nftables rules that drop arriving packets at `interface`, where no packet is aggregated any more.

    Only IP is dropped: a lost ARP request costs 1 s and does not test the protocol. Each interface has its own table,
    because in a shared table every packet would pass the rules of all interfaces.
    """
    below = round(link.loss_ratio * LOSS_STEPS)
    return (
        f"table netdev loss_{interface} {{\n"
        "  chain arriving {\n"
        f'    type filter hook ingress device "{interface}" priority 0; policy accept;\n'
        f"    meta protocol ip numgen random mod {LOSS_STEPS} < {below} counter drop\n"
        "  }\n"
        "}\n"
    )
