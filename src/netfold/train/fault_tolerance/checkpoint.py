"""A job's checkpoints, by torch.distributed.checkpoint: written beside training, checked before they are loaded.

A save copies the rank's state (training waits only for this), then a thread writes the copy. Its messages use a group
of their own, and so cannot mix with training's. `state` names the contents; `atomic_checkpoint` completes the folder.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from netfold.train import recipe as asked
from netfold.train.fault_tolerance.atomic_checkpoint import (
    PART,
    AtomicCheckpointWriter,
    Manifest,
    Position,
    complete_checkpoints,
    find_damage,
    name_of,
    quarantine,
    remove_incomplete,
)
from netfold.train.fault_tolerance.state import Metadata, StateToLoad
from netfold.train.fault_tolerance.stop import PolicyStopError

T = TypeVar("T")
# The metadata of a checkpoint -> the tensors that a rank loads from it.
WantedOf = Callable[[Metadata], StateToLoad]


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read. disk_full: the reason is a full disk or quota."""

    def __init__(self, text: str, disk_full: bool = False) -> None:
        super().__init__(text)
        self.disk_full = disk_full


class CheckpointStopError(PolicyStopError, CheckpointError):
    """A failed checkpoint whose policy is to stop."""


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks share.

    All methods but `failed` and `let_finish` are collective over the world.
    """

    def __init__(self, folder: Path, recipe: asked.Checkpoint, timeout_s: float) -> None:
        """Make the folder, and remove what crashes left in it. timeout_s: the limit of one write."""
        self.folder, self._recipe, self._timeout_s = folder, recipe, timeout_s
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._pending: tuple[int, Future[Any]] | None = None
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            remove_incomplete(folder)

    def save(self, tensors: dict[str, Tensor], position: Position) -> None:
        """Begin to write a checkpoint, or write it if checkpoints are not asynchronous. Copies `tensors`.

        `wait` must be called before the next save; it raises this save's errors.
        """
        assert self._pending is None, "wait() must be called before the next save()"
        writer = AtomicCheckpointWriter(self.folder, position, self._recipe.keep)
        future: Any
        if self._recipe.asynchronous:
            future = async_save(tensors, storage_writer=writer, process_group=self._group)
        else:
            future = Future()
            try:
                future.set_result(save(tensors, storage_writer=writer, process_group=self._group))
            except (CheckpointException, Exception) as error:
                future.set_exception(error)
        self._pending = position.step, future

    def let_finish(self, timeout_s: float) -> None:
        """Wait for the pending write at the end of the process, also of a rank that fails. Raises nothing."""
        if self._pending is not None:
            futures.wait([self._pending[1]], timeout_s)

    def failed(self) -> bool:
        """Whether the pending write has failed on this rank, and so fails on all ranks."""
        return self._pending is not None and self._pending[1].done() and bool(self._pending[1].exception())

    def wait(self) -> None:
        """Wait for the pending write. Raises CheckpointError on all ranks alike, after removing the partial folder."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            error = future.exception(self._timeout_s)
        except futures.TimeoutError:
            raise CheckpointError(
                f"rank {dist.get_rank()}: the checkpoint of step {step} is not written after {self._timeout_s:.0f} s; "
                f"is {self.folder} on a slow disk? run.timeout_s is the limit"
            ) from None
        if error is not None:
            if dist.get_rank() == 0:
                shutil.rmtree(self.folder / (name_of(step) + PART), ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.folder} was not written: {_reasons(error)}; earlier ones are "
                "unchanged",
                disk_full=any(
                    isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT)
                    for each in _errors(error).values()
                ),
            ) from error

    def newest(self, corrupt: str) -> tuple[Path | None, list[str]]:
        """(the newest undamaged checkpoint, warnings about damaged ones). Every rank reads a share of the files.

        corrupt: "previous" renames a damaged checkpoint and tries the one before it; "stop" raises CheckpointStopError.
        """
        warnings: list[str] = []
        paths = [complete_checkpoints(self.folder) if dist.get_rank() == 0 else []]
        dist.broadcast_object_list(paths, src=0, group=self._group)
        for path in reversed(paths[0]):
            try:
                damages = [find_damage(path, Manifest.read(path), dist.get_rank(), dist.get_world_size())]
            except ValueError as error:
                damages = [str(error)]
            damages = [each for each in self._gather(damages[0]) if each]
            if not damages:
                return path, warnings
            if corrupt == "stop":
                raise CheckpointStopError(
                    f"checkpoint {path} is damaged: {damages[0]}; remove it to continue from the one before it, or set "
                    'fault_tolerance.corrupt_checkpoint = "previous"'
                )
            if dist.get_rank() == 0:
                quarantine(path)
            warnings.append(f"checkpoint {path} is damaged and was renamed: {damages[0]}; the one before it is taken")
        return None, warnings

    def load(self, path: Path, wanted_of: WantedOf) -> Position:
        """Load this rank's state from a checkpoint. Raises ValueError if the checkpoint is of another model."""
        reader = FileSystemReader(path)
        saved: Metadata = {
            key: meta
            for key, meta in reader.read_metadata().state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }
        wanted = wanted_of(saved)
        verdicts = self._gather((wanted.problem(saved), set(wanted.tensors)))
        problems = [problem for problem, _ in verdicts if problem]
        over = {key for key in saved if key.startswith("model.")}.difference(*(keys for _, keys in verdicts))
        if over and not problems:
            problems = [f"it has {sorted(over)[0]}, which the model lacks"]
        if problems:
            raise ValueError(
                f"checkpoint {path} is of another model: {problems[0]}; give run.name another name, or the recipe the "
                "model that it was written for"
            )
        position = Manifest.read(path).position
        try:
            load(wanted.tensors, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            raise CheckpointError(f"checkpoint {path} cannot be loaded: {_reasons(error)}") from error
        wanted.adopt(position.numbers)
        return position

    def _gather(self, own: T) -> list[T]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found


def _errors(error: BaseException) -> dict[int, BaseException]:
    """rank -> its error."""
    if isinstance(error, CheckpointException):
        return {rank: failure[0] for rank, failure in error.failures.items()}
    return {dist.get_rank(): error}


def _reasons(error: BaseException) -> str:
    return ", ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, each in _errors(error).items())
