"""A process's placement from the variables of torchrun, Open MPI, PMI and Slurm."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest
from load import seconds

from netfold.bootstrap import pmi
from netfold.bootstrap.launchers import Placement, first_host, is_launched, placement

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

# Variables of the second of two ranks on two hosts: Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.18, by remote shell.
OPEN_MPI_2 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_NODE_RANK": "0", "PMIX_NAMESPACE": "prterun-gpu-0-22280@1",
    "PMIX_HOSTNAME": "gpu-1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1",
    "PMIX_SERVER_URI41": "prterun-gpu-0-22280@0.1;tcp4://127.0.0.1:39921",
}  # fmt: skip
MPICH_2 = {
    "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_HOSTNAME": "10.77.0.2", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
INTEL_2 = {
    "HYDRA_BSTRAP_LOCALHOST": "10.77.0.2", "I_MPI_HYDRA_UUID": "33570000-f4c3-d5ed-d960-060014997306",
    "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip


def test_torchruns_variables_give_the_store_and_the_rank() -> None:
    assert placement(TORCHRUN) == Placement(3, 8, 1, 2, "node0", 29500, "x7 port 29500 ranks 8 restart 2")


def test_the_port_after_torchruns_agent_is_used() -> None:
    assert placement(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).port == 29501


def test_a_restart_is_another_job() -> None:
    assert placement(TORCHRUN).job != placement(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}).job


def test_slurm_jobs_derive_host_and_port_from_the_job_id() -> None:
    here = placement(SLURM)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.host) == (5, 7, 1, 2, "gpu07")
    assert 20000 <= here.port < 32000
    assert placement(SLURM | {"SLURM_PROCID": "0"}).port == here.port
    assert placement(SLURM | {"SLURM_JOB_ID": "123457"}).port != here.port
    assert placement(SLURM | {"MASTER_PORT": "4000", "MASTER_ADDR": "other"}).host == "other"


def test_the_size_is_that_of_the_slurm_step_and_not_of_the_allocation() -> None:
    more = SLURM | {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "7"}
    assert placement(more) == placement(SLURM)
    assert placement(more | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "4"}) == placement(SLURM)


def test_a_batch_script_of_slurm_is_not_a_rank() -> None:
    """Slurm sets SLURM_PROCID=0 there. Once, such a script waited for ranks that never came."""
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "12"}
    assert not is_launched(batch)
    with pytest.raises(ValueError, match="the shell of a Slurm job, and no task of it: start the ranks with srun"):
        placement(batch)
    assert placement(batch | OPEN_MPI).size == 2


@pytest.mark.parametrize(
    ("tasks", "node", "count"), [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("4(x2),3", 3, None)]
)
def test_a_slurm_list_of_tasks_is_expanded(tasks: str, node: int, count: int | None) -> None:
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
def test_a_slurm_list_of_nodes_is_expanded(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_open_mpi_on_one_host_needs_no_further_variable() -> None:
    here = placement(OPEN_MPI)
    assert (here.rank, here.size, here.local_rank, here.local_size, here.host) == (1, 2, 1, 2, "127.0.0.1")
    assert placement(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-node0-4243@1"}).port != here.port


def test_open_mpis_job_name_gives_the_host_of_mpirun_where_rank_0_runs() -> None:
    assert placement(OPEN_MPI_2).host == "gpu-0"
    first = OPEN_MPI_2 | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_HOSTNAME": "gpu-0"}
    assert placement(first).host == "gpu-0"
    assert placement(first).port == placement(OPEN_MPI_2).port


def test_rank_0_on_another_host_than_mpirun_must_set_master_addr() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is on gpu-1 and mpirun on gpu-0, .* mpirun -x MASTER_ADDR=gpu-1"):
        placement(OPEN_MPI_2 | {"OMPI_COMM_WORLD_RANK": "0"})


def test_pmi_inside_a_slurm_allocation_is_not_a_slurm_step() -> None:
    here = placement(SLURM | PMI)
    assert (here.rank, here.size, here.host) == (0, 4, "127.0.0.1")


@contextlib.contextmanager
def hydra(ranks: int) -> Iterator[list[str]]:
    """The PMI_FD of each rank, with proxies that send MPICH's recorded replies."""
    values: dict[str, str] = {}
    barrier = threading.Barrier(ranks)

    def serve(end: socket.socket) -> None:
        with end, end.makefile("rw") as lines:
            for line in lines:
                words = dict(word.split("=", 1) for word in line.split())
                answer = {
                    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=kvs_22749_0_360390924_vm",
                    "barrier_in": "cmd=barrier_out tag=0",
                    "put": "cmd=put_result rc=0",
                    "finalize": "cmd=finalize_ack rc=0",
                }.get(words["cmd"])
                if words["cmd"] == "put":
                    values[words["key"]] = words["value"]
                if words["cmd"] == "get":
                    answer = f"cmd=get_result rc=0 value={values[words['key']]}"
                if words["cmd"] == "barrier_in":
                    barrier.wait(seconds(10))
                lines.write(f"{answer}\n")
                lines.flush()

    ends = [socket.socketpair() for _ in range(ranks)]
    servers = [threading.Thread(target=serve, args=(theirs,)) for _, theirs in ends]
    for server in servers:
        server.start()
    try:
        yield [str(ours.fileno()) for ours, _ in ends]
    finally:
        for ours, _ in ends:
            ours.close()
        for server in servers:
            server.join(seconds(10))


@pytest.fixture(autouse=True)
def nothing_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi, "_replies", {})
    monkeypatch.setattr(pmi, "_finalizing", {os.getpid()})  # these proxies are gone when this process ends


def test_mpich_on_one_host_queries_only_the_job_name() -> None:
    with hydra(1) as fds:
        here = placement(PMI | {"PMI_FD": fds[0]})
        assert placement(PMI | {"PMI_FD": fds[0]}) == here
    assert (here.host, here.job) == ("127.0.0.1", f"kvs_22749_0_360390924_vm port {here.port} ranks 4 restart 0")


@pytest.mark.parametrize("theirs", [MPICH_2, INTEL_2], ids=["mpich", "intel"])
def test_on_several_hosts_rank_0_publishes_its_host(theirs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Placement] = []
    monkeypatch.setattr(pmi, "_once", lambda what, ask: ask())  # both ranks are in this process
    name = "PMI_HOSTNAME" if "PMI_HOSTNAME" in theirs else "HYDRA_BSTRAP_LOCALHOST"
    with hydra(2) as fds:
        first = threading.Thread(
            target=lambda: told.append(placement(theirs | {"PMI_RANK": "0", name: "10.77.0.1", "PMI_FD": fds[0]}))
        )
        first.start()
        second = placement(theirs | {"PMI_FD": fds[1]})
        first.join(seconds(10))
    assert second.host == told[0].host == "10.77.0.1"
    assert (second.port, second.job) == (told[0].port, told[0].job)


def test_two_mpiruns_in_one_allocation_of_slurm_are_two_jobs() -> None:
    with hydra(1) as fds:
        asked = placement(SLURM | PMI | {"PMI_FD": fds[0], "PMIX_NAMESPACE": "slurm.pmix.123456.0"})
    assert asked.job.startswith("kvs_22749_0_360390924_vm ")


def test_a_slurm_step_with_pmi_variables_is_a_slurm_step() -> None:
    srun = {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_FD": "4", "PMI_JOBID": "123456.0"}
    assert placement(SLURM | srun) == placement(SLURM)


def test_a_process_that_a_rank_started_is_not_a_rank() -> None:
    with pytest.raises(ValueError, match=r"PMI_FD=4000 is no connection to mpirun .* take PMI_RANK and PMI_SIZE out"):
        placement(PMI | {"PMI_FD": "4000"})


def test_a_silent_proxy_is_awaited_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi, "_TIMEOUT_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ValueError, match="proxy did not answer 'get_my_kvsname' within 0 s"):
        placement(PMI | {"PMI_FD": str(ours.fileno())})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no launcher's variables are set .*start with torchrun, mpirun or srun"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "2490368001"},  # Open MPI 4
            "does not say where rank 0 is: set MASTER_ADDR",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is set and PMI_RANK is not"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "WORLD_SIZE is set and RANK is not"),
        (PMI, "set MASTER_PORT, the same on every rank"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not one of WORLD_SIZE=8 ranks"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one' is not a whole number"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
    ],
)
def test_missing_or_wrong_variables_are_named(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        placement(environment)


def test_a_process_without_a_launcher_has_no_launch() -> None:
    assert not is_launched({"SLURM_JOB_ID": "1"}) and is_launched(PMI)
