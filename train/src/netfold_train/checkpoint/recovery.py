"""A run's checkpoints, by torch.distributed.checkpoint: written beside training, checked before they are loaded."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from netfold_train.checkpoint import atomic, state
from netfold_train.checkpoint.drift import check_replicated
from netfold_train.checkpoint.state import CheckpointError
from netfold_train.fault_tolerance.stop import PolicyStopError
from netfold_train.models.model import Replica
from netfold_train.optim.step import OptimizerStep
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.recipe import Recipe

Note = Callable[[str, str], None]  # (level, text)
# Changed, these keys change the steps that a run would have taken.
_STEPS = ("optimizer.", "schedule.", "diloco.", "training.batch", "training.scaling", "training.clip")
# These do too, unless the learning rate is constant.
_LENGTH = ("training.steps", "training.epochs")
# These change the samples of a step.
_SAMPLES = ("data.", "model.", "training.seed")


class CheckpointStopError(PolicyStopError, CheckpointError):
    """A failed checkpoint whose policy is to stop."""


class Recovery:
    """Saves a run's state, and continues from it.

    A save copies the rank's state (training waits only for this), then a thread writes the copy. Its messages use a
    group of their own, and so cannot mix with training's. All methods but `failed` and `leave` are collective over the
    world.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Recipe,
        mesh: Mesh,
        replica: Replica,
        update: OptimizerStep,
        note: Note,
    ) -> None:
        """folder: the run's, shared by all ranks. Removes what crashes left in it. Collective over the world."""
        self._folder, self._recipe, self._mesh, self._note = folder / atomic.CHECKPOINTS, recipe, mesh, note
        self._parts, self._update = (replica, dict(replica.named_parameters())), update
        self._group = dist.new_group(timeout=timedelta(seconds=recipe.run.timeout_s))
        self._saved: int | None = None
        self._pending: tuple[int, futures.Future[Any]] | None = None
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic.remove_incomplete(self._folder)

    def begin(self) -> atomic.Position | None:
        """Load the newest checkpoint; None if there is none. Raises ValueError, CheckpointError."""
        position = self.back()
        if position is not None:
            # A restart by torchrun continues whatever the recipe says about earlier runs.
            if self._recipe.run.resume == "never" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                raise ValueError(
                    f"run.resume is 'never', and {self._folder} holds checkpoints of an earlier run: give run.name "
                    "another name, or remove them"
                )
            for level, text in compare_recipes(Recipe.model_validate(position.recipe), self._recipe, self._folder):
                self._note(level, text)
            self._note("info", f"continues from the checkpoint of step {position.step}, {position.samples} samples")
        return position

    def back(self) -> atomic.Position | None:
        """Load the newest undamaged checkpoint; None if there is none, and then nothing has changed."""
        self.settle()
        path = self._newest()
        if path is None:
            return None
        position, _ = atomic.read_manifest(path)
        reader = FileSystemReader(path)
        saved = state.list_tensors(reader)
        kinds = {key.partition(".")[0] for key in saved}
        tensors = state.allocate_state(saved, *self._parts, self._update.states(kinds))
        unlike = state.differences(state.of_model(saved), state.of_model(tensors), self._group)
        if unlike:
            raise ValueError(
                f"checkpoint {path} is of another model: {unlike}; give run.name another name, or the recipe the "
                "model that it was written for"
            )
        state.load_tensors(tensors, reader, self._group)
        self._update.load_state_dict(position.numbers)
        self._saved = position.step
        return position

    def save(self, step: int, samples: int) -> None:
        """Begin to write a checkpoint of this step unless there is one; complete it if it is not asynchronous.

        Raises DriftError, CheckpointError.
        """
        if step == self._saved:
            return
        self.settle()
        _, parameters = self._parts
        check_replicated(parameters, self._mesh, step)
        tensors = state.collect_state(*self._parts, self._update.states(), buffers=self._mesh.data.rank == 0)
        position = atomic.Position(step, samples, self._update.state_dict(), self._recipe.model_dump(mode="json"))
        writer = atomic.AtomicCheckpointWriter(self._folder, position, self._recipe.checkpoint.keep)
        future: Any
        if self._recipe.checkpoint.asynchronous:
            future = async_save(tensors, storage_writer=writer, process_group=self._group)
        else:  # Without a copy of the tensors.
            with futures.ThreadPoolExecutor(1) as thread:
                future = thread.submit(save, tensors, storage_writer=writer, process_group=self._group)
        self._pending, self._saved = (step, future), step
        if not self._recipe.checkpoint.asynchronous:
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint being written, and remove it if it has failed.

        Raises CheckpointError on all ranks alike, unless the disk is full and the policy is to warn; after
        run.timeout_s on this rank alone.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        timeout_s = self._recipe.run.timeout_s
        try:
            error = future.exception(timeout_s)
        except futures.TimeoutError:
            raise CheckpointError(
                f"rank {dist.get_rank()}: the checkpoint of step {step} is not written after {timeout_s:.0f} s; "
                f"is {self._folder} on a slow disk? run.timeout_s is the limit"
            ) from None
        if error is None:
            return
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / (atomic.name_of(step) + atomic.PART), ignore_errors=True)
        text = (
            f"the checkpoint of step {step} in {self._folder} was not written: {state.reasons(error)}; earlier "
            "ones are unchanged"
        )
        full = (errno.ENOSPC, errno.EDQUOT)
        if not any(isinstance(each, OSError) and each.errno in full for each in state.errors_of(error).values()):
            raise CheckpointError(text) from error
        if self._recipe.fault_tolerance.disk_full == "stop":
            raise CheckpointStopError(f"{text}; fault_tolerance.disk_full is 'stop'") from error
        self._note("warning", f"{text}; training continues without it (fault_tolerance.disk_full)")

    def failed(self) -> bool:
        """Whether the pending write has failed on this rank, and so fails on all ranks."""
        return self._pending is not None and self._pending[1].done() and bool(self._pending[1].exception())

    def leave(self) -> None:
        """Wait up to the grace time for the checkpoint being written, also on a rank that fails. Raises nothing."""
        if self._pending is not None:
            futures.wait([self._pending[1]], self._recipe.fault_tolerance.grace_s)

    def _newest(self) -> Path | None:
        """The newest undamaged checkpoint. Every rank reads a share of the files; damage is handled by the policy."""
        for path in reversed(gather(atomic.complete_checkpoints(self._folder), self._group)[0]):
            found = gather(atomic.find_damage(path, dist.get_rank(), dist.get_world_size()), self._group)
            damage = next(filter(None, found), "")
            if not damage:
                return path
            if self._recipe.fault_tolerance.corrupt_checkpoint == "stop":
                raise CheckpointStopError(
                    f"checkpoint {path} is damaged: {damage}; remove it to continue from the one before it, or set "
                    'fault_tolerance.corrupt_checkpoint = "previous"'
                )
            if dist.get_rank() == 0:
                atomic.quarantine(path)
            self._note("warning", f"checkpoint {path} is damaged and was renamed: {damage}; the one before it is taken")
        return None


def compare_recipes(then: Recipe, now: Recipe, folder: Path) -> list[tuple[str, str]]:
    """Notes (level, text) on the keys of the recipe that have changed since the checkpoint.

    Raises ValueError for another optimizer; and, unless run.resume is "changed", for keys that change the steps which
    the run would have taken. A section that only one of the recipes has changes nothing that the run has done.
    """
    old, new = (
        {f"{section}.{key}": value for section, keys in recipe if keys is not None for key, value in keys}
        for recipe in (then, now)
    )
    changed = {
        key: f"{key} is {_shown(new.get(key))} and was {_shown(old.get(key))}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    }
    fixed = _STEPS if then.schedule.shape == now.schedule.shape == "constant" else _STEPS + _LENGTH
    refused = [text for key, text in changed.items() if key.startswith(fixed) and key in old and key in new]
    other, advice = changed.get("optimizer.name"), ""
    if other is None:
        advice = ", or set run.resume = 'changed' to continue with it"
    if other is not None or (refused and now.run.resume != "changed"):
        raise ValueError(
            f"{other or '; '.join(refused)} when the checkpoint in {folder} was written: set it back, give run.name "
            f"another name{advice}"
        )
    samples = "when the checkpoint was written: samples may come twice or never"
    notes = [("warning", f"{text} {samples}") for key, text in changed.items() if key.startswith(_SAMPLES)]
    later = [text for key, text in changed.items() if key.startswith(_STEPS + _LENGTH)]
    return notes + [("info", f"changed since the checkpoint: {text}") for text in later]


def _shown(value: object) -> str:
    return "not given" if value is None else repr(value)
