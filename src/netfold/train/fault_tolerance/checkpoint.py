"""Checkpoints of a job, through torch.distributed.checkpoint: written beside training, checked before they are loaded.

A save copies what a rank holds (the only time that training waits), then a thread writes it. Its messages go over a
group of its own: they can never meet training's. What one holds is `contents`, how it becomes whole is `sealed`.
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
# What is saved -> what a rank asks for of it.
WantedOf = Callable[[Metadata], StateToLoad]


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read. `disk_full`: for want of room, of ranks' quotas too."""

    def __init__(self, text: str, disk_full: bool = False) -> None:
        super().__init__(text)
        self.disk_full = disk_full


class CheckpointStopError(PolicyStopError, CheckpointError):
    """The policy for such a checkpoint is to stop."""


class Checkpoints:
    """Those of one run, in one folder that all ranks share. All methods are collective over the world but
    `failed` and `let_finish`."""

    def __init__(self, folder: Path, recipe: asked.Checkpoint, timeout_s: float) -> None:
        """Makes the folder, and removes what crashes left in it. `timeout_s`: the longest that a write may take."""
        self.folder, self._recipe, self._timeout_s = folder, recipe, timeout_s
        self._group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self._under_way: tuple[int, Future[Any]] | None = None
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            remove_incomplete(folder)

    def save(self, tensors: dict[str, Tensor], position: Position) -> None:
        """Begin to write one, or write it where checkpoints are not asynchronous; `tensors` are copied before it
        returns. `wait` comes before the next one, and says what came of this one."""
        assert self._under_way is None, "wait() comes before the next save()"
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
        self._under_way = position.step, future

    def let_finish(self, timeout_s: float) -> None:
        """As the last thing, also of a rank that fails: the one under way may become whole. Raises nothing."""
        if self._under_way is not None:
            futures.wait([self._under_way[1]], timeout_s)

    def failed(self) -> bool:
        """Whether this rank knows that the one under way has failed: then all will."""
        return self._under_way is not None and self._under_way[1].done() and bool(self._under_way[1].exception())

    def wait(self) -> None:
        """Until the one under way is whole. Raises CheckpointError, on all ranks alike; what it left is removed."""
        if self._under_way is None:
            return
        (step, future), self._under_way = self._under_way, None
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
            raise _failure(step, self.folder, error) from error

    def newest(self, corrupt: str) -> tuple[Path | None, list[str]]:
        """The newest checkpoint of which every file is as it was written, and what there is to say about others.

        Every rank reads a share of the files. corrupt "previous": one that is damaged is put aside, and the one before
        it is tried; "stop": raises CheckpointStopError.
        """
        said: list[str] = []
        for path in reversed(self._agreed(complete_checkpoints(self.folder) if dist.get_rank() == 0 else [])):
            try:
                damages = [find_damage(path, Manifest.read(path), dist.get_rank(), dist.get_world_size())]
            except ValueError as error:
                damages = [str(error)]
            damages = [each for each in self._everyones(damages[0]) if each]
            if not damages:
                return path, said
            if corrupt == "stop":
                raise CheckpointStopError(
                    f"checkpoint {path} is damaged: {damages[0]}; remove it to go on from the one before it, or set "
                    'fault_tolerance.corrupt_checkpoint = "previous"'
                )
            if dist.get_rank() == 0:
                quarantine(path)
            said.append(f"checkpoint {path} is damaged and was put aside: {damages[0]}; the one before it is taken")
        return None, said

    def load(self, path: Path, wanted_of: WantedOf) -> Position:
        """Fill what this rank holds from a checkpoint. Raises ValueError where it is of another model."""
        reader = FileSystemReader(path)
        saved: Metadata = {
            key: meta
            for key, meta in reader.read_metadata().state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }
        wanted = wanted_of(saved)
        verdicts = self._everyones((wanted.problem(saved), set(wanted.tensors)))
        problems = [problem for problem, _ in verdicts if problem]
        over = {key for key in saved if key.startswith("model.")}.difference(*(keys for _, keys in verdicts))
        if over and not problems:
            problems = [f"it has {sorted(over)[0]}, which the model has not"]
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

    def _agreed(self, of_rank_0: T) -> T:
        box = [of_rank_0]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _everyones(self, own: T) -> list[T]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found


def _failure(step: int, folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} in {folder} was not written: {_reasons(error)}; earlier ones are as they were",
        disk_full=any(_is_full(each) for each in _errors(error).values()),
    )


def _errors(error: BaseException) -> dict[int, BaseException]:
    """rank -> what went wrong there."""
    if isinstance(error, CheckpointException):
        return {rank: failure[0] for rank, failure in error.failures.items()}
    return {dist.get_rank(): error}


def _reasons(error: BaseException) -> str:
    return ", ".join(f"rank {rank}: {type(each).__name__}: {each}" for rank, each in _errors(error).items())


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
