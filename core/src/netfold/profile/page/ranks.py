"""Tables with one row for each rank: stragglers, and offsets of clocks."""

from __future__ import annotations

from collections.abc import Sequence

from netfold import units
from netfold.page.table import Column, table
from netfold.profile.findings import ClockOffset, Straggler

# A job of thousands of ranks would otherwise fill most of the page.
MOST_ROWS = 256


def straggler_table(each: Sequence[Straggler]) -> str:
    """The longest waits first."""
    if not each:
        return (
            "<p>Not known: it takes the records of two ranks of one group, and operations that need all ranks of the "
            "group.</p>"
        )
    by_wait = sorted(each, key=lambda late: -late.delay_s)[:MOST_ROWS]
    columns: tuple[Column[Straggler], ...] = (
        Column("rank", "rank", units.count),
        Column("host", "host"),
        Column(
            "waits for it",
            "waited_for_s",
            units.seconds,
            "time that other ranks waited where this rank was the last to begin, the mean over them",
            bar=True,
        ),
        Column(
            "its host's waits for it",
            "host_waited_s",
            units.seconds,
            "the same among the ranks of its host, whose clock is one: no error hides these waits",
            bar=True,
        ),
        Column("its waits", "waited_s", units.seconds, "time that this rank waited for other ranks", bar=True),
        Column("last to begin", "last", units.count, "number of operations"),
        Column("last of its host", "last_of_host", units.count, "number of operations"),
        Column("of operations", "operations", units.count, "that no rank can finish before all began"),
    )
    caption = (
        "Operations that no rank can finish before all have begun. The rank with the longest waits for it is first."
    )
    return table("stragglers", caption + _first(len(by_wait), len(each)), columns, by_wait, heads=2)


def clock_table(each: Sequence[ClockOffset]) -> str:
    if not each:
        return "<p>Not known: no records compare the ranks' clocks.</p>"
    columns: tuple[Column[ClockOffset], ...] = (
        Column("rank", "rank", units.count),
        Column("offset", "offset_ns", _ns, "is added to this rank's times, for times of the first rank"),
        Column("error at most", "bound_ns", _ns, "of the offset", "no two operations bound it from both sides"),
    )
    caption = "Each rank's clock against the first rank's." + _first(min(len(each), MOST_ROWS), len(each))
    return table("clocks", caption, columns, each[:MOST_ROWS])


def _ns(time_ns: float) -> str:
    return units.seconds(time_ns * 1e-9)


def _first(shown: int, ranks: int) -> str:
    if shown == ranks:
        return ""
    return f" The first {shown} of {units.count(ranks)} ranks; the findings in this file have all of them."
