"""The export for Perfetto: the format's own rules, and a run's numbers on one clock."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invented import AHEAD_NS, STEP_NS, about, clocks, run
from typer.testing import CliRunner

from netfold.cli import app
from netfold.profile.findings import ClockOffset
from netfold.profile.perfetto import trace_events, write_trace
from netfold.profile.record import RECORD
from netfold.profile.run import PROGRESS, STEP, RankWriter, Run, Trace
from netfold.profile.timeline import lanes, number_calls

HOSTILE = 'a"b\\</script>\n\udcff☃'
# What an event of each phase must have, and may: "Trace Event Format".
MUST = {"M": {"ph", "name", "pid", "tid", "args"}, "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur"}}
MUST |= {"C": {"ph", "name", "pid", "tid", "ts", "args"}}
MAY: Mapping[str, set[str]] = {"M": set(), "X": {"args", "bind_id", "flow_in", "flow_out"}, "C": set()}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "process_labels": ("labels", str),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def ns(time_us: float) -> int:
    """Read a time as Perfetto does: a double of microseconds, times 1000, truncated."""
    return int(time_us * 1000)


def check(events: list[dict[str, Any]]) -> None:
    """The format's rules: keys and their types, names before use, no overlap within a thread, flows that join."""
    named: dict[str, set[Any]] = defaultdict(set)
    slices = defaultdict(list)
    flows: dict[int, list[tuple[int, bool, bool]]] = defaultdict(list)
    for event in events:
        kind = event["ph"]
        assert MUST[kind] <= set(event) <= MUST[kind] | MAY[kind], event
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] > 0, "0 is the idle process"
        if kind == "M":
            key, of = METADATA[event["name"]]
            assert set(event["args"]) == {key} and isinstance(event["args"][key], of)
            named[event["name"]].add(event["tid"] if event["name"].startswith("thread") else event["pid"])
            continue
        assert isinstance(event["ts"], float) and event["ts"] >= 0
        if kind == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
            continue
        assert isinstance(event["dur"], float) and event["dur"] >= 0
        slices[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
        if "bind_id" in event:
            flows[event["bind_id"]].append((ns(event["ts"]), event.get("flow_in", False), event.get("flow_out", False)))
    assert {pid for pid, _ in slices} <= named["process_name"]
    assert {tid for _, tid in slices} == named["thread_name"] == named["thread_sort_index"]
    assert len({tid for _, tid in slices}) == len(slices), "a thread's number stands for one thread"
    for spans in slices.values():
        spans.sort()
        for (_, end), (begin, _) in pairwise(spans):
            assert begin >= end
    for steps in flows.values():
        steps.sort()
        assert len(steps) > 1
        inward, outward = [step[1] for step in steps], [step[2] for step in steps]
        assert inward == [False] + [True] * (len(steps) - 1)
        assert outward == [True] * (len(steps) - 1) + [False]


def written(recorded: Run, path: Path, offsets: list[ClockOffset]) -> list[dict[str, Any]]:
    count = write_trace(recorded, offsets, path)
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    assert len(events) == count
    check(events)
    return events


def of(events: list[dict[str, Any]], kind: str, rank: int, **having: str) -> list[dict[str, Any]]:
    return [
        event
        for event in events
        if event["ph"] == kind
        and event["pid"] == rank + 1
        and all(event[key] == value for key, value in having.items())
    ]


def test_every_operation_is_a_slice_on_the_first_ranks_clock(tmp_path: Path) -> None:
    recorded = run()
    events = written(recorded, tmp_path / "trace.json", clocks(4))
    for trace in recorded.traces:
        rank = trace.metadata.rank
        shown = of(events, "X", rank, cat="communication")
        assert len(shown) == len(trace.operations) == 48
        by_sequence = {event["args"]["sequence"]: event for event in shown}
        for one in trace.operations:
            event = by_sequence[one["sequence"]]
            # The first step of rank 0 is the first of all events.
            assert ns(event["ts"]) == one["started_ns"] - rank * AHEAD_NS
            assert ns(event["dur"]) == one["finished_ns"] - one["started_ns"]
            assert ns(event["args"]["queued_us"]) == one["started_ns"] - one["queued_ns"]
            assert event["name"] == trace.metadata.name_of("operation", one["operation"])
            assert event["args"]["bytes"] == one["bytes"]
            assert event["args"]["wire_bytes"] == one["wire_bytes"]
            assert event["args"]["algorithm"] == trace.metadata.name_of("algorithm", one["algorithm"])
            assert event["args"]["wire"] == "f32" and event["args"]["group"] == "world"
        steps = of(events, "X", rank, cat="step")
        assert [(event["name"], ns(event["ts"])) for event in steps] == [
            (f"step {step}", step * STEP_NS) for step in range(6)
        ]
        (name,) = (event for event in of(events, "M", rank) if event["name"] == "process_name")
        assert name["args"]["name"] == f"rank {rank} on node-{rank // 2}"
        assert not any(event["name"] == "process_labels" for event in of(events, "M", rank))


def test_the_counter_shows_how_much_the_training_thread_computed(tmp_path: Path) -> None:
    events = written(run(ranks=1), tmp_path / "trace.json", clocks(1))
    counted = [(ns(event["ts"]), event["args"]["percent"]) for event in of(events, "C", 0)]
    assert counted[:4] == [(0, 100), (12_000_000, 0), (20_000_000, 100), (32_000_000, 0)]
    assert counted[-1] == (6 * STEP_NS, 0)


def test_arrows_join_one_call_from_the_first_rank_to_the_last(tmp_path: Path) -> None:
    recorded = run()
    events = written(recorded, tmp_path / "trace.json", clocks(4))
    joined = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["cat"] == "communication":
            joined[event["bind_id"]].append(event)
    assert len(joined) == 48
    for each in joined.values():
        assert len(each) == 4
        assert len({(event["args"]["sequence"], event["name"]) for event in each}) == 1
        (last,) = (event for event in each if "flow_out" not in event)
        assert last["pid"] == 1 + 1, "rank 1 is late to every call"


def test_sends_other_groups_and_repeated_numbers_have_no_arrows() -> None:
    def trace(rank: int, sequence: list[int], operation: list[int], group: str, ranks: list[int]) -> Trace:
        operations = np.zeros(len(sequence), RECORD)
        operations["sequence"], operations["operation"], operations["group"] = sequence, operation, 77 + rank
        lists = (operations, np.zeros(0, STEP), np.zeros(0, PROGRESS))
        return Trace(about(rank, 3, group=group, ranks=ranks), *lists)

    one, two, other = number_calls(
        Run(
            Path(),
            {},
            [
                trace(0, [1, 2, 3, 3, 4], [0, 0, 2, 2, 9], "world", [0, 1]),
                trace(1, [2, 1, 3, 4, 5], [0, 0, 2, 10, 0], "world", [0, 1]),
                trace(2, [1, 2, 3], [0, 0, 2], "another", [2]),
            ],
        )
    )
    assert one[0] == two[1] != 0
    assert one[1] == two[0] not in (0, one[0])
    assert one[2:].tolist() == [0, 0, 0]
    assert two[2:].tolist() == [0, 0, 0]
    assert other.tolist() == [0, 0, 0]


def test_a_group_without_a_name_matches_no_other_rank() -> None:
    nameless = [replace(trace, metadata=replace(trace.metadata, groups={})) for trace in run(ranks=2).traces]
    for trace in nameless:
        trace.operations["group"] = 5
    assert not any(each.any() for each in number_calls(Run(Path(), {}, nameless)))


def test_lanes_have_no_overlapping_slices_and_are_as_few_as_possible() -> None:
    random = np.random.default_rng(7)
    began = np.sort(random.integers(0, 1000, 400))
    ended = began + random.integers(0, 40, 400)
    row = lanes(began, ended)
    for lane in np.unique(row):
        assert (ended[row == lane][:-1] <= began[row == lane][1:]).all()
    at_once = max(int(((began <= at) & (np.maximum(ended, began + 1) > at)).sum()) for at in began)
    assert set(row.tolist()) == set(range(at_once))


def test_times_survive_export_to_the_nanosecond(tmp_path: Path) -> None:
    """Slices that touch: cut off the wrong way, one would begin before the other ended, and be dropped."""
    edges = np.cumsum(np.random.default_rng(3).integers(1, 10**7, 4000))
    operations = np.zeros(len(edges) - 1, RECORD)
    operations["started_ns"], operations["finished_ns"], operations["sequence"] = edges[:-1], edges[1:], range(1, 4000)
    spans = np.zeros(len(edges) - 1, STEP)
    spans["began_ns"], spans["ended_ns"] = edges[:-1], edges[1:]
    trace = Trace(about(0, 1), operations, spans, np.zeros(0, PROGRESS))
    events = written(Run(Path(), {}, [trace]), tmp_path / "trace.json", clocks(1))
    assert len({event["tid"] for event in of(events, "X", 0, cat="communication")}) == 1
    for name in ("communication", "step"):
        assert [ns(event["ts"]) for event in of(events, "X", 0, cat=name)] == (edges[:-1] - edges[0]).tolist()


def test_a_rank_with_an_unbounded_clock_has_a_label(tmp_path: Path) -> None:
    events = written(run(ranks=2), tmp_path / "trace.json", [ClockOffset(0, 0, 0), ClockOffset(1, -AHEAD_NS, None)])
    assert ns(of(events, "X", 1, name="step 1")[0]["ts"]) == STEP_NS, "a guess is better than none"
    (label,) = (event for event in events if event["name"] == "process_labels")
    assert label["pid"] == 2
    assert "nothing bounds" in label["args"]["labels"]


@pytest.mark.parametrize("operations", [0, 3])
def test_an_almost_empty_run_is_a_valid_trace(operations: int, tmp_path: Path) -> None:
    lists = (np.zeros(operations, RECORD), np.zeros(0, STEP), np.zeros(0, PROGRESS))
    events = written(Run(Path(), {}, [Trace(about(0, 4), *lists)]), tmp_path / "trace.json", [])
    assert len(of(events, "X", 0)) == operations


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    recorded = run(ranks=2, steps=1, host=HOSTILE)
    names = {"operation": {"0": HOSTILE}, "error": {"4": HOSTILE}}
    for trace in recorded.traces:
        trace.operations["error"][0] = 4
    recorded = replace(
        recorded, traces=[replace(trace, metadata=replace(trace.metadata, names=names)) for trace in recorded.traces]
    )
    events = written(recorded, tmp_path / "trace.json", clocks(2))
    assert any(event["args"]["name"] == f"rank 1 on {HOSTILE}" for event in of(events, "M", 1, name="process_name"))
    assert sum(event["args"].get("error") == HOSTILE for event in of(events, "X", 0, cat="communication")) == 1


def test_events_are_made_one_at_a_time() -> None:
    events = trace_events(run(steps=50, calls=100), clocks(4))
    assert next(events)["name"] == "process_name"


def test_a_failing_disk_keeps_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("as before")
    broken = run()
    names = {**broken.traces[3].metadata.names, "operation": 5}
    broken.traces[3] = replace(broken.traces[3], metadata=replace(broken.traces[3].metadata, names=names))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        write_trace(broken, clocks(4), path)
    assert path.read_text() == "as before"
    assert list(tmp_path.iterdir()) == [path]


def leave(recorded: Run, folder: Path) -> Path:
    for trace in recorded.traces:
        writer = RankWriter(folder, trace.metadata)
        for name in ("operations", "steps", "progress"):
            writer.append(name, getattr(trace, name))
        writer.close()
    return folder


def test_the_command_exports_a_run(tmp_path: Path) -> None:
    folder, file = leave(run(), tmp_path / "run"), tmp_path / "out.json"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["profile", "export", "--perfetto", str(folder), "-o", str(file)])
    assert done.exit_code == 0, done.output
    check(json.loads(file.read_text())["traceEvents"])
    assert "ui.perfetto.dev" in done.output
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_reports_errors(tmp_path: Path) -> None:
    def says(*words: str) -> str:
        done = CliRunner().invoke(app, ["profile", "export", *words])
        assert done.exit_code == 2
        return " ".join(done.output.split())

    assert "holds no profile" in says("--perfetto", str(tmp_path))
    folder = leave(run(ranks=1), tmp_path / "run")
    assert "--perfetto" in says(str(folder))
    assert "choose another path" in says("--perfetto", str(folder), "-o", str(tmp_path / "nowhere" / "file.json"))
