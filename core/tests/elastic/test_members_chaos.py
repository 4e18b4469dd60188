"""Members that are killed, stopped, continued and joined at random moments: every step's sum stays right."""

from __future__ import annotations

from pathlib import Path

import pytest
from members_chaos import run_chaos


@pytest.mark.parametrize("seed", range(2))
def test_members_go_on_through_faults_at_random_moments(seed: int, tmp_path: Path) -> None:
    run_chaos(tmp_path, seed, 8.0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
def test_members_go_on_through_many_faults_at_random_moments(seed: int, tmp_path: Path) -> None:
    run_chaos(tmp_path, seed, 40.0)
