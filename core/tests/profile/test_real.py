"""Analysis of real records of the engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values
from traces import MB, make_run

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.profile.analyse import analyse
from netfold.profile.matching import SYNCHRONISING
from netfold.profile.record import records_of
from netfold.profile.run import PROGRESS, STEP, GroupName, RankMetadata, Run, Trace
from netfold.tuning.cost import predict
from netfold.tuning.profile_link import Fitted, ObservedGroup, fit, observe_groups
from netfold.tuning.topology import DEFAULT_LINKS, Link

SIZE, ROUNDS, LATE, LATE_S = 3, 12, 1, 0.03
NAMES = {"operation": engine.KINDS, "algorithm": engine.ALGORITHMS, "dtype": engine.DTYPES, "wire": engine.DTYPES}


def work(rank: int, size: int, folder: str, transport: str) -> tuple[bytes, list[tuple[int, int]]]:
    """ROUNDS times every synchronising operation; rank LATE begins each all_reduce 30 ms after the other ranks."""
    steps = []
    with Communicator(FileStore(folder), rank, size, options=Options(transport=transport), timeout_s=30) as group:
        for _ in range(ROUNDS):
            group.barrier()
            began = time.perf_counter_ns()
            if rank == LATE:
                time.sleep(LATE_S)
            group.all_reduce(np.ones(MB // 4, np.float32))
            group.all_gather(np.ones(1000, np.float32))
            group.reduce_scatter(np.ones(3000, np.float32))
            group.all_to_all(np.ones(3000, np.float32), np.empty(3000, np.float32))
            steps.append((began, time.perf_counter_ns()))
        return group.group.events().tobytes(), steps


def run_of(found: list[Any], clocks_ns: list[int]) -> Run:
    """As if every rank had been on a host of its own, with such clocks."""
    traces = []
    for rank, (raw, steps) in enumerate(found):
        records = records_of(raw).copy()
        for name in ("queued_ns", "started_ns", "finished_ns"):
            records[name] += clocks_ns[rank]
        about = RankMetadata(
            rank=rank,
            size=SIZE,
            host=f"host-{rank}",
            pid=rank,
            source="event records",
            names={what: {str(number): name for name, number in names.items()} for what, names in NAMES.items()},
            groups={
                str(number): GroupName("world", "netfold", list(range(SIZE)))
                for number in set(records["group"].tolist())
            },
        )
        shifted = np.array([(begin + clocks_ns[rank], end + clocks_ns[rank]) for begin, end in steps], STEP)
        traces.append(Trace(about, records, shifted, np.empty(0, PROGRESS)))
    return make_run(*traces)


@pytest.mark.native
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_real_records_give_clock_bounds_stragglers_and_a_link(transport: str) -> None:
    """All ranks have one clock. With invented offsets added, the found offsets undo them within the stated bounds."""
    clocks = [0, 7_000_000_000_000, -3_000_000_000]
    found = values(run_ranks(work, SIZE, transport, timeout_s=60))
    run = run_of(found, clocks)
    findings = analyse(run)
    counts = {row.operation: row.count for row in findings.rows}
    assert counts == dict.fromkeys(SYNCHRONISING, ROUNDS)
    for each, truth in zip(findings.clocks, clocks, strict=True):
        assert each.bound_ns is not None and each.bound_ns < 1e9
        assert abs(each.offset_ns + truth) <= each.bound_ns + 1
    gaps = [text for text in findings.coverage_gaps if "within the error of the hosts' clocks" not in text]
    assert not [text for text in gaps if "clock" in text or "records" in text], gaps

    # The true start of each synchronising operation by rank, on one clock, and the largest error of a wait.
    records = [np.sort(records_of(raw), order="sequence") for raw, _ in found]
    started = np.stack([each["started_ns"] for each in records]).astype(np.float64)
    error_ns = 2 * max(each.bound_ns or 0 for each in findings.clocks)
    waits = started[LATE] - started
    behind = np.delete(waits, LATE, 0).min(0)
    certain, possible = behind > 2 * error_ns, behind > 0
    assert certain.any(), "LATE was never last by more than clocks say"
    late = findings.stragglers[LATE]
    assert late.operations == len(SYNCHRONISING) * ROUNDS
    assert certain.sum() <= late.last <= possible.sum()
    waited_ns = waits.sum(0) / (SIZE - 1)
    assert (waited_ns - error_ns)[certain].sum() <= 1e9 * late.waited_for_s <= (waited_ns + error_ns)[possible].sum()
    reduces = records[0]["operation"] == engine.KINDS["all_reduce"]
    reduced = next(row for row in findings.rows if row.operation == "all_reduce")
    assert reduced.bytes == ROUNDS * MB and reduced.skew_s is not None
    skew_ns = (started.max(0) - started)[:, reduces].sum() / SIZE
    assert 1e9 * reduced.skew_s == pytest.approx(skew_ns, abs=ROUNDS * error_ns)
    gathered = next(row for row in findings.rows if row.operation == "all_gather")
    assert gathered.bytes == ROUNDS * 12_000, "three blocks of 4000 bytes"

    # The real records with the times that the cost model gives for a link: the load of the machine has no part in them.
    link = fit(as_over(run, Link(80e-6, 50e6)))
    if transport == "auto":
        assert link == "no 3 operations of one size used an algorithm whose time depends on one link (shared_memory)"
    else:
        assert isinstance(link, Fitted), link
        assert link.links.network.latency_s == pytest.approx(80e-6, rel=1e-2)
        assert link.links.network.bytes_per_s == pytest.approx(50e6, rel=1e-2)
        assert link.operations >= 3 * ROUNDS


def as_over(run: Run, link: Link) -> ObservedGroup:
    """Give each operation the time that the cost model states for `link`, and start them a second apart."""
    (observed,) = observe_groups(run)
    links = replace(DEFAULT_LINKS, network=link)
    for trace in run.traces:
        order = np.argsort(trace.operations["sequence"])
        assert len(order) == len(observed.size)
        for number, place in enumerate(order):
            kind, algorithm, wire = (str(each[number]) for each in (observed.kind, observed.algorithm, observed.wire))
            seconds = predict(kind, algorithm, float(observed.size[number]), observed.topology, links, wire)
            trace.operations["queued_ns"][place] = trace.operations["started_ns"][place] = (number + 1) * 1_000_000_000
            trace.operations["finished_ns"][place] = (number + 1) * 1_000_000_000 + round(1e9 * seconds)
    return observe_groups(run)[0]
