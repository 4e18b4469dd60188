"""The page in a browser: the numbers of the findings, and no failing script, for every kind of run."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from browser import Element, needs_chromium, opened, parse
from invented import AHEAD_NS, STEP_NS, about, clocks, each_step, findings, rows, run
from load import seconds

from netfold import units
from netfold.profile.findings import ClockOffset, Findings, Overlap, Straggler
from netfold.profile.page import render_page
from netfold.profile.page.by_size import COLUMNS
from netfold.profile.page.ranks import MOST_ROWS
from netfold.profile.page.timeline import FIELDS, MOST_OPERATIONS, MOST_RANKS, MOST_STEPS, timeline
from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, Run, Trace

HOSTILE = "</script><script>document.title='taken'</script>\"'><img src=x onerror=document.title='taken'>&amp;\u2028]]>"


def whole() -> str:
    return render_page(findings(), run(), each_step=each_step(310))


def no_errors(page: Element) -> None:
    assert [each.text for each in page.all(class_="script-error")] == []


@needs_chromium
def test_every_number_of_the_findings_is_in_the_page_that_a_browser_shows(tmp_path: Path) -> None:
    page = opened(whole(), tmp_path)
    no_errors(page)
    found = findings()
    read = json.loads(page.one("script", id="findings").text)
    assert read == json.loads(json.dumps(asdict(found)))

    shown = page.rows("rows")
    assert len(shown) == len(found.rows)
    for cells, row in zip(shown, found.rows, strict=True):
        assert len(cells) == len(COLUMNS)
        by_title = {column.title: cell for column, cell in zip(COLUMNS, cells, strict=True)}
        assert by_title["operation"].text == row.operation
        assert by_title["size"].text == units.size_range(row.above_bytes, row.to_bytes)
        numbers = {
            "count": row.count, "bytes": row.bytes, "total": row.total_s, "share": row.share, "mean": row.mean_s,
            "p50": row.p50_s, "p99": row.p99_s, "algbw": row.algbw, "busbw": row.busbw, "exposed": row.exposed_s,
            "queue": row.queue_s, "skew": row.skew_s, "wire bytes": row.wire_bytes, "resent": row.retransmissions,
            "registered": row.registration_hits, "not registered": row.registration_misses, "errors": row.errors,
        }  # fmt: skip
        assert set(by_title) == {"operation", "size", "algorithms", "wire formats", *numbers}
        for title, number in numbers.items():
            if number is None:
                assert re.fullmatch(r"not known\d", by_title[title].text), title
            else:
                assert json.loads(by_title[title].attributes["data-value"]) == number, title
        assert by_title["algorithms"].text == ", ".join(f"{name} {times}" for name, times in row.algorithms.items())
        assert by_title["p99"].text == units.seconds(row.p99_s)
        assert by_title["busbw"].text == units.rate(row.busbw)

    late = page.rows("stragglers")
    assert [int(cells[0].text) for cells in late] == [1, 0, 2, 3]
    assert json.loads(late[0][2].attributes["data-value"]) == 4.2
    by_rank = {int(cells[0].text): cells for cells in page.rows("clocks")}
    assert {rank: json.loads(cells[1].attributes["data-value"]) for rank, cells in by_rank.items()} == {
        clock.rank: clock.offset_ns for clock in found.clocks
    }
    assert by_rank[3][2].text == "36 us"
    assert [cells[1].text for cells in page.rows("steps")] == ["290 ms", "110 ms", "36 ms"]


@needs_chromium
def test_a_script_that_fails_says_so_on_the_page(tmp_path: Path) -> None:
    (said,) = opened(whole(), tmp_path, then="nobody.home();").all(class_="script-error")
    assert "nobody is not defined" in said.text


@needs_chromium
def test_no_other_script_runs_in_the_page(tmp_path: Path) -> None:
    page = whole().replace("</body>", "<script>document.title='taken'</script></body>")
    assert opened(page, tmp_path).one("title").text.startswith("netfold profile: torchrun")


def test_the_page_needs_no_network_and_no_other_file() -> None:
    page = whole()
    text = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import", text)
    assert not re.search(r"https?:|fetch\(|import\(|XMLHttpRequest", page)


def test_the_headline_says_how_much_was_communication_how_much_exposed_and_who_was_slowest() -> None:
    page = parse(whole())
    assert page.one("h1").text == (
        "38 % of the time was communication, 12 % was exposed; ranks waited longest for rank 1."
    )
    titles = [each.text for each in page.all("h2")]
    assert titles == [
        "What to do",
        "Operations by size",
        "Where time goes, by size",
        "Steps of training",
        "Who waited for whom",
        "Clocks",
        "All ranks over time",
        "What is not in these records",
        "Lost records",
        "Versions",
    ]
    advice = page.one("ul", class_="advice").all("li")
    assert advice[0].text.startswith("measured rank 1")
    assert advice[1].text.startswith("predicted, not measured all_reduce")


def test_every_table_has_a_caption_and_every_picture_words() -> None:
    page = parse(whole())
    for table in page.all("table"):
        assert table.all("caption"), table.attributes
        assert all(head.attributes.get("scope") in ("col", "row") for head in table.all("th"))
    pictures = page.all(role="img")
    assert len(pictures) == 4  # two clouds, steps, the timeline
    assert all(len(picture.attributes["aria-label"]) > 20 for picture in pictures)


@needs_chromium
def test_a_pressed_header_sorts_and_unknown_values_come_last(tmp_path: Path) -> None:
    press = """
      const heads = [...document.querySelectorAll("#rows thead th")];
      const place = heads.findIndex((head) => head.textContent === "exposed");
      const button = heads[place].querySelector("button");
      const cells = () => [...document.querySelectorAll("#rows tbody tr")].map((row) => row.cells[place]);
      const column = () => cells().map((cell) => cell.dataset.value ?? "none");
      const seen = [];
      for (const turn of [0, 1]) { button.click(); seen.push(column()); }
      document.body.dataset.seen = JSON.stringify(seen);
    """
    page = opened(whole(), tmp_path, then=press)
    no_errors(page)
    known = sorted(row.exposed_s for row in rows() if row.exposed_s is not None)
    falling, rising = json.loads(page.one("body").attributes["data-seen"])
    assert [float(value) for value in falling[:-1]] == known[::-1]
    assert [float(value) for value in rising[:-1]] == known
    assert falling[-1] == rising[-1] == "none"


@needs_chromium
def test_the_timeline_shows_all_ranks_aligned_and_zooms(tmp_path: Path) -> None:
    page = opened(whole(), tmp_path)
    no_errors(page)
    canvas = page.one("canvas")
    assert int(canvas.attributes["data-in-view"]) == 4 * 6 * 8
    assert "192 operations in view" in page.one("p", id="timeline-shown").text
    # Zoomed in five times round the middle: 1/32 of 120 ms from 58.1 ms on.
    use = """
      // The document is read when it has loaded, which may be before the next frame.
      window.requestAnimationFrame = (draw) => draw();
      document.getElementById("timeline-details").open = true;
      for (let turn = 0; turn < 5; turn += 1) document.querySelector("[data-command='+']").click();
    """
    page = opened(whole(), tmp_path, then=use)
    no_errors(page)
    began_ns, length_ns = 6 * STEP_NS * (0.5 - 1 / 64), 6 * STEP_NS / 32
    expected = []
    for trace in run().traces:
        shift_ns = -trace.metadata.rank * AHEAD_NS
        for one in trace.operations:
            begin, end = int(one["started_ns"]) + shift_ns, int(one["finished_ns"]) + shift_ns
            if begin <= began_ns + length_ns and end >= began_ns:
                expected.append((trace.metadata.rank, int(one["sequence"])))
    listed = [(int(cells[0].text), int(cells[5].text)) for cells in page.rows("timeline-list")]
    assert sorted(listed) == sorted(expected)
    assert expected
    assert int(page.one("canvas").attributes["data-in-view"]) == len(expected)


@needs_chromium
def test_a_touched_operation_is_described_with_who_was_last(tmp_path: Path) -> None:
    # The first of rank 0, in the lane below the axis and the rank's name; touched where it begins, as a part of 120 ms.
    recorded = run()
    began_ns = int(recorded.traces[0].operations["started_ns"][0])
    touch = f"""
      const canvas = document.getElementById("timeline-canvas");
      const box = canvas.getBoundingClientRect();
      const clientX = box.left + canvas.clientWidth * {began_ns / (6 * STEP_NS)} + 1;
      const clientY = box.top + 24 + 18 + 5;
      canvas.dispatchEvent(new PointerEvent("pointermove", {{ clientX, clientY, bubbles: true }}));
    """
    page = opened(whole(), tmp_path, then=touch)
    no_errors(page)
    said = page.one("p", id="timeline-picked").text
    assert re.match(r"rank 0: all_reduce of 4 KB, .* from 10\.\d+ ms on, queued .* before; number 1 of world; ", said)
    first = min(recorded.traces, key=lambda trace: trace.operations["started_ns"][0] - trace.metadata.rank * AHEAD_NS)
    late_ns = recorded.traces[1].operations["started_ns"][0] - AHEAD_NS
    late_ns -= first.operations["started_ns"][0] - first.metadata.rank * AHEAD_NS
    after = f"{late_ns / 1000:.1f} us after rank {first.metadata.rank}."
    assert said.endswith(f"algorithm ring, wire f32. Rank 1 was the last of 4 to begin, {after}")


def test_the_timelines_numbers_are_the_runs_on_the_first_ranks_clock() -> None:
    drawn = timeline(run(), clocks(4), [])
    assert drawn is not None
    (window,) = drawn.data["windows"]
    assert window["length"] == 6 * STEP_NS
    for rank, trace in zip(window["ranks"], run().traces, strict=True):
        numbers = np.array(rank["operations"]).reshape(-1, len(FIELDS))
        assert len(numbers) == len(trace.operations)
        shift_ns = -trace.metadata.rank * AHEAD_NS
        order = np.argsort(trace.operations["started_ns"], kind="stable")
        for line, one in zip(numbers, trace.operations[order], strict=True):
            said = dict(zip(FIELDS, line.tolist(), strict=True))
            assert said["began"] == one["started_ns"] + shift_ns
            assert said["lasted"] == one["finished_ns"] - one["started_ns"]
            assert said["queued"] == one["started_ns"] - one["queued_ns"]
            assert (said["bytes"], said["sequence"], said["error"]) == (one["bytes"], one["sequence"], -1)
            for what in ("operation", "algorithm", "wire"):
                assert drawn.data["names"][what][said[what]] == trace.metadata.name_of(what, one[what])
            assert drawn.data["names"]["group"][said["group"]] == "world"
        assert rank["steps"][:6] == [0, 0, STEP_NS, 1, STEP_NS, 2 * STEP_NS]
        # Six tenths of a step of 20 ms: computing all of the time until 12 ms, then not at all.
        assert rank["computing"][:6] == [0, 12_000_000, 100, 12_000_000, 20_000_000, 0]


@needs_chromium
@pytest.mark.parametrize("where", ["command", "host", "names", "advice"])
def test_text_from_a_run_never_becomes_markup(where: str, tmp_path: Path) -> None:
    found, recorded = findings(), run(host=HOSTILE if where == "host" else "")
    if where == "command":
        found = replace(found, title=HOSTILE, versions={HOSTILE: HOSTILE}, hosts=[HOSTILE], sources=[HOSTILE])
    if where == "host":
        found = replace(found, stragglers=[Straggler(0, HOSTILE, 1, 1, 1.0, 0.0)], coverage_gaps=[HOSTILE])
    if where == "advice":
        found = replace(found, advice=[replace(found.advice[0], text=HOSTILE)])
    if where == "names":
        found = replace(
            found, rows=[replace(rows()[0], operation=HOSTILE, algorithms={HOSTILE: 1}, wires={HOSTILE: 2})]
        )
        traces = [
            replace(trace, metadata=replace(trace.metadata, names={"operation": {"0": HOSTILE}}))
            for trace in recorded.traces
        ]
        recorded = replace(recorded, traces=traces)
    page = opened(render_page(found, recorded, each_step=each_step(3)), tmp_path)
    no_errors(page)
    title = HOSTILE if where == "command" else found.title
    assert page.one("title").text == " ".join(f"netfold profile: {title}".split())
    assert not page.all("img")
    assert len(page.all("script")) == 5
    read = json.loads(page.one("script", id="findings").text)
    assert read == json.loads(json.dumps(asdict(found)))
    data = json.loads(page.one("script", id="timeline-data").text)
    assert (data["windows"][0]["ranks"][0]["host"] == HOSTILE) == (where == "host")
    shown = {"command": "dd", "host": "li", "advice": "li", "names": "td"}[where]
    assert any(" ".join(HOSTILE.split()) in each.text for each in page.all(shown))


def test_invalid_utf_8_and_values_that_are_not_finite_can_be_written() -> None:
    broken = b"train-\xff.py".decode(errors="surrogateescape")
    row = replace(rows()[0], algbw=math.inf, busbw=math.nan, p50_s=math.nan)
    page = render_page(findings(title=broken, rows=[row]), run(host=broken))
    assert "train-?.py" in page
    read = json.loads(parse(page).one("script", id="findings").text)
    assert read["title"] == broken
    assert read["rows"][0]["algbw"] is read["rows"][0]["busbw"] is None
    page.encode()


def bare(**changes: object) -> Findings:
    """The page of an empty run."""
    nothing: dict[str, object] = {
        "rows": [], "overall": Overlap(0.0, 0.0, None, None), "steps": None, "stragglers": [], "clocks": [],
        "advice": [],
        "coverage_gaps": [], "versions": {}, "hosts": [], "sources": [], "backends": [],
    }  # fmt: skip
    return findings(**{**nothing, **changes})


def nothing(ranks: int) -> Run:
    empty = [
        Trace(about(rank, ranks), np.zeros(0, RECORD), np.zeros(0, STEP), np.zeros(0, PROGRESS))
        for rank in range(ranks)
    ]
    return Run(Path("run"), {}, empty)


@needs_chromium
@pytest.mark.parametrize("case", ["nothing", "one rank", "no progress", "no steps", "no run", "missing", "unaligned"])
def test_missing_data_is_named(case: str, tmp_path: Path) -> None:
    found, recorded, says = {
        "nothing": (bare(), nothing(4), "No operation was recorded."),
        "one rank": (findings(size=1, stragglers=[], clocks=clocks(1)), run(ranks=1), "takes the records of two ranks"),
        "no progress": (
            findings(overall=Overlap(91.5, 34.8, None, None), rows=[replace(row, exposed_s=None) for row in rows()]),
            run(progress=False),
            "exposed is not known: the training thread was not watched",
        ),
        "no steps": (
            findings(steps=None),
            replace(run(), traces=[replace(trace, steps=np.zeros(0, STEP)) for trace in run().traces]),
            "No steps were marked",
        ),
        "no run": (findings(), None, "The run's records are not available here"),
        "missing": (
            findings(ranks=[0, 1, 3], lost=12),
            replace(run(), traces=[trace for trace in run().traces if trace.metadata.rank != 2]),
            "1 of 4 ranks left no records, rank 2: means are over 3.",
        ),
        "unaligned": (
            findings(clocks=[ClockOffset(0, 0, 0), ClockOffset(1, 5, None)]),
            run(ranks=2),
            "Nothing bounds the clock errors of these ranks: 1.",
        ),
    }[case]
    page = opened(render_page(found, recorded), tmp_path)
    no_errors(page)
    assert says in page.one("main").text
    if case == "missing":
        assert "12 operations were lost" in page.one("main").text
        assert [
            rank["rank"] for rank in json.loads(page.one("script", id="timeline-data").text)["windows"][0]["ranks"]
        ] == [
            0,
            1,
            3,
        ]
    if case == "no progress":
        assert "The training threads were not watched" in page.one("main").text
        assert "computes" not in page.one(id="timeline-key").text
    if case in ("nothing", "no run"):
        assert not page.all("canvas")


@needs_chromium
def test_a_run_of_many_operations_is_shown_by_two_of_its_steps_and_opens_at_once(tmp_path: Path) -> None:
    many = run(ranks=16, steps=50, calls=400)
    text = render_page(findings(size=16), many, each_step=each_step(100_000))
    assert len(text.encode()) < 3_000_000
    page = opened(text, tmp_path, then="document.body.dataset.openedMs = performance.now();")
    no_errors(page)
    assert float(page.one("body").attributes["data-opened-ms"]) < 1000 * seconds(2)
    data = json.loads(page.one("script", id="timeline-data").text)
    median, slowest = data["windows"]
    assert (median["length"], slowest["length"]) == (STEP_NS, 2 * STEP_NS)
    assert slowest["name"] == "the slowest step (step 6)"
    assert len(slowest["ranks"]) == 16
    for rank in slowest["ranks"]:
        assert len(rank["operations"]) == 400 * len(FIELDS)
    said = page.one(id="timeline-title").text + page.one("main").text
    assert "Shown: the median step" in said and "the run has 320,000 operations of 16 ranks" in said
    assert "Of every 250 steps in a row the slowest is drawn." in page.one("main").text
    assert len(page.one(id="timeline-windows").all("button")) == 2


def test_the_largest_page_is_within_its_bound() -> None:
    """Everything at its limit: operations, steps, stretches of computing, ranks, cells of clouds."""
    ranks, calls = MOST_RANKS + 1, MOST_OPERATIONS // MOST_RANKS // 4
    random = np.random.default_rng(1)
    many = run(ranks=ranks, steps=4, calls=calls)
    for trace in many.traces:
        count = len(trace.operations)
        trace.operations["bytes"] = 1 << random.integers(2, 36, count)
        trace.operations["operation"] = random.integers(0, 9, count)
        trace.operations["finished_ns"] = trace.operations["started_ns"] + 10 ** random.integers(3, 9, count)
        trace.operations["wire_bytes"] = trace.operations["sequence"] = random.integers(1 << 30, 1 << 31, count)
    names = {"operation": {str(number): f"operation_{number}" for number in range(9)}}
    many = replace(
        many, traces=[replace(trace, metadata=replace(trace.metadata, names=names)) for trace in many.traces]
    )
    text = render_page(findings(size=2000), many, each_step=each_step(100_000))
    assert 1_500_000 < len(text.encode()) < 3_000_000
    page = parse(text)
    assert len(page.rows("stragglers")) == len(page.rows("clocks")) == MOST_ROWS
    assert f"The first {MOST_ROWS} of 2,000 ranks" in page.one(id="clocks-caption").text
    assert len(json.loads(page.one("script", id="findings").text)["stragglers"]) == 2000


def test_steps_beyond_the_bound_are_not_shaded_and_the_page_says_so() -> None:
    steps = np.zeros(MOST_STEPS + 1, STEP)
    steps["began_ns"] = np.arange(len(steps)) * 1000
    steps["ended_ns"] = steps["began_ns"] + 1000
    few = run(ranks=1, steps=1)
    for count in (MOST_STEPS, MOST_STEPS + 1):
        drawn = timeline(replace(few, traces=[replace(few.traces[0], steps=steps[:count])]), clocks(1), [])
        assert drawn is not None
        shaded = len(drawn.data["windows"][0]["ranks"][0]["steps"])
        assert shaded == (3 * MOST_STEPS if count == MOST_STEPS else 0)
        assert ("More than 10,000 steps: they are not shaded." in drawn.notes) == (count > MOST_STEPS)


def test_a_window_with_too_many_operations_is_cut_and_the_page_says_where() -> None:
    drawn = timeline(run(ranks=2, steps=1, calls=2 * MOST_OPERATIONS), clocks(2), [])
    assert drawn is not None
    (window,) = drawn.data["windows"]
    kept = sum(len(rank["operations"]) for rank in window["ranks"]) // len(FIELDS)
    assert MOST_OPERATIONS - 10 <= kept <= MOST_OPERATIONS
    assert ", of which the first " in drawn.notes[0]


def test_without_steps_the_middle_of_a_long_run_is_shown() -> None:
    long = run(ranks=2, steps=50, calls=400)
    long = replace(long, traces=[replace(trace, steps=np.zeros(0, STEP)) for trace in long.traces])
    drawn = timeline(long, clocks(2), [])
    assert drawn is not None
    (window,) = drawn.data["windows"]
    assert window["name"] == "the middle of the run"
    kept = sum(len(rank["operations"]) for rank in window["ranks"]) // len(FIELDS)
    assert MOST_OPERATIONS - 10 <= kept <= MOST_OPERATIONS


def test_ranks_with_operations_are_shown_before_idle_ranks() -> None:
    *others, last = run(ranks=MOST_RANKS + 2, steps=1).traces
    idle = [replace(each, operations=each.operations[:0]) for each in others]
    drawn = timeline(Run(Path(), {}, [*idle, last]), clocks(len(others) + 1), [])
    assert drawn is not None
    shown = drawn.data["windows"][0]["ranks"]
    assert [rank["rank"] for rank in shown if rank["operations"]] == [last.metadata.rank]


def test_of_too_many_ranks_those_with_the_longest_waits_are_shown() -> None:
    ranks = MOST_RANKS + 6
    late = [Straggler(rank, "node", 10, 1, float(rank), 0.0) for rank in range(ranks)]
    drawn = timeline(run(ranks=ranks, steps=1), clocks(ranks), late)
    assert drawn is not None
    assert [rank["rank"] for rank in drawn.data["windows"][0]["ranks"]] == list(range(6, ranks))
    assert drawn.notes[-1] == f"Of the ranks {MOST_RANKS} are shown, those with the longest waits for them."
