"""What launchers say of a process: torchrun's, Open MPI's, PMI's and Slurm's variables."""

from __future__ import annotations

import pytest

from netfold.communicator.launchers import Placement, first_host, is_launched, placement

pytestmark = pytest.mark.native

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x7", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "4,2,1", "SLURM_STEP_NODELIST": "gpu[07-09]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-node0-4242@1",
}  # fmt: skip
PMI = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}


def test_torchrun() -> None:
    assert placement(TORCHRUN) == Placement(3, 8, 1, 2, "node0", 29500, "x7 port 29500 ranks 8 restart 2")


def test_torchruns_agent_keeps_its_port() -> None:
    assert placement(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).port == 29501


def test_a_restart_is_another_job() -> None:
    assert placement(TORCHRUN).job != placement(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).job


def test_slurm_gives_host_and_port_by_its_job() -> None:
    here = placement(SLURM)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.host) == (5, 7, 1, 2, "gpu07")
    assert 20000 <= here.port < 32000
    assert placement(SLURM | {"SLURM_PROCID": "0"}).port == here.port
    assert placement(SLURM | {"SLURM_JOB_ID": "123457"}).port != here.port
    assert placement(SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "other"}).host == "other"


@pytest.mark.parametrize(
    ("tasks", "node", "count"), [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("4(x2),3", 3, None)]
)
def test_slurms_list_of_tasks(tasks: str, node: int, count: int | None) -> None:
    assert placement(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}).local_size == count


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("n1,n2", "n1"),
        ("single", "single"),
        ("rack[1-2]-eth", "rack1-eth"),
        ("a.b-c[003]", "a.b-c003"),
    ],
)
def test_slurms_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_open_mpi_on_one_host_needs_nothing_else() -> None:
    here = placement(OPEN_MPI)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.host) == (1, 2, 1, 2, "127.0.0.1")
    assert placement(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-node0-4243@1"}).port != here.port


def test_pmi_inside_a_slurm_allocation_is_not_slurms_own_step() -> None:
    here = placement(SLURM | PMI)
    assert (here.rank, here.size, here.host) == (0, 4, "gpu07")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no launcher's variables are set .*start with torchrun, mpirun or srun"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "does not say where rank 0 is: set MASTER_ADDR"),
        (PMI, "set MASTER_PORT, the same on every rank"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not one of WORLD_SIZE=8 ranks"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
    ],
)
def test_what_is_missing_or_wrong_is_said(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        placement(environment)


def test_a_lone_process_was_not_launched() -> None:
    assert not is_launched({"SLURM_JOB_ID": "1"}) and is_launched(PMI)
