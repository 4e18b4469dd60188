"""10,000 and 60,000 ranks by simulation: start-up, all_reduce of 8 B and 1 GB, and what breaks next. No root:

    .venv/bin/python lab/bench/simulate_scale.py                          # or `make simulate-scale`, some minutes
    .venv/bin/python lab/bench/simulate_scale.py --ranks 1024 --beside "" # 1,024 ranks alone, in seconds

The start-up runs production's rendezvous and tree in virtual time (start_simulation.py). Its costs of CPU are measured
here, first (start_costs.py). An all_reduce between hosts is simulated step by step (network_model.py), and through
switches packet by packet (netfold_plan.packets). What is too large for both is composed by the formulas of
netfold.tuning, and the page says how far they are from the simulations where both can be had.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import driver
import numpy as np
import start_costs
from network_model import Between, Dragonfly, FatTree, Latency, Network, between_two
from start_simulation import Costs, Rendezvous, Result, StartUp, even_hosts, meet

from netfold.bootstrap.store import MAX_KEYS
from netfold.bootstrap.tcp_store import MAX_BYTES, MAX_CONNECTIONS
from netfold.bootstrap.tree import MAX_FRAME_BYTES
from netfold.switch_protocol.job_tree import MAX_JOB_WORKERS
from netfold.switch_protocol.open_files import files_needed
from netfold.tuning import DEFAULT_LINKS, Link, Links, Topology
from netfold.tuning.cost import FORMULAS, Case, best_between, given_back_bytes_per_s
from netfold_plan.packets import Fabric, all_reduce

# Ranks, and ranks a host: 1,024 as in scale.md, 60,000 as in the talk.
PER_HOST = {1024: 64, 10_000: 40, 60_000: 40}
LEAVES = {1024: 1, 10_000: 10, 60_000: 30}
GIGABIT = 1e9 / 8
RATES = (1, 10, 100)
SMALL, LARGE = 8, 10**9
# Assumed. TCP of a Linux host, from one process to another; a link and the switch behind it.
STACK_S, LINK_S = 15e-6, 0.6e-6
# As a fabric without the kernel, and its links and switches; memory of a server with 12 channels, for all its ranks.
FABRIC_STACK_S, FABRIC_LINK_S = 0.6e-6, 0.1e-6
MEMORY = Link(latency_s=3e-6, bytes_per_s=180e9)
TENSOR_PART = 1448 / 1538
# Of one core of the switch, per packet of 1408 bytes (switch_cost.md): alone, and in a stream that GRO joins.
PACKET_S, STREAM_PACKET_S = 1408 * 8 / 3.30e9, 1408 * 8 / 8.38e9
SWITCH_CORES = 16
# More than a link carries in a round trip. Slots of a larger window take gigabytes here. Simulated packets of a run.
WINDOW_BYTES, PACKETS = 256 << 10, 100_000
# CPU seconds of a leaf for the path and the join of a worker (tree_admission.md: 0.24 s for 256).
ADMISSION_S = 0.24 / 256
BEGIN_S = 1.0
PHASES = ("store", "job", "places", "connected", "addresses", "shared memory", "table", "switch", "native group")


class Remembered:
    """The latency between two hosts, found once."""

    def __init__(self, network: Network) -> None:
        self._network, self._known = network, dict[tuple[int, int], float]()

    def latency_s(self, source: int, to: int) -> float:
        found = self._known.get((source, to))
        if found is None:
            found = self._known[source, to] = between_two(self._network, source, to)
        return found


def networks(hosts: int, stack_s: float = STACK_S, link_s: float = LINK_S) -> tuple[Network, Network]:
    latency = Latency(stack_s, link_s, own_memory_s())
    return FatTree(latency), Dragonfly(latency, hosts)


def start_up(
    ranks: int, met: Rendezvous, costs: Costs, network: Network, gbit: float, *, has_switch: bool = False
) -> Result:
    hosts = even_hosts(ranks, PER_HOST[ranks])
    below = len(hosts) / LEAVES[ranks]
    switch = (lambda _: below * ADMISSION_S) if has_switch else None
    rate = gbit * GIGABIT
    return StartUp(hosts, met, costs, Remembered(network), rate, begin_s=BEGIN_S, switch=switch).run()


def start_rows(ranks: int, met: Rendezvous, own: Costs, torchs: Costs) -> tuple[list[list[object]], Result]:
    """The rows of the first table, and a start-up with torch's store at 10 Gbit/s."""
    fat, dragonfly = networks(len(even_hosts(ranks, PER_HOST[ranks])))
    cases: list[tuple[str, Costs, Network, int, bool]] = [("torch's", torchs, fat, gbit, False) for gbit in RATES] + [
        ("torch's", torchs, dragonfly, 10, False),
        ("torch's, a switch in each rack", torchs, fat, 10, True),
        ("torch's, a key a request", replace(torchs, batch=1), fat, 10, False),
        (f"netfold's{', without its bound' if ranks >= MAX_CONNECTIONS else ''}", own, fat, 10, False),
    ]
    rows, shown = [], None
    for name, costs, network, gbit, has_switch in cases:
        found = start_up(ranks, met, costs, network, gbit, has_switch=has_switch)
        if (name, gbit, network) == ("torch's", 10, fat):
            shown = found
        ends, before, cells = found.ends_s, 0.0, []
        for phase in PHASES:
            end = ends.get(phase)
            cells.append("-" if end is None else f"{end - before:.2f}")
            before = before if end is None else end
        rows.append([f"{ranks:,}", name, network.name, gbit, *cells, f"**{found.seconds:.1f}**"])
    assert shown is not None
    return rows, shown


_memory_s = 0.0


def own_memory_s() -> float:
    """One way between two processes of this machine over a socket, measured once."""
    global _memory_s
    _memory_s = _memory_s or start_costs.loopback_s()
    return _memory_s


def links_of(network: Network, hosts: int, gbit: float, per_host: int) -> Links:
    """The parameters of the formulas between hosts: the mean latency, and what the ranks of a host reduce together."""
    source, to = (each.ravel() for each in np.meshgrid(np.arange(hosts), np.arange(hosts)))
    apart = source != to
    links = float(network.links(source[apart], to[apart]).mean())
    latency_s = network.latency.stack_s + links * network.latency.link_s
    reduce = min(per_host * DEFAULT_LINKS.reduce_bytes_per_s, MEMORY.bytes_per_s / 3)
    rate = gbit * GIGABIT * TENSOR_PART
    return replace(DEFAULT_LINKS, network=Link(latency_s, rate), memory=MEMORY, reduce_bytes_per_s=reduce)


def inside_s(size: float, per_host: int, links: Links) -> float:
    """The stages inside a host, by the formula: in shared memory, before and after those between hosts."""
    return FORMULAS["all_reduce", "shared_memory"].seconds(Case(size, Topology((0,) * per_host), links))


def formula_s(algorithm: str, size: float, hosts: int, links: Links) -> float:
    return FORMULAS["all_reduce", algorithm].seconds(Case(size, Topology.apart(hosts), links))


@lru_cache
def through_packets_s(size: float, hosts: int, leaves: int, gbit: float, latency: Latency) -> float:
    """A tree of switches that take no time and have a port of their own for each link, packet by packet."""
    fabric = Fabric(hosts, gbit * GIGABIT, latency.link_s, racks=leaves, window_bytes=WINDOW_BYTES)
    return all_reduce(fabric, size, most_packets=PACKETS).time_s + latency.stack_s


def through_daemons_s(size: float, hosts: int, leaves: int, gbit: float, links_to: float = 4) -> float:
    """A tree of `netfold switch` on hosts of their own, with one link each.

    One packet: each switch takes its contributions one after the other. Many: what the slowest switch gives back.
    """
    levels = [hosts // leaves, *([leaves] if leaves > 1 else [])]
    trips_s = 2 * len(levels) * (STACK_S + links_to * LINK_S)
    rate = gbit * GIGABIT * TENSOR_PART
    added = SWITCH_CORES * 1408 / STREAM_PACKET_S
    pace = min(given_back_bytes_per_s(below, rate, added) for below in levels)
    return trips_s + sum(levels) * PACKET_S + (size / pace if size > 1408 else 0.0)


def reduction_rows(ranks: int, size: int) -> list[list[object]]:
    """The rows of an all_reduce, in ms (1 GB: s)."""
    per_host = PER_HOST[ranks]
    hosts, leaves = len(even_hosts(ranks, per_host)), LEAVES[ranks]
    unit, form = (1e6, ".0f") if size == SMALL else (1.0, ".2f")
    rows = []
    for gbit in RATES:
        for network in networks(hosts):
            links = links_of(network, hosts, gbit, per_host)
            inside = inside_s(size, per_host, links)
            between = Between(network, hosts, links.network.bytes_per_s, links.reduce_bytes_per_s)
            found = [inside + each(size) for each in (between.ring, between.halving_doubling)]
            small = size == SMALL
            found.append(inside + (between.tree(size) if small else formula_s("tree", size, hosts, links)))
            daemons = inside + through_daemons_s(size, hosts, leaves, gbit)
            packets = inside + through_packets_s(size, hosts, leaves, gbit, network.latency)
            auto = best_between("all_reduce", Case(size, Topology.even(ranks, hosts), links))
            cells = [f"{each * unit:{form}}" for each in (*found, daemons, packets, inside)]
            predicted = f"{(inside + formula_s(auto, size, hosts, links)) * unit:{form}}"
            rows.append([f"{ranks:,}", gbit, network.name, *cells, f"{auto}: {predicted}"])
    return rows


def beside_talk_rows() -> list[list[object]]:
    """128 hosts with a rank each and 1,500 hosts with 40, without the kernel."""
    rows = []
    for hosts, per_host, leaves in ((128, 1, 4), (1500, 40, 30)):
        network = networks(hosts, FABRIC_STACK_S, FABRIC_LINK_S)[1]
        links = links_of(network, hosts, 100, per_host)
        inside = inside_s(SMALL, per_host, links) if per_host > 1 else 0.0
        between = Between(network, hosts, links.network.bytes_per_s, links.reduce_bytes_per_s)
        best = min(between.halving_doubling(SMALL), between.tree(SMALL))
        packets = through_packets_s(SMALL, hosts, leaves, 100, network.latency)
        cells = [f"{each * 1e6:.1f}" for each in (inside, inside + best, inside + packets)]
        rows.append([f"{hosts:,}", per_host, *cells])
    return rows


def error_rows() -> tuple[list[list[object]], list[list[object]]]:
    """The formulas beside the steps, and beside the packets."""
    steps, packets = [], []
    for hosts in (16, 64, 256, 1500):
        for network in networks(hosts):
            links = links_of(network, hosts, 10, 40)
            between = Between(network, hosts, links.network.bytes_per_s, links.reduce_bytes_per_s)
            simulated = {"ring": between.ring, "halving_doubling": between.halving_doubling}
            cells: list[object] = []
            for algorithm, simulate in simulated.items():
                for size in (SMALL, 1 << 20, LARGE):
                    cells.append(f"{formula_s(algorithm, size, hosts, links) / simulate(size) - 1:+.1%}")
            steps.append([f"{hosts:,}", network.name, *cells])
    for workers, racks, size in (
        (16, 1, SMALL),
        (256, 16, SMALL),
        (16, 1, 1 << 20),
        (16, 1, 4 << 20),
        (64, 4, 1 << 20),
    ):
        fabric = Fabric(workers, 10 * GIGABIT, LINK_S, racks=racks, window_bytes=WINDOW_BYTES)
        whole = all_reduce(fabric, size, most_packets=10**9)
        composed = all_reduce(fabric, size, most_packets=8_000)
        apart = (whole.closed_s / whole.time_s - 1, composed.time_s / whole.time_s - 1)
        packets.append([workers, racks, f"{size:,}", f"{whole.time_s * 1e6:.1f}", *(f"{of:+.1%}" for of in apart)])
    return steps, packets


def beside_real(sizes: Sequence[int], own: Costs, launches: int = 3) -> list[list[object]]:
    """Start-ups of real ranks on this machine, and the simulation with as many cores for all."""
    rows: list[list[object]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="netfold-bench-") as folder:
            data = Path(folder, "data.json")
            command = [sys.executable, str(Path(__file__).with_name("scale.py")), "--ranks", str(size), "--hosts", "1"]
            command += ["--gloo-up-to", "0", "--calls", "1", "--data", str(data), "-o", f"{folder}/page.md"]
            real: list[tuple[float, float]] = []
            for _ in range(launches):
                subprocess.run(command, check=True, capture_output=True, timeout=driver.DEADLINE_S)
                real += start_costs.real_starts(data.read_text(), size)
        hosts = even_hosts(size, size)
        at_size = start_costs.at_size(hosts, 1)
        network = networks(2)[0]
        met = meet(hosts)
        costs = start_costs.measure_costs(at_size, own, met.places_s)
        found = StartUp(hosts, met, costs, Remembered(network), GIGABIT, cores=2).run()
        starts = [start_s for start_s, _ in real]
        spread = f"{median(starts):.2f} ({min(starts):.2f} .. {max(starts):.2f})"
        cpu = (median(cpu_s for _, cpu_s in real), median(found.busy_s.values()))
        rows.append([size, spread, f"{found.seconds:.2f}", *(f"{each * 1e3:.1f}" for each in cpu)])
    return rows


def figures(ranks: int, met: Rendezvous, shown: Result, at: start_costs.AtSize) -> list[object]:
    """The figures that grow with P: a column of the second table."""
    hosts = even_hosts(ranks, PER_HOST[ranks])
    values = sum(request.sent_bytes for of in met.requests for some in of.values() for request in some)
    requests = sum(shown.requests.values())
    per_rank = at.addresses_memory_bytes + at.native_memory_bytes
    first = met.places[0]
    return [
        f"{requests:,}",
        f"{len(met.requests[0]['places']):,}",
        f"{shown.store_busy_s:.2f}",
        f"{values / 1e6:.1f}",
        f"{shown.dropped:,}",
        f"{at.addresses_bytes / 1e6:.2f}",
        f"{at.addresses_bytes * len(first.children) / 1e6:.1f}",
        f"{max(shown.frames.values())}",
        first.height,
        f"{shown.busy_s[0]:.2f}",
        f"{median(shown.busy_s.values()):.2f}",
        f"{at.addresses_memory_bytes / 1e6:.1f}",
        f"{at.native_memory_bytes / 1e6:.1f}",
        f"{per_rank * len(hosts[0]) / 1e9:.1f}",
        f"{len(first.children) + 1}",
        f"{files_needed(ranks):,}",
        f"{at.handle_bytes * ranks / 1e6:.1f}, {at.handles_s:.2f}",
        f"{at.tree_of_switches_s * 1e3:.1f}",
        f"{met.places_s:.2f}",
    ]


FIGURES = (
    "requests of the store",
    "of them rank 0's for the places, one after the other",
    "the store's server, CPU s",
    "bytes that ranks send to the store, MB",
    "connections to the store that came to a full queue, and again 1 s later",
    "the frame with all addresses, MB",
    "sent by rank 0 to its children, MB",
    "frames that a rank receives in the start-up, most",
    "height of the tree",
    "CPU s of rank 0",
    "CPU s of a rank, median",
    "memory of a rank: addresses, MB",
    "memory of a rank: its native group before any connection, MB",
    "both, of all ranks of a host, GB",
    "connections of rank 0 in the tree, and to the store",
    "open files that a rank asks for, if it used a connection to every other rank",
    "handles of all ranks, for `reconfigure`: MB, and CPU s to check them",
    "the job's tree of switches, of one leader a host, at a rank, ms",
    "the places of all ranks, at rank 0, CPU s",
)


def simulated_scale(ranks: str = "1024,10000,60000", beside: str = "32,64") -> str:
    """Ten thousand ranks and more, by simulation"""
    began = time.monotonic()
    join, frame, byte_s = start_costs.handshakes(), start_costs.frames(), start_costs.copied_byte_s()
    alone = start_costs.alone_s()
    stores = {"netfold's": start_costs.own_store(), "torch's": start_costs.torch_store()}
    bases = {
        name: start_costs.costs(*of, join, frame, byte_s, alone, is_rank_0=name == "netfold's")
        for name, of in stores.items()
    }
    sizes = [int(each) for each in ranks.split(",")]
    starts: list[list[object]] = []
    columns: list[list[object]] = []
    simulated: dict[int, float] = {}
    for size in sizes:
        hosts = even_hosts(size, PER_HOST[size])
        met, at = meet(hosts), start_costs.at_size(hosts, LEAVES[size])
        costs = {name: start_costs.measure_costs(at, base, met.places_s) for name, base in bases.items()}
        before = time.monotonic()
        rows, shown = start_rows(size, met, costs["netfold's"], costs["torch's"])
        simulated[size] = (time.monotonic() - before) / len(rows)
        starts += rows
        columns.append(figures(size, met, shown, at))
    real = beside_real([int(each) for each in beside.split(",") if each], bases["netfold's"])
    steps, packets = error_rows()
    took = ", ".join(f"{seconds:.1f} s for {size:,} ranks" for size, seconds in simulated.items())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    page = Page(stores, join, frame, byte_s, alone, starts, columns, real, steps, packets, sizes)
    return f"{page.text()}\n\n{_cost_of(took, memory, time.monotonic() - began)}"


def _cost_of(took: str, memory: float, seconds: float) -> str:
    return f"A simulated start-up took {took}; this page {seconds / 60:.1f} minutes and {memory:.2f} GB."


@dataclass(frozen=True)
class Page:
    stores: dict[str, Any]
    join: start_costs.Both
    frame: start_costs.Both
    byte_s: float
    alone: float
    starts: list[list[object]]
    columns: list[list[object]]
    real: list[list[object]]
    steps: list[list[object]]
    packets: list[list[object]]
    sizes: Sequence[int]

    def text(self) -> str:
        return "\n\n".join(
            (self.assumptions(), self.start(), self.reductions(), self.talk(), self.errors(), self.limits())
        )

    def assumptions(self) -> str:
        rows = []
        for name, (connection, request) in self.stores.items():
            rows.append([f"{name} store: a connection", *_us(connection)])
            rows.append([f"{name} store: a request", *_us(request)])
        rows.append(["a connection between ranks, with its handshake", *_us(self.join)])
        rows.append(["a frame of the tree, without its bytes", *_us(self.frame)])
        rows.append(["1 MB of a frame, into or out of a socket", *2 * [f"{self.byte_s * 1e12:.0f}"]])
        rows.append(["a rank's own: listener, engine, sockets, first use of modules", "-", f"{self.alone * 1e6:.0f}"])
        return f"""Production's rendezvous (claim, agree, addresses, places) runs for every rank against a store in
memory that notes each request, and production's steps of the tree run as they are; both give order, number and bytes.
Links, cores and the store's server are simulated. lab/tests/bench/test_simulate_scale.py compares with real ranks.

CPU of one core, measured on this machine with production's code, the least of {start_costs.TURNS} turns, in us; what a
rank does alone with P addresses is measured at that P:

{driver.table("what | at the server or receiver | at the client or sender", rows)}

Assumed: a core for each rank; {BEGIN_S:g} s in which the ranks begin, at random; hosts of 64 ranks at 1,024, else of
40, as in the talk; TCP takes {STACK_S * 1e6:g} us from one process to another of two hosts, and {LINK_S * 1e6:g} us for
each link and switch on the way. *Fat tree*: three levels of switches of 64 ports, nothing oversubscribed. *Dragonfly*:
groups of 16 routers with 8 hosts each, 8 links of a router to other groups, minimal routes. No host, switch or packet
fails, and TCP has its rate at once."""

    def start(self) -> str:
        head = "ranks | store | network | Gbit/s | " + " | ".join(PHASES) + " | all: s"
        grown = [[name, *cells] for name, *cells in zip(FIGURES, *self.columns, strict=True)]
        second = "with torch's store, 10 Gbit/s | " + " | ".join(f"{size:,}" for size in self.sizes)
        beside = (
            "\n\nReal ranks on this machine, and the simulation of the same with its two cores for all:\n\n"
            + driver.table(
                "ranks | measured: s | simulated: s | CPU ms of the median rank: measured | simulated", self.real
            )
            + """

The measured seconds include what other programs took of the machine, and what only the kernel does for many processes
at once: page faults after fork, threads that wait for a core."""
            if self.real
            else ""
        )
        return f"""## Start-up

Seconds that each phase adds, until the last rank has ended it; the phases are those of [How a group comes
together](../../../docs/explanation/start-up.md). *store*: all are connected to rank 0's store, with the {BEGIN_S:g} s
in which they begin. *places*: each knows its place in the tree. *connected*: to its neighbours. The goal is 30 s.

{driver.table(head, self.starts)}

{driver.table(second, grown)}{beside}"""

    def reductions(self) -> str:
        small = [row for size in self.sizes for row in reduction_rows(size, SMALL)]
        large = [row for size in self.sizes for row in reduction_rows(size, LARGE)]
        kinds = "ring | halving_doubling | tree | switches on hosts | switches in the network | inside a host"
        head = f"ranks | Gbit/s | network | {kinds} | auto takes"
        return f"""## all_reduce

By hierarchical: first inside each host through shared memory (by the formula, at {MEMORY.bytes_per_s / 1e9:g} GB/s),
then the named algorithm between hosts. A ring and halving and doubling are simulated step by step, and the tree of 8 B;
the tree of 1 GB is the formula. *Switches on hosts*: `netfold switch` in two levels, each on a host with one link and
{SWITCH_CORES} cores; a packet takes {PACKET_S * 1e6:.1f} us of one ([measured](switch_cost.md)). *Switches in the
network*: the production machines packet by packet, in switches that take no time and have a port for each link, as a
data plane in hardware might; of 1 GB the beginning, and its pace for the rest. *Auto takes*: the choice without
switches, and its time by the formula, which knows latency and rate, and no routes.

8 B, us:

{driver.table(head, small)}

1 GB, s:

{driver.table(head, large)}"""

    def talk(self) -> str:
        head = "hosts | ranks a host | inside a host: us | best host algorithm: us | switches in the network: us"
        return f"""## Beside the talk

The talk (Mellanox, ChipEx 2019) shows SHARP with 1,500 nodes and 60,000 ranks on a Dragonfly+ as a picture, without a
number in its text. Its authors give these. MPI_Allreduce of 8 B on 128 hosts: 6.01 us by hosts and 2.83 us by
switches (Graham et al., COMHPC 2016); large ones at 95% of the link by switches, which is 2 to 5 times as fast as by
hosts (Graham et al., ISC 2020). netfold's figure over the kernel's TCP is in the tables above. Here 8 B at
100 Gbit/s on the dragonfly, with {FABRIC_STACK_S * 1e6:g} us from process to process and {FABRIC_LINK_S * 1e6:g} us a
link, as a fabric without the kernel has:

{driver.table(head, beside_talk_rows())}

The host algorithms of netfold take 2 log2 H steps also for 8 B; recursive doubling, which MPI uses there, takes log2 H.
A contribution of 8 B is a packet of 1408 bytes on each link.

1 GB at 100 Gbit/s: the ring sends 2 (H-1)/H GB, so switches in the network, which send 1 GB, are up to twice as fast
between hosts. With 40 ranks a host, its memory takes longer than both."""

    def errors(self) -> str:
        sizes = ("8 B", "1 MB", "1 GB")
        names = " | ".join(f"{name}, {size}" for name in ("ring", "halving_doubling") for size in sizes)
        return f"""## How far the formulas are off

The formula over the simulated steps, less 1, at 10 Gbit/s. The formula knows no routes: below -50% the routes of the
dragonfly share links, which adaptive routing would spread.

{driver.table(f"hosts | network | {names}", self.steps)}

The packets of switches in the network at 10 Gbit/s: all of them, beside the formula, and beside a simulation of 8,000
packets whose pace continues. The formula of 8 B knows no padding to a whole packet.

{driver.table("workers | racks | bytes | all packets: us | the formula | the continued pace", self.packets)}"""

    def limits(self) -> str:
        last = self.columns[-1]
        size = self.sizes[-1]
        found = dict(zip(FIGURES, last, strict=True))
        frame_ranks = MAX_FRAME_BYTES / (float(str(found["the frame with all addresses, MB"])) * 1e6 / size)
        store_ranks = MAX_BYTES / (float(str(found["bytes that ranks send to the store, MB"])) * 1e6 / size)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        native = float(str(found["memory of a rank: its native group before any connection, MB"])) * 1e6 / size
        rows = [
            ["netfold's store", f"{MAX_CONNECTIONS:,} connections at once", "more ranks are refused"],
            ["open files of rank 0, which serves the store", "one a rank", f"the hard limit, here {hard:,}"],
            [
                "rank 0's requests for the places",
                f"2 P / {MAX_KEYS}, one after the other",
                "above, also with a key a request",
            ],
            ["a native group", f"{native / 1e3:.1f} KB for each rank, at every rank", "P times ranks a host"],
            ["the frame with all addresses", f"{MAX_FRAME_BYTES >> 20} MB", f"at about {_ranks(frame_ranks)} ranks"],
            ["values in netfold's store", f"{MAX_BYTES >> 20} MB", f"at about {_ranks(store_ranks)} ranks"],
            [
                "workers of a job, over switches",
                f"{MAX_JOB_WORKERS:,}",
                f"{MAX_JOB_WORKERS * 40:,} ranks where one rank of 40 joins; without shared memory {MAX_JOB_WORKERS:,}",
            ],
            ["contributors of a switch", "256", "the packet's field has 16 bits, and counts those of one switch"],
            ["ranks in a handshake", "32 bits", "none"],
            ["i32 on the wire", "16,384 ranks", "an error above"],
            ["i8 on the wire", "32 ranks", "an error above"],
            ["ranks of a host in one memory", "256", "several memories"],
        ]
        return f"""## What breaks next

{driver.table("what | bound, or growth | where it ends", rows)}"""


def _ranks(number: float) -> str:
    digits = 10 ** max(0, int(math.log10(number)) - 1)
    return f"{round(number / digits) * digits:,}"


def _us(of: start_costs.Both) -> list[str]:
    return [f"{each * 1e6:.1f}" for each in of]


if __name__ == "__main__":
    driver.run(simulated_scale)
