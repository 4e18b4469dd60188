"""One kind of table for the whole page: real rows and headers, a bar in a cell where lengths say more than digits.

A cell carries its exact value in `data-value`: the page's script sorts by it, whoever reads the file can count on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from netfold.profile.page import units
from netfold.profile.page.escape import escape, is_known, to_plain

Item = TypeVar("Item")
# Where a bar begins and ends, as parts of the cell's width, and where a mark stands on it.
Bar = tuple[float, float, float | None]


@dataclass(frozen=True)
class Column(Generic[Item]):
    """value: of one item, None where it is not known, and then `unknown` says why, for all items or for one; text: the
    value in words.

    meaning: for the list of columns below the table, empty where the title says all.
    """

    title: str
    value: Callable[[Item], Any]
    text: Callable[[Any], str] = str
    meaning: str = ""
    unknown: str | Callable[[Item], str] = ""
    bar: Callable[[Item], Bar | None] | None = None


def table(name: str, caption: str, columns: Sequence[Column[Item]], items: Sequence[Item], *, heads: int = 1) -> str:
    """name: the element's id; heads: how many of the first columns name the row. Sorted by the page's script."""
    notes: dict[str, int] = {}
    head = "".join(
        f'<th scope="col"{" class=name" if index < heads else ""}>{escape(column.title)}</th>'
        for index, column in enumerate(columns)
    )
    rows = "".join(
        "<tr>" + "".join(_cell(column, item, index < heads, notes) for index, column in enumerate(columns)) + "</tr>"
        for item in items
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="{name}-caption"><table id="{name}" '
        f'class="sortable"><caption id="{name}-caption">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{_notes(notes)}{_meanings(columns)}"
    )


def of_largest(items: Sequence[Item], value: Callable[[Item], float | None]) -> Callable[[Item], Bar | None]:
    """Bars from nothing to each value, the largest of all as wide as the cell."""
    numbers = [value(item) for item in items]
    largest = max((number for number in numbers if number is not None and is_known(number)), default=0.0)

    def bar(item: Item) -> Bar | None:
        number = value(item)
        return (
            None if number is None or not is_known(number) or largest <= 0 else (0.0, max(0.0, number) / largest, None)
        )

    return bar


def times_taken(names: Mapping[str, int]) -> str:
    """`ring 120, tree 8`, the most frequent first; `–` where nothing was named."""
    by_times = sorted(names.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {units.count(times)}" for name, times in by_times) or "–"


def _cell(column: Column[Item], item: Item, heads: bool, notes: dict[str, int]) -> str:
    value = column.value(item)
    if is_known(value):
        text = escape(column.text(value))
        # Of names and how often, the sum: it is what a column of these can be sorted by.
        exact = sum(value.values()) if isinstance(value, Mapping) else to_plain(value)
        exact = f' data-value="{escape(json.dumps(exact))}"'
    else:
        why = column.unknown if isinstance(column.unknown, str) else column.unknown(item)
        number = notes.setdefault(why, len(notes) + 1)
        text, exact = f'<span class="unknown">not known<sup>{number}</sup></span>', ""
    if heads:
        return f'<th scope="row"{exact}>{text}</th>'
    return f"<td{exact}>{text}{_bar(column.bar(item)) if column.bar is not None else ''}</td>"


def _bar(bar: Bar | None) -> str:
    if bar is None:
        return ""
    begin, end, mark = bar
    line = "" if end == 0 else f'<i style="left:{100 * begin:.2f}%;width:{100 * (end - begin):.2f}%"></i>'
    point = "" if mark is None else f'<b style="left:{100 * mark:.2f}%"></b>'
    return f'<span class="bar" aria-hidden="true">{line}{point}</span>'


def _notes(notes: Mapping[str, int]) -> str:
    if not notes:
        return ""
    return (
        '<ul class="notes">'
        + "".join(f"<li><sup>{number}</sup> Not known: {escape(why)}.</li>" for why, number in notes.items())
        + "</ul>"
    )


def _meanings(columns: Sequence[Column[Item]]) -> str:
    said = [(column.title, column.meaning) for column in columns if column.meaning]
    if not said:
        return ""
    terms = "".join(f"<dt>{escape(title)}</dt><dd>{escape(meaning)}</dd>" for title, meaning in said)
    return f"<details><summary>What the columns say</summary><dl>{terms}</dl></details>"
