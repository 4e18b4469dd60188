"""Recordings of NCCL's profiler: beside recordings of netfold, and of several processes. (core/tests/nccl.)"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import PROFILER, Op, make_run, make_trace, write_run

from netfold.profile.analyse import analyse
from netfold.profile.nccl import CUT_OFF, OPERATION, SOURCE, TRANSFER
from netfold.profile.run import SUBMISSIONS_ONLY, Trace, read_run

MS = 1_000_000
NAMES = {
    "operation": ["?", "all_reduce", "send"],
    "dtype": ["?", "f32", "bf16"],
    "algorithm": ["?", "ring", "tree"],
    "protocol": ["?", "LL", "Simple"],
}


def write_process(run: Path, pid: int, comms: Sequence[tuple[str, int, int]], rows: np.ndarray, rank: int = -1) -> None:
    """comms: (id, place, ranks)."""
    folder = run / f"nccl-host0-{pid}"
    folder.mkdir(parents=True)
    about = {
        "format": 1,
        "host": "host0",
        "pid": pid,
        "rank": rank,
        "interface": 6,
        "comms": [{"id": id_, "name": "", "rank": place, "ranks": ranks, "nodes": 1} for id_, place, ranks in comms],
        "names": NAMES,
        "dropped_events": 0,
        "unknown_events": 0,
        "has_ended": True,
    }
    (folder / "metadata.json").write_text(json.dumps(about))
    (folder / "operations").write_bytes(rows.tobytes())
    (folder / "transfers").write_bytes(np.zeros(0, TRANSFER).tobytes())


def operations(count: int, *, comm: int = 0, first_ms: float = 0) -> np.ndarray:
    """all_reduces of 1, 2, ... elements, each 1 ms after the one before, called 0.5 ms before, and 0.25 ms long."""
    rows = np.zeros(count, OPERATION)
    rows["id"] = np.arange(count) + 1
    rows["count"] = np.arange(count) + 1
    rows["called_ns"] = ((first_ms + 1 + np.arange(count)) * MS).astype(np.int64)
    rows["began_ns"] = rows["called_ns"] + MS // 2
    rows["ended_ns"] = rows["began_ns"] + MS // 4
    rows["sequence"] = np.arange(count)
    rows["comm"] = comm
    for what in ("operation", "dtype", "algorithm"):
        rows[what] = 1
    rows["protocol"] = 2
    return rows


def rank_of_torch(rank: int, pid: int) -> Trace:
    """A recording with torch's marks of an nccl group, records of gloo, and a step."""
    made = make_trace(
        rank,
        2,
        [Op(i, i + 1, group=group) for group in ("gpus", "hosts") for i in range(4)],
        groups={"gpus": [0, 1], "hosts": [0, 1]},
        backends={"gpus": "nccl", "hosts": "gloo"},
        source=PROFILER,
        steps_ms=[(0, 5)],
        coverage_gaps=[SUBMISSIONS_ONLY],
        host="host0",
    )
    return replace(made, metadata=replace(made.metadata, pid=pid))


def test_exact_times_replace_the_marks_of_submissions(tmp_path: Path) -> None:
    write_run(make_run(*(rank_of_torch(rank, 100 + rank) for rank in range(2))), tmp_path)
    before = analyse(read_run(tmp_path))
    assert before.submissions == {"nccl": 8}
    # The places in the communicator are in another order than the ranks, which the recordings tell.
    for rank in range(2):
        write_process(tmp_path, 100 + rank, [("feed", 1 - rank, 2)], operations(3))
    run = read_run(tmp_path)
    for trace in run.traces:
        backends = [trace.metadata.groups[str(number)].backend for number in trace.operations["group"]]
        assert (backends.count("gloo"), backends.count("nccl")) == (4, 3)
        exact = [group for group in trace.metadata.groups.values() if group.is_timed]
        assert [group.ranks for group in exact] == [[1, 0]]
        assert trace.metadata.coverage_gaps == []
        assert trace.metadata.source == f"{PROFILER} and {SOURCE}"
        assert len(trace.steps) == 1
    found = analyse(run)
    assert found.submissions == {}
    assert sum(row.count for row in found.rows) == 7


def test_ranks_of_communicators_come_from_all_processes(tmp_path: Path) -> None:
    """Ranks 0 to 3 in two communicators of two, and one of which a process is missing."""
    for rank in range(4):
        comms = [(f"pair {rank // 2}", rank % 2, 2), ("five", rank, 5)]
        write_process(
            tmp_path, 10 + rank, comms, np.concatenate([operations(2), operations(1, comm=1, first_ms=9)]), rank
        )
    run = read_run(tmp_path)
    assert [trace.metadata.rank for trace in run.traces] == [0, 1, 2, 3]
    for rank, trace in enumerate(run.traces):
        ranks = {
            group.name.split()[-2]: group.ranks for group in trace.metadata.groups.values() if "pair" in group.name
        }
        assert list(ranks.values()) == [[rank // 2 * 2, rank // 2 * 2 + 1]]
        assert [group.ranks for group in trace.metadata.groups.values() if "five" in group.name] == [[]]
        assert trace.operations["queued_ns"].tolist() == [1 * MS, 2 * MS, 10 * MS]
        assert (trace.operations["finished_ns"] - trace.operations["started_ns"]).tolist() == [MS // 4] * 3
        assert trace.operations["bytes"].tolist() == [4, 8, 4]


def test_a_cut_off_operation_is_a_submission_beside_the_timed_ones(tmp_path: Path) -> None:
    rows = operations(4)
    rows["ending"][2] = CUT_OFF
    for rank in range(2):
        write_process(tmp_path, 10 + rank, [("both", rank, 2)], rows, rank)
    found = analyse(read_run(tmp_path))
    assert {row.submitted_only: row.count for row in found.rows} == {False: 3, True: 1}
    assert found.submissions == {"nccl": 2}


def test_a_process_that_is_several_ranks_is_said_to_be(tmp_path: Path) -> None:
    write_process(
        tmp_path, 10, [("both", 0, 2), ("both", 1, 2)], np.concatenate([operations(2), operations(2, comm=1)])
    )
    (trace,) = read_run(tmp_path).traces
    assert len(trace.operations) == 4
    assert any("several ranks of one communicator" in gap for gap in trace.metadata.coverage_gaps)


@pytest.mark.parametrize("comm", [1, 4_000_000_000])
def test_an_operation_of_no_communicator_is_counted_and_left_out(comm: int, tmp_path: Path) -> None:
    rows = operations(3)
    rows["comm"][1] = comm
    write_process(tmp_path, 10, [("one", 0, 1)], rows)
    (trace,) = read_run(tmp_path).traces
    assert len(trace.operations) == 2
    assert any("1 operations of NCCL name a communicator" in gap for gap in trace.metadata.coverage_gaps)
