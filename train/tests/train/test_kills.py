"""Ranks are killed at random moments; torchrun restarts all ranks, and training resumes from the last checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from load import seconds

pytestmark = pytest.mark.torch

SIZE, BATCH, EVERY = 2, 8, 10
SCRIPT = Path(__file__).with_name("killed_script.py")


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a log whose writer was killed."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def survives(folder: Path, seed: int, kills: int, steps: int, timeout_s: float) -> None:
    from netfold_train.data.sampler import Sampler

    replay = f"{SCRIPT.name} FOLDER {seed} {kills} {steps}"
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE),
            "--max-restarts", str(kills), "--monitor-interval", "0.1", str(SCRIPT), str(folder), str(seed), str(kills),
            str(steps),
        ],
        capture_output=True,
        text=True,
        timeout=seconds(timeout_s),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)},
    )  # fmt: skip
    assert ended.returncode == 0, f"{replay}\n{ended.stderr[-5000:]}"

    order = Sampler(96, 0)
    reached, repeated = 0, 0
    for attempt in range(kills + 1):
        starts = set()
        for rank in range(SIZE):
            log = lines(folder / f"{attempt}-{rank}")
            if not log:
                continue  # killed before its first line
            start = log[0]["from"]
            starts.add(start)
            for number, row in enumerate(line["samples"] for line in log if "samples" in line):
                first = (start + number) * BATCH + rank * BATCH // SIZE
                assert row == order.indices(first, BATCH // SIZE), (
                    f"{replay}: attempt {attempt}, rank {rank}, row {number}"
                )
        assert len(starts) == 1, f"{replay}: attempt {attempt} began at steps {starts}"
        start = starts.pop()
        # What is lost is at most the steps since the last checkpoint, and those since the one before while the last
        # was being written.
        assert start % EVERY == 0 and max(0, reached // EVERY - 1) * EVERY <= start <= reached, (replay, attempt, start)
        repeated += reached - start
        reached = max([start, *(line["step"] for line in lines(folder / f"{attempt}-0") if "step" in line)])
    assert reached == steps, f"{replay}: ended at step {reached}"

    for rank in range(SIZE):
        metric, uninterrupted, cost = json.loads((folder / f"ended-{rank}").read_text())
        assert metric == uninterrupted, f"{replay}: the same bits as a run that nobody killed"
        if rank == 0:
            toll = re.search(r"(\d+) restarts? of all ranks, (\d+) steps? repeated, ([\d.]+) s lost", cost)
            assert toll is not None, cost
            assert int(toll[1]) == kills
            # A process that is killed between two callbacks of a step has written one more line.
            assert repeated <= int(toll[2]) <= repeated + kills
            assert float(toll[3]) > 0


@pytest.mark.jobs
def test_two_kills_in_a_row_lose_no_sample(tmp_path: Path) -> None:
    survives(tmp_path, seed=1, kills=2, steps=200, timeout_s=200)


@pytest.mark.soak
def test_thirty_kills_in_a_row_lose_no_sample(tmp_path: Path) -> None:
    survives(tmp_path, seed=2, kills=30, steps=2500, timeout_s=1500)
