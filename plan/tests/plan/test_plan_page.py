"""The page of a plan: complete without a network, with the numbers of the result."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from browser import needs_chromium, opened, parse

from netfold_plan.render import as_json, render_page, render_text
from netfold_plan.request import parse_request
from netfold_plan.result import Result, solve


@cache
def found() -> Result:
    tree = {
        "model": "megatron-1b7",
        "cluster": "dgx-a100",
        "job": {"gpus": 16, "batch": 64},
        "price": {"gpu_hour": 2.0, "currency": "<EUR>"},
        "training": {"samples": 1e6},
    }
    return solve(parse_request(tree, {}), sizes=(8, 16, 32), comparisons=("network=tcp,in-network",))


def test_a_page_loads_nothing_and_blocks_other_scripts() -> None:
    page = render_page(found())
    assert "default-src 'none'" in page and "http" not in re.sub(r"http-equiv", "", page)
    assert "<EUR>" not in page and "&lt;EUR&gt;" in page


def test_a_page_contains_the_whole_result() -> None:
    text = parse(render_page(found())).one("script", id="answer").text
    assert json.loads(text) == json.loads(as_json(found()))


def test_a_page_has_a_section_for_each_part_of_the_request() -> None:
    titles = [each.text for each in parse(render_page(found())).all("h2")]
    assert titles == [
        "Where a step's time goes",
        "Memory of the rank that needs most",
        "Ways to split it",
        "Less memory for more time",
        "Scaling out",
        "Elsewhere",
        "What more would buy",
        "What one more aggregator would buy",
        "The cluster",
    ]


def test_a_page_says_the_order_of_a_meshs_numbers() -> None:
    (section,) = parse(render_page(found())).all("section", id="ways")
    assert "tensor x pipeline x data" in section.all("p")[0].text


def test_the_widths_of_a_steps_bars_are_proportional_to_its_parts() -> None:
    bar = parse(render_page(found())).all("div", class_="stack")[0]
    widths = [float(each.attributes["style"].removeprefix("width:").removesuffix("%")) for each in bar.all("i")]
    assert sum(widths) == pytest.approx(100, abs=0.05)


def test_text_and_page_show_the_same_step() -> None:
    headline = parse(render_page(found())).one("h1").text
    step = headline.removeprefix("A step takes ").split(":")[0]
    assert f"a step takes {step};" in render_text(found())


@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])
def test_a_page_fits_the_window_and_no_script_fails(width: int, tmp_path: Path) -> None:
    said = "document.body.dataset.wide = document.documentElement.scrollWidth > window.innerWidth;"
    document = opened(render_page(found()), tmp_path, then=said, width=width)
    assert document.one("body").attributes["data-wide"] == "false"
    assert not document.all("p", class_="script-error")
