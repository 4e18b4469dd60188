"""A process as one rank of a job: it joins the others, trains, and says how it ended.

Under torchrun, Slurm or mpirun `netfold train` is this at once. Alone it starts such processes (`launch`), which run
this file: `python -m netfold.train.rank FOLDER`.
"""

from __future__ import annotations

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

from netfold.communicator.launchers import placement
from netfold.train.problem import Source, in_a_sentence
from netfold.train.recipe import Recipe

if TYPE_CHECKING:
    from netfold.train.trainer import Outcome, Trainer

FAILED, CANNOT, INTERRUPTED = 1, 2, 128 + signal.SIGINT
# Files in the folder of a job that `launch` has started: what to do, and that no restart helps.
JOB, HOPELESS = "job.json", "hopeless"
# What another try may find better: a peer or a machine that failed. A wrong shape or a missing key will be so again.
_PASSING = (RuntimeError, OSError, MemoryError)
_PR_SET_PDEATHSIG = 1


def train(recipe: Recipe, source: Source) -> int:
    """Join the ranks that the launcher has started, train, and print what came of it on rank 0.

    Returns the exit status: FAILED, or CANNOT where a restart would fail in the same way. An error is one sentence on
    stderr, with the rank and the step, and the place in `source` of the key that it names; it is in torchrun's error
    file too, where that is asked for.
    """
    import torch
    import torch.distributed as dist

    from netfold.train.trainer import Trainer

    began_s = time.perf_counter()
    torch.set_num_threads(recipe.run.threads)
    name_place(os.environ)
    rank, trainer = int(os.environ["RANK"]), None
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0 and restarts != "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        print(f"netfold train: all ranks start anew, restart {restarts} of {most}", file=sys.stderr, flush=True)
    try:
        dist.init_process_group(recipe.run.backend, timeout=timedelta(seconds=recipe.run.timeout_s))
        trainer = Trainer(recipe)
        outcome = trainer.fit()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        if rank == 0:
            print(f"netfold train: interrupted{_step(trainer)}", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        _tell(error, rank, trainer, source)
        passing = isinstance(error, _PASSING) and not isinstance(error, NotImplementedError)
        return FAILED if passing else CANNOT
    if rank == 0:
        print(result(outcome, trainer, time.perf_counter() - began_s), flush=True)
    return 0


def name_place(environment: MutableMapping[str, str]) -> None:
    """Give torch's names for this process's place, whoever started it. ValueError says what the launcher left out."""
    if "RANK" in environment and "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return  # torchrun's own, and of anybody who speaks as it does
    place = placement(environment)
    environment.update(
        RANK=str(place.rank), WORLD_SIZE=str(place.size), MASTER_ADDR=place.host, MASTER_PORT=str(place.port)
    )
    if place.local_rank is not None:
        environment["LOCAL_RANK"] = str(place.local_rank)
    if place.local_size is not None:
        environment["LOCAL_WORLD_SIZE"] = str(place.local_size)


def result(outcome: Outcome, trainer: Trainer, seconds: float) -> str:
    """One line: the metric, the baseline, which is better, how long it took."""
    metric, ranks = trainer.data.metric, trainer.mesh.device_mesh.size()
    ahead = (outcome.metric - metric.baseline) * (1 if metric.better == "higher" else -1)
    verdict = "better" if ahead > 0 else "no better"
    ended = "" if outcome.reason == "done" else f", ended early: {outcome.reason}"
    return (
        f"{metric.name} {outcome.metric:.4g} {metric.unit}, {verdict} than {metric.baseline_is} "
        f"({metric.baseline:.4g} {metric.unit}); {outcome.step} steps in {seconds:.1f} s on {ranks} "
        f"rank{'' if ranks == 1 else 's'}{ended}"
    )


def main() -> None:
    """As one of the processes that `launch` starts; argv[1] is the job's folder."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB).read_text())
    _leave_with(job["starter"])
    if (folder / HOPELESS).exists():
        sys.exit(CANNOT)
    try:
        status = train(Recipe.model_validate(job["recipe"]), Source.from_json(job["source"]))
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == CANNOT:
        (folder / HOPELESS).touch()
    sys.exit(status)


def _leave_with(starter: int) -> None:
    """SIGTERM for this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:
        sys.exit(FAILED)


def _tell(error: Exception, rank: int, trainer: Trainer | None, source: Source) -> None:
    said = "; ".join(source.placed(error)) if isinstance(error, ValueError) else in_a_sentence(error)
    sentence = f"rank {rank} of {os.environ['WORLD_SIZE']}{_step(trainer)}: {said}"
    print(f"netfold train: {sentence}", file=sys.stderr, flush=True)
    if os.environ.get("LOGLEVEL") in ("INFO", "DEBUG"):
        traceback.print_exception(error)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        # What torchrun shows as the reason.
        calls = "".join(traceback.format_exception(error))
        told = {"message": sentence, "extraInfo": {"py_callstack": calls, "timestamp": str(int(time.time()))}}
        Path(report).write_text(json.dumps({"message": told}))


def _step(trainer: Trainer | None) -> str:
    return ", before the first step" if trainer is None else f", step {min(trainer.step + 1, trainer.steps)}"


if __name__ == "__main__":
    main()
