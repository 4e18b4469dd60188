"""Rank by rank: who waited for whom, and how far clocks were apart."""

from __future__ import annotations

from collections.abc import Sequence

from netfold.profile.findings import ClockOffset, Straggler
from netfold.profile.page import units
from netfold.profile.page.table import Column, of_largest, table

# Of the longest waits; a job of thousands of ranks would be most of the page otherwise.
MOST_ROWS = 256


def straggler_table(each: Sequence[Straggler]) -> str:
    if not each:
        return "<p>Not known: it takes the records of two ranks of one group, and operations that need them all.</p>"
    by_wait = sorted(each, key=lambda late: -late.waited_for_s)[:MOST_ROWS]
    columns: tuple[Column[Straggler], ...] = (
        Column("rank", lambda late: late.rank, units.count),
        Column("host", lambda late: late.host),
        Column(
            "others waited for it",
            lambda late: late.waited_for_s,
            units.seconds,
            "what the others spent waiting for this rank where it was the last to begin, the mean over them",
            bar=of_largest(each, lambda late: late.waited_for_s),
        ),
        Column(
            "it waited",
            lambda late: late.waited_s,
            units.seconds,
            "what this rank spent waiting for others",
            bar=of_largest(each, lambda late: late.waited_s),
        ),
        Column("last to begin", lambda late: late.last, units.count, "in how many of the operations"),
        Column("of operations", lambda late: late.operations, units.count, "that no rank can finish before all began"),
    )
    caption = "Operations that no rank can finish before all have begun; first, whom the others waited for longest."
    caption += _first(len(by_wait), len(each))
    return table("stragglers", caption, columns, by_wait, heads=2)


def clock_table(each: Sequence[ClockOffset]) -> str:
    if not each:
        return "<p>Not known: nothing was recorded by which the ranks' clocks could be compared.</p>"
    columns: tuple[Column[ClockOffset], ...] = (
        Column("rank", lambda clock: clock.rank, units.count),
        Column(
            "offset",
            lambda clock: clock.offset_ns,
            lambda offset_ns: units.seconds(offset_ns * 1e-9),
            "added to this rank's times to have the first rank's",
        ),
        Column(
            "at most off by",
            lambda clock: clock.bound_ns,
            lambda bound_ns: units.seconds(bound_ns * 1e-9),
            "how far that may be wrong",
            "no two operations bound it from both sides",
        ),
    )
    caption = "Each rank's clock against the first rank's." + _first(len(each[:MOST_ROWS]), len(each))
    return table("clocks", caption, columns, each[:MOST_ROWS])


def _first(shown: int, ranks: int) -> str:
    if shown == ranks:
        return ""
    return f" The first {shown} of {units.count(ranks)} ranks; the findings that this file carries have all."
