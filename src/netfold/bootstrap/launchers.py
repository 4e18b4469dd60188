"""Who this process is, as its launcher says: torchrun, Open MPI, PMI (MPICH, Intel MPI) or Slurm.

Where the ranks meet: MASTER_ADDR and MASTER_PORT, if they are set. Else rank 0 serves, and the others find it:

    host   all ranks are on one: its loopback. Slurm: the first of its list. Open MPI: the host of mpirun, which its
           job's name tells (rank 0 says so if it is not there). Hydra (MPICH, Intel MPI): asked (pmi.py)
    port   drawn from the job's name, which no other job on any host has; where it is taken, one of those that follow
           (tcp_store.py). Who finds the store of another job there is turned away, and looks on

Recorded environments of each are in tests/bootstrap/test_launchers.py.
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
# Slurm tells a batch script much the same, as its rank 0; this one says that srun started a task.
_SLURMS_STEP = "SLURM_STEP_ID"
# Of the step, where `srun --preserve-env` leaves SLURM_NTASKS at the allocation's.
_SLURMS_TASKS = "SLURM_STEP_NUM_TASKS"
# Slurm comes last: inside its allocation another launcher's ranks are the ones.
_LAUNCHERS = (_TORCHRUN, _OPEN_MPI, _PMI, _SLURM)
# What names a run, by who started it: one may run inside another's allocation, or inside its ranks.
_RUN_NAMES = {
    _TORCHRUN: ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE"),
    _OPEN_MPI: ("PMIX_NAMESPACE",),
    _PMI: ("I_MPI_HYDRA_UUID",),
    _SLURM: ("PMIX_NAMESPACE",),
}
# Below the range from which Linux takes ports of its own accord.
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True)
class Placement:
    """A process's place in its job, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int | None  # among the ranks of this host; None where the launcher does not say
    local_size: int | None
    host: str  # rank 0's
    port: int
    job: str  # the same for all ranks of one run, another for every other run that can be told apart


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether any launcher's variables are there."""
    return _launcher(environment) is not None


def placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """From the launcher's variables; ValueError says which are missing or make no sense."""
    launcher = _launcher(environment)
    if launcher is None:
        raise ValueError(_what_is_missing(environment))
    rank_name, size_name, local_rank_name, local_size_name = launcher
    if launcher is _SLURM and _SLURMS_TASKS in environment:
        size_name = _SLURMS_TASKS
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
        # torchrun's agent has a store of its own on MASTER_PORT.
        port=port + 1 if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port,
        job=f"{run} port {port} ranks {size} restart {restart}",
    )


def _launcher(environment: Mapping[str, str]) -> _Names | None:
    found = next((names for names in _LAUNCHERS if names[0] in environment and names[1] in environment), None)
    # srun speaks PMI to an MPI that wants it, and says more in words of its own.
    if found is _PMI and "MPI_LOCALNRANKS" not in environment:
        theirs = (environment.get("SLURM_PROCID"), environment.get(_SLURMS_TASKS, environment.get("SLURM_NTASKS")))
        if theirs == (environment["PMI_RANK"], environment["PMI_SIZE"]):
            return _SLURM
    return None if found is _SLURM and _SLURMS_STEP not in environment else found


def _what_is_missing(environment: Mapping[str, str]) -> str:
    for rank, size, _, _ in _LAUNCHERS[:-1]:
        for there, absent in ((rank, size), (size, rank)):
            if there in environment:
                return (
                    f"{there} is set and {absent} is not: a rank needs both, and its launcher sets both; start with "
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
        # As the launcher itself reaches this host, which MPICH and Intel MPI tell by names of their own.
        own = environment.get("PMI_HOSTNAME") or environment.get("HYDRA_BSTRAP_LOCALHOST") or socket.gethostname()
        return pmi.first_host(environment, rank, own)
    if launcher is _OPEN_MPI:
        found = re.fullmatch(r"pr\w+-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
        here = environment.get("PMIX_HOSTNAME")
        if found and (rank != 0 or here in (None, found[1])):
            return found[1]
        if found:
            raise ValueError(
                f"rank 0 is on {here} and mpirun on {found[1]}, where the other ranks will look for it: say "
                f"mpirun -x MASTER_ADDR={here}"
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
    """What tells this run from others; "" where that is not known."""
    for name in _RUN_NAMES[launcher]:
        if name in environment:
            return environment[name]
    # Inside one allocation of Slurm there may be several mpiruns, so theirs comes first.
    if _is_hydra(environment, launcher) and not environment.get("MASTER_PORT"):
        return pmi.job_name(environment)
    if "SLURM_JOB_ID" in environment:
        return f"{environment['SLURM_JOB_ID']} {environment.get('SLURM_STEP_ID', '')}"
    return ""


def _is_hydra(environment: Mapping[str, str], launcher: _Names) -> bool:
    """Whether Hydra can be asked. Slurm's own PMI has a PMI_FD too, in another language, and no MPI_LOCALNRANKS."""
    return launcher is _PMI and "PMI_FD" in environment and "MPI_LOCALNRANKS" in environment


def _slurm_local(environment: Mapping[str, str]) -> int | None:
    """Ranks on this host, of a list such as `4(x2),3`: four on each of two hosts, three on the next."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if not tasks or "SLURM_NODEID" not in environment:
        return None
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID")
    return counts[node] if node < len(counts) else None


def first_host(nodes: str) -> str:
    """The first of Slurm's list: `gpu[07-09,12],login` begins with gpu07."""
    first = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes.strip())
    assert first is not None  # every part may be empty
    return "".join(part or "" for part in first.groups())


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdigit():
        raise ValueError(f"{name}={environment[name]!r} is not a whole number")
    return int(text)
