"""Analysis of what the engine really recorded."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values
from traces import MB, make_run

from netfold import Communicator, FileStore, Options
from netfold._native import engine
from netfold.plan.observed import Fitted, fit, observe
from netfold.profile.analyse import analyse
from netfold.profile.matching import SYNCHRONISING
from netfold.profile.record import records_of
from netfold.profile.run import PROGRESS, STEP, About, GroupName, Run, Trace

SIZE, ROUNDS, LATE, LATE_S = 3, 12, 1, 0.03
NAMES = {"operation": engine.KINDS, "algorithm": engine.ALGORITHMS, "dtype": engine.DTYPES, "wire": engine.DTYPES}


def work(rank: int, size: int, folder: str, transport: str) -> tuple[bytes, list[tuple[int, int]]]:
    """ROUNDS times every meeting there is, LATE 30 ms after the others in each all_reduce."""
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
        about = About(
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
def test_real_records_bound_clocks_name_the_late_and_show_a_link(transport: str) -> None:
    """All ranks have one clock in truth: with others put on, the offsets found must undo them, within what is said."""
    clocks = [0, 7_000_000_000_000, -3_000_000_000]
    run = run_of(values(run_ranks(work, SIZE, transport, timeout_s=60)), clocks)
    findings = analyse(run)
    counts = {row.operation: row.count for row in findings.rows}
    assert counts == dict.fromkeys(SYNCHRONISING, ROUNDS)
    for each, truth in zip(findings.clocks, clocks, strict=True):
        assert each.bound_ns is not None and each.bound_ns < 5e6
        assert abs(each.offset_ns + truth) <= each.bound_ns + 1
    assert not [text for text in findings.blind_spots if "clock" in text or "records" in text], findings.blind_spots
    late = findings.lateness[LATE]
    assert late.operations == len(SYNCHRONISING) * ROUNDS
    assert late.last >= ROUNDS
    assert late.waited_for_s > 0.9 * ROUNDS * (LATE_S - 0.005)
    reduced = next(row for row in findings.rows if row.operation == "all_reduce")
    assert reduced.bytes == ROUNDS * MB and reduced.skew_s is not None
    assert reduced.skew_s > 0.9 * ROUNDS * (LATE_S - 0.005) * (SIZE - 1) / SIZE
    gathered = next(row for row in findings.rows if row.operation == "all_gather")
    assert gathered.bytes == ROUNDS * 12_000, "three blocks of 4000 bytes"
    link = fit(observe(run)[0])
    if transport == "auto":
        assert link == "no 3 operations of one size ran by an algorithm whose time is one link's (shared_memory)"
    elif isinstance(link, Fitted):  # or a machine too busy for the formulas, and it says so
        assert 1e7 < link.links.network.bytes_per_s < 1e11
    else:
        assert "off the formulas" in link or "larger operations take no longer" in link
