"""One rank of a job: join the group, check the hosts, train, and report the result.

Under torchrun, Slurm or mpirun `netfold train` calls `train` at once. Otherwise `launch` starts processes that run this
file: `python -m netfold.train.rank FOLDER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from netfold.bootstrap.launchers import Placement, placement
from netfold.train.fault_tolerance.stop import POLICY_STATUS, STOPPED_STATUS, PolicyStopError
from netfold.train.recipe import Recipe
from netfold.train.recipe.errors import Source, error_sentence

if TYPE_CHECKING:
    from netfold.train.trainer import Outcome, Trainer

FAILED, CANNOT, INTERRUPTED = 1, 2, 128 + signal.SIGINT
# Files in the folder of a job of `launch`: the job, a mark that a rank has begun to train, and the final status.
JOB, BEGUN, FINAL = "job", "begun", "final"
# Errors that a restart may avoid: a peer or a machine failed. A wrong shape or a missing key would occur again.
_TRANSIENT = (RuntimeError, OSError, MemoryError)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What `launch` passes to its ranks."""

    starter: int
    """The process id of `launch`."""
    command: list[str]
    """The user's command, for the run's environment.json."""
    recipe: Recipe
    source: Source


def train(recipe: Recipe, source: Source, begun: Path | None = None) -> int:
    """Join the ranks that the launcher has started, train in the run's folder, and print the result on rank 0.

    Returns the exit status: FAILED, or CANNOT if a restart would fail in the same way; POLICY_STATUS if a policy of the
    recipe ended the run; STOPPED_STATUS if the job was asked to stop, and has. An error is one sentence on stderr, with
    the rank, the step, and the place in `source` of a key that it names. torchrun's error file, if any, has it too.
    begun: a file that is made when training begins; from then on SIGTERM requests a stop after a step.
    """
    import torch
    import torch.distributed as dist

    from netfold.train.callbacks.run_folder import run_folder
    from netfold.train.callbacks.selection import make_callbacks
    from netfold.train.preflight import preflight
    from netfold.train.trainer import Trainer

    began_s = time.perf_counter()
    torch.set_num_threads(recipe.run.threads)
    place = placement()
    name_local_rank(place, os.environ)
    rank, trainer = place.rank, None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0 and restarts != "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"netfold train: all ranks start again, restart {restarts} of {most}", file=sys.stderr, flush=True)
    try:
        dist.init_process_group(recipe.run.backend, timeout=timedelta(seconds=recipe.run.timeout_s))
        if recipe.run.check and not preflight(recipe):
            return CANNOT
        folder = run_folder(recipe, source.file)
        trainer = Trainer(recipe, folder=folder, callbacks=make_callbacks(recipe, folder, rank))
        trainer.stop.listen()
        if begun is not None:
            # The folder is gone if its process is.
            with contextlib.suppress(FileNotFoundError):
                begun.touch()
        outcome = trainer.fit()
        # Rank 0 may still be writing its page: an agent ends it when another rank leaves early.
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        if rank == 0:
            print(f"netfold train: interrupted{_step(trainer)}", file=sys.stderr, flush=True)
        return INTERRUPTED
    except PolicyStopError as error:
        # All ranks raise the same error.
        if rank == 0:
            _report(error, place, trainer, source)
        return POLICY_STATUS
    except Exception as error:
        _report(error, place, trainer, source)
        # torch raises NotImplementedError, a RuntimeError, for an operation that it lacks: a restart does not help.
        transient = isinstance(error, _TRANSIENT) and not isinstance(error, NotImplementedError)
        return FAILED if transient else CANNOT
    stopped = outcome.reason != "done"
    if rank == 0 and stopped:
        print(
            f"netfold train: asked to stop ({outcome.reason}) after step {outcome.step} of {trainer.steps}; a "
            "checkpoint is written, and the same command continues from it",
            file=sys.stderr,
            flush=True,
        )
    elif rank == 0:
        print(_result(outcome, trainer, time.perf_counter() - began_s), flush=True)
    return STOPPED_STATUS if stopped else 0


def name_local_rank(place: Placement, environment: MutableMapping[str, str]) -> None:
    """Set torch's variables of the local rank, by which user code chooses a device.

    RANK stays unset: with it torch would use MASTER_PORT, and netfold uses a free port (torch/env_rendezvous.py).
    """
    if place.local_rank is not None:
        environment["LOCAL_RANK"] = str(place.local_rank)
    if place.local_size is not None:
        environment["LOCAL_WORLD_SIZE"] = str(place.local_size)


def main() -> None:
    """Run as one of the processes that `launch` starts; argv[1] is the job's folder."""
    folder = Path(sys.argv[1])
    try:
        job: Job = pickle.loads((folder / JOB).read_bytes())
    except FileNotFoundError:
        sys.exit("netfold train: a rank leaves before it has begun: the process that started it is gone")
    _leave_with(job.starter)
    sys.argv = job.command
    final = final_status(folder)
    if final is not None:
        sys.exit(final)
    # The mark of an earlier start; no rank of this one begins before all have joined.
    (folder / BEGUN).unlink(missing_ok=True)
    try:
        status = train(job.recipe, job.source, folder / BEGUN)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status in (CANNOT, POLICY_STATUS, STOPPED_STATUS):
        with contextlib.suppress(FileNotFoundError):
            (folder / FINAL).write_text(str(status))
    sys.exit(status)


def final_status(folder: Path) -> int | None:
    """The exit status of a rank that no restart would change (CANNOT, POLICY_STATUS or STOPPED_STATUS), or None."""
    final = folder / FINAL
    return int(final.read_text()) if final.exists() else None


def _leave_with(starter: int) -> None:
    """Send SIGTERM to this process when its starter ends in any way."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        sys.exit(FAILED)


def _result(outcome: Outcome, trainer: Trainer, seconds: float) -> str:
    """One line: the metric, its baseline, the better one, and the time."""
    from netfold.train.callbacks.result import metric_words, result

    ranks = trainer.mesh.device_mesh.size()
    return (
        f"{result(metric_words(trainer.data.metric), outcome.metric)}; {outcome.step} steps in {seconds:.1f} s on "
        f"{ranks} rank{'' if ranks == 1 else 's'}"
    )


def _report(error: Exception, place: Placement, trainer: Trainer | None, source: Source) -> None:
    if isinstance(error, ValueError):
        text = "; ".join(source.placed(error))
    else:
        text = str(error) if isinstance(error, PolicyStopError) else error_sentence(error)
    sentence = f"rank {place.rank} of {place.size}{_step(trainer)}: {text}"
    print(f"netfold train: {sentence}", file=sys.stderr, flush=True)
    if os.environ.get("LOGLEVEL") in ("INFO", "DEBUG"):
        traceback.print_exception(error)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        # torchrun shows this message as the reason.
        calls = "".join(traceback.format_exception(error))
        message = {"message": sentence, "extraInfo": {"py_callstack": calls, "timestamp": str(int(time.time()))}}
        # The folder is gone if the agent is.
        with contextlib.suppress(FileNotFoundError):
            Path(report).write_text(json.dumps({"message": message}))


def _step(trainer: Trainer | None) -> str:
    return ", before the first step" if trainer is None else f", step {min(trainer.step + 1, trainer.steps)}"


if __name__ == "__main__":
    main()
