"""A plain torch script under torchrun, in which only init_process_group("netfold") names netfold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from load import seconds
from ranks import running_switch

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).with_name("plain_script.py")
SIZE = 3


def torchrun(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("NETFOLD_")} | environment
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE),
            str(SCRIPT), str(folder), *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=seconds(120),
        env=env,
    )  # fmt: skip


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(SIZE)]


def check(found: list[dict[str, Any]]) -> None:
    for each in found:
        for turn in range(2):
            assert each[f"sum {turn}"] == SIZE * 99_999 + SIZE * (SIZE - 1) / 2
            assert each[f"max {turn}"] == [SIZE - 1, 0]
            assert each[f"ranks {turn}"] == list(range(SIZE))
            assert each[f"f64 {turn}"] == found[0][f"f64 {turn}"]
            assert each[f"bf16 {turn}"] == found[0][f"bf16 {turn}"]


def test_the_script_does_not_import_netfold() -> None:
    assert "import netfold" not in SCRIPT.read_text()


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run without a switch that serves two tests: the script trains and writes its results, then one rank raises."""
    folder = tmp_path_factory.mktemp("failed")
    return torchrun(folder, "fail"), folder


def test_a_plain_script_trains_without_a_switch(failed: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ended, folder = failed
    assert all((folder / f"{rank}.json").exists() for rank in range(SIZE)), ended.stderr
    check(results(folder))


def test_a_plain_script_trains_with_a_switch(tmp_path: Path) -> None:
    with running_switch() as switch:
        ended = torchrun(tmp_path, NETFOLD_SWITCH=switch.endpoint)
        assert ended.returncode == 0, ended.stderr
        assert len(switch.wait_for(r"closed after .* (\d+) chunks", count=2)) == 2, "each group was a job there"
        check(results(tmp_path))


def test_a_rank_that_raises_ends_the_run_and_other_ranks_get_its_error(
    failed: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    ended, _ = failed
    assert ended.returncode != 0
    assert "PeerLost: rank 0: all_reduce #" in ended.stderr or "PeerLost: rank 1: all_reduce #" in ended.stderr
    reports = [line for line in ended.stderr.splitlines() if "PeerLost" in line]
    assert any("ZeroDivisionError: the learning rate fell to nothing" in line for line in reports), ended.stderr
