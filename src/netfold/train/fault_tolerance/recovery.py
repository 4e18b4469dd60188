"""Where a run goes on from, and what it leaves for its next life: checkpoints, and the toll of those that failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from netfold.train.fault_tolerance.atomic_checkpoint import Position
from netfold.train.fault_tolerance.checkpoint import CheckpointError, Checkpoints, CheckpointStopError
from netfold.train.fault_tolerance.drift import check_replicated
from netfold.train.fault_tolerance.recipe_changes import changed as changed_keys
from netfold.train.fault_tolerance.restart_log import RestartLog
from netfold.train.fault_tolerance.state import Metadata, StateToLoad, collect_state
from netfold.train.mesh import Mesh
from netfold.train.optimizer_step import OptimizerStep
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica

Note = Callable[[str, str], None]  # (level, text)


class Recovery:
    """The checkpoints of a job as its recipe wants them. Every method is collective over the world, but `failed`,
    `stepped` and `leave`."""

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
        """`folder` is the run's; all ranks share it."""
        self._folder, self._recipe, self._mesh = folder, recipe, mesh
        self._replica, self._optimizer, self._update = replica, optimizer, update
        self._parameters = dict(replica.named_parameters())
        self._note = note
        self._saved: int | None = None
        self._checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint, recipe.run.timeout_s)
        self._restart_log = RestartLog(folder / "restarts.json") if dist.get_rank() == 0 else None

    def begin(self) -> Position | None:
        """Take up the newest checkpoint; None where there is none. Raises ValueError, CheckpointError."""
        position = self.back()
        if position is not None:
            # torchrun's own restarts go on, whatever was said of earlier runs.
            if self._recipe.run.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                raise ValueError(
                    f"run.resume is 'never', and {self._folder} holds checkpoints of an earlier run: give run.name "
                    "another name, or remove them"
                )
            self._compare(position)
            self._note("info", f"goes on from the checkpoint of step {position.step}, {position.samples} samples")
        if self._restart_log is not None:
            self._restart_log.begin(position.step if position else 0, position.taken_s if position else None)
        return position

    def back(self) -> Position | None:
        """To the newest checkpoint that is whole; None where there is none, and then nothing has changed."""
        self.settle()
        path, said = self._checkpoints.newest(self._recipe.fault_tolerance.corrupt_checkpoint)
        for text in said:
            self._note("warning", text)
        if path is None:
            return None
        position = self._checkpoints.load(path, self._wanted)
        self._saved = position.step
        return position

    def save(self, step: int, samples: int) -> None:
        """A checkpoint of now, unless there is one; begun where checkpoints are asynchronous, else whole. Raises
        DriftError, CheckpointError."""
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
        """Wait for the checkpoint under way. Raises CheckpointError; a full disk may be a warning (disk_full)."""
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            if not error.disk_full:
                raise
            if self._recipe.fault_tolerance.disk_full == "stop":
                raise CheckpointStopError(f"{error}; fault_tolerance.disk_full is 'stop'", disk_full=True) from error
            self._note("warning", f"{error}; training goes on without it (fault_tolerance.disk_full)")

    def failed(self) -> bool:
        return self._checkpoints.failed()

    def stepped(self, step: int) -> None:
        if self._restart_log is not None:
            self._restart_log.stepped(step)

    def end(self) -> None:
        """The run is over, or was asked to stop, and its last checkpoint is whole. Says what failures have cost."""
        if self._restart_log is not None:
            self._restart_log.end()
            if self._restart_log.goodput.lost:
                self._note("info", str(self._restart_log.goodput))

    def leave(self) -> None:
        """Also of a rank that fails. What it was writing may become whole first."""
        self._checkpoints.let_finish(self._recipe.fault_tolerance.grace_s)
        if self._restart_log is not None:
            self._restart_log.close()

    def _wanted(self, saved: Metadata) -> StateToLoad:
        return StateToLoad(saved, self._replica, self._parameters, self._optimizer, self._update)

    def _compare(self, position: Position) -> None:
        """What has changed in the recipe since the checkpoint, as far as it changes what is going on."""
        then = Recipe.model_validate(position.recipe)
        now = self._recipe
        if then.optimizer.name != now.optimizer.name:
            raise ValueError(
                f"optimizer.name is {now.optimizer.name!r}, and the checkpoint in {self._folder} was written with "
                f"{then.optimizer.name!r}: set it back, or give run.name another name"
            )
        learnt, length = changed_keys(then, now)
        if learnt and now.run.resume != "changed":
            raise ValueError(
                f"{'; '.join(learnt)} when the checkpoint in {self._folder} was written: set it back, give run.name "
                "another name, or say run.resume = 'changed' to go on with it"
            )
        for each in learnt + length:
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
            self._note("warning", "diloco is gone since the checkpoint: of the ranks' optimizer states one is taken")
        if then.training.precision != "f16" and now.training.precision == "f16":
            self._note("warning", "training.precision is f16 since the checkpoint: the loss scale begins anew")


def _batch(recipe: Recipe, ranks: int) -> int:
    """Samples a step, of the whole job."""
    replicas = ranks // (recipe.parallel.pipeline * recipe.parallel.tensor)
    return recipe.training.batch * (replicas if recipe.training.scaling == "weak" else 1)
