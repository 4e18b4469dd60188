"""The cost of a sleep in a mesh of many connections."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from changed import build

pytestmark = pytest.mark.native

TRANSPORT = Path(__file__).parents[3] / "core" / "native" / "transport"
INCLUDES = [TRANSPORT.parent / folder / "include" for folder in ("transport", "auth")]


def test_a_sleep_looks_only_at_the_connections_that_were_used(tmp_path: Path) -> None:
    sources = [Path(__file__).with_name("mesh_flush.cpp"), TRANSPORT / "mesh.cpp", TRANSPORT / "socket.cpp"]
    program = build(tmp_path / "mesh_flush", sources, INCLUDES, "-O1")
    few, many = (
        int(subprocess.run([program, ranks], check=True, capture_output=True, text=True).stdout)
        for ranks in ("8", "1024")
    )
    assert few == many
