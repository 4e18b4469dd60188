"""Times of NCCL's algorithms and protocols over a measured link, for the plugin's tuner.

NCCL's own model (src/graph/tuning.cc, `ncclTopoTuneModel`) assumes a latency of the network for each protocol and takes
the rate from the network card's nominal one. Here both are the link's that was measured. What the protocol costs beside
the link is NCCL's own constant. The bytes and steps of a ring are those of the cost formulas. A tree is counted as NCCL
runs it: always two pipelined binary trees, where netfold takes a binomial one for small tensors.

Only what crosses hosts is modelled, by ring and tree. NCCL's choice stays in a communicator on one host, and where
NCCL's choice is NVLS, CollNet or PAT: nothing here says how long these take.

The table is text, whose form core/native/nccl/tuning.hpp describes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, log2

from netfold.tuning.cost import FORMULAS, Case
from netfold.tuning.topology import DEFAULT_LINKS, Link, Topology

VERSION = 1
# NCCL's choice changes only to what takes less than 1/(1 + this) of its time by the model. The model's error is not
# known on GPUs: this margin was chosen, and not measured.
LEAST_GAIN = 0.3
SIZES = tuple(1 << power for power in range(10, 33))


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL.

    data: the part of the sent bytes that is data. LL sends 4 bytes of flag with 4 of data; LL128 8 with 120.
    piece: bytes that a rank of a tree receives before it sends them on. Those of LL and LL128 are small: 0 here.
    start_us: of any operation. ring_us, tree_us: of one step over a network. on_host_us: of one step on a host.
    The times are NCCL's constants for it (tuning.cc, baseLatencies, hwLatencies NET and PCI).
    """

    data: float
    piece: int
    start_us: float
    ring_us: float
    tree_us: float
    on_host_us: float


PROTOCOLS = {
    "LL": Protocol(1 / 2, 0, 6.8, 2.7, 5.0, 1.0),
    "LL128": Protocol(120 / 128, 0, 14.0, 4.0, 8.5, 2.5),
    "Simple": Protocol(1.0, 512 << 10, 8.4, 14.0, 14.0, 5.7),
}
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


def seconds(collective: str, algorithm: str, protocol: str, size: float, ranks: int, hosts: int, link: Link) -> float:
    """The time of `size` bytes as NCCL counts them: the larger of a rank's input and output.

    link: of one host, in one direction, which all of its ranks share.
    KeyError for what is not modelled; ValueError for one host.
    """
    if not 1 < hosts <= ranks:
        raise ValueError(f"{ranks} ranks on {hosts} hosts: only what crosses hosts is modelled")
    about = PROTOCOLS[protocol]
    is_tree = algorithm == "tree"
    step_us = about.tree_us if is_tree else about.ring_us
    # NCCL reduces on the GPU, while it receives.
    network = Link(link.latency_s + step_us * 1e-6, link.bytes_per_s * about.data)
    per_host = ranks / hosts
    if is_tree:
        if collective != "all_reduce":
            raise KeyError((collective, algorithm))
        # Along a chain on each host, and up and down two trees between hosts, each with half of the tensor. A host has
        # two children in one of them, and none in the other: it sends the tensor twice (of 2 hosts: once).
        on_host = 2 * (per_host - 1) * about.on_host_us
        hops = 2 * int(log2(hosts))
        sent = min(2.0, hosts / 2) * size + hops * min(size / 2, about.piece)
        return (about.start_us + on_host) * 1e-6 + hops * network.latency_s + sent / network.bytes_per_s
    # A ring of all ranks crosses each host's link once. The steps on a host have its latency, not the network's.
    links = replace(DEFAULT_LINKS, network=network, reduce_bytes_per_s=inf, measured=True)
    ring = Case(size, Topology.even(ranks, hosts), links)
    steps = (2 if collective == "all_reduce" else 1) * (ranks - hosts)
    over_all = FORMULAS[collective, algorithm].seconds(ring)
    return about.start_us * 1e-6 + over_all - steps * (network.latency_s - about.on_host_us * 1e-6)


def rows(
    ranks: int, hosts: int, link: Link, sizes: Sequence[int] = SIZES
) -> Iterator[tuple[str, int, str, str, float]]:
    """(collective, bytes, algorithm, protocol, microseconds) of all that is modelled, by size within each."""
    for collective in RINGS:
        for algorithm in ("tree", "ring") if collective == "all_reduce" else ("ring",):
            for protocol in PROTOCOLS:
                for size in sizes:
                    took = seconds(collective, algorithm, protocol, size, ranks, hosts, link)
                    yield collective, size, algorithm, protocol, took * 1e6


def table_text(shapes: Sequence[tuple[int, int]], link: Link, least_gain: float = LEAST_GAIN) -> str:
    """The file for the tuner. shapes: (ranks, hosts) of communicators, each once; ValueError otherwise."""
    if len(set(shapes)) < len(shapes):
        raise ValueError(f"a shape is named twice: {', '.join(f'{ranks}x{hosts}' for ranks, hosts in shapes)}")
    lines = [f"netfold-nccl-tuning {VERSION}", f"# modelled for a link of {link.text()}", f"least-gain {least_gain:g}"]
    for ranks, hosts in shapes:
        lines.append(f"shape {ranks} {hosts}")
        lines += [f"{name} {size} {how} {by} {us:.6g} 0" for name, size, how, by, us in rows(ranks, hosts, link)]
    return "\n".join([*lines, "end", ""])
