"""Starts a job's ranks on this machine, through torchrun's own agent, and leaves none of them behind.

The agent restarts all ranks when one is lost (`fault_tolerance.restarts`). A signal to this process reaches every rank,
which has `fault_tolerance.grace_s` to leave; a rank also leaves when this process is killed without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from netfold.train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS, unwind_on_signals
from netfold.train.rank import BEGUN, FAILED, JOB, final_status
from netfold.train.recipe import Recipe
from netfold.train.recipe.errors import Source


def launch(recipe: Recipe, source: Source, ranks: int) -> int:
    """Run `recipe` on `ranks` processes of this machine to their end; the exit status, 128 + n after signal n.

    STOPPED_STATUS where they were asked to stop, and have written a checkpoint or had not begun to train. POLICY_STATUS
    where a policy of the recipe ended the run.

    What a rank has to say it says itself; here only what it could not: which of them failed first, or was killed.
    """
    with unwind_on_signals(), _folder() as folder:
        # With this process's number: a rank that finds another parent has been left alone.
        job = {
            "starter": os.getpid(),
            "command": sys.argv,
            "recipe": recipe.model_dump(mode="json"),
            "source": source.as_json(),
        }
        (folder / JOB).write_text(json.dumps(job))
        os.environ["OMP_NUM_THREADS"] = str(recipe.run.threads)
        try:
            # The agent leaves its own handlers behind.
            with _agent_quiet(), unwind_on_signals():
                elastic_launch(_config(recipe, ranks, folder), sys.executable)("-m", "netfold.train.rank", str(folder))
        except ChildFailedError as error:
            final = final_status(folder)
            if final in (POLICY_STATUS, STOPPED_STATUS):
                return final
            print(f"netfold train: {_ending(error, recipe, hopeless=final is not None)}", file=sys.stderr)
            return FAILED
        except SignalException as stopped:
            early = stopped.sigval == signal.SIGTERM and not (folder / BEGUN).exists()
            in_order = early or final_status(folder) == STOPPED_STATUS
            return STOPPED_STATUS if in_order else 128 + int(stopped.sigval)
    return 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For the job's files, gone when this process is, however it went: a shell waits for that and takes it away."""
    name = tempfile.mkdtemp(prefix="netfold-train-")
    keeper = subprocess.Popen(
        ("sh", "-c", 'cat; rm -rf -- "$1"', "sh", name),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield Path(name)
    finally:
        # Also closed by the kernel.
        keeper.communicate()


def _config(recipe: Recipe, ranks: int, folder: Path) -> LaunchConfig:
    wanted = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        # A free port; all ranks are here, and this machine's name need not resolve.
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "max_restarts": recipe.fault_tolerance.restarts,
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder / "agent")),
        # Longer than the grace: the ranks' own deadline comes first.
        "shutdown_timeout": math.ceil(recipe.fault_tolerance.grace_s) + 5,
    }
    # Some older torch knows no such deadline, and waits 30 s.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{key: value for key, value in wanted.items() if key in known})  # type: ignore[arg-type]


def _ending(error: ChildFailedError, recipe: Recipe, *, hopeless: bool) -> str:
    rank, failure = error.get_first_failure()
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    if hopeless:
        return "no restart would help; see the sentence above"
    restarts = recipe.fault_tolerance.restarts
    often = (
        f"after {restarts} restart{'' if restarts == 1 else 's'} (fault_tolerance.restarts)"
        if restarts
        else "(no restarts)"
    )
    return f"given up {often}: rank {rank} failed first, it {how}"


@contextlib.contextmanager
def _agent_quiet() -> Iterator[None]:
    """The agent's own reports on what the ranks say themselves stay away, unless LOGLEVEL asks for them."""
    logger, before = logging.getLogger("torch.distributed.elastic"), {}
    if "LOGLEVEL" not in os.environ:
        names = [name for name in logging.root.manager.loggerDict if name.startswith(logger.name)]
        for each in (logging.getLogger(name) for name in names):
            before[each] = each.level
            each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in before.items():
            each.setLevel(level)
