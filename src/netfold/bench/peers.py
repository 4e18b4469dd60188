"""Where the MPIs are that we measure ourselves against.

Each is a wheel from PyPI, and all of them install the same file names (bin/mpiexec, lib/libmpi.so), so each has a
virtual environment of its own beside the sources, made by `make bench-peers`. Only its launcher and its library are
used: every side runs on the same Python and NumPy, and mpi4py (the extra `bench`) loads the library it is told to.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import netfold


class PeerMissingError(ValueError):
    """What must be installed first, in a sentence."""


@dataclass(frozen=True)
class Mpi:
    """How an MPI's ranks are started. Nothing is pinned: the other sides are not either."""

    library: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]


_MPIS = {
    # Root in a container is no accident; and the bench has more ranks than cores on purpose.
    "openmpi": Mpi(
        "libmpi.so.40",
        ("--oversubscribe", "--bind-to", "none"),
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    "intel": Mpi("libmpi.so.12", (), {"I_MPI_PIN": "off"}),
    "mpich": Mpi("libmpi.so.12", ("-bind-to", "none"), {}),
}


@dataclass(frozen=True)
class Launch:
    argv: list[str]
    environment: dict[str, str]


def launch_mpi(name: str, ranks: int, command: list[str]) -> Launch:
    """The command line and environment that run `command` on so many ranks of this MPI. Raises PeerMissingError."""
    mpi, prefix = _MPIS[name], find_prefix(name)
    library = prefix / "lib" / mpi.library
    if importlib.util.find_spec("mpi4py") is None:
        raise PeerMissingError(f"mpi:{name} needs mpi4py in this Python; install netfold[bench]")
    environment = {**os.environ, **mpi.environment, "MPI4PY_LIBMPI": str(library), "OMP_NUM_THREADS": "1"}
    return Launch([str(prefix / "bin" / "mpiexec"), *mpi.arguments, "-n", str(ranks), *command], environment)


def find_prefix(name: str) -> Path:
    """The MPI's environment: in the working directory or beside the sources. Raises PeerMissingError."""
    for folder in (Path.cwd(), Path(netfold.__file__).parents[2]):
        prefix = folder / f".venv-mpi-{name}"
        if (prefix / "lib" / _MPIS[name].library).exists():
            return prefix.resolve()
    raise PeerMissingError(f"mpi:{name} is not installed here (.venv-mpi-{name}); `make bench-peers` does it")


def have_peer(name: str) -> bool:
    try:
        launch_mpi(name, 1, [])
    except PeerMissingError:
        return False
    return True
