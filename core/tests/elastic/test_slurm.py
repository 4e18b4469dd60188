"""An elastic job on a Slurm of this machine, as docs/how-to/elastic.md starts it: it loses a rank or a node."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from launched_rank import SIZE, Watched
from load import seconds, settles
from ranks import Daemon
from slurm_cluster import WAIT_TIME_S, SlurmCluster
from small_recipe import SMALL_GPT
from sources import HELPERS

from netfold_train.runs.metrics import read_metrics

pytest.importorskip("torch")
# tools/setup installs no Slurm: its daemons are not for every developer's machine.
LACK = slurm_cluster.missing()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.jobs,
    # The sum of all bounds below, on a loaded machine: a test that fails must end its cluster.
    pytest.mark.timeout(3000),
    pytest.mark.skipif(LACK != "", reason=f"an elastic job under Slurm needs a Slurm: {LACK}"),
]

HERE = Path(__file__).parent
BEGIN = f"""
export PYTHONPATH={HERE}:{HELPERS} OMP_NUM_THREADS=1
python={sys.executable}
"""
STORE = """
$python -m netfold.cli store --listen 127.0.0.1:0 > store &
until grep -q listening store; do sleep 0.1; done
export NETFOLD_STORE=$(sed 's/.* listening on //' store)
"""


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="slurm", dir="/tmp") as folder,
        SlurmCluster(Path(folder), SIZE + 1) as made,
    ):
        yield made


def output(cluster: SlurmCluster, name: str) -> str:
    return (cluster.folder / f"{name}.out").read_text()


def ended(cluster: SlurmCluster, job: int, name: str) -> str:
    assert settles(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING"), 60), output(cluster, name)
    return cluster.state(job)


def job_that_loses(cluster: SlurmCluster, script: str, rank: int) -> tuple[int, Watched, int]:
    """Start the job and kill the rank when all wait for that; returns the job, its ranks, and the killed process."""
    job = cluster.sbatch("job", script)
    watched = Watched(cluster.folder)
    victim = watched.rank_to_kill(rank)
    os.kill(victim, signal.SIGKILL)
    watched.has_killed()
    return job, watched, victim


def test_a_task_starts_its_lost_rank_again(cluster: SlurmCluster) -> None:
    """The settings of this cluster end a step whose task fails; no task of this step fails."""
    script = f"""#!/bin/bash
#SBATCH --nodes={SIZE}
{BEGIN}{STORE}
srun bash -c 'for try in 1 2 3; do '$python' {HERE}/launched_rank.py . && exit; done; exit 1'
status=$?
kill %1
exit $status
"""
    job, watched, victim = job_that_loses(cluster, script, 1)
    watched.check(victim)
    assert ended(cluster, job, "job") == "COMPLETED", output(cluster, "job")


RECIPE = (
    SMALL_GPT
    + """
[training]
steps = 100000
batch = 24
[optimizer]
name = "sgd"
lr = 0.05
[fault_tolerance]
elastic = true
[report]
profile = false
tensorboard = false
[run]
folder = "."
name = "run"
check = false
"""
)


def test_netfold_train_takes_a_lost_rank_back(cluster: SlurmCluster) -> None:
    cluster.write("recipe.toml", RECIPE)
    script = f"""#!/bin/bash
#SBATCH --nodes={SIZE}
{BEGIN}{STORE}
srun bash -c 'for try in 1 2; do
    '$python' -m netfold.cli train recipe.toml & echo $! > rank-$SLURM_PROCID
    wait $!; status=$?
    test $status = 137 || exit $status
done'
status=$?
kill %1
exit $status
"""
    job = cluster.sbatch("job", script)

    def steps() -> list[int]:
        return [line["step"] for line in read_metrics(cluster.folder / "run").steps]

    def notes() -> str:
        return " ".join(line["text"] for line in read_metrics(cluster.folder / "run").notes)

    assert settles(lambda: (cluster.folder / "run" / "metrics.jsonl").exists() and len(steps()) > 10, 60), output(
        cluster, "job"
    )
    os.kill(int((cluster.folder / "rank-1").read_text()), signal.SIGKILL)
    assert settles(lambda: "generation 3 has 3 ranks" in notes(), 60), output(cluster, "job")
    os.kill(int((cluster.folder / "rank-0").read_text()), signal.SIGTERM)
    # A rank that was asked to stop ends with 75.
    assert ended(cluster, job, "job") == "FAILED", output(cluster, "job")
    assert "asked to stop (SIGTERM)" in output(cluster, "job")
    assert steps() == list(range(1, len(steps()) + 1))


def test_a_new_step_takes_the_place_of_a_lost_task(cluster: SlurmCluster) -> None:
    """The other tasks of the step go on, for longer than the cluster's WaitTime."""
    script = f"""#!/bin/bash
#SBATCH --nodes={SIZE}
{BEGIN}{STORE}
srun --kill-on-bad-exit=0 --wait=0 $python {HERE}/launched_rank.py . &
until test -e start; do sleep 0.1; done
RANK=1 WORLD_SIZE={SIZE} srun --overlap --nodes=1 --ntasks=1 --nodelist=$(cat start) $python {HERE}/launched_rank.py .
status=$?
wait %2
echo "the first step ended with $?"
kill %1
exit $status
"""
    job, watched, victim = job_that_loses(cluster, script, 1)
    assert watched.needs_a_rank(), output(cluster, "job")
    # The time is what is tested: Slurm would end the others now.
    time.sleep(WAIT_TIME_S + 2)
    cluster.write("start", "n2")
    watched.check(victim)
    assert ended(cluster, job, "job") == "COMPLETED", output(cluster, "job")
    assert "the first step ended with 137" in output(cluster, "job")  # as its lost task


def test_a_job_goes_on_without_a_lost_node(cluster: SlurmCluster) -> None:
    """The new rank runs on a node that is left."""
    script = f"""#!/bin/bash
#SBATCH --nodes={SIZE} --no-kill
{BEGIN}{STORE}
srun --no-kill --kill-on-bad-exit=0 --wait=0 $python {HERE}/launched_rank.py . &
until test -e start; do sleep 0.1; done
RANK=2 WORLD_SIZE={SIZE} srun --overlap --nodes=1 --ntasks=1 --nodelist=$(cat start) $python {HERE}/launched_rank.py .
status=$?
wait %2
kill %1
exit $status
"""
    job = cluster.sbatch("job", script)
    watched = Watched(cluster.folder)
    victim = watched.rank_to_kill(2)
    cluster.lose(psutil.Process(victim).environ()["SLURMD_NODENAME"])
    watched.has_killed()
    assert watched.needs_a_rank(), output(cluster, "job")
    assert settles(lambda: "down" in cluster.call("sinfo", "--noheader", "--format=%T"), 60), cluster.call("sinfo")
    assert cluster.state(job) == "RUNNING", output(cluster, "job")
    cluster.write("start", "n2")
    watched.check(victim)
    assert ended(cluster, job, "job") == "COMPLETED", output(cluster, "job")


def test_slurm_starts_the_rank_of_a_lost_node_again_in_an_array(cluster: SlurmCluster) -> None:
    """Each rank is a job of its own: Slurm puts the one of a lost node back into the queue."""
    script = f"""#!/bin/bash
#SBATCH --nodes=1 --exclusive --requeue --array=0-{SIZE - 1}
{BEGIN}
export RANK=$SLURM_ARRAY_TASK_ID WORLD_SIZE=$SLURM_ARRAY_TASK_COUNT
exec $python {HERE}/launched_rank.py .
"""
    store = Daemon(["store", "--listen", "127.0.0.1:0"], cluster.folder / "store.log")
    try:
        job = cluster.sbatch("job", script, NETFOLD_STORE=store.stdout.readline().split()[-1])
        watched = Watched(cluster.folder)
        victim = watched.rank_to_kill(2)
        cluster.lose(psutil.Process(victim).environ()["SLURMD_NODENAME"])
        watched.has_killed()
        requeued = f"{job}_2"
        assert settles(lambda: cluster.state(requeued) == "PENDING", 60), cluster.state(requeued)
        cluster.call("scontrol", "update", f"JobId={requeued}", "StartTime=now")  # Slurm would wait for 120 s
        watched.check(victim)
    finally:
        store.send_signal(signal.SIGTERM)
        assert store.wait(seconds(20)) == 0
        store.stdout.close()
