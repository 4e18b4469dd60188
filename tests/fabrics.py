"""Whether this host has the library and the MPIs that tests of a fabric need."""

from __future__ import annotations

from pathlib import Path

import pytest

from netfold._native import fabric
from netfold_lab.bench.mpi_peers import have_peer


def need_libfabric() -> str:
    """Return libfabric's version. Without libfabric, skip this test, or the tests of this module, with the reason."""
    try:
        return str(fabric.version())
    except fabric.FabricError as error:
        pytest.skip(f"there is no fabric to be tried on this host: {error}", allow_module_level=True)


def real_library() -> str:
    """Load libfabric, and return its path: a library that stands in for it passes calls on to it."""
    need_libfabric()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in maps if "/libfabric.so" in line)


def need_mpi(mpi: str) -> None:
    """Each MPI needs an environment of its own, which CI makes and a plain `make test` does not."""
    if not have_peer(mpi):
        pytest.skip(f"no ranks can be started under {mpi}: it is not installed (make bench-peers does it)")
