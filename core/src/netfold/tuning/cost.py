"""The cost of a collective: one formula for each operation and algorithm. The planner predicts training with them.

The alpha-beta-gamma model (Hockney, 1994; Thakur, Rabenseifner & Gropp, 2005): a step costs a latency, a byte its time
on the link, a contribution the time to reduce it. n is the size of the whole tensor: the one that is reduced or
broadcast, the result of a gather, a rank's input to reduce_scatter and all_to_all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from netfold.tuning.topology import Links, Topology

# As in core/native/collective (pipelined_plan.cpp, tree.cpp).
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 16 << 10, 256 << 10
BINOMIAL_BYTES = 16 << 10
# Of shared memory (netfold/transport/shm/shm_node.hpp): the most bytes that one synchronisation passes.
POST_BYTES, CHUNK_BYTES = 16 << 10, 256 << 10
# Elements that share a scale in the integer formats (netfold/kernels/block_quantise.hpp).
BLOCK_ELEMENTS = 128
# Wire formats with half the bytes of f32; and integer formats, with their part of f32's bytes.
HALVES = ("bf16", "f16")
INTEGERS = {"i32": 1.0, "i8": 0.25}


@dataclass(frozen=True)
class Case:
    """An operation on P ranks (`ranks`) and n bytes (`size`)."""

    size: float  # bytes in the wire format
    topology: Topology
    links: Links
    switch: int = 0  # switches that operations between hosts may use in parallel
    wire: str = "auto"  # the wire format of f32 tensors

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @property
    def doublings(self) -> int:
        return math.ceil(math.log2(self.ranks))

    @property
    def share(self) -> float:
        """n(P-1)/P: the bytes that a rank must send if it keeps its own part."""
        return self.size * (self.ranks - 1) / self.ranks

    @property
    def through_switch(self) -> float:
        """Bytes a second through all switches together, at most the rate of a rank's link.

        Each switch's link carries the contributions of all P ranks. An unmeasured link counts as a rank's.
        """
        network = self.links.network.bytes_per_s
        each = network / self.ranks
        return min(network, sum(self.links.switches) or max(1, self.switch) * each)

    def steps(self, count: float) -> float:
        return count * self.links.network.latency_s

    def sent(self, size: float) -> float:
        return size / self.links.network.bytes_per_s

    def crowded(self, size: float) -> float:
        """Time to send `size` bytes to one port from all other ranks at once."""
        return self.sent(size) * (1 + self.links.crowding * (self.ranks - 2))

    def restarted(self, size: float) -> float:
        """Time to send `size` bytes with another partner in every step."""
        return self.sent(size) * (1 + self.links.restarts)

    def reduced(self, size: float) -> float:
        return size / self.links.reduce_bytes_per_s

    def messages(self, count: float) -> float:
        """Time of further messages in a step; the step's latency includes the first message."""
        return count * self.links.message_s


@dataclass(frozen=True)
class Formula:
    """The cost of one operation by one algorithm."""

    seconds: Callable[[Case], float]
    source: str  # the origin of the formula, in a sentence
    narrow: bool = False  # f32 tensors may travel as bf16 or f16
    neighbours: bool = False  # a rank exchanges messages with the previous and the next rank only


FORMULAS: dict[tuple[str, str], Formula] = {}


def _formula(
    operation: str, algorithm: str, source: str, *, narrow: bool = False, neighbours: bool = False
) -> Callable[[Callable[[Case], float]], Callable[[Case], float]]:
    def register(seconds: Callable[[Case], float]) -> Callable[[Case], float]:
        FORMULAS[operation, algorithm] = Formula(seconds, source, narrow, neighbours)
        return seconds

    return register


_ONE_STEP = "one step, a message to each; the port of a receiver takes what all others send"


@_formula("all_reduce", "direct", _ONE_STEP)
@_formula("reduce", "direct", _ONE_STEP)
def _direct_reduction(case: Case) -> float:
    others = case.ranks - 1
    return (
        case.steps(1)
        + case.messages(2 * (others - 1))
        + case.crowded(others * case.size)
        + case.reduced(others * case.size)
    )


@_formula("reduce_scatter", "direct", _ONE_STEP)
def _direct_reduce_scatter(case: Case) -> float:
    return _direct_exchange(case) + case.reduced(case.share)


@_formula("all_gather", "direct", _ONE_STEP)
@_formula("all_to_all", "direct", _ONE_STEP)
def _direct_exchange(case: Case) -> float:
    return case.steps(1) + case.messages(2 * (case.ranks - 2)) + case.crowded(case.share)


@_formula("broadcast", "direct", "one step; the root sends to each in turn")
def _direct_broadcast(case: Case) -> float:
    return case.steps(1) + case.messages(case.ranks - 2) + case.sent((case.ranks - 1) * case.size)


@_formula("gather", "direct", _ONE_STEP)
@_formula("scatter", "direct", "one step; the root sends to each in turn")
def _direct_root(case: Case) -> float:
    return case.steps(1) + case.messages(case.ranks - 2) + case.sent(case.share)


_BINOMIAL = "a binomial tree of whole subtrees' blocks: ceil(log2 P) steps, n(P-1)/P bytes at the root"


@_formula("gather", "tree", _BINOMIAL)
@_formula("scatter", "tree", _BINOMIAL)
def _tree_root(case: Case) -> float:
    return case.steps(case.doublings) + case.messages(2 * case.doublings - 1) + case.sent(case.share)


@_formula("barrier", "direct", "one step, a header to each")
def _direct_barrier(case: Case) -> float:
    return case.steps(1) + case.messages(2 * (case.ranks - 2))


@_formula("all_reduce", "ring", "Patarasuk & Yuan, 2009: 2(P-1) steps, 2n(P-1)/P bytes", narrow=True, neighbours=True)
def _ring_all_reduce(case: Case) -> float:
    return case.steps(2 * (case.ranks - 1)) + case.sent(2 * case.share) + case.reduced(case.share)


@_formula("reduce_scatter", "ring", "Thakur et al., 2005, section 4.3: P-1 steps, n(P-1)/P bytes", neighbours=True)
def _ring_reduce_scatter(case: Case) -> float:
    return case.steps(case.ranks - 1) + case.sent(case.share) + case.reduced(case.share)


@_formula("all_gather", "ring", "Thakur et al., 2005, section 4.1: P-1 steps, n(P-1)/P bytes", neighbours=True)
def _ring_all_gather(case: Case) -> float:
    return case.steps(case.ranks - 1) + case.sent(case.share)


@_formula("all_reduce", "halving_doubling", "Rabenseifner, 2004: 2 log2 Q steps, 2n(Q-1)/Q bytes", narrow=True)
def _halving_doubling(case: Case) -> float:
    core = 2 ** int(math.log2(case.ranks))
    share = case.size * (core - 1) / core
    seconds = case.steps(2 * math.log2(core)) + case.restarted(2 * share) + case.reduced(share)
    if core < case.ranks:  # the ranks beyond a power of two send n bytes before, and receive n bytes after
        seconds += case.steps(2) + case.sent(2 * case.size) + case.reduced(case.size)
    return seconds


@_formula("reduce_scatter", "halving_doubling", "Thakur et al., 2005, section 4.3: recursive halving, log2 Q steps")
def _halving(case: Case) -> float:
    core = 2 ** int(math.log2(case.ranks))
    reduced = case.size * (core - 1) / core + (case.size if core < case.ranks else 0)  # what is handed over, all of it
    return _doubling(case) + case.reduced(reduced)


@_formula("all_gather", "halving_doubling", "Thakur et al., 2005, section 4.1: recursive doubling, log2 Q steps")
def _doubling(case: Case) -> float:
    core = 2 ** int(math.log2(case.ranks))
    steps = math.log2(core)
    seconds = case.steps(steps) + case.messages(case.ranks - 1 - steps) + case.restarted(case.size * (core - 1) / core)
    if core < case.ranks:  # n bytes in one direction, one block in the other
        seconds += case.steps(2) + case.sent(case.size)
    return seconds


def _segment_bytes(block: float) -> float:
    wanted = min(max(block / 64, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
    return block / max(1, math.ceil(block / wanted))


def _tree(case: Case, passes: int, reductions: int) -> float:
    """passes: traversals of the tree (up, down or both). reductions: 1 if a pass reduces, else 0."""
    if case.size <= BINOMIAL_BYTES:
        hops = passes * case.doublings
        return case.steps(hops) + case.sent(hops * case.size) + case.reduced(reductions * case.doublings * case.size)
    hops = passes * (int(math.log2(max(1, case.ranks - 1))) + 1)
    segment = _segment_bytes(case.size / 2)
    # An inner rank of a tree sends to two children, and each of the two trees has half of the tensor.
    return case.steps(hops) + case.sent(passes * case.size + hops * 2 * segment) + case.reduced(reductions * case.size)


_TREES = "Sanders, Speck & Traeff, 2009: two binary trees, pipelined; one binomial tree for small tensors"


_formula("all_reduce", "tree", _TREES, narrow=True)(partial(_tree, passes=2, reductions=1))
_formula("reduce", "tree", _TREES)(partial(_tree, passes=1, reductions=1))
_formula("broadcast", "tree", _TREES)(partial(_tree, passes=1, reductions=0))


@_formula("broadcast", "chain", "a pipeline of P-1 hops: (P-1) pieces fill it, then n bytes", neighbours=True)
def _chain(case: Case) -> float:
    segment = _segment_bytes(case.size)
    return case.steps(case.ranks - 1) + case.sent((case.ranks - 2) * segment + case.size)


@_formula("all_gather", "bruck", "Bruck et al., 1997: ceil(log2 P) steps, n(P-1)/P bytes")
def _bruck_all_gather(case: Case) -> float:
    return case.steps(case.doublings) + case.messages(case.ranks - 1 - case.doublings) + case.restarted(case.share)


@_formula("all_to_all", "bruck", "Bruck et al., 1997: ceil(log2 P) steps, about n/2 bytes each")
def _bruck_all_to_all(case: Case) -> float:
    blocks = case.doublings * case.ranks / 2
    return (
        case.steps(case.doublings)
        + case.messages(blocks - case.doublings)
        + case.restarted(case.doublings * case.size / 2)
    )


@_formula("barrier", "bruck", "Hensgen, Finkel & Manber, 1988: dissemination, ceil(log2 P) steps")
def _dissemination(case: Case) -> float:
    return case.steps(case.doublings)


@_formula("all_to_all", "pairwise", "P-1 exchanges with one partner each, two under way at a time")
def _pairwise(case: Case) -> float:
    steps = math.ceil((case.ranks - 1) / 2)
    return case.steps(steps) + case.messages(2 * (case.ranks - 2)) + case.restarted(case.share)


_SWITCH = "n bytes to the switch while n come back, a latency each way; its link takes what all P send"
_SWITCH_BLOCKS = _SWITCH + ", a rank's own block among them"


@_formula("all_reduce", "in_network", _SWITCH, narrow=True)
@_formula("reduce", "in_network", _SWITCH)
@_formula("broadcast", "in_network", _SWITCH)
@_formula("reduce_scatter", "in_network", _SWITCH_BLOCKS)
@_formula("all_gather", "in_network", _SWITCH_BLOCKS)
def _in_network(case: Case) -> float:
    return case.steps(2) + case.size / case.through_switch


@_formula(
    "all_reduce",
    "split",
    "one part through the switch and the rest in a ring, so that both end at once: S + H (1 - S/b) bytes per second, "
    "with S of the switch, H of the ring and b of the link",
    narrow=True,
)
def _split(case: Case) -> float:
    steps = case.steps(2 * (case.ranks - 1))
    return steps + case.size / split_rate(case) + case.reduced(case.share * (1 - switch_part(case)))


def ring_bytes_per_s(ranks: int, link_bytes_per_s: float) -> float:
    """Bytes of tensor a second that a ring reduces, without latencies."""
    return link_bytes_per_s * ranks / (2 * (ranks - 1))


def given_back_bytes_per_s(workers: int, link_bytes_per_s: float, added_bytes_per_s: float) -> float:
    """Bytes of tensor a second that a switch returns. Its link carries the contributions of all P workers.

    added_bytes_per_s: contributions that all of its cores add.
    """
    return min(link_bytes_per_s, added_bytes_per_s) / workers


def beside_a_worker_bytes_per_s(
    workers: int, worker_bytes_per_s: float, link_bytes_per_s: float, added_bytes_per_s: float
) -> float:
    """As `given_back_bytes_per_s`, for a switch on a worker's host, in a split.

    b is the rate of any other worker's link, c b the rate of this host's link. With S bytes per second through the
    switch, any other worker's link carries S each way, and S' of the ring: S + S' = b. This host's link carries
    (P-1) S, the contributions of the other workers, and the same S': (P-1) S + S' = c b. So S = (c - 1) b / (P - 2),
    which is 0 unless this link is faster than the others. With two workers, each sends as many bytes in a ring as
    through a switch, so the result is 0.
    """
    if workers < 3:
        return 0.0
    left = max(0.0, link_bytes_per_s - worker_bytes_per_s) / (workers - 2)
    return min(left, added_bytes_per_s / workers)


def split_rate(case: Case) -> float:
    """Bytes of tensor a second, with the switch and the ring busy."""
    through, link = case.through_switch, case.links.network.bytes_per_s
    return through + ring_bytes_per_s(case.ranks, link) * (1 - through / link)


def switch_part(case: Case) -> float:
    """The part of a split all_reduce that goes through the switch."""
    return case.through_switch / split_rate(case)


@_formula("barrier", "in_network", "a packet to the switch and one back")
def _in_network_barrier(case: Case) -> float:
    return case.steps(2)


def _through_memory(case: Case, copied: float, reduced: float = 0) -> float:
    """One synchronisation for a post, else one a chunk. copied: bytes that all ranks together read and write."""
    memory = case.links.memory
    chunks = 1 if case.size <= POST_BYTES else 2 + math.ceil(case.size / CHUNK_BYTES)
    return chunks * memory.latency_s + copied / memory.bytes_per_s + case.reduced(reduced)


_MEMORY = "through the memory that the ranks share, in chunks: one copy in and one out for each reader, or direct"


@_formula("all_reduce", "shared_memory", "flat: all read all; else 2n a rank through the memory they share, in chunks")
def _shared_memory(case: Case) -> float:
    flat = _through_memory(case, (case.ranks + 1) * case.ranks * case.size, case.ranks * case.size)
    return flat if case.size <= POST_BYTES else _through_memory(case, 2 * case.ranks * case.size)


@_formula("reduce", "shared_memory", _MEMORY)
def _shared_memory_reduce(case: Case) -> float:
    return _through_memory(case, (case.ranks + 2) * case.size)


@_formula("reduce_scatter", "shared_memory", _MEMORY)
@_formula("all_to_all", "shared_memory", _MEMORY)
def _shared_memory_exchange(case: Case) -> float:
    return _through_memory(case, 2 * case.ranks * case.size)


@_formula("broadcast", "shared_memory", _MEMORY)
@_formula("all_gather", "shared_memory", _MEMORY)
def _shared_memory_copy(case: Case) -> float:
    return _through_memory(case, (case.ranks + 1) * case.size)


@_formula("gather", "shared_memory", _MEMORY)
@_formula("scatter", "shared_memory", _MEMORY)
def _shared_memory_root(case: Case) -> float:
    return _through_memory(case, 2 * case.share)


@_formula("barrier", "shared_memory", "every rank posts and reads all posts")
def _shared_memory_barrier(case: Case) -> float:
    return case.links.memory.latency_s


# Algorithms that need a switch.
BY_SWITCH = ("in_network", "split")
# Algorithms for ranks that share a host, which one rank of each host cannot use.
NOT_BETWEEN = ("shared_memory", "hierarchical")
# Never chosen by cost, with the reason.
BY_NAME_ONLY = {
    ("all_to_all", "bruck"): "by name only: no rank can know that all blocks are equal",
    ("all_to_all", "hierarchical"): "by name only: ranks that give different sizes must all choose it",
}


def best_between(operation: str, case: Case) -> str:
    """The cheapest algorithm between hosts for a hierarchical `operation`."""
    hosts = case.topology.node_count
    excluded = {*NOT_BETWEEN, *(() if case.switch else BY_SWITCH), *(("split",) if hosts < 3 else ())}
    able = [name for name in algorithms_of(operation) if name not in excluded and (operation, name) not in BY_NAME_ONLY]
    narrow = [name for name in able if case.wire not in HALVES or FORMULAS[operation, name].narrow]
    return min(narrow, key=lambda name: FORMULAS[operation, name].seconds(_hosts(operation, case)))


def _hosts(operation: str, case: Case) -> Case:
    """The step between hosts: among one rank of each host; for all_to_all among all ranks, over shared links."""
    if operation != "all_to_all":
        return replace(case, topology=Topology.apart(case.topology.node_count))
    most = case.topology.most_on_a_node
    network = replace(case.links.network, bytes_per_s=case.links.network.bytes_per_s / most)
    size = case.size * (case.ranks - most) / (case.ranks - 1)
    return replace(case, size=size, topology=Topology.apart(case.ranks), links=replace(case.links, network=network))


# The stages of a hierarchical operation inside a host: (operation, part of the bytes by number of hosts). The bool says
# whether every rank also sorts blocks by host, which is one more copy.
_INTRA_HOST: dict[str, tuple[tuple[tuple[str, Callable[[int], float]], ...], bool]] = {
    "all_reduce": ((("all_reduce", lambda hosts: 1),), False),
    "reduce": ((("reduce", lambda hosts: 1),), False),
    "broadcast": ((("broadcast", lambda hosts: 1),), False),
    "all_gather": ((("gather", lambda hosts: 1 / hosts), ("broadcast", lambda hosts: 1)), True),
    "reduce_scatter": ((("reduce", lambda hosts: 1), ("scatter", lambda hosts: 1 / hosts)), True),
    "all_to_all": ((("all_to_all", lambda hosts: 1 / hosts),), False),
    "gather": ((("barrier", lambda hosts: 1), ("gather", lambda hosts: 1 / hosts)), False),
    "scatter": ((("scatter", lambda hosts: 1 / hosts),), False),
    "barrier": ((("barrier", lambda hosts: 1), ("barrier", lambda hosts: 1)), False),
}


def _hierarchical(operation: str) -> Callable[[Case], float]:
    stages, sorts = _INTRA_HOST[operation]

    def seconds(case: Case) -> float:
        on_host = Topology((0,) * case.topology.most_on_a_node)
        whole = 2 * case.size if case.wire in HALVES else case.size
        inside = sum(
            FORMULAS[kind, "shared_memory"].seconds(
                replace(case, size=whole * part(case.topology.node_count), topology=on_host)
            )
            for kind, part in stages
        )
        if sorts:
            inside += 2 * on_host.ranks * case.size / case.links.memory.bytes_per_s
        return inside + FORMULAS[operation, best_between(operation, case)].seconds(_hosts(operation, case))

    return seconds


for _operation in _INTRA_HOST:
    _formula(
        _operation,
        "hierarchical",
        "inside a host through memory; between hosts as one rank per host",
        narrow=_operation == "all_reduce",
    )(_hierarchical(_operation))


def algorithms_of(operation: str) -> list[str]:
    return [algorithm for kind, algorithm in FORMULAS if kind == operation]


def case_of(size: float, topology: Topology, links: Links, wire: str = "auto", switch: int = 0) -> Case:
    """Make a case; a 16-bit wire sends half the bytes of f32 tensors."""
    return Case(size / 2 if wire in HALVES else size, topology, links, switch, wire)


def predict(
    operation: str,
    algorithm: str,
    size: float,
    topology: Topology,
    links: Links,
    wire: str = "auto",
    *,
    switch: int = 0,
) -> float:
    """Predict the seconds of an operation by an algorithm; KeyError without a formula.

    switch: the number of switches that one rank of each host can use.
    The ranks of one host share its link: one at a time if only neighbours communicate, else, at worst, all at once.
    """
    formula = FORMULAS[operation, algorithm]
    sharing = 1 if formula.neighbours or topology.node_count == 1 else topology.most_on_a_node
    if sharing > 1 and algorithm != "hierarchical":
        network = replace(links.network, bytes_per_s=links.network.bytes_per_s / sharing)
        links = replace(links, network=network)
    case = case_of(size, topology, links, wire, switch)
    if wire not in INTEGERS or operation != "all_reduce":
        return formula.seconds(case)
    # First an all_reduce of the blocks' scales; and four passes over the tensor.
    scales = replace(case, size=max(4.0, size / BLOCK_ELEMENTS))
    values = replace(case, size=size * INTEGERS[wire])
    return formula.seconds(scales) + formula.seconds(values) + 4 * size / links.memory.bytes_per_s
