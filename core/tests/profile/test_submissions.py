"""Operations on a device, of which only the host's submission was recorded: counts and bytes, never a time."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import parse
from traces import KB, MB, PROFILER, Op, make_run, make_trace

from netfold._native import engine
from netfold.profile.analyse import analyse
from netfold.profile.columns import completes, submissions
from netfold.profile.compare import compare
from netfold.profile.export import as_csv, as_json, comparison_as_json
from netfold.profile.findings import Findings, Row
from netfold.profile.overlap import each_step
from netfold.profile.page import render_page
from netfold.profile.page.timeline import FIELDS, timeline
from netfold.profile.perfetto import write_trace
from netfold.profile.recording import Names, Recording
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, Run, Trace
from netfold.profile.table import render_comparison, render_table
from netfold.profile.torch import records as profiler_records
from netfold.profile.torch import source as profiler_source
from netfold.profile.torch import window as profiler_window
from netfold.tuning.advice import advise

GROUPS = {"model": range(2), "cpu": range(2)}
HOW = ("torch.cuda.Event(enable_timing=True)", "torch.profiler")
TIMES = ("total_s", "mean_s", "p50_s", "p99_s", "algbw", "busbw", "share", "exposed_s", "queue_s", "skew_s")


def nccl(count: int = 4, *, gloo: bool = False, took_ms: float = 0.05) -> Run:
    """Two ranks submit `count` all_reduces of 8 MB in `took_ms` each; gloo adds one of 1 KB, from 50 to 60 ms."""
    submitted = [Op(10 * index, 10 * index + took_ms, 8 * MB, group="model") for index in range(count)]
    timed = [Op(50, 60, KB, group="cpu")] if gloo else []
    return make_run(
        *(
            make_trace(
                rank,
                2,
                [*submitted, *timed],
                groups=GROUPS if gloo else {"model": range(2)},
                backends={"model": "nccl", "cpu": "gloo"},
                source=PROFILER,
                steps_ms=[(0, 50), (50, 100)],
                progress_ms=[(0, 0), (100, 100)],
                host="a",
            )
            for rank in range(2)
        ),
        command="train.py",
    )


def advised(run: Run) -> Findings:
    return advise(run, analyse(run))


def said_how(text: str, count: int) -> bool:
    return f"{count:,} operations" in text and all(each in text for each in (*HOW, "nccl", "submi"))


def test_submissions_have_counts_and_bytes_and_no_times() -> None:
    findings = analyse(nccl())
    (row,) = findings.rows
    assert row.submitted_only and (row.operation, row.count, row.bytes) == ("all_reduce", 4, 32 * MB)
    assert {name: getattr(row, name) for name in TIMES} == dict.fromkeys(TIMES)
    assert (findings.overall.communication_s, findings.overall.exposed_s, findings.overall.overlap_ratio) == (None,) * 3
    assert findings.steps is not None
    assert (findings.steps.count, findings.steps.communication_s, findings.steps.exposed_s) == (2, None, None)
    assert findings.submissions == {"nccl": 8}
    assert [said_how(text, 8) for text in findings.coverage_gaps] == [True]
    assert [(step.communication_s, step.exposed_s, step.overlap_ratio) for step in each_step(nccl())] == [
        (None,) * 3
    ] * 2


def test_operations_on_the_host_keep_their_times_beside_submissions() -> None:
    """gloo's 10 ms alone are communication; it takes all of the share."""
    findings = analyse(nccl(gloo=True))
    timed, submitted = findings.rows
    assert not timed.submitted_only and submitted.submitted_only
    assert (timed.to_bytes, timed.share, submitted.share) == (128 * KB, 1, None)
    assert findings.overall.communication_s == 0.01
    assert findings.steps is not None and findings.steps.communication_s is not None
    one_kind = {"operation": "all_reduce", "above_bytes": 128 * KB}
    same_size = nccl(gloo=True)
    for trace in same_size.traces:
        trace.operations["bytes"] = 8 * MB
    rows = analyse(same_size).rows
    assert [(row.submitted_only, row.count) for row in rows] == [(False, 1), (True, 4)], "never one row of both"
    assert all(getattr(row, name) == value for row in rows for name, value in one_kind.items())


def test_a_group_of_two_backends_counts_as_submissions() -> None:
    """Of `cpu:gloo,cuda:nccl` an old record does not say which backend an operation was of."""
    run = nccl()
    named = [{n: replace(g, backend="gloo and nccl") for n, g in t.metadata.groups.items()} for t in run.traces]
    traces = [replace(t, metadata=replace(t.metadata, groups=g)) for t, g in zip(run.traces, named, strict=True)]
    (row,) = analyse(make_run(*traces)).rows
    assert row.submitted_only and row.total_s is None


def test_the_table_shows_submissions_and_how_to_get_times() -> None:
    lines = render_table(advised(nccl())).splitlines()
    assert lines[0] == (
        "train.py: 2 of 2 ranks on 1 host; 0.1 s; how long its operations took is not known: "
        "only their submission was recorded"
    )
    assert [word for word in lines[2].split() if "time" in word or "bw" in word or "exposed" in word] == []
    assert lines[3].split() == ["all_reduce", "(submitted)", "128", "KB", "to", "16", "MB", "4"]
    assert lines[5] == "2 steps, a step (p5..p95): wall 50 ms (50..50)"
    assert [said_how(line, 8) for line in lines if line.startswith("#")] == [True]
    both = render_table(advised(nccl(gloo=True)))
    assert "communicated 0.01 s (10%), not counting 8 submitted operations" in both.splitlines()[0]


def test_json_and_csv_of_submissions_have_no_times() -> None:
    whole = json.loads(as_json(advised(nccl())))
    (row,) = whole["rows"]
    assert row["submitted_only"] is True and [row[name] for name in TIMES] == [None] * len(TIMES)
    assert whole["submissions"] == {"nccl": 8} and whole["overall"]["communication_s"] is None
    (line,) = csv.DictReader(io.StringIO(as_csv(analyse(nccl()))))
    assert line["submitted_only"] == "True" and [line[name] for name in TIMES] == [""] * len(TIMES)


def test_the_page_shows_submissions_and_how_to_get_times() -> None:
    run = nccl()
    page = parse(render_page(advised(run), run, each_step=each_step(run)))
    assert (
        page.one("h1").text
        == "How long communication took is not known: of 8 operations only the submission was recorded."
    )
    assert said_how(page.one("p", class_="failed").text, 8)
    (cells,) = page.rows("rows")
    assert cells[0].text == "all_reduce (submitted)"
    assert sum("not known" in cell.text for cell in cells) == 10 + 4, "times, and what the backend does not say"
    assert not page.all(id="by-size"), "a picture of times has nothing to draw"
    assert not page.all(class_="clouds")
    assert [cells[1].text[:9] for cells in page.rows("steps")] == ["50 ms", "not known", "not known"]
    assert "not watched" not in page.one("div", id="rows-section").text if page.all("div", id="rows-section") else True


def test_the_timeline_draws_a_submission_as_a_moment() -> None:
    run = nccl()
    drawn = timeline(run, [], [])
    assert drawn is not None
    numbers = [dict(zip(FIELDS, drawn.data["windows"][0]["ranks"][0]["operations"][: len(FIELDS)], strict=True))]
    assert [(each["submitted"], each["lasted"], each["queued"]) for each in numbers] == [(1, 0, 0)]
    assert any("submi" in text for text in drawn.notes)


def test_perfetto_names_a_submission_and_draws_no_arrow(tmp_path: Path) -> None:
    run = nccl(gloo=True)
    write_trace(run, analyse(run).clocks, tmp_path / "trace.json")
    events: list[Mapping[str, object]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_kind = {kind: [each for each in events if each.get("cat") == kind] for kind in ("submission", "communication")}
    assert {each["name"] for each in by_kind["submission"]} == {"submit all_reduce"}
    assert (len(by_kind["submission"]), len(by_kind["communication"])) == (8, 2)
    assert not any("bind_id" in each for each in by_kind["submission"])


def test_a_comparison_never_says_that_submissions_became_faster() -> None:
    slower = compare(nccl(took_ms=0.05), nccl(took_ms=0.5))
    assert [change.verdict for change in (*slower.rows, slower.total)] == ["not timed", "not timed"]
    assert [(change.a_s, change.b_s, change.improvement) for change in slower.rows] == [(None, None, None)]
    assert any(note.startswith("A: ") and said_how(note, 8) for note in slower.notes)
    text = render_comparison(slower)
    assert "all_reduce (submitted)" in text and "not timed" in text and "%" not in text
    assert json.loads(comparison_as_json(slower))["rows"][0]["submitted_only"] is True


def test_a_run_on_a_device_is_no_gain_over_a_run_on_the_host() -> None:
    """gloo's times against nccl's submissions: the comparison names no faster run."""
    host = nccl(gloo=True)
    device = nccl()
    found = compare(host, device)
    verdicts = {(change.operation, change.above_bytes): change.verdict for change in (*found.rows, found.total)}
    assert verdicts == {("all_reduce", 0): "only in A", ("all_reduce", 128 * KB): "not timed", (None, 0): "not timed"}
    assert found.total.improvement is None and found.total.improvement_per_step is None


def test_every_time_of_a_row_may_be_unknown() -> None:
    assert {name for name in TIMES if "None" in str(Row.__annotations__[name])} == set(TIMES)


def test_in_a_group_of_gloo_and_nccl_each_operation_is_its_own_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """init_process_group() without a backend: CPU tensors by gloo, CUDA tensors by nccl."""
    monkeypatch.setattr(profiler_records, "other_groups", list)
    source = profiler_source.TorchSource(Recording("unused"))
    source._records.known = {"0": GroupName("default", "gloo and nccl", [0, 1])}
    kinds = ("nccl:all_reduce", "gloo:all_reduce")
    events = [profiler_window.Event(name, 10 * at, 5, [[4]], ["float"]) for at, name in enumerate(kinds)]
    entries = [
        {"process_group": ["0", "default"], "collective_seq_id": at + 1, "time_created_ns": 10 * at,
         "profiling_name": name, "input_sizes": [[4]]}
        for at, name in enumerate(kinds)
    ]  # fmt: skip
    kept = json.dumps({"entries": entries}).encode()
    source._windows.read.append(profiler_window.Window(events, (0, 0), (100, 0), {"0": 0}, kept, 2))
    names = Names(engine)
    (operations,) = source.take(names).operations
    about = RankMetadata(0, 2, "a", 1, PROFILER, names.by_number(), source.groups())
    trace = Trace(about, operations, np.zeros(0, STEP), np.zeros(0, PROGRESS))
    assert completes(trace).tolist() == [False, True] and submissions(make_run(trace)) == {"nccl": 1}
    assert analyse(make_run(trace)).backends == ["gloo", "nccl"]
