"""Tables with real rows and headers, sorted by a script of the page; a cell may have a bar.

Each cell has its exact value in `data-value`. The script sorts by this value, and programs that read the file use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

from netfold.page.escape import attribute, escape, is_known, terms, to_plain

Item = TypeVar("Item")
# The bar's begin and end, and the place of a mark on the bar, as fractions of the cell's width.
Bar = tuple[float, float, float | None]


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table.

    value: of one item, or the path of its attribute (`choice.step_s`); None if unknown.
    text: the value in words.
    meaning: for the list below the table; empty if the title is enough.
    unknown: why the value is unknown, for all items or for one item.
    bar: of one item; True: from 0 to the value, as wide as the cell for the largest value.
    prose: the cells are sentences, which wrap.
    """

    title: str
    value: Callable[[Item], Any] | str
    text: Callable[[Any], str] = str
    meaning: str = ""
    unknown: str | Callable[[Item], str] = ""
    bar: Callable[[Item], Bar | None] | bool = False
    prose: bool = False

    def value_of(self, item: Item) -> Any:
        if not isinstance(self.value, str):
            return self.value(item)
        found: Any = item
        for name in self.value.split("."):
            found = None if found is None else getattr(found, name)
        return found


def table(name: str, caption: str, columns: Sequence[Column[Item]], items: Sequence[Item], *, heads: int = 1) -> str:
    """Return a table, with notes on unknown values and the meanings of its columns.

    name: the element's id. heads: the number of first columns that name the row.
    """
    notes: dict[str, int] = {}
    kinds = ["name" if index < heads else "prose" if column.prose else "" for index, column in enumerate(columns)]
    head = "".join(
        f'<th scope="col"{attribute("class", kind)}>{escape(column.title)}</th>'
        for column, kind in zip(columns, kinds, strict=True)
    )
    bars = [of_largest(items, column.value_of) if column.bar is True else column.bar for column in columns]
    cells = list(zip(columns, kinds, bars, strict=True))
    rows = "".join(
        f"<tr>{''.join(_cell(column, item, kind, bar, notes) for column, kind, bar in cells)}</tr>" for item in items
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-labelledby="{name}-caption"><table id="{name}" '
        f'class="sortable"><caption id="{name}-caption">{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{_notes(notes)}{_meanings(columns)}"
    )


def text_table(name: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts, [rows, columns]. An empty cell is shown as `–`."""
    columns: list[Column[Sequence[str]]] = [
        Column(title, itemgetter(index), lambda cell: cell or "–") for index, title in enumerate(header)
    ]
    return table(name, caption, columns, rows)


def of_largest(items: Sequence[Item], value: Callable[[Item], float | None]) -> Callable[[Item], Bar | None]:
    """Return a column's `bar`: from 0 to the value, as wide as the cell for the largest value."""
    numbers = [number for item in items if (number := value(item)) is not None and is_known(number)]
    largest = max(numbers, default=0.0)

    def bar(item: Item) -> Bar | None:
        number = value(item)
        if number is None or not is_known(number) or largest <= 0:
            return None
        return 0.0, max(0.0, number) / largest, None

    return bar


def _cell(
    column: Column[Item], item: Item, kind: str, bar: Callable[[Item], Bar | None] | bool, notes: dict[str, int]
) -> str:
    value = column.value_of(item)
    if is_known(value):
        text = escape(column.text(value))
        # A column of counts by name is sorted by their sums.
        exact = sum(value.values()) if isinstance(value, Mapping) else to_plain(value)
        exact = f' data-value="{escape(json.dumps(exact))}"'
    else:
        why = column.unknown if isinstance(column.unknown, str) else column.unknown(item)
        number = notes.setdefault(why, len(notes) + 1)
        text, exact = f'<span class="unknown">not known<sup>{number}</sup></span>', ""
    if kind == "name":
        return f'<th scope="row"{exact}>{text}</th>'
    return f"<td{attribute('class', kind)}{exact}>{text}{_bar(bar(item)) if callable(bar) else ''}</td>"


def _bar(bar: Bar | None) -> str:
    if bar is None:
        return ""
    begin, end, mark = bar
    line = "" if end == 0 else f'<i style="left:{100 * begin:.2f}%;width:{100 * (end - begin):.2f}%"></i>'
    point = "" if mark is None else f'<b style="left:{100 * mark:.2f}%"></b>'
    return f'<span class="bar" aria-hidden="true">{line}{point}</span>'


def _notes(notes: Mapping[str, int]) -> str:
    found = "".join(f"<li><sup>{number}</sup> Not known: {escape(why)}.</li>" for why, number in notes.items())
    return f'<ul class="notes">{found}</ul>' if found else ""


def _meanings(columns: Sequence[Column[Item]]) -> str:
    found = [(column.title, column.meaning) for column in columns if column.meaning]
    return f"<details><summary>What the columns say</summary>{terms(found)}</details>" if found else ""
