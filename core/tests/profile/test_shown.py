"""One small run as a table, and as JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace

from traces import MB, PROFILER, Op, make_run, make_trace

from netfold.profile.analyse import analyse
from netfold.profile.compare import compare
from netfold.profile.export import as_csv, as_json, comparison_as_json
from netfold.profile.findings import Advice, Row
from netfold.profile.page import render_page
from netfold.profile.run import Run
from netfold.profile.table import render_table


def small() -> Run:
    """Two ranks of one host; a step of 100 ms; 8 MB in 20 ms of which 10 are exposed; rank 1 begins 4 ms late; 4 bytes
    in 1 ms, through a tree once. Communication of rank 0: 20 + 1 ms, of rank 1: 16 + 1, exposed 10 + 1 and 8 + 1."""
    both = {"steps_ms": [(0, 100)], "progress_ms": [(0, 0), (10, 10), (30, 20), (100, 90)], "host": "a"}
    small = Op(30, 31, 4, algorithm="tree", wire_bytes=44)
    return make_run(
        make_trace(0, 2, [Op(10, 30, 8 * MB, wire_bytes=8 * MB), small], coverage_gaps=["no sends"], **both),
        make_trace(1, 2, [Op(14, 30, 8 * MB, wire_bytes=8 * MB), small], coverage_gaps=["no sends"], **both),
        command="train.py",
    )


def test_the_table_has_all_findings() -> None:
    """Exposed: idle 50% from 10 to 30, none after. algbw 16 MB / 36 ms = 0.466 GB/s; rank 0 waited 4 ms: 2 a rank."""
    findings = replace(analyse(small()), advice=[Advice("do that", True), Advice("it is so", False)])
    assert render_table(findings).splitlines() == [
        "train.py: 2 of 2 ranks on 1 host; 0.1 s, in which a rank communicated 0.019 s (19%), 0.009 s of it exposed: "
        "computing hid 53%",
        "",
        " operation             size  count  time(ms)  share  mean(ms)  p50  p99  exposed(ms)  skew(ms)   algbw   busbw"
        "  algorithms  wires  wire",
        "all_reduce     up to 128 KB      1         1   5.3%         1    1    1            0         0  0.0000  0.0000"
        "        tree    f32  44 B",
        "all_reduce  128 KB to 16 MB      1        18  94.7%        18   18   20            9         2  0.4660  0.4660"
        "        ring    f32  8 MB",
        "",
        "1 step, a step (p5..p95): wall 100 ms (100..100), communication 19 ms (17.2..20.8), exposed 9 ms (8.1..9.9)",
        "",
        "rank 1 (a) was last in 1 of 2 operations: other ranks waited 4 ms for it; it waited 0 ms for other ranks",
        "",
        "prediction: do that",
        "it is so",
        "",
        "# no sends",
    ]


def test_over_a_fabric_the_ratio_of_registration_hits_is_shown() -> None:
    lines = render_table(analyse(make_run(make_trace(0, 1, [Op(0, 1, registration=(3, 1))])))).splitlines()
    assert lines[2].endswith("registered") and lines[3].endswith(" 75%")


def test_registrations_at_the_end_are_shown_as_a_sum_over_ranks() -> None:
    assert "evicted" not in render_table(analyse(small()))
    kept = {"ranges": 2, "bytes": 3 * MB, "evictions": 5}
    traces = [replace(each, metadata=replace(each.metadata, registrations=kept)) for each in small().traces]
    findings = analyse(make_run(*traces))
    said = "at the end: 4 ranges of memory, 6 MB, on 2 ranks; 10 were evicted for other ranges"
    assert said in render_table(findings) and said in render_page(findings, None)
    assert json.loads(as_json(findings))["registrations"] == {"0": kept, "1": kept}


def test_empty_columns_are_left_out_and_unknown_is_a_dash() -> None:
    ops = [Op(0, 1), Op(2, 3, error="timeout")]
    text = render_table(analyse(make_run(make_trace(0, 1, ops, source=PROFILER))))
    assert "wire" not in text and "exposed(ms)" not in text and "errors" in text
    assert "errors" not in render_table(analyse(make_run(make_trace(0, 1, ops[:1]))))
    assert "of 1 ranks" in render_table(analyse(make_run(make_trace(0, 1)))), "nothing to show, and shown"


def test_json_has_every_field_and_csv_every_row() -> None:
    findings = analyse(small())
    whole = json.loads(as_json(findings))
    assert whole["overall"]["exposed_s"] == findings.overall.exposed_s
    assert whole["rows"][1]["algorithms"] == {"ring": 2}
    lines = list(csv.DictReader(io.StringIO(as_csv(findings))))
    assert list(lines[0]) == [field.name for field in fields(Row)]
    assert lines[1]["operation"] == "all_reduce" and float(lines[1]["bytes"]) == 8 * MB
    assert lines[1]["algorithms"] == "ring:2" and lines[1]["registration_hits"] == ""


def test_a_comparison_as_json_says_its_verdicts() -> None:
    whole = json.loads(comparison_as_json(compare(small(), small())))
    assert whole["total"]["improvement"] == 0 and whole["rows"][0]["verdict"] == "same"
    assert whole["total"]["steps"] == [1, 1]
