"""Start a job's ranks on this machine with torchrun's agent, and leave none of them behind.

The agent restarts all ranks when one is lost (`fault_tolerance.restarts`). A signal to this process reaches every rank,
which has `fault_tolerance.grace_s` to leave. A rank also leaves when this process is killed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
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
from netfold.train.rank import BEGUN, FAILED, JOB, Job, final_status
from netfold.train.recipe import Recipe
from netfold.train.recipe.errors import Source


def launch(recipe: Recipe, source: Source, ranks: int) -> int:
    """Run `recipe` on `ranks` processes of this machine; return the exit status, 128 + n after signal n.

    STOPPED_STATUS: the ranks were asked to stop, and have written a checkpoint or had not begun to train.
    POLICY_STATUS: a policy of the recipe ended the run. Ranks print their own errors; this process prints only which
    rank failed first, or was killed.
    """
    with unwind_on_signals(), _folder() as folder:
        # A rank whose parent has another process id has lost its starter.
        (folder / JOB).write_bytes(pickle.dumps(Job(os.getpid(), sys.argv, recipe, source)))
        os.environ["OMP_NUM_THREADS"] = str(recipe.run.threads)
        # Longer than the grace time, which the ranks enforce themselves.
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(recipe.fault_tolerance.grace_s) + 5)
        try:
            # The agent would report errors that the ranks print themselves.
            logging.disable(logging.NOTSET if "LOGLEVEL" in os.environ else logging.ERROR)
            # The inner unwind_on_signals restores the handlers, which the agent does not.
            with unwind_on_signals():
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
        finally:
            logging.disable(logging.NOTSET)
    return 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the job's files. A shell removes it when this process ends in any way, which closes its stdin."""
    name = tempfile.mkdtemp(prefix="netfold-train-")
    with subprocess.Popen(
        ("sh", "-c", 'cat; rm -rf -- "$1"', "sh", name),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        yield Path(name)


def _config(recipe: Recipe, ranks: int, folder: Path) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # A free port. All ranks are on this machine, whose name need not resolve.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=recipe.fault_tolerance.restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
    )


def _ending(error: ChildFailedError, recipe: Recipe, *, hopeless: bool) -> str:
    if hopeless:
        return "no restart would help; see the sentence above"
    rank, failure = error.get_first_failure()
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    restarts = recipe.fault_tolerance.restarts
    often = f"after {restarts} restart{'' if restarts == 1 else 's'} (fault_tolerance.restarts)"
    return f"given up {often if restarts else '(no restarts)'}: rank {rank} failed first, it {how}"
