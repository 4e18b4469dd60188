"""torchrun restarts a job's workers with the store of the failed attempt; no attempt may read another's keys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from load import seconds

pytestmark = pytest.mark.torch

SIZE = 2

SCRIPT = """
import os, sys
import torch, torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("netfold")
rank = dist.get_rank()
group = dist.new_group()  # its keys, too
tensor = torch.full((1000,), 10.0 * attempt + rank)
dist.all_reduce(tensor)
dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
with open(f"{sys.argv[1]}/{rank}", "a") as file:
    print(attempt, tensor[-1].item(), file=file)
if attempt < int(sys.argv[2]):
    if attempt % 3 == rank:
        os.kill(os.getpid(), 9)  # without a goodbye
    if attempt % 3 == 2:
        raise RuntimeError("this attempt fails")
    dist.barrier()  # the other one is gone
    raise AssertionError("the barrier did not notice")
dist.destroy_process_group()
"""


def restarted(folder: Path, restarts: int, timeout_s: float) -> None:
    (folder / "script.py").write_text(SCRIPT)
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE),
            "--max-restarts", str(restarts), "--monitor-interval", "0.1", str(folder / "script.py"), str(folder),
            str(restarts),
        ],
        capture_output=True,
        text=True,
        timeout=seconds(timeout_s),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "AssertionError" not in ended.stderr, ended.stderr[-3000:]
    expected = [f"{attempt} {SIZE * 10.0 * attempt + 1}" for attempt in range(restarts + 1)]
    for rank in range(SIZE):
        assert (folder / str(rank)).read_text().splitlines() == expected


@pytest.mark.jobs
def test_restarted_workers_connect_again(tmp_path: Path) -> None:
    restarted(tmp_path, 3, 120)


@pytest.mark.soak
def test_fifty_restarts_in_a_row_reconnect(tmp_path: Path) -> None:
    restarted(tmp_path, 50, 1200)
