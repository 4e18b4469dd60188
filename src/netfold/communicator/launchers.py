"""Who this process is, as its launcher says: torchrun, Open MPI, PMI (MPICH, Intel MPI) or Slurm."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

# (rank, size, local rank, local size). Slurm comes last: inside its allocation another launcher's ranks are the ones.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
)
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
    return any(rank in environment and size in environment for rank, size, _, _ in _LAUNCHERS)


def placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """From the launcher's variables; ValueError says which are missing or make no sense."""
    launcher = next((names for names in _LAUNCHERS if names[0] in environment and names[1] in environment), None)
    if launcher is None:
        known = ", ".join(f"{rank} and {size}" for rank, size, _, _ in _LAUNCHERS)
        raise ValueError(
            f"no launcher's variables are set ({known}): start with torchrun, mpirun or srun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
    rank_name, size_name, local_rank_name, local_size_name = launcher
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if not 0 <= rank < size:
        raise ValueError(f"{rank_name}={rank} is not one of {size_name}={size} ranks")
    local_rank = _number(environment, local_rank_name) if local_rank_name in environment else None
    local_size = _number(environment, local_size_name) if local_size_name in environment else _slurm_local(environment)
    run = _run(environment)
    port = _port(environment, run)
    restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Placement(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=_host(environment, size, local_size),
        # torchrun's agent has a store of its own on MASTER_PORT.
        port=port + 1 if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else port,
        job=f"{run} port {port} ranks {size} restart {restart}",
    )


def _host(environment: Mapping[str, str], size: int, local_size: int | None) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if nodes:
        return first_host(nodes)
    if local_size == size:
        return "127.0.0.1"
    raise ValueError("the launcher does not say where rank 0 is: set MASTER_ADDR to its host's name on every rank")


def _port(environment: Mapping[str, str], run: str) -> int:
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    if run:
        return _FIRST_PORT + zlib.crc32(run.encode()) % _PORTS
    raise ValueError("the launcher gives the job no number to find a port by: set MASTER_PORT, the same on every rank")


def _run(environment: Mapping[str, str]) -> str:
    for names in (("TORCHELASTIC_RUN_ID",), ("PMIX_NAMESPACE",), ("SLURM_JOB_ID", "SLURM_STEP_ID")):
        if names[0] in environment:
            return " ".join(environment.get(name, "") for name in names)
    return ""


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
