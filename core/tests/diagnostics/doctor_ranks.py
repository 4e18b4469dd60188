"""Synthetic ranks, as a status segment shows them."""

from __future__ import annotations

from dataclasses import replace

from netfold.diagnostics.status_segment import Counters, Rank

S = 1_000_000_000
NOW = 100 * S


def rank(number: int, **fields: object) -> Rank:
    """Rank `number` of 3, asleep, that has finished #4 two seconds ago."""
    plain = Rank(
        pid=1000 + number,
        process_state="S",
        command="python train.py",
        group=1,
        job="a",
        rank=number,
        size=3,
        joined_ns=NOW - 50 * S,
        sequence=0,
        operation="all_reduce",
        dtype="f32",
        reduce="sum",
        algorithm="ring",
        bytes=4000,
        queued_ns=0,
        waiting=0,
        awaited=(),
        done_sequence=4,
        done_operation="barrier",
        done_ns=NOW - 2 * S,
        failure="",
        site="",
        done_site="",
        with_switch=False,
        without_switch=False,
        transfer=None,
        counters=Counters(NOW, 4, 16000, 20000, 0, 0, 0, False, S, S // 2),
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def waiting(number: int, *awaited: int, **fields: object) -> Rank:
    return rank(number, **{"sequence": 5, "queued_ns": NOW - 2 * S, "waiting": 1, "awaited": awaited, **fields})
