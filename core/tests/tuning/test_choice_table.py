"""The choice table: immutable, the same for all, with a reason in every row."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator

import pytest

from netfold.tuning import (
    DEFAULT_LINKS,
    OPERATIONS,
    SUPPORTS,
    WIRES,
    ChoiceTable,
    Link,
    Row,
    Topology,
    build_table,
    candidates,
)
from netfold.tuning.cost import predict

SWITCH = "127.0.0.1:7171"
ALGORITHMS = ("auto", *SUPPORTS, "all_reduce=ring,broadcast=chain")


def tables() -> list[ChoiceTable]:
    """Every table that options can request."""
    found = []
    for ranks, switch, algorithm, wire in itertools.product((1, 2, 64), (None, SWITCH), ALGORITHMS, WIRES):
        try:
            found.append(build_table(ranks=ranks, switch=switch, algorithm=algorithm, wire=wire))
        except ValueError:
            continue
    return found


def test_a_table_survives_json() -> None:
    for table in tables():
        again = ChoiceTable.from_json(table.to_json())
        assert again == table
        assert again.hash16 == table.hash16


def test_every_operation_of_every_size_has_a_row_with_a_reason() -> None:
    for table in tables():
        for operation in OPERATIONS:
            for size in (0, 1, 4096, 4097, 1 << 40):
                row = table.choose(operation, size)
                assert row.operation == operation
                assert row.min_bytes <= size
                assert operation in SUPPORTS[row.algorithm], "there is a machine for it"
                assert len(row.reason.split()) >= 1 and row.reason.strip() == row.reason


def test_the_hash_differs_when_any_field_of_any_row_does() -> None:
    table = build_table(ranks=4, switch=None)
    hashes = {table.hash16}
    changes = 0
    for index, row in enumerate(table.rows):
        for field, value in (
            ("min_bytes", 12345),
            ("algorithm", "x"),
            ("wire", "f16"),
            ("reason", "another"),
            ("between", "y"),
        ):
            rows = (*table.rows[:index], dataclasses.replace(row, **{field: value}), *table.rows[index + 1 :])
            hashes.add(ChoiceTable(rows).hash16)
            changes += 1
    # 16 bits of a digest: two of these few dozen might coincide, not more.
    assert len(hashes) >= changes


def test_the_hash_is_the_same_in_every_process() -> None:
    """A constant: ranks compare it over the wire, so no salt and no order of a set may enter it."""
    table = ChoiceTable((Row("all_reduce", 0, "ring", "auto", "because"),))
    assert table.to_json() == json.dumps(
        [
            {
                "algorithm": "ring",
                "between": "local",
                "min_bytes": 0,
                "operation": "all_reduce",
                "reason": "because",
                "wire": "auto",
            }
        ]
    )
    assert table.hash16 == 0x1FEC


def test_a_table_cannot_be_changed() -> None:
    table = build_table(ranks=2, switch=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows[0].min_bytes = 1  # type: ignore[misc]


def test_small_messages_go_direct_and_large_ones_round_the_ring() -> None:
    table = build_table(ranks=4, switch=None)
    assert table.choose("all_reduce", 0).algorithm == "direct"
    assert table.choose("all_reduce", 1024).algorithm == "direct"
    assert table.choose("all_reduce", 16 << 20).algorithm == "ring"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 64])
def test_the_choice_is_nowhere_much_slower_than_the_fastest(ranks: int) -> None:
    """Rows start at powers of two where they save 2%; between them the difference is at most that of one doubling."""
    table = build_table(ranks=ranks, switch=None)
    for operation in OPERATIONS:
        for size in (0, 100, 3000, 40_000, 600_000, 10 << 20, 1 << 30):
            found = candidates(operation, size, Topology.apart(ranks))
            times = {each.algorithm: each.seconds for each in found if each.seconds is not None}
            cheapest = min(seconds for name, seconds in times.items() if (operation, name) != ("all_to_all", "bruck"))
            chosen = times[table.choose(operation, size).algorithm]
            assert chosen <= 1.35 * cheapest, (operation, size, found)


@pytest.mark.parametrize(
    "topology", [Topology.apart(4), Topology.apart(300), Topology((0, 0, 1)), Topology.even(64, 4)]
)
def test_an_operation_with_different_sizes_per_rank_has_one_row(topology: Topology) -> None:
    table = build_table(ranks=topology.ranks, switch=None, topology=topology)
    for operation in ("gather", "scatter", "barrier"):
        (row,) = [row for row in table.rows if row.operation == operation]
        assert row.min_bytes == 0


def test_gathers_of_many_ranks_go_up_a_tree_where_a_step_is_short() -> None:
    near = dataclasses.replace(DEFAULT_LINKS, network=Link(20e-6, 118e6))
    for operation in ("gather", "scatter"):
        assert build_table(ranks=4, switch=None).choose(operation, 0).algorithm == "direct"
        assert build_table(ranks=64, switch=None, links=near).choose(operation, 0).algorithm == "tree"


def test_every_reason_of_a_choice_by_cost_gives_the_predicted_times() -> None:
    row = build_table(ranks=4, switch=None).choose("all_reduce", 1 << 20)
    assert row.reason.startswith("predicted for ")
    for algorithm in ("ring", "halving_doubling", "tree", "direct"):
        assert f"{algorithm} " in row.reason
    assert "assumed: 60 us, 118 MB/s" in row.reason


def test_the_last_row_that_the_size_reaches_applies_in_any_order_of_rows() -> None:
    rows = [Row("all_reduce", size, f"from {size}", "auto", "test") for size in (0, 100, 10_000)]
    for order in itertools.permutations(rows):
        table = ChoiceTable(order)
        for size, expected in ((0, 0), (99, 0), (100, 100), (9_999, 100), (10_000, 10_000), (1 << 50, 10_000)):
            assert table.choose("all_reduce", size).algorithm == f"from {expected}"


# A switch with a port per worker.
PORTS = dataclasses.replace(DEFAULT_LINKS, switches=(DEFAULT_LINKS.network.bytes_per_s,))


@pytest.mark.parametrize("c", [0.25, 0.5, 1, 2, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_auto_chooses_the_fastest_for_the_switchs_link(ranks: int, c: float) -> None:
    rate = DEFAULT_LINKS.network.bytes_per_s
    links = dataclasses.replace(DEFAULT_LINKS, switches=(min(c, ranks) * rate / ranks,))
    table = build_table(ranks=ranks, switch=SWITCH, links=links)
    for size in (1, 1000, 64 << 10, 16 << 20, 1 << 30):
        row = table.choose("all_reduce", size)
        found = candidates("all_reduce", size, Topology.apart(ranks), links, switch=SWITCH)
        able = {each.algorithm: each.seconds for each in found if each.seconds is not None}
        assert able[row.algorithm] <= 1.35 * min(able.values()), size
    row = table.choose("all_reduce", 16 << 20)
    if c >= ranks:
        assert row.algorithm == "in_network"
    elif ranks > 2:
        assert row.algorithm == "split"
        assert f"NETFOLD_SWITCH={SWITCH} gives" in row.reason and f"c = {c:.2g} of a rank's link" in row.reason
    else:
        assert row.algorithm not in ("in_network", "split")  # each rank sends its whole tensor to the other


def test_an_unmeasured_switch_is_assumed_to_have_a_workers_link() -> None:
    row = build_table(ranks=8, switch=SWITCH).choose("all_reduce", 16 << 20)
    assert row.algorithm == "split" and "assumed, a link as a rank's for each: c = 1 of" in row.reason
    two = build_table(ranks=8, switch=f"{SWITCH},b:7171").choose("all_reduce", 16 << 20)
    assert "assumed, a link as a rank's for each: c = 2 of" in two.reason


@pytest.mark.parametrize("hosts", [8, 4])
def test_during_the_measurement_of_a_switch_all_sums_use_it(hosts: int) -> None:
    topology = Topology.even(8, hosts)
    table = build_table(ranks=8, switch=SWITCH, topology=topology, measuring=True)
    row = table.choose("all_reduce", 1)
    assert "in_network" in (row.algorithm, row.between) and row == table.choose("all_reduce", 1 << 30)
    assert table.workers(topology) == topology.leaders


SWITCH_OPERATIONS = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "barrier")


def test_a_switch_is_a_candidate_for_its_operations_and_chosen_where_faster() -> None:
    assert set(SUPPORTS["in_network"]) == set(SWITCH_OPERATIONS)
    for ranks, operation, size in itertools.product(
        (2, 4, 16, 64), SWITCH_OPERATIONS[1:], (0, 1000, 100_000, 16 << 20)
    ):
        found = candidates(operation, size, Topology.apart(ranks), PORTS, switch=SWITCH)
        able = {each.algorithm: each.seconds for each in found if each.seconds is not None}
        assert "in_network" in able
        row = build_table(ranks=ranks, switch=SWITCH, links=PORTS).choose(operation, size)
        assert able[row.algorithm] <= 1.35 * min(able.values()), (ranks, operation, size)  # type: ignore[operator]
    table = build_table(ranks=16, switch=SWITCH, links=PORTS)
    assert {operation: table.choose(operation, 16 << 20).algorithm for operation in SWITCH_OPERATIONS} == {
        "all_reduce": "in_network",
        "reduce": "in_network",
        "broadcast": "in_network",
        "reduce_scatter": "ring",  # which sends n(P-1)/P
        "all_gather": "ring",
        "barrier": "in_network",
    }
    assert "predicted for " in table.choose("broadcast", 16 << 20).reason


def test_one_rank_a_host_joins_the_switch_which_is_chosen_between_hosts_where_faster() -> None:
    hosts = Topology.even(64, 16)
    table = build_table(ranks=64, switch=SWITCH, topology=hosts, links=PORTS)
    assert table.workers(hosts) == hosts.leaders
    assert "in_network" not in {row.algorithm for row in table.rows}
    for operation in ("reduce", "broadcast", "barrier"):
        row = table.choose(operation, 16 << 20)
        assert (row.algorithm, row.between) == ("hierarchical", "in_network"), operation
        assert row.reason.startswith("in_network between hosts; predicted for ")


def test_if_every_rank_joins_the_switch_no_operation_uses_it_between_hosts() -> None:
    hosts = Topology.even(64, 16)
    for asked in ("in_network", "broadcast=in_network", "broadcast=in_network,reduce=hierarchical"):
        table = build_table(ranks=64, switch=SWITCH, topology=hosts, algorithm=asked)
        assert table.workers(hosts) == tuple(range(64))
        assert "in_network" not in {row.between for row in table.rows}, asked
        assert table.choose("all_reduce", 1).algorithm == "in_network"


def test_the_algorithm_between_hosts_can_be_named() -> None:
    hosts = Topology.even(64, 16)
    for asked in ("all_reduce=hierarchical:in_network", "hierarchical:in_network"):
        table = build_table(ranks=64, switch=SWITCH, topology=hosts, algorithm=asked)
        for size in (1, 1 << 30):
            row = table.choose("all_reduce", size)
            assert (row.algorithm, row.between) == ("hierarchical", "in_network")
            assert row.reason == f"NETFOLD_ALGORITHM={asked}"
        assert table.workers(hosts) == hosts.leaders
    # The fastest algorithm runs the operations that the named one lacks.
    table = build_table(ranks=64, switch=None, topology=hosts, algorithm="hierarchical:ring")
    assert table.choose("all_gather", 1).between == "ring"
    assert table.choose("broadcast", 1).between != "ring"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("ring:tree", "only hierarchical takes an algorithm between hosts: hierarchical:tree"),
        ("hierarchical:auto", "'auto' cannot run between hosts; there are direct, "),
        ("broadcast=hierarchical:ring", "'ring' cannot run between hosts; there are direct, in_network, tree, chain"),
        ("hierarchical:in_network", "NETFOLD_ALGORITHM=hierarchical:in_network needs an aggregator"),
    ],
)
def test_an_algorithm_that_cannot_run_between_hosts_is_refused(asked: str, sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        build_table(ranks=8, switch=None, topology=Topology.even(8, 4), algorithm=asked)
    assert sentence in str(refused.value)


def test_ranks_of_one_host_use_the_switch_only_for_sums() -> None:
    table = build_table(ranks=4, switch=SWITCH, topology=Topology.even(4, 1))
    assert {operation: table.choose(operation, 1 << 20).algorithm for operation in SWITCH_OPERATIONS} == {
        **dict.fromkeys(SWITCH_OPERATIONS, "shared_memory"),
        "all_reduce": "in_network",
    }


def test_a_ring_can_be_requested_although_there_is_a_switch() -> None:
    row = build_table(ranks=4, switch=SWITCH, algorithm="ring").choose("all_reduce", 1)
    assert (row.algorithm, row.reason) == ("ring", "NETFOLD_ALGORITHM=ring")


def test_a_wire_format_is_named_in_the_reason() -> None:
    for switch in (None, SWITCH):
        row = build_table(ranks=4, switch=switch, wire="bf16").choose("all_reduce", 1)
        assert row.wire == "bf16"
        assert "f32 tensors travel as bf16 (NETFOLD_WIRE_DTYPE)" in row.reason


def test_a_narrow_wire_leaves_the_switchs_other_operations_as_they_are() -> None:
    """Found by the sweep over wires: a broadcast by the switch was refused for a wire that it does not take."""
    for topology in (Topology.apart(4), Topology.even(4, 2)):
        table = build_table(ranks=4, switch=SWITCH, algorithm="in_network", wire="bf16", topology=topology)
        wires = {row.operation: row.wire for row in table.rows if row.algorithm == "in_network"}
        assert wires == {**dict.fromkeys(SWITCH_OPERATIONS, "auto"), "all_reduce": "bf16"}


def test_a_group_of_one_rank_uses_the_local_algorithm() -> None:
    for switch in (None, SWITCH):
        table = build_table(ranks=1, switch=switch)
        assert {row.algorithm for row in table.rows} == {"local"}


def test_a_requested_algorithm_is_chosen_where_possible_and_other_rows_have_the_reason() -> None:
    table = build_table(ranks=4, switch=None, algorithm="tree")
    for operation in ("all_reduce", "reduce", "broadcast"):
        row = table.choose(operation, 1)
        assert (row.algorithm, row.reason) == ("tree", "NETFOLD_ALGORITHM=tree")
    for operation in ("all_gather", "all_to_all", "barrier"):
        row = table.choose(operation, 1)
        assert row.algorithm == "direct"
        assert row.reason.endswith(f"; NETFOLD_ALGORITHM=tree does not do {operation}")


def test_pairs_name_an_algorithm_for_an_operation_each() -> None:
    table = build_table(ranks=4, switch=SWITCH, algorithm="all_reduce=ring, broadcast=chain,all_to_all=bruck")
    assert table.choose("all_reduce", 1).reason == "NETFOLD_ALGORITHM=all_reduce=ring"
    assert table.choose("broadcast", 1).algorithm == "chain"
    assert table.choose("all_to_all", 1).algorithm == "bruck"
    assert table.choose("all_gather", 1).reason.startswith("predicted for ")


def test_bruck_needs_equal_blocks_and_is_chosen_only_on_request() -> None:
    slow = dataclasses.replace(DEFAULT_LINKS, message_s=1e-3)  # where it would be fastest
    table = build_table(ranks=64, switch=None, links=slow)
    assert {row.algorithm for row in table.rows if row.operation == "all_to_all"} <= {"direct", "pairwise"}
    by_name = [each for each in candidates("all_to_all", 64, Topology.apart(64), slow) if each.algorithm == "bruck"]
    assert "by name only" in by_name[0].note


def test_operations_without_an_implementation_are_not_candidates() -> None:
    for each in candidates("all_reduce", 1 << 20, Topology.even(8, 2)):
        if "all_reduce" not in SUPPORTS[each.algorithm]:
            assert each.seconds is None and each.note == "not built in"


@pytest.fixture
def fresh_tables() -> Iterator[None]:
    build_table.cache_clear()
    yield
    build_table.cache_clear()


@pytest.mark.usefixtures("fresh_tables")
def test_shared_memory_needs_one_host_and_hierarchical_several(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {**SUPPORTS, "shared_memory": ("all_reduce",), "hierarchical": ("all_reduce",)}
    monkeypatch.setattr("netfold.tuning.choice_table.SUPPORTS", built)

    def chosen(topology: Topology) -> str:
        return build_table(ranks=8, switch=None, topology=topology).choose("all_reduce", 16 << 20).algorithm

    assert chosen(Topology.even(8, 1)) == "shared_memory"
    assert chosen(Topology.even(8, 2)) == "hierarchical"
    assert chosen(Topology.apart(8)) == "ring"
    with pytest.raises(ValueError, match="NETFOLD_ALGORITHM=shared_memory cannot be: the ranks are on 2 hosts"):
        build_table(ranks=8, switch=None, algorithm="shared_memory", topology=Topology.even(8, 2))


def test_a_narrow_wire_excludes_algorithms_without_it_and_halves_the_bytes() -> None:
    table = build_table(ranks=4, switch=None, wire="bf16")
    assert {row.wire for row in table.rows if row.operation == "all_reduce"} == {"bf16"}
    assert "direct" not in {row.algorithm for row in table.rows if row.operation == "all_reduce"}
    assert {row.wire for row in table.rows if row.operation != "all_reduce"} == {"auto"}
    apart = Topology.apart(4)
    half = predict("all_reduce", "ring", 1 << 20, apart, DEFAULT_LINKS, "bf16")
    assert half == predict("all_reduce", "ring", 1 << 19, apart, DEFAULT_LINKS)


def test_i8_counts_a_quarter_of_the_bytes_and_the_scales_of_its_blocks() -> None:
    apart, size = Topology.apart(4), 1 << 24
    whole, scales, quarter = (
        predict("all_reduce", "ring", each, apart, DEFAULT_LINKS) for each in (size, size // 128, size // 4)
    )
    passes = predict("all_reduce", "ring", size, apart, DEFAULT_LINKS, "i32") - whole - scales
    assert predict("all_reduce", "ring", size, apart, DEFAULT_LINKS, "i8") == pytest.approx(quarter + scales + passes)
    assert {row.wire for row in build_table(ranks=32, switch=None, wire="i8").rows} == {"i8", "auto"}


ALL = (
    "auto, direct, ring, in_network, shared_memory, halving_doubling, tree, hierarchical, bruck, pairwise, chain, split"
)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"algorithm": "nonsense"},
            f"NETFOLD_ALGORITHM='nonsense' is not one of {ALL}, nor operation=algorithm,...",
        ),
        (
            {"algorithm": "all_sum=ring"},
            f"NETFOLD_ALGORITHM='all_sum=ring': 'all_sum' is not an operation; there are {', '.join(OPERATIONS)}",
        ),
        (
            {"algorithm": "all_reduce=wheel"},
            f"NETFOLD_ALGORITHM='all_reduce=wheel': 'wheel' is not one of {ALL}",
        ),
        (
            {"algorithm": "broadcast=ring"},
            "NETFOLD_ALGORITHM='broadcast=ring': there is no broadcast by ring; there are direct, in_network, "
            "shared_memory, tree, hierarchical, chain",
        ),
        ({"wire": "i7"}, "NETFOLD_WIRE_DTYPE='i7' is not one of auto, f32, bf16, f16, i32, i8"),
        (
            {"algorithm": "in_network"},
            "NETFOLD_ALGORITHM=in_network needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port",
        ),
        (
            {"algorithm": "direct", "wire": "bf16"},
            "NETFOLD_ALGORITHM=direct sends tensors as they are; NETFOLD_WIRE_DTYPE=bf16 needs ring or "
            "halving_doubling or "
            "tree or in_network or split or hierarchical",
        ),
    ],
)
def test_an_impossible_algorithm_is_refused_in_a_sentence(asked: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        build_table(ranks=4, switch=None, **asked)
    assert str(refused.value) == sentence


def test_an_unknown_operation_is_refused_with_the_known_operations() -> None:
    with pytest.raises(KeyError, match="no operation 'all_scatter'; there are all_reduce, broadcast"):
        build_table(ranks=4, switch=None).choose("all_scatter", 1)
