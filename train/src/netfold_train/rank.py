"""One rank of a job: join the group, check the hosts, train, and report the result.

`netfold train` runs this under torchrun, Slurm or mpirun, and in the ranks that `launch` starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from netfold.bootstrap.launchers import placement
from netfold.units import plural
from netfold_train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS, PolicyStopError
from netfold_train.recipe import Recipe
from netfold_train.recipe.errors import Source, error_sentence

if TYPE_CHECKING:
    from netfold.elastic.torch import World
    from netfold_train.elastic import ElasticTrainer
    from netfold_train.trainer import Outcome, Trainer

FAILED, CANNOT, INTERRUPTED = 1, 2, 128 + signal.SIGINT
# The exit statuses that a restart would not change.
FINAL = (CANNOT, POLICY_STATUS, STOPPED_STATUS)
# A job's status before it has a final one: no rank has begun to train, or one has.
NOT_BEGUN, BEGUN = 0, 255
# Errors that a restart may avoid: a peer or a machine failed. A wrong shape or a missing key would occur again.
_TRANSIENT = (RuntimeError, OSError, MemoryError)
_PR_SET_PDEATHSIG = 1
# The path of `share_job`.
_JOB = "_NETFOLD_TRAIN_JOB"


@dataclass(frozen=True)
class Evaluation:
    """A job that evaluates a run's newest checkpoint, and trains nothing."""

    run: Path
    predictions: Path | None = None
    """A folder for the model's outputs; it exists."""


def train(recipe: Recipe, source: Source, evaluation: Evaluation | None = None) -> int:
    """Join the ranks that the launcher has started, train in the run's folder, and print the result on rank 0.

    Returns the exit status: FAILED, or CANNOT if a restart would fail in the same way; POLICY_STATUS if a policy of the
    recipe ended the run; STOPPED_STATUS if the job was asked to stop, and has. An error is one sentence on stderr, with
    the rank, the step, and the place in `source` of a key that it names. torchrun's error file, if any, has the error.
    """
    if _JOB not in os.environ:
        return _train(recipe, source, evaluation)
    if job_status() in FINAL:
        return job_status()
    if not recipe.fault_tolerance.elastic:
        # Replaces the mark of an earlier start; no rank of this one begins before all have joined.
        set_job_status(NOT_BEGUN)
    status = _train(recipe, source, evaluation)
    if status in FINAL:
        set_job_status(status)
    return status


def share_job(recipe: Recipe, source: Source) -> None:
    """Make the job whose ranks this process will start: its status, and the recipe as this process has read it.

    The status is one byte, BEGUN, NOT_BEGUN or one of FINAL. The job is in this process's memory, and the ranks open it
    in /proc. So nothing is left when this process ends in any way.
    """
    job = os.memfd_create("netfold-train")
    os.write(job, bytes((NOT_BEGUN,)) + pickle.dumps((recipe, source)))
    os.environ[_JOB] = f"/proc/{os.getpid()}/fd/{job}"


def shared_job() -> tuple[Recipe, Source] | None:
    """The recipe of the job that this process is a rank of; None under another launcher.

    The recipe's file may have changed since the job began. From now on this process ends with the job's starter.
    """
    if _JOB not in os.environ:
        return None
    _leave_with_the_starter()
    job: tuple[Recipe, Source] = pickle.loads(Path(os.environ[_JOB]).read_bytes()[1:])
    return job


def job_status() -> int:
    return Path(os.environ[_JOB]).read_bytes()[0]


def set_job_status(status: int) -> None:
    """Does nothing if the starter is gone, whose end also ends this process."""
    with contextlib.suppress(FileNotFoundError), open(os.environ[_JOB], "r+b") as file:
        file.write(bytes((status,)))


def _train(recipe: Recipe, source: Source, evaluation: Evaluation | None) -> int:
    import torch
    import torch.distributed as dist

    from netfold_train.callbacks.run_folder import run_folder
    from netfold_train.callbacks.selection import make_callbacks
    from netfold_train.preflight import preflight
    from netfold_train.trainer import Trainer

    began_s = time.perf_counter()
    torch.set_num_threads(recipe.run.threads)
    place = placement()
    rank, trainer = place.rank, None
    # torch's variables of the local rank, by which user code chooses a device. RANK stays unset: with it torch would
    # use MASTER_PORT, and netfold uses a free port (torch/env_rendezvous.py).
    for name, value in {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}.items():
        if value is not None:
            os.environ[name] = str(value)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0 and restarts != "0":
        _print(f"all ranks start again, restart {restarts} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}")
    try:
        if recipe.fault_tolerance.elastic and evaluation is None:
            elastic, outcome = _fit_elastic(recipe)
            return _ended(outcome, elastic, elastic.world.rank, elastic.world.size, began_s)
        dist.init_process_group(recipe.run.backend, timeout=timedelta(seconds=recipe.run.timeout_s))
        if recipe.run.check and not preflight(recipe):
            return CANNOT
        if evaluation is not None:
            values = Trainer(recipe, folder=evaluation.run).evaluate(evaluation.predictions)
            dist.barrier()
            dist.destroy_process_group()
            if rank == 0:
                print("; ".join(f"{name} {value:.6g}" for name, value in values.items()), flush=True)
            return 0
        folder = run_folder(recipe)
        trainer = Trainer(recipe, folder=folder, callbacks=make_callbacks(recipe, folder, rank))
        _begin(trainer)
        outcome = trainer.fit()
        # Rank 0 may still be writing its page: an agent ends it when another rank leaves early.
        dist.barrier()
        dist.destroy_process_group()
    except _CannotTrainError:
        return CANNOT
    except KeyboardInterrupt:
        if rank == 0:
            _print(f"interrupted{_step(trainer)}")
        return INTERRUPTED
    except Exception as error:
        by_policy = isinstance(error, PolicyStopError)
        if rank == 0 or not by_policy:  # All ranks raise a policy's error.
            _report(error, f"rank {rank} of {place.size}{_step(trainer)}", source)
        # torch raises NotImplementedError, a RuntimeError, for an operation that it lacks: a restart does not help.
        transient = isinstance(error, _TRANSIENT) and not isinstance(error, NotImplementedError)
        return POLICY_STATUS if by_policy else FAILED if transient else CANNOT
    return _ended(outcome, trainer, rank, place.size, began_s)


def _begin(trainer: Trainer) -> None:
    """From now on SIGTERM requests a stop after a step."""
    trainer.stop.listen()
    if _JOB in os.environ and job_status() == NOT_BEGUN:
        set_job_status(BEGUN)


def _ended(outcome: Outcome, trainer: Trainer, rank: int, ranks: int, began_s: float) -> int:
    """The exit status; rank 0 prints the result."""
    from netfold_train.callbacks.metrics_file import metric_words
    from netfold_train.runs.metrics import result

    done, took_s = outcome.reason == "done", time.perf_counter() - began_s
    if rank == 0 and done:
        found = result(metric_words(trainer.data.metric), outcome.metric)
        print(f"{found}; {outcome.step} steps in {took_s:.1f} s on {plural(ranks, 'rank')}", flush=True)
    elif rank == 0:
        _print(
            f"asked to stop ({outcome.reason}) after step {outcome.step} of {trainer.steps}; a checkpoint is written, "
            "and the same command continues from it"
        )
    return 0 if done else STOPPED_STATUS


class _CannotTrainError(Exception):
    """The preflight check has found a problem, and printed it."""


def _fit_elastic(recipe: Recipe) -> tuple[ElasticTrainer, Outcome]:
    """Raises _CannotTrainError."""
    from netfold_train.callbacks.run_folder import run_folder
    from netfold_train.callbacks.selection import make_callbacks
    from netfold_train.elastic import ElasticTrainer, fit_elastic
    from netfold_train.preflight import preflight

    def choose_folder() -> Path:
        if recipe.run.check and not preflight(recipe):
            raise _CannotTrainError
        return run_folder(recipe)

    def make(world: World, folder: Path | None) -> ElasticTrainer:
        assert folder is not None
        trainer = ElasticTrainer(
            recipe, world, folder=folder, callbacks=functools.partial(make_callbacks, recipe, folder)
        )
        _begin(trainer)
        return trainer

    return fit_elastic(recipe, make, choose_folder)


def _leave_with_the_starter() -> None:
    """Send SIGTERM to this process when its parent ends in any way, which is the job's starter."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if not os.environ[_JOB].startswith(f"/proc/{os.getppid()}/"):
        sys.exit("netfold train: a rank leaves before it has begun: the process that started it is gone")


def _report(error: Exception, where: str, source: Source) -> None:
    """Print the error as one sentence, and leave it in torchrun's error file. Called while the error is handled."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if isinstance(error, ValueError):
        text = "; ".join(source.placed(error))
    else:
        text = str(error) if isinstance(error, PolicyStopError) else error_sentence(error)
    _print(f"{where}: {text}")
    if os.environ.get("LOGLEVEL") in ("INFO", "DEBUG"):
        traceback.print_exception(error)
    # The file's folder is gone if the agent is.
    with contextlib.suppress(FileNotFoundError):
        get_error_handler().record_exception(error)


def _print(text: str) -> None:
    print(f"netfold train: {text}", file=sys.stderr, flush=True)


def _step(trainer: Trainer | None) -> str:
    return ", before the first step" if trainer is None else f", step {min(trainer.step + 1, trainer.steps)}"
