"""Start a job's ranks on this machine by torchrun, and leave none of them behind.

Each rank runs this process's own command, and finds by torchrun's variables that it is a rank. The agent restarts all
ranks when one is lost (`fault_tolerance.restarts`). A signal to this process reaches every rank, which has
`fault_tolerance.grace_s` to leave. A rank also leaves when this process is killed.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import uuid

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from netfold.train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS, unwind_on_signals
from netfold.train.rank import FAILED, FINAL, NOT_BEGUN, job_status, share_job
from netfold.train.recipe import Recipe
from netfold.train.recipe.errors import Source


def launch(recipe: Recipe, source: Source, ranks: int) -> int:
    """Run `python -m netfold.cli` with this process's arguments, which name `recipe`, as `ranks` processes here.

    Returns the exit status, 128 + n after signal n. STOPPED_STATUS: the ranks were asked to stop, and have written a
    checkpoint or had not begun to train. POLICY_STATUS: a policy of the recipe ended the run. Ranks print their own
    errors; this process prints only which rank failed first, or was killed.
    """
    share_job(recipe, source)
    os.environ["OMP_NUM_THREADS"] = str(recipe.run.threads)
    # Longer than the grace time, which the ranks enforce themselves.
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(recipe.fault_tolerance.grace_s) + 5)
    arguments = [
        f"--nproc-per-node={ranks}",
        f"--max-restarts={recipe.fault_tolerance.restarts}",
        f"--rdzv-id={uuid.uuid4().hex}",
        "--rdzv-backend=c10d",
        # A free port. All ranks are on this machine, whose name need not resolve.
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--log-dir={os.devnull}",
        *("-m", "netfold.cli", *sys.argv[1:]),
    ]
    try:
        # The agent would report errors that the ranks print themselves.
        logging.disable(logging.NOTSET if "LOGLEVEL" in os.environ else logging.ERROR)
        # Restores the handlers, which the agent does not.
        with unwind_on_signals():
            torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        status = job_status()
        if status in (POLICY_STATUS, STOPPED_STATUS):
            return status
        print(f"netfold train: {_ending(error, recipe, hopeless=status in FINAL)}", file=sys.stderr)
        return FAILED
    except SignalException as stopped:
        early = stopped.sigval == signal.SIGTERM and job_status() == NOT_BEGUN
        return STOPPED_STATUS if early or job_status() == STOPPED_STATUS else 128 + int(stopped.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _ending(error: ChildFailedError, recipe: Recipe, *, hopeless: bool) -> str:
    if hopeless:
        return "no restart would help; see the sentence above"
    rank, failure = error.get_first_failure()
    how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with status {failure.exitcode}"
    restarts = recipe.fault_tolerance.restarts
    often = f"after {restarts} restart{'' if restarts == 1 else 's'} (fault_tolerance.restarts)"
    return f"given up {often if restarts else '(no restarts)'}: rank {rank} failed first, it {how}"
