"""A process as one rank of a job: it joins the others, looks at the hosts, trains, and says how it ended.

Under torchrun, Slurm or mpirun `netfold train` is this at once. Alone it starts such processes (`launch`), which run
this file: `python -m netfold.train.rank FOLDER`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import MutableMapping
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
# Files in the folder of a job that `launch` has started: what to do, that a rank has begun to train, and the status
# that no restart would change.
JOB, BEGUN, FINAL = "job.json", "begun", "final"
# What another try may find better: a peer or a machine that failed. A wrong shape or a missing key will be so again.
_PASSING = (RuntimeError, OSError, MemoryError)
_PR_SET_PDEATHSIG = 1


def train(recipe: Recipe, source: Source, begun: Path | None = None) -> int:
    """Join the ranks that the launcher has started, train in the run's folder, and print what came of it on rank 0.

    Returns the exit status: FAILED, or CANNOT where a restart would fail in the same way; POLICY_STATUS where a policy
    of the recipe ended the run; STOPPED_STATUS where the job was asked to stop, and has. An error is one sentence on
    stderr, with the rank and the step, and the place in `source` of the key that it names; it is in torchrun's error
    file too, where that is asked for. begun: made when training begins; from then on SIGTERM is a request to stop after
    a step.
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
        print(f"netfold train: all ranks start anew, restart {restarts} of {most}", file=sys.stderr, flush=True)
    try:
        dist.init_process_group(recipe.run.backend, timeout=timedelta(seconds=recipe.run.timeout_s))
        if recipe.run.check and not preflight(recipe):
            return CANNOT
        folder = run_folder(recipe, source.file)
        trainer = Trainer(recipe, folder=folder, callbacks=make_callbacks(recipe, folder, rank))
        trainer.stop.listen()
        if begun is not None:
            # The folder goes when the starter does.
            with contextlib.suppress(FileNotFoundError):
                begun.touch()
        outcome = trainer.fit()
        # Rank 0 may be writing its page yet: an agent that sees another one leave early ends it.
        dist.barrier()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        if rank == 0:
            print(f"netfold train: interrupted{_step(trainer)}", file=sys.stderr, flush=True)
        return INTERRUPTED
    except PolicyStopError as error:
        # All ranks raise it alike.
        if rank == 0:
            _tell(error, place, trainer, source)
        return POLICY_STATUS
    except Exception as error:
        _tell(error, place, trainer, source)
        # To Python a RuntimeError; torch raises it for an operation that it lacks, and it will lack it again.
        passing = isinstance(error, _PASSING) and not isinstance(error, NotImplementedError)
        return FAILED if passing else CANNOT
    stopped = outcome.reason != "done"
    if rank == 0 and stopped:
        print(f"netfold train: {_stopped(outcome, trainer)}", file=sys.stderr, flush=True)
    elif rank == 0:
        print(_came_of(outcome, trainer, time.perf_counter() - began_s), flush=True)
    return STOPPED_STATUS if stopped else 0


def name_local_rank(place: Placement, environment: MutableMapping[str, str]) -> None:
    """By torch's names, for who chooses a device by them. Not the rank's: torch meets at a port of its own choice where
    it has those, and we at one that is free (torch/env_rendezvous.py)."""
    if place.local_rank is not None:
        environment["LOCAL_RANK"] = str(place.local_rank)
    if place.local_size is not None:
        environment["LOCAL_WORLD_SIZE"] = str(place.local_size)


def main() -> None:
    """As one of the processes that `launch` starts; argv[1] is the job's folder."""
    folder = Path(sys.argv[1])
    try:
        job = json.loads((folder / JOB).read_text())
    except FileNotFoundError:
        sys.exit("netfold train: a rank leaves before it has begun: the process that has started it is gone")
    _leave_with(job["starter"])
    # What the run's environment.json tells is what its user typed.
    sys.argv = job["command"]
    final = final_status(folder)
    if final is not None:
        sys.exit(final)
    # An earlier life's: no rank begins before all have joined.
    (folder / BEGUN).unlink(missing_ok=True)
    try:
        status = train(Recipe.model_validate(job["recipe"]), Source.from_json(job["source"]), folder / BEGUN)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status in (CANNOT, POLICY_STATUS, STOPPED_STATUS):
        with contextlib.suppress(FileNotFoundError):
            (folder / FINAL).write_text(str(status))
    sys.exit(status)


def final_status(folder: Path) -> int | None:
    """What a rank of the job has left with that no restart would change: CANNOT, POLICY_STATUS or STOPPED_STATUS."""
    final = folder / FINAL
    return int(final.read_text()) if final.exists() else None


def _leave_with(starter: int) -> None:
    """SIGTERM for this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        sys.exit(FAILED)


def _came_of(outcome: Outcome, trainer: Trainer, seconds: float) -> str:
    """One line: the metric, the baseline, which is better, how long it took."""
    from netfold.train.callbacks.result import metric_words, result

    ranks = trainer.mesh.device_mesh.size()
    return (
        f"{result(metric_words(trainer.data.metric), outcome.metric)}; {outcome.step} steps in {seconds:.1f} s on "
        f"{ranks} rank{'' if ranks == 1 else 's'}"
    )


def _stopped(outcome: Outcome, trainer: Trainer) -> str:
    return (
        f"asked to stop ({outcome.reason}) after step {outcome.step} of {trainer.steps}; a checkpoint is written, and "
        "the same command goes on from it"
    )


def _tell(error: Exception, place: Placement, trainer: Trainer | None, source: Source) -> None:
    if isinstance(error, ValueError):
        said = "; ".join(source.placed(error))
    else:
        said = str(error) if isinstance(error, PolicyStopError) else error_sentence(error)
    sentence = f"rank {place.rank} of {place.size}{_step(trainer)}: {said}"
    print(f"netfold train: {sentence}", file=sys.stderr, flush=True)
    if os.environ.get("LOGLEVEL") in ("INFO", "DEBUG"):
        traceback.print_exception(error)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        # What torchrun shows as the reason.
        calls = "".join(traceback.format_exception(error))
        told = {"message": sentence, "extraInfo": {"py_callstack": calls, "timestamp": str(int(time.time()))}}
        # Gone where the agent is.
        with contextlib.suppress(FileNotFoundError):
            Path(report).write_text(json.dumps({"message": told}))


def _step(trainer: Trainer | None) -> str:
    return ", before the first step" if trainer is None else f", step {min(trainer.step + 1, trainer.steps)}"


if __name__ == "__main__":
    main()
