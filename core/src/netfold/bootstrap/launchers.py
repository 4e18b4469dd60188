"""This process's rank, and where the ranks meet, from its launcher: torchrun, Open MPI, PMI (MPICH, Intel MPI), Slurm.

The ranks meet at MASTER_ADDR and MASTER_PORT, if these are set. Else rank 0 serves the store, and the others find it:

    host   the loopback, if all ranks are on one host. Slurm: the first of its list. Open MPI: the host of mpirun, from
           the job's name (if rank 0 is on another host, it raises an error). Hydra (MPICH, Intel MPI): a query (pmi.py)
    port   a hash of the job's name, which is unique; if that port is in use, one of the next ones (tcp_store.py). The
           store of another job refuses a rank, which then tries the next port

Recorded environments of each are in core/tests/bootstrap/test_launchers.py.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from netfold.bootstrap import pmi

# (rank, size, local rank, local size).
_Names = tuple[str, str, str, str]
_TORCHRUN: _Names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI: _Names = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI: _Names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM: _Names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "")
# Slurm sets nearly the same variables for a batch script, as rank 0. Only srun's tasks have this one.
_SLURM_STEP = "SLURM_STEP_ID"
# The tasks of the step: `srun --preserve-env` leaves SLURM_NTASKS at the allocation's.
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
# Slurm comes last, since another launcher may have started the ranks inside its allocation.
_LAUNCHERS = (_TORCHRUN, _OPEN_MPI, _PMI, _SLURM)
# Variables that name a run, by launcher: one launcher may run inside another's allocation or ranks.
_RUN_NAMES = {
    _TORCHRUN: ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"),
    _OPEN_MPI: ("PMIX_NAMESPACE",),
    _PMI: ("I_MPI_HYDRA_UUID",),
    _SLURM: ("PMIX_NAMESPACE",),
}
# Below Linux's range of ephemeral ports.
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True)
class Placement:
    """A process's rank in its job, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int | None  # among the ranks of this host; None where not known
    local_size: int | None
    host: str  # rank 0's
    port: int
    job: str  # names the run: the same on all its ranks, different from other runs where the launcher names them


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether any launcher's variables are set."""
    return _launcher(environment) is not None


def placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """From the launcher's variables. ValueError names those that are missing or invalid."""
    launcher = _launcher(environment)
    if launcher is None:
        raise ValueError(_what_is_missing(environment))
    rank_name, size_name, local_rank_name, local_size_name = launcher
    if launcher is _SLURM and _SLURM_TASKS in environment:
        size_name = _SLURM_TASKS
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} is not one of {size_name}={size} ranks")
    local_rank = _number(environment, local_rank_name) if local_rank_name in environment else None
    local_size = _number(environment, local_size_name) if local_size_name in environment else _slurm_local(environment)
    run = _run(environment, launcher)
    port = _port(environment, run)
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=_host(environment, launcher, rank, size, local_size),
        # torchrun's agent serves its own store on MASTER_PORT.
        port=port + 1 if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port,
        job=f"{run} port {port} ranks {size} restart {restart}",
    )


def _launcher(environment: Mapping[str, str]) -> _Names | None:
    found = next((names for names in _LAUNCHERS if names[0] in environment and names[1] in environment), None)
    # srun also sets PMI variables, for MPI programs. Slurm's own variables say more.
    if found is _PMI and "MPI_LOCALNRANKS" not in environment:
        slurm = (environment.get("SLURM_PROCID"), environment.get(_SLURM_TASKS, environment.get("SLURM_NTASKS")))
        if slurm == (environment["PMI_RANK"], environment["PMI_SIZE"]):
            return _SLURM
    return None if found is _SLURM and _SLURM_STEP not in environment else found


def _what_is_missing(environment: Mapping[str, str]) -> str:
    for rank, size, _, _ in _LAUNCHERS[:-1]:
        for present, absent in ((rank, size), (size, rank)):
            if present in environment:
                return (
                    f"{present} is set and {absent} is not: a rank needs both, and its launcher sets both; start with "
                    f"torchrun, mpirun or srun, or set {absent} too"
                )
    if "SLURM_JOB_ID" in environment:
        return (
            "this is the shell of a Slurm job, and no task of it: start the ranks with srun, torchrun or mpirun, or "
            "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    known = ", ".join(f"{rank} and {size}" for rank, size, _, _ in _LAUNCHERS)
    return (
        f"no launcher's variables are set ({known}): start with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT"
    )


def _host(environment: Mapping[str, str], launcher: _Names, rank: int, size: int, local_size: int | None) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if local_size == size:
        return "127.0.0.1"
    if _is_hydra(environment, launcher):
        # The name by which the launcher reaches this host; MPICH and Intel MPI have different variables.
        own = environment.get("PMI_HOSTNAME") or environment.get("HYDRA_BSTRAP_LOCALHOST") or socket.gethostname()
        return pmi.first_host(environment, rank, own)
    if launcher is _OPEN_MPI:
        match = re.fullmatch(r"pr\w+-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
        own_host = environment.get("PMIX_HOSTNAME")
        if match and (rank != 0 or own_host in (None, match[1])):
            return match[1]
        if match:
            raise ValueError(
                f"rank 0 is on {own_host} and mpirun on {match[1]}, where the other ranks will look for it: say "
                f"mpirun -x MASTER_ADDR={own_host}"
            )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    raise ValueError("the launcher does not say where rank 0 is: set MASTER_ADDR to its host's name on every rank")


def _port(environment: Mapping[str, str], run: str) -> int:
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    if run:
        return _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS
    raise ValueError("the launcher gives the job no number to find a port by: set MASTER_PORT, the same on every rank")


def _run(environment: Mapping[str, str], launcher: _Names) -> str:
    """A name that is unique to this run; "" where there is none."""
    for name in _RUN_NAMES[launcher]:
        if name in environment:
            return environment[name]
    # One allocation of Slurm may have several mpiruns, so the name of mpirun comes first.
    if _is_hydra(environment, launcher) and not environment.get("MASTER_PORT"):
        return pmi.job_name(environment)
    if "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']} {environment.get('SLURM_STEP_ID', '')}"
    return ""


def _is_hydra(environment: Mapping[str, str], launcher: _Names) -> bool:
    """Whether Hydra can be queried. Slurm's PMI also sets PMI_FD, with another protocol, but not MPI_LOCALNRANKS."""
    return launcher is _PMI and "PMI_FD" in environment and "MPI_LOCALNRANKS" in environment


def _slurm_local(environment: Mapping[str, str]) -> int | None:
    """The number of ranks on this host. Slurm's list is such as `4(x2),3`: 4 on each of two hosts, 3 on the next."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not tasks or "SLURM_NODEID" not in environment:
        return None
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID")
    return counts[node] if node < len(counts) else None


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: gpu07 of `gpu[07-09,12],login`."""
    first = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes.strip())
    assert first is not None  # every part may be empty
    return "".join(part or "" for part in first.groups())


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdigit():
        raise ValueError(f"{name}={environment[name]!r} is not a whole number")
    return int(text)
