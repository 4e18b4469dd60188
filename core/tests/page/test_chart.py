"""Axes and marks of charts, tables of texts, and the page around them."""

from __future__ import annotations

import re

import pytest
from browser import parse

from netfold import units
from netfold.page.chart import SIDE, Axis, Chart, stack
from netfold.page.layout import render_layout
from netfold.page.table import text_table


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis("", 0, 10), [0, 2, 4, 6, 8, 10]),
        (Axis("", 0, 3, least_step=1), [0, 1, 2, 3]),
        (Axis("", 1, 10, base=10), [1, 2, 5, 10]),
        (Axis("", 1.5, 30, base=10), [2, 5, 10, 20]),
        (Axis("", 0.85, 1.6, base=10), [1, 1.2, 1.4, 1.6]),
        (Axis("", 1e-3, 1e3, base=10), [1e-3, 1e-2, 1e-1, 1, 10, 100, 1e3]),
        (Axis.holding("", 5, 5000, str, base=2), [4, 16, 64, 256, 1024, 4096]),
        (Axis("", 0, 4, named={1: "one", 3: "three"}), [1, 3]),
    ],
)
def test_axis_ticks_are_few_round_numbers(axis: Axis, ticks: list[float]) -> None:
    assert [place for place, _ in axis.labels()] == pytest.approx([axis.at(tick) for tick in ticks])


@pytest.mark.parametrize(
    ("high_s", "labels"),
    [
        (100.0, ["0 s", "20 s", "40 s", "60 s", "80 s", "100 s"]),
        (170.0, ["0 min", "0.5 min", "1 min", "1.5 min", "2 min", "2.5 min"]),
        (3 * 3600.0, ["0 h", "0.5 h", "1 h", "1.5 h", "2 h", "2.5 h", "3 h"]),
        (4 * 86400.0, ["0 days", "1 days", "2 days", "3 days", "4 days"]),
    ],
)
def test_an_axis_of_time_has_one_unit(high_s: float, labels: list[str]) -> None:
    assert [text for _, text in Axis("time", 0.0, high_s, units.seconds).labels()] == labels


def test_a_value_beyond_the_axis_is_drawn_at_its_end() -> None:
    assert [Axis("", 1, 100, base=10).at(value) for value in (0, 10, 1e6)] == [0, SIDE / 2, SIDE]


def test_an_unknown_value_interrupts_a_line_and_a_lone_point_is_a_dot() -> None:
    chart = Chart(Axis("x", 0, 3), Axis("y", 0, 1))
    chart.line("0", [(0, 0.0), (1, None), (2, 0.5), (3, 1.0)], "a line")
    drawn = parse(chart.render("a chart"))
    (line,) = (path.attributes["d"] for path in drawn.all("path", class_="ink-0"))
    assert re.sub(r"\.0", "", line) == "M0,1000h0M667,500h0L1000,0".replace("667", "666.7")
    assert drawn.one("div", class_="legend").text == "a line"


def test_texts_of_charts_bars_and_tables_are_escaped() -> None:
    bad = "<b>\"'&"
    chart = Chart(Axis(bad, 0, 1, lambda _: bad), Axis(bad, 0, 1, lambda _: bad))
    chart.line("0", [(0, 0.5)], bad)
    chart.dot("0", 0.5, 0.5, bad)
    chart.moment("bad", 0.5, bad)
    found = chart.render(bad, bad) + stack({bad: 1.0}, 1.0, {bad: "0"}, bad) + text_table("t", bad, [bad], [[bad]])
    assert "<b>" not in found and "&lt;b&gt;" in found


def test_a_page_has_its_sections_and_leaves_out_empty_ones() -> None:
    page = render_layout(
        title="t",
        headline="h",
        opening="",
        sections=[("one", "One", "<p>1</p>"), ("two", "Two", "")],
        data=("d", [1.5]),
    )
    assert [heading.text for heading in parse(page).all("h2")] == ["One"]
    assert parse(page).one("script", id="d").text == "[1.5]"
