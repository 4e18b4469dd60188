"""Every host algorithm against its stated order of summation and its stated bytes on the wire, ranks 1 to 8.

Ranks are threads. A group each for the three sets of algorithms below, in which every call is made.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_threads, values
from reductions import by_halving, by_halving_scatter, by_rank, by_ring, by_ring_scatter, by_tree, contribution

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.communicator.group import region
from netfold.profile import records_of

pytestmark = pytest.mark.native

SETS = (
    "all_reduce=ring,reduce_scatter=ring,all_gather=ring,broadcast=chain,all_to_all=pairwise,reduce=tree",
    "all_reduce=halving_doubling,broadcast=tree,all_gather=bruck,all_to_all=bruck,reduce=direct",
    "all_reduce=tree,broadcast=direct,all_gather=direct,all_to_all=direct,reduce_scatter=direct",
    "all_gather=halving_doubling,reduce_scatter=halving_doubling,barrier=bruck,gather=tree,scatter=tree",
)
REFERENCES: dict[str, Callable[..., Any]] = {
    "ring": by_ring,
    "halving_doubling": by_halving,
    "tree": by_tree,
    "direct": by_rank,
}
SCATTER_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ring": by_ring_scatter,
    "halving_doubling": by_halving_scatter,
    "direct": lambda op, parts, owner: by_rank(op, parts),
}
HEADER, WORD = 40, 8
LARGE = 60_013
# op, dtype, and a size where one size is enough.
SAMPLE = (
    ("max", "int64", 353),
    ("avg", "float16", 1009),
    ("product", "float64", 4099),
    ("bxor", "uint8", 70_001),
    ("avg", "float32", 4099),
)


def sizes(ranks: int) -> list[int]:
    return sorted({0, 1, ranks - 1, ranks, 353, 10_007, LARGE})


def join(rank: int, size: int, folder: str, algorithm: str, wire: str = "auto") -> Communicator:
    options = Options(algorithm=algorithm, wire_dtype=wire, probe="off", transport="tcp")
    return Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20)


def every_call(rank: int, size: int, folder: str) -> list[tuple[str, int, int, int]]:
    """(operation by algorithm, elements, wire bytes, sequence) of every f32 call of this rank."""
    sent = []
    for index, text in enumerate(SETS):
        chosen = dict(pair.split("=") for pair in text.split(","))
        with join(rank, size, f"{folder}/{index}", text) as group:
            for operation, algorithm in chosen.items():
                check = globals()[f"check_{operation}"]
                for count in sizes(size):
                    check(group, algorithm, "sum", "float32", count)
                    record = group.group.events()[-1]
                    sent.append((f"{operation} by {algorithm}", count, int(record["wire_bytes"]), rank))
                for op, dtype, count in SAMPLE if operation in ("all_reduce", "reduce", "reduce_scatter") else ():
                    check(group, algorithm, op, dtype, count)
            group.barrier()
    return sent


def check_all_reduce(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    parts = [contribution(rank, count, dtype) for rank in range(group.size)]
    mine = parts[group.rank].copy()
    group.all_reduce(mine, op=op)
    np.testing.assert_array_equal(
        mine, REFERENCES[algorithm](op, parts), strict=True, err_msg=f"{algorithm} {op} {count}"
    )


def check_reduce(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    for root in {0, group.size // 2, group.size - 1}:
        parts = [contribution(rank, count, dtype) for rank in range(group.size)]
        mine = parts[group.rank].copy()
        group.reduce(mine, root, op=op)
        expected = parts[group.rank]
        if group.rank == root:
            expected = by_tree(op, parts, root=root) if algorithm == "tree" else by_rank(op, parts)
        np.testing.assert_array_equal(mine, expected, strict=True, err_msg=f"{algorithm} {op} {count} root {root}")


def check_broadcast(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    for root in {0, group.size // 2, group.size - 1}:
        mine = contribution(group.rank, count, dtype)
        group.broadcast(mine, root)
        np.testing.assert_array_equal(mine, contribution(root, count, dtype), err_msg=f"{algorithm} {count} {root}")


def check_all_gather(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    for uneven in (5, 0):  # the last call is counted
        counts = [count + uneven * rank for rank in range(group.size)]
        into = [np.zeros(each, dtype) for each in counts]
        group.all_gather(contribution(group.rank, counts[group.rank], dtype), into)
        for rank, got in enumerate(into):
            np.testing.assert_array_equal(got, contribution(rank, counts[rank], dtype), err_msg=f"{algorithm} {count}")


def check_reduce_scatter(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    size = group.size
    for uneven in (5, 0):
        counts = [count + uneven * rank for rank in range(size)]
        buffers = [contribution(group.rank * size + rank, counts[rank], dtype) for rank in range(size)]
        before = [buffer.copy() for buffer in buffers]
        parts = [contribution(rank * size + group.rank, counts[group.rank], dtype) for rank in range(size)]
        into = np.empty(counts[group.rank], dtype)
        group.reduce_scatter(buffers, into, op=op)
        expected = SCATTER_REDUCTIONS[algorithm](op, parts, group.rank)
        np.testing.assert_array_equal(into, expected, strict=True, err_msg=f"{algorithm} {op} {count}")
        for was, buffer in zip(before, buffers, strict=True):
            np.testing.assert_array_equal(buffer, was)


def check_all_to_all(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    size = group.size
    for uneven in (0,) if algorithm == "bruck" else (3, 0):
        into = [np.zeros(count + uneven * (rank + 2 * group.rank), dtype) for rank in range(size)]
        given = [
            contribution(group.rank * size + rank, count + uneven * (group.rank + 2 * rank), dtype)
            for rank in range(size)
        ]
        group.all_to_all(given, into)
        for rank, got in enumerate(into):
            expected = contribution(rank * size + group.rank, len(got), dtype)
            np.testing.assert_array_equal(got, expected, err_msg=f"{algorithm} {count}")


def check_gather(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    for root in {group.size // 2, group.size - 1, 0}:
        for uneven in (3, 0):
            counts = [count + uneven * ((rank * 5) % 7) for rank in range(group.size)]
            into = [np.zeros(each, dtype) for each in counts] if group.rank == root else None
            group.gather(contribution(group.rank, counts[group.rank], dtype), into, root)
            for rank, got in enumerate(into or ()):
                np.testing.assert_array_equal(got, contribution(rank, counts[rank], dtype), err_msg=f"{count} {root}")


def check_scatter(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    for root in {group.size // 2, group.size - 1, 0}:
        for uneven in (3, 0):
            counts = [count + uneven * ((rank * 5) % 7) for rank in range(group.size)]
            given = [contribution(rank, each, dtype) for rank, each in enumerate(counts)]
            into = np.zeros(counts[group.rank], dtype)
            group.scatter(given if group.rank == root else None, into, root)
            np.testing.assert_array_equal(into, contribution(group.rank, len(into), dtype), err_msg=f"{count} {root}")


def check_barrier(group: Communicator, algorithm: str, op: str, dtype: str, count: int) -> None:
    group.barrier()


def pieces_of(block_bytes: int, least: int = 4) -> int:
    wanted = min(max(block_bytes // least, 16 << 10), 256 << 10)
    return max(1, -(-block_bytes // wanted))


def cut(count: int, parts: int) -> list[int]:
    return [count // parts + (index < count % parts) for index in range(parts)]


def stream(blocks: list[int], least: int = 4, pieces: int | None = None) -> int:
    """Bytes of one stream of f32 blocks: a header, a word for each chunk that is not empty, the values."""
    words = sum(sum(piece > 0 for piece in cut(block, pieces or pieces_of(4 * block, least))) for block in blocks)
    return HEADER + WORD * words + 4 * sum(blocks)


def total_bytes(name: str, count: int, ranks: int) -> int:
    """Bytes that all ranks together send in one call of so many f32 (of a block, where there are blocks)."""
    operation, _, algorithm = name.partition(" by ")
    others = ranks - 1
    if ranks == 1 or (count == 0 and operation == "all_reduce" and algorithm != "direct"):
        return 0
    if algorithm in ("direct", "pairwise"):
        messages = ranks * others if operation not in ("broadcast", "reduce") else others
        return messages * (HEADER + 4 * count)
    if operation in ("gather", "scatter"):
        spans = [min(number & -number, ranks - number) for number in range(1, ranks)]
        return sum(2 * HEADER + span * (WORD + 4 * count) for span in spans)
    if algorithm == "ring" and operation == "all_reduce":
        blocks = cut(count, ranks)
        pieces = pieces_of(4 * blocks[0])
        twice = [blocks[(rank - step) % ranks] for rank in range(ranks) for step in range(2 * others)]
        return ranks * HEADER + stream(twice, pieces=pieces) - HEADER
    if algorithm == "ring":
        return ranks * stream([count] * others)
    if algorithm == "chain":
        return others * stream([count], least=64)
    if name == "all_gather by bruck":
        return ranks * (math.ceil(math.log2(ranks)) * HEADER + others * (4 * count + (WORD if count else 0)))
    if name == "all_to_all by bruck":
        hops = sum(distance.bit_count() for distance in range(ranks))
        return ranks * (math.ceil(math.log2(ranks)) * HEADER + hops * (4 * count + (WORD if count else 0)))
    if algorithm == "tree":
        ways = 2 if operation == "all_reduce" else 1
        if 4 * count <= 16 << 10:
            return ways * others * stream([count], pieces=1)
        half = cut(count, 2)
        pieces = pieces_of(4 * half[0], 64)
        values = ways * others * (2 * WORD * pieces + 4 * count)
        return values + HEADER * tree_directions(ranks, ways)
    if operation == "barrier":
        return ranks * math.ceil(math.log2(ranks)) * (HEADER + WORD + 1)
    if algorithm == "halving_doubling" and operation != "all_reduce":
        return halves_bytes(operation, count, ranks)
    if algorithm == "halving_doubling":
        return halving_bytes(count, ranks)
    raise AssertionError(f"no formula for {name}")


def halving_bytes(count: int, ranks: int) -> int:
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    total = 2 * extra * stream([count])
    for number in range(core):
        total += HEADER * (core.bit_length() - 1)
        held = count
        for bit in (1 << power for power in range(core.bit_length() - 1)):
            low, high = cut(held, 2)
            kept, given = (low, high) if number & bit == 0 else (high, low)
            # Its share of the reduce_scatter phase, and its finished part in the all_gather phase.
            total += stream([given]) + stream([kept]) - 2 * HEADER
            held = kept
    return total


def halves_bytes(operation: str, count: int, ranks: int) -> int:
    core = 1 << (ranks.bit_length() - 1)
    extra = ranks - core
    members = [2 if number < extra else 1 for number in range(core)]
    sent = extra * (1 + (ranks if operation == "reduce_scatter" else ranks - 1))  # blocks of pairs, in both directions
    for bit in (1 << power for power in range(core.bit_length() - 1)):
        for number in range(core):
            first = number & ~(bit - 1)
            first ^= bit if operation == "reduce_scatter" else 0
            sent += sum(members[first : first + bit])
    streams = core * (core.bit_length() - 1) + 2 * extra
    return streams * HEADER + sent * (stream([count]) - HEADER)


def tree_directions(ranks: int, ways: int) -> int:
    """Directed connections of the two trees of a broadcast or an all_reduce: one header each."""

    def parent(number: int) -> int:
        low = number & -number
        above = (number - low) | 2 * low
        return above if above < ranks else number - low

    def other(number: int) -> int:
        if ranks % 2:
            above = parent(ranks - number)
            return ranks - above if above else 0
        above = parent((number - 2) % (ranks - 1) + 1)
        return above % (ranks - 1) + 1 if above else 0

    down = {(tree(number), number) for tree in (parent, other) for number in range(1, ranks)}
    return len(down if ways == 1 else down | {(b, a) for a, b in down})


@pytest.mark.parametrize("size", range(1, 9))
def test_every_algorithm_gives_its_documented_bits_and_bytes(size: int) -> None:
    totals: dict[tuple[str, int], int] = {}
    for found in values(run_threads(every_call, size, timeout_s=100)):
        for name, count, sent, _ in found:
            totals[name, count] = totals.get((name, count), 0) + sent
    for (name, count), sent in totals.items():
        assert sent == total_bytes(name, count, size), f"{name}, {count} f32, {size} ranks"


def uneven_gather(rank: int, size: int, folder: str, operation: str) -> str:
    """The root, rank 0, expects 2 elements of rank 3 and 1 of rank 2; they have 1 and 2."""
    with join(rank, size, folder, f"{operation}=tree") as group:
        own = np.ones((1, 1, 2, 1, 1)[rank])
        all_of_them = [np.ones(count) for count in (1, 1, 1, 2, 1)] if rank == 0 else None
        try:
            if operation == "gather":
                group.gather(own, all_of_them, 0)
            else:
                group.scatter(all_of_them, own, 0)
            group.barrier()
        except Exception as error:
            return f"{type(error).__name__} {getattr(error, 'rank', None)}: {error}"
        return ""


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_a_tree_that_forwards_blocks_detects_different_sizes_at_its_ends(operation: str) -> None:
    found = values(run_threads(uneven_gather, 5, operation))
    assert any(said.startswith("Mismatch") and "16 bytes" in said and "8 bytes" in said for said in found), found
    assert all(said.startswith(("Mismatch", "PeerLost")) for said in found), found


def held_back(rank: int, size: int, folder: str, arrived: list[int]) -> None:
    for algorithm in ("direct", "bruck"):
        with join(rank, size, f"{folder}/{algorithm}", f"barrier={algorithm}") as group:
            for turn in range(size):
                if rank == turn:
                    time.sleep(0.02)
                arrived[rank] += 1
                came = arrived[rank]
                group.barrier()
                assert min(arrived) >= came, f"{algorithm}: rank {rank} went on before all of {arrived} were there"


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_no_rank_leaves_a_barrier_before_the_last_has_entered(size: int) -> None:
    values(run_threads(held_back, size, [0] * size))


def narrow(rank: int, size: int, folder: str) -> None:
    for algorithm in ("halving_doubling", "tree"):
        for wire in ("bf16", "f16"):
            with join(rank, size, f"{folder}/{algorithm}{wire}", f"all_reduce={algorithm}", wire) as group:
                for count in (1, 353, 40_009):
                    parts = [contribution(other, count, "float32") for other in range(size)]
                    mine = parts[rank].copy()
                    group.all_reduce(mine)
                    np.testing.assert_array_equal(mine, REFERENCES[algorithm]("sum", parts, wire), strict=True)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_narrower_wire_rounds_at_documented_places_and_all_ranks_get_the_same_bits(size: int) -> None:
    values(run_threads(narrow, size))


def uneven_bruck(rank: int, size: int, folder: str) -> str:
    with join(rank, size, folder, "all_to_all=bruck") as group:
        buffers = [np.ones(1 + (rank + other) % 2, np.uint8) for other in range(size)]
        with pytest.raises(ValueError) as refused:
            group.all_to_all(buffers, [buffer.copy() for buffer in buffers])
        group.barrier()
        return str(refused.value)


def test_bruck_refuses_blocks_that_differ_in_a_sentence() -> None:
    said = "all_to_all: bruck needs blocks of equal size, and these differ; pairwise and direct take any sizes"
    assert values(run_threads(uneven_bruck, 2)) == [said] * 2


def native_groups(tables: list[list[tuple[int, int, int, int]]], buffer_bytes: int | None = None) -> list[Any]:
    """A group a rank, each with its own table (operation, from bytes, algorithm, wire) of the same hash."""
    connections: list[list[tuple[int, int, int, int, None]]] = [[] for _ in tables]
    for low, high in itertools.combinations(range(len(tables)), 2):
        ends = socket.socketpair()
        for end in ends if buffer_bytes is not None else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        for rank, peer, end in zip((low, high), (high, low), ends, strict=True):
            connections[rank].append((0, peer, 0, end.detach(), None))
    return [
        engine.add_group(
            rank=rank,
            nodes=list(range(len(tables))),
            lanes=2,
            rails=1,
            connections=connections[rank],
            resumable=False,
            id=900 + rank,
            job="",
            spin_us=0,
            spins_for_sockets=False,
            yields=False,
            table=[(*row, engine.ALGORITHMS["local"]) for row in table],
            table_hash=7,
            fabric=None,
            rma_min_bytes=0,
        )
        for rank, table in enumerate(tables)
    ]


def submit_all(groups: list[Any], operation: str, given: Any, into: Any) -> None:
    """Make one call of u8 arrays on every rank and wait; given[rank] and into[rank] are lists of arrays."""
    submitted = [
        group.submit(
            engine.KINDS[operation],
            engine.DTYPES["u8"],
            engine.REDUCE_OPS["max"],
            False,
            0,
            *([region(one) for one in arrays[rank]] for arrays in (given, into)),
            (given, into),
            10**10,
            False,
        )
        for rank, group in enumerate(groups)
    ]
    for one in submitted:
        assert one.wait(10**10) and one.failure is None, one.failure


def test_ranks_may_pace_an_exchange_differently() -> None:
    """Sizes of uneven blocks differ between ranks, and the choice goes by size: direct and pairwise must mix."""
    size = 4
    groups = native_groups(
        [
            [(engine.KINDS["all_to_all"], 0, engine.ALGORITHMS[algorithm], -1)]
            for algorithm in ("direct", "pairwise", "pairwise", "direct")
        ]
    )
    given = [[contribution(a * size + b, 60_000 * (a + b), "uint8") for b in range(size)] for a in range(size)]
    into = [[np.zeros(60_000 * (a + b), np.uint8) for b in range(size)] for a in range(size)]
    submit_all(groups, "all_to_all", given, into)
    for group in groups:
        engine.remove_group(group)
    for a, b in itertools.product(range(size), repeat=2):
        np.testing.assert_array_equal(into[a][b], given[b][a])


def test_ranks_choose_alike_where_their_own_blocks_differ_in_size() -> None:
    """The whole tensor's size decides: blocks of 10 and of 200 000 bytes would choose different rows."""
    size, counts = 3, (10, 200_000, 20)
    kinds = [engine.KINDS[name] for name in ("all_gather", "reduce_scatter")]
    starts = ((0, "direct"), (100_000, "ring"))
    table = [(kind, start, engine.ALGORITHMS[algorithm], -1) for kind in kinds for start, algorithm in starts]
    groups = native_groups([table] * size)
    blocks = [contribution(rank, counts[rank], "uint8") for rank in range(size)]
    gathered = [[np.zeros(count, np.uint8) for count in counts] for _ in range(size)]
    submit_all(groups, "all_gather", [[block] for block in blocks], gathered)
    reduced = [[np.zeros(count, np.uint8)] for count in counts]
    submit_all(groups, "reduce_scatter", gathered, reduced)
    for group in groups:
        records = records_of(group.events()[1])
        assert records["algorithm"].tolist() == [engine.ALGORITHMS["ring"]] * 2
        engine.remove_group(group)
    for rank in range(size):
        np.testing.assert_array_equal(reduced[rank][0], blocks[rank])


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_no_plan_deadlocks_where_a_socket_holds_less_than_a_chunk(size: int) -> None:
    kinds = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    cases = [
        (kind, algorithm)
        for algorithm, able in engine.SUPPORTS.items()
        for kind in kinds
        if kind in able and algorithm not in ("local", "in_network", "split", "shared_memory", "hierarchical")
    ]
    for kind, algorithm in cases:
        groups = native_groups([[(engine.KINDS[kind], 0, engine.ALGORITHMS[algorithm], -1)]] * size, buffer_bytes=4096)
        blocks = [[contribution(a * size + b, 40_009, "uint8") for b in range(size)] for a in range(size)]
        given = {"all_gather": [row[:1] for row in blocks], "reduce_scatter": blocks, "all_to_all": blocks}
        given |= {"gather": given["all_gather"], "scatter": [blocks[0], *([] for _ in range(size - 1))]}
        many = [kind in ("all_gather", "all_to_all") or (kind == "gather" and rank == 0) for rank in range(size)]
        counts = [size if many[rank] else kind != "gather" for rank in range(size)]
        into = [[np.zeros(40_009, np.uint8) for _ in range(count)] for count in counts]
        if kind not in given:
            into = [[row[0].copy()] for row in blocks]
        submit_all(groups, kind, given.get(kind, [[]] * size), into)
        for group in groups:
            engine.remove_group(group)
        for rank in range(size):
            expected = {
                "all_reduce": [np.max([row[0] for row in blocks], axis=0)],
                "reduce": [np.max([row[0] for row in blocks], axis=0) if rank == 0 else blocks[rank][0]],
                "broadcast": [blocks[0][0]],
                "all_gather": [row[0] for row in blocks],
                "reduce_scatter": [np.max([row[rank] for row in blocks], axis=0)],
                "all_to_all": [row[rank] for row in blocks],
                "gather": [row[0] for row in blocks] if rank == 0 else [],
                "scatter": [blocks[0][rank]],
            }[kind]
            for got, wanted in zip(into[rank], expected, strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=f"{kind} by {algorithm}, rank {rank}")
