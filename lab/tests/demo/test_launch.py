"""Failing workers: the demo names the worker, shows its output, and ends all processes."""

import json
import sys
import time
from pathlib import Path

import pytest
from load import seconds

from netfold_lab.demo import launch
from netfold_lab.demo.settings import Job, Run, Training

JOB_STEPS = 2


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Workers that run a few lines of Python in place of a training; returns the job and their pids' folder."""

    def make(code: str) -> Job:
        script = tmp_path / "worker.py"
        script.write_text(
            "import json, os, sys, time\n"
            "rank = int(os.environ['RANK'])\n"
            f"open(f'{tmp_path}/pid{{rank}}', 'w').write(str(os.getpid()))\n" + code
        )
        monkeypatch.setattr(launch, "WORKER", (sys.executable, str(script)))
        return Job(Training(workers=2), (Run("gloo", "gloo", (0, 1), JOB_STEPS),), str(tmp_path))

    return make


def _running(folder: Path) -> list[str]:
    return [pid for file in folder.glob("pid*") if Path(f"/proc/{(pid := file.read_text())}").exists()]


def test_steps_of_rank_0_are_passed_on_in_order(stand_in, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = stand_in(
        "print('a library says hello')\n"
        "for step in (1, 2):\n"
        "    if rank == 0: print(json.dumps({'run': 'gloo', 'step': step, 'loss': 0.5 / step}), flush=True)\n"
    )
    seen: list[tuple[str, int, float]] = []
    launch.train(job, {}, lambda *step: seen.append(step))
    assert seen == [("gloo", 1, 0.5), ("gloo", 2, 0.25)]
    assert _running(tmp_path) == []


def test_a_failed_worker_is_named_with_its_output_and_all_workers_end(
    stand_in,  # type: ignore[no-untyped-def]
    tmp_path: Path,
) -> None:
    job = stand_in(
        "while not os.path.exists(f'{os.path.dirname(sys.argv[0])}/pid0'): time.sleep(0.01)\n"
        "if rank == 1: sys.exit('rank 1 could not reach the switch')\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(
        launch.LaunchError, match=r"worker 1 of 2 ended with code 1.\n(.*\n)*.*could not reach the switch"
    ):
        launch.train(job, {}, lambda *_: None)
    assert _running(tmp_path) == []


def test_workers_that_make_no_step_are_ended_at_the_deadline(
    stand_in,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "STALL_S", 0.5)
    job = stand_in("time.sleep(600)\n")
    started_s = time.monotonic()
    with pytest.raises(launch.LaunchError, match=r"no step for 0 s; workers \[0, 1\] still run"):
        launch.train(job, {}, lambda *_: None)
    assert time.monotonic() - started_s < seconds(30)
    assert _running(tmp_path) == []


def test_a_worker_gets_its_rank_the_job_and_the_environment(stand_in, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    job = stand_in(
        "told = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'NETFOLD_SWITCH')] + [sys.argv[1]]\n"
        "open(f'{os.path.dirname(sys.argv[0])}/told{rank}', 'w').write(json.dumps(told))\n"
    )
    launch.train(job, {"NETFOLD_SWITCH": "127.0.0.1:7171"}, lambda *_: None)
    for rank in range(2):
        told = json.loads((tmp_path / f"told{rank}").read_text())
        assert told[:3] == [str(rank), "2", "127.0.0.1:7171"]
        assert Job.from_json(told[3]) == job
