"""The page of a run in a browser: every number of metrics.jsonl, and no harm by hostile texts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import Element, needs_chromium, opened, parse
from invented_run import BITS, STEPS, a_run_that_was_cut_off_and_went_on, evaluated, goes_through, recipe, started, tell
from ranks import run_command

from netfold_train import Recipe
from netfold_train.callbacks.events import Ended, Noted
from netfold_train.callbacks.metrics_file import MetricsFile, metric_words
from netfold_train.callbacks.report import ReportCallback
from netfold_train.callbacks.run_folder import run_folder
from netfold_train.data.examples import Panel
from netfold_train.runs.metrics import read_metrics, result
from netfold_train.runs.page import write_report

HOSTILE = "</script><script>document.title='taken'</script>\"'><img src=x onerror=document.title='taken'>&amp;]]>"


def cut_off_and_gone_on(asked: Recipe) -> Path:
    folder = run_folder(asked)
    for events in a_run_that_was_cut_off_and_went_on(asked):
        writer = MetricsFile(folder)
        tell([writer], events)
        del writer
    return folder


def test_the_page_is_made_again_without_torch(tmp_path: Path) -> None:
    folder = cut_off_and_gone_on(recipe(tmp_path))
    verb = "import sys; sys.modules['torch'] = None; from netfold.cli import app; app()"
    subprocess.run([sys.executable, "-c", verb, "train", "report", str(folder)], check=True)
    assert (folder / "report.html").exists()


def no_errors(page: Element) -> None:
    assert [each.text for each in page.all(class_="script-error")] == []


@needs_chromium
def test_a_browser_shows_every_number_of_the_metrics(tmp_path: Path) -> None:
    folder = cut_off_and_gone_on(recipe(tmp_path))
    page = opened(write_report(folder).read_text(), tmp_path)
    no_errors(page)
    found = read_metrics(folder)
    read = json.loads(page.one("script", id="metrics").text)
    for number, line in enumerate(found.steps):
        assert {name: column[number] for name, column in read["steps"].items() if column[number] is not None} == {
            name: value for name, value in line.items() if value is not None and name != "kind"
        }
    assert [len(column) for column in read["steps"].values()] == [STEPS] * len(read["steps"])
    assert (read["evaluations"], read["notes"], read["starts"], read["ended"]) == (
        *(found.evaluations, found.notes, found.starts, found.ended),
    )
    shown = page.rows("evaluations")
    assert [json.loads(cells[1].attributes["data-value"]) for cells in shown] == [
        line["values"]["bits per byte"] for line in found.evaluations
    ]
    assert [cells[3].text for cells in page.rows("notes")] == [
        "started, on 4 ranks",
        "the loss of step 7 is <nan>: the step was left out",
        "started, going on after step 10, on 4 ranks",
        "all is well",
        "ended: done",
    ]
    recipe_shown = page.one("pre").text
    assert '"name": "gpt"' in recipe_shown and '"width": 32' in recipe_shown


@needs_chromium
def test_a_hostile_run_is_only_text(tmp_path: Path) -> None:
    asked = recipe(tmp_path, model={"name": "gpt", "text": HOSTILE})
    folder = run_folder(asked)
    metric = replace(BITS, name=HOSTILE, unit=HOSTILE, baseline_is=HOSTILE)
    looked = replace(evaluated(1), values={HOSTILE: 1.0, "loss": 2.0})
    tell(
        [MetricsFile(folder)],
        [replace(started(asked), metric=metric), looked, Noted(1, "warning", HOSTILE), Ended(1, HOSTILE, 1.0)],
    )
    page = opened(write_report(folder).read_text(), tmp_path)
    no_errors(page)
    assert page.one("head").one("title").text == "netfold train: invented"
    assert page.all("img") == []
    assert HOSTILE in [cells[3].text for cells in page.rows("notes")]
    assert page.one("h1").text.startswith(HOSTILE) and "<script>" in page.one("pre").text


def test_the_page_needs_no_network_and_no_other_file_but_its_profile(tmp_path: Path) -> None:
    page = write_report(cut_off_and_gone_on(recipe(tmp_path))).read_text()
    text = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import", text)


def test_the_command_writes_the_page_again(tmp_path: Path) -> None:
    folder = cut_off_and_gone_on(recipe(tmp_path))
    made = write_report(folder).read_text()
    (folder / "report.html").unlink()
    again = run_command("train", "report", folder)
    assert (again.returncode, again.stdout.split()) == (0, [str(folder / "report.html")]), again.stderr
    assert (folder / "report.html").read_text() == made


def test_each_quantity_has_a_chart_with_a_description_and_the_baseline_a_line(tmp_path: Path) -> None:
    page = parse(write_report(cut_off_and_gone_on(recipe(tmp_path))).read_text())
    charts = page.one("section", id="curves").all("div", class_="chart")
    assert [chart.attributes["aria-label"].split(" by step")[0] for chart in charts] == [
        *("loss", "bits per byte, bit", "learning rate", "time of a step", "samples per second", "gradients' norm"),
    ]
    loss, bits, *_ = charts
    assert [len(chart.all("line", class_="level")) for chart in charts] == [0, 1, 0, 0, 0, 0]
    # Step 7's loss is not a number, so it interrupts the line.
    line = loss.one("path", class_="ink-0").attributes["d"]
    assert line.count("M") == 2 and line.count("L") == STEPS - 3
    assert bits.one("path", class_="ink-1").attributes["d"].count("L") == 3
    assert all(len(chart.all("line", class_="note")) == 2 for chart in charts)
    assert not bits.one("div", class_="over").all(class_="dot")


def test_the_only_evaluation_of_a_run_is_a_dot(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    folder = run_folder(asked)
    tell([MetricsFile(folder)], [started(asked), evaluated(STEPS)])
    charts = parse(write_report(folder).read_text()).one("section", id="curves").all("div", class_="chart")
    assert [len(chart.one("div", class_="over").all(class_="dot")) for chart in charts] == [1, 1]  # loss and metric


def test_the_page_says_that_a_run_continues_or_why_it_failed(tmp_path: Path) -> None:
    asked = recipe(tmp_path)
    folder = run_folder(asked)
    writer = MetricsFile(folder)
    with pytest.raises(ValueError, match="no folder of a run"):
        write_report(folder)
    tell([writer], goes_through(asked, 0, 3))
    page = parse(write_report(folder).read_text())
    assert page.one("h1").text == "There is no evaluation of held-out samples yet."
    assert "No end yet: the run goes on, or was cut off after step 3." in page.one("main").text
    tell([writer], [*goes_through(asked, 3, 5), Ended(5, "a loss that is not a number", 2.0)])
    page = parse(write_report(folder).read_text())
    assert page.one("p", class_="failed").text == "Ended after step 5: a loss that is not a number"
    assert page.one("h1").text.endswith("(after step 5).")


def test_the_result_depends_on_the_better_direction() -> None:
    lower, higher = metric_words(BITS), metric_words(replace(BITS, better="higher"))
    assert result(lower, 5.0) == "bits per byte 5 bit, 0.25 bit better than 5.25 bit (how often each byte comes)"
    assert "0.25 bit worse than" in result(higher, 5.0)
    assert "no better than 5.25 bit" in result(lower, 5.25)
    for value in (None, float("nan")):
        assert result(lower, value).startswith("bits per byte is not a number;")


def test_pictures_are_in_the_page_and_in_the_folder_without_loss(tmp_path: Path) -> None:
    from base64 import b64decode
    from io import BytesIO

    import numpy as np
    from PIL import Image

    asked = recipe(tmp_path)
    folder = run_folder(asked)
    pixels = torch.arange(3 * 6 * 8).view(3, 6, 8).to(torch.uint8)
    panels = (Panel("bicubic", "27.50 dB", pixels), Panel("the truth", "", 255 - pixels))
    tell([MetricsFile(folder), ReportCallback(folder)], [started(asked), replace(evaluated(5), pictures=panels)])
    page = parse((folder / "report.html").read_text())
    shown = page.one("section", id="pictures").all("img")
    for image, panel in zip(shown, panels, strict=True):
        raw = b64decode(image.attributes["src"].removeprefix("data:image/png;base64,"))
        assert np.array_equal(np.asarray(Image.open(BytesIO(raw))), panel.pixels.permute(1, 2, 0).numpy())
        assert image.attributes["alt"] == panel.title
    assert [each.text for each in page.one("section", id="pictures").all("figcaption")] == [
        "bicubic 27.50 dB",
        "the truth",
    ]


def test_a_page_is_written_seldom_if_writing_takes_long_and_always_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    now_s = [100.0]

    def slow(folder: Path) -> Path:
        written.append(folder)
        now_s[0] += 0.5
        return folder

    monkeypatch.setattr("netfold_train.callbacks.report.write_report", slow)
    monkeypatch.setattr("netfold_train.callbacks.report.time.monotonic", lambda: now_s[0])
    page = ReportCallback(tmp_path)
    for at_s, times in ((100.0, 1), (150.0, 1), (200.4, 1), (200.6, 2)):
        now_s[0] = at_s
        tell([page], [evaluated(5)])
        assert len(written) == times, at_s
    tell([page], [Ended(5, "done", 1.0)])
    assert len(written) == 3


def test_a_long_run_keeps_its_extremes_and_a_small_page(tmp_path: Path) -> None:
    from netfold_train.runs.curves import _thinned

    points: list[tuple[int, float | None]] = [(step, float(step % 97)) for step in range(100_000)]
    points[54_321] = (54_321, 1e6)
    points[12_345] = (12_345, -1e6)
    thinned = _thinned(points)
    assert len(thinned) <= 800 and {(54_321, 1e6), (12_345, -1e6)} <= set(thinned)
    assert thinned == sorted(thinned)


def test_the_page_of_a_very_long_run_has_some_steps_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cut_off_and_gone_on(recipe(tmp_path))
    monkeypatch.setattr("netfold_train.runs.page._MOST_STEPS", 7)
    page = parse(write_report(folder).read_text())
    assert json.loads(page.one("script", id="metrics").text)["steps"]["step"] == [1, 4, 7, 10, 13, 16, 19]
    assert "carries the numbers of one in 3" in page.one("main").text
