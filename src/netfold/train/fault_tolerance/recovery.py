"""Where a run continues, and what it leaves for its next start: checkpoints, and the cost of failures."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from netfold.train.fault_tolerance.atomic_checkpoint import Position
from netfold.train.fault_tolerance.checkpoint import CheckpointError, Checkpoints, CheckpointStopError
from netfold.train.fault_tolerance.drift import check_replicated
from netfold.train.fault_tolerance.state import StateToLoad, collect_state
from netfold.train.mesh import Mesh
from netfold.train.model import Replica
from netfold.train.optimizer_step import OptimizerStep
from netfold.train.recipe import Recipe

Note = Callable[[str, str], None]  # (level, text)


class Recovery:
    """A job's checkpoints, by its recipe. All methods but `failed`, `stepped` and `leave` are collective over the
    world.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        mesh: Mesh,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        update: OptimizerStep,
        note: Note,
    ) -> None:
        """folder: the run's, shared by all ranks."""
        self._folder, self._recipe, self._mesh = folder, recipe, mesh
        self._replica, self._optimizer, self._update = replica, optimizer, update
        self._parameters = dict(replica.named_parameters())
        self._note = note
        self._saved: int | None = None
        self._checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint, recipe.run.timeout_s)
        self._restart_log = RestartLog(folder / "restarts.json") if dist.get_rank() == 0 else None

    def begin(self) -> Position | None:
        """Load the newest checkpoint; None if there is none. Raises ValueError, CheckpointError."""
        position = self.back()
        if position is not None:
            # A restart by torchrun continues whatever the recipe says about earlier runs.
            if self._recipe.run.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                raise ValueError(
                    f"run.resume is 'never', and {self._folder} holds checkpoints of an earlier run: give run.name "
                    "another name, or remove them"
                )
            self._compare(position)
            self._note("info", f"continues from the checkpoint of step {position.step}, {position.samples} samples")
        if self._restart_log is not None:
            self._restart_log.begin(position.step if position else 0, position.taken_s if position else None)
        return position

    def back(self) -> Position | None:
        """Load the newest complete checkpoint; None if there is none, and then nothing has changed."""
        self.settle()
        path, problems = self._checkpoints.newest(self._recipe.fault_tolerance.corrupt_checkpoint)
        for text in problems:
            self._note("warning", text)
        if path is None:
            return None
        position = self._checkpoints.load(
            path,
            lambda saved: StateToLoad(saved, self._replica, self._parameters, self._optimizer, self._update),
        )
        self._saved = position.step
        return position

    def save(self, step: int, samples: int) -> None:
        """Begin to write a checkpoint of this step unless there is one; complete it if it is not asynchronous.

        Raises DriftError, CheckpointError.
        """
        if step == self._saved:
            return
        self.settle()
        check_replicated(self._replica, self._parameters, self._mesh, step)
        tensors, numbers = collect_state(
            self._replica, self._parameters, self._optimizer, self._update, buffers=self._mesh.data.rank == 0
        )
        recipe = self._recipe.model_dump(mode="json")
        self._checkpoints.save(tensors, Position(step, samples, dist.get_world_size(), time.time(), numbers, recipe))
        self._saved = step
        if not self._recipe.checkpoint.asynchronous:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint being written. Raises CheckpointError, unless a full disk is only a warning."""
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            if not error.disk_full:
                raise
            if self._recipe.fault_tolerance.disk_full == "stop":
                raise CheckpointStopError(f"{error}; fault_tolerance.disk_full is 'stop'", disk_full=True) from error
            self._note("warning", f"{error}; training continues without it (fault_tolerance.disk_full)")

    def failed(self) -> bool:
        return self._checkpoints.failed()

    def stepped(self, step: int) -> None:
        if self._restart_log is not None:
            self._restart_log.stepped(step)

    def end(self) -> None:
        """End the run, done or asked to stop, after its last checkpoint. Notes the cost of failures."""
        if self._restart_log is not None:
            self._restart_log.end()
            if self._restart_log.goodput.lost:
                self._note("info", str(self._restart_log.goodput))

    def leave(self) -> None:
        """Close, after waiting up to the grace time for the checkpoint being written; also on a rank that fails."""
        self._checkpoints.let_finish(self._recipe.fault_tolerance.grace_s)
        if self._restart_log is not None:
            self._restart_log.close()

    def _compare(self, position: Position) -> None:
        """Note or refuse changes of the recipe since the checkpoint."""
        then, now = Recipe.model_validate(position.recipe), self._recipe
        if then.optimizer.name != now.optimizer.name:
            raise ValueError(
                f"optimizer.name is {now.optimizer.name!r}, and the checkpoint in {self._folder} was written with "
                f"{then.optimizer.name!r}: set it back, or give run.name another name"
            )
        steps, length = changed_keys(then, now)
        if steps and now.run.resume != "changed":
            raise ValueError(
                f"{'; '.join(steps)} when the checkpoint in {self._folder} was written: set it back, give run.name "
                "another name, or set run.resume = 'changed' to continue with it"
            )
        for each in steps + length:
            self._note("info", f"changed since the checkpoint: {each}")
        batches = [_batch(recipe, ranks) for recipe, ranks in ((then, position.ranks), (now, dist.get_world_size()))]
        if then.training.batch == now.training.batch and batches[0] != batches[1]:
            self._note("info", f"a step takes {batches[1]} samples since the checkpoint, and took {batches[0]}")
        changed = [key for key in ("data", "model") if getattr(then, key) != getattr(now, key)]
        changed += ["training.seed"] if then.training.seed != now.training.seed else []
        if changed:
            self._note("warning", f"{', '.join(changed)} changed since the checkpoint: samples may come twice or never")
        if then.diloco is None and now.diloco is not None:
            self._note("warning", "diloco is new since the checkpoint: its momentum begins at 0")
        if then.diloco is not None and now.diloco is None:
            self._note("warning", "diloco is gone since the checkpoint: one of the ranks' optimizer states is taken")
        if then.training.precision != "f16" and now.training.precision == "f16":
            self._note("warning", "training.precision is f16 since the checkpoint: the loss scale starts again")


def changed_keys(then: Recipe, now: Recipe) -> tuple[list[str], list[str]]:
    """Keys of [optimizer], [schedule], [diloco] and [training] that differ, each as "key is NEW and was OLD".

    Returns those that change steps which the run would have taken, and those that only change its length.
    """
    steps: list[str] = []
    length: list[str] = []
    keys = [("training", key) for key in ("steps", "epochs", "batch", "scaling", "clip")]
    sections = ["optimizer", "schedule"] + ["diloco"] * (then.diloco is not None and now.diloco is not None)
    keys += [(section, key) for section in sections for key in type(getattr(now, section)).model_fields]
    # With a constant rate the steps do not depend on the length.
    constant = then.schedule.shape == now.schedule.shape == "constant"
    for section, key in keys:
        old, new = (getattr(getattr(recipe, section), key) for recipe in (then, now))
        if old != new:
            was, is_now = ("not given" if value is None else repr(value) for value in (old, new))
            only_length = constant and section == "training" and key in ("steps", "epochs")
            (length if only_length else steps).append(f"{section}.{key} is {is_now} and was {was}")
    return steps, length


def _batch(recipe: Recipe, ranks: int) -> int:
    """Samples per step, of the whole job."""
    replicas = ranks // (recipe.parallel.pipeline * recipe.parallel.tensor)
    return recipe.training.batch * (replicas if recipe.training.scaling == "weak" else 1)


@dataclass(frozen=True)
class Goodput:
    began_s: float
    """The time of day of the first start, in seconds since 1970."""
    step: int = 0
    """The last step."""
    ended: bool = False
    """The run ended by itself, or was asked to stop: nothing was lost."""
    lost: int = 0
    """Starts that ended otherwise."""
    steps_repeated: int = 0
    seconds_lost: float = 0.0
    """From the time of the checkpoint to the time when training continued from it."""

    def __str__(self) -> str:
        return (
            f"cost of failures: {self.lost} restarts of all ranks, {self.steps_repeated} steps repeated, "
            f"{self.seconds_lost:.1f} s lost"
        )


class RestartLog:
    """The goodput of one run, in a file that rank 0 rewrites after each step and reads at the next start.

    A killed process loses nothing: each write reaches the kernel at once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.goodput = Goodput(began_s=time.time())
        self._first = not path.exists()
        # The file is empty if the disk was full at the first write.
        if not self._first and (text := path.read_text()):
            self.goodput = Goodput(**json.loads(text))
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def begin(self, step: int, taken_s: float | None) -> None:
        """Start at `step`, from a checkpoint taken at that time of day, or from nothing."""
        goodput = self.goodput
        if not self._first and not goodput.ended:
            goodput = replace(
                goodput,
                lost=goodput.lost + 1,
                steps_repeated=goodput.steps_repeated + goodput.step - step,
                seconds_lost=goodput.seconds_lost + time.time() - (goodput.began_s if taken_s is None else taken_s),
            )
        self._write(replace(goodput, step=step, ended=False))

    def stepped(self, step: int) -> None:
        self._write(replace(self.goodput, step=step))

    def end(self) -> None:
        self._write(replace(self.goodput, ended=True))

    def close(self) -> None:
        os.close(self._file)

    def _write(self, goodput: Goodput) -> None:
        self.goodput = goodput
        # One write of constant length: a reader never sees half a line. A full disk must not end a job here; the
        # checkpoints report it.
        with contextlib.suppress(OSError):
            os.pwrite(self._file, f"{json.dumps(asdict(goodput)):<255}\n".encode(), 0)
