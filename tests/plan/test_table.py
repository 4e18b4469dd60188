"""The choice table: immutable, the same for all, with a reason in every row."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from netfold.plan import ALGORITHMS, WIRES, ChoiceTable, Row, build_table
from netfold.plan.table import DIRECT_MAX_BYTES, OPERATIONS

SWITCH = "127.0.0.1:7171"


def tables() -> list[ChoiceTable]:
    """Every table that can be asked for."""
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
            for size in (0, 1, DIRECT_MAX_BYTES, DIRECT_MAX_BYTES + 1, 1 << 40):
                row = table.choose(operation, size)
                assert row.operation == operation
                assert row.min_bytes <= size
                assert row.algorithm in ("local", "direct", "ring", "in_network")
                assert len(row.reason.split()) >= 1 and row.reason.strip() == row.reason


def test_the_hash_differs_when_any_field_of_any_row_does() -> None:
    table = build_table(ranks=4, switch=None)
    hashes = {table.hash16}
    changes = 0
    for index, row in enumerate(table.rows):
        for field, value in (("min_bytes", 12345), ("algorithm", "x"), ("wire", "f16"), ("reason", "another")):
            rows = (*table.rows[:index], dataclasses.replace(row, **{field: value}), *table.rows[index + 1 :])
            hashes.add(ChoiceTable(rows).hash16)
            changes += 1
    # 16 bits of a digest: two of these few dozen might coincide, not more.
    assert len(hashes) >= changes


def test_the_hash_is_the_same_in_every_process() -> None:
    """A constant: ranks compare it over the wire, so no salt and no order of a set may enter it."""
    table = ChoiceTable((Row("all_reduce", 0, "ring", "auto", "because"),))
    assert table.to_json() == json.dumps(
        [{"algorithm": "ring", "min_bytes": 0, "operation": "all_reduce", "reason": "because", "wire": "auto"}]
    )
    assert table.hash16 == 0xC508


def test_a_table_cannot_be_changed() -> None:
    table = build_table(ranks=2, switch=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows[0].min_bytes = 1  # type: ignore[misc]


def test_small_messages_go_direct_and_large_ones_round_the_ring() -> None:
    table = build_table(ranks=4, switch=None)
    assert table.choose("all_reduce", 0).algorithm == "direct"
    assert table.choose("all_reduce", DIRECT_MAX_BYTES).algorithm == "direct"
    assert table.choose("all_reduce", DIRECT_MAX_BYTES + 1).algorithm == "ring"


def test_the_row_in_force_is_the_last_one_reached_whatever_the_order_of_rows() -> None:
    rows = [Row("all_reduce", size, f"from {size}", "auto", "test") for size in (0, 100, 10_000)]
    for order in itertools.permutations(rows):
        table = ChoiceTable(order)
        for size, expected in ((0, 0), (99, 0), (100, 100), (9_999, 100), (10_000, 10_000), (1 << 50, 10_000)):
            assert table.choose("all_reduce", size).algorithm == f"from {expected}"


def test_a_switch_makes_all_reduce_in_network_and_the_reason_names_it() -> None:
    table = build_table(ranks=4, switch=SWITCH)
    for size in (1, 1 << 30):
        row = table.choose("all_reduce", size)
        assert row.algorithm == "in_network"
        assert f"NETFOLD_SWITCH={SWITCH}" in row.reason


def test_the_ring_may_be_asked_for_although_there_is_a_switch() -> None:
    row = build_table(ranks=4, switch=SWITCH, algorithm="ring").choose("all_reduce", 1)
    assert (row.algorithm, row.reason) == ("ring", "NETFOLD_ALGORITHM=ring")


def test_a_wire_format_is_named_in_the_reason() -> None:
    for switch in (None, SWITCH):
        row = build_table(ranks=4, switch=switch, wire="bf16").choose("all_reduce", 1)
        assert row.wire == "bf16"
        assert "f32 tensors travel as bf16 (NETFOLD_WIRE)" in row.reason


def test_a_group_of_one_needs_nobody() -> None:
    for switch in (None, SWITCH):
        table = build_table(ranks=1, switch=switch)
        assert {row.algorithm for row in table.rows} == {"local"}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"algorithm": "nonsense"},
            "NETFOLD_ALGORITHM='nonsense' is not one of auto, direct, ring, in_network, shared",
        ),
        ({"wire": "i7"}, "NETFOLD_WIRE='i7' is not one of auto, f32, bf16, f16"),
        (
            {"algorithm": "in_network"},
            "NETFOLD_ALGORITHM=in_network needs an aggregator: start `netfold switch` and set NETFOLD_SWITCH=host:port",
        ),
        (
            {"algorithm": "direct", "wire": "bf16"},
            "NETFOLD_ALGORITHM=direct sends tensors as they are; NETFOLD_WIRE=bf16 needs ring or in_network",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(asked: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        build_table(ranks=4, switch=None, **asked)
    assert str(refused.value) == sentence


def test_an_operation_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(KeyError, match="no operation 'all_scatter'; there are all_reduce, broadcast"):
        build_table(ranks=4, switch=None).choose("all_scatter", 1)
