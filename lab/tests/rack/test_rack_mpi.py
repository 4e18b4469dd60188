"""Ranks on two hosts that mpirun started without settings: they join and communicate. Needs root."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fabrics import need_mpi
from load import seconds
from sources import HELPERS, ROOT

from netfold_lab.bench.network import Network, Place
from netfold_lab.rack import Rack
from netfold_lab.rack.command import why_unavailable

LACK = why_unavailable(loss=False)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

RANKS = ROOT / "core" / "tests" / "communicator"
# Variables that a rack sets; here the launcher must set them.
UNSAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("mpi", ["mpich", "intel"])
def test_ranks_of_two_hosts_join_by_hydras_pmi(mpi: str, tmp_path: Path) -> None:
    need_mpi(mpi)
    without = [word for name in UNSAID for word in ("-u", name)]
    paths = f"PYTHONPATH={RANKS}{os.pathsep}{HELPERS}"
    with Rack(2, "1gbit", "0%", delay="0us") as rack:
        script = str(RANKS / "mpi_ranks.py")
        ranks = Network(Place(2), rack).spawn_mpi(mpi, ["env", *without, paths, sys.executable, script], tmp_path)
        assert ranks.wait(seconds(90)) == 0
