"""Training that restarts from its last commit when an operation fails.

    @hvd.elastic.run
    def train(state): ...

    train(hvd.elastic.TorchState(model, optimizer, batch=0))

`run` handles failures that every process survives: a collective that timed out, a connection that broke, ranks that
disagreed. All ranks leave the job, restore their last commit, join again under the same ranks and call the function
again. A process that died is not replaced: the other ranks wait 60 s for it to join, raise RendezvousError and end.
torchrun (`--max-restarts`) then restarts all ranks, and the script loads its state from its own checkpoint. Ranks
cannot be added or removed while a job runs.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

import torch
import torch.utils.data

from netfold.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from netfold.horovod.torch.negotiation import HorovodInternalError
from netfold.horovod.torch.world import init, rank, shutdown, size

log = logging.getLogger("netfold")


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Distributes the examples of an epoch over the ranks, without those that were used before the last reset.

    Pass it to the `TorchState`. Call `record_batch` after each batch, and `set_epoch` at the end of each epoch.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on every rank."""
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all examples in another order."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has used `batch_size` more examples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the epoch's unused examples anew."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Repeat the first examples, so that all ranks get the same number.
        padded = self.remaining_indices + self.remaining_indices[: self.total_size - len(self.remaining_indices)]
        return iter(padded[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Ranks are to be added or removed. netfold never raises this; it exists for scripts that catch it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class State:
    """The state that `run` commits, restores and synchronizes."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have `run` call these functions after it has joined the job again, before `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Copy the current values in memory, for `restore`. Costs a copy of the whole state."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: a netfold job keeps its ranks."""

    def save(self) -> None:
        """Copy the current values. A subclass defines it; so with `restore` and `sync`, as in Horovod."""
        raise NotImplementedError(f"{type(self).__name__} needs a method save")

    def restore(self) -> None:
        """Return to the last commit."""
        raise NotImplementedError(f"{type(self).__name__} needs a method restore")

    def sync(self) -> None:
        """Copy rank 0's values to every rank."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sync")

    def reset(self) -> None:
        """Subclasses may override this. `run` calls it after it has joined the job again."""


class ObjectState(State):
    """A state of picklable objects, as attributes."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """bcast_object, get_rank: as in Horovod; get_rank has no effect."""
        super().__init__()
        self._bcast_object = bcast_object
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object({name: getattr(self, name) for name in self._saved_state})
            self._set()

    def _set(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class TorchState(ObjectState):
    """A state of models, optimizers and ElasticSamplers, by their `state_dict`, and of other objects, as attributes."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        self._parts = {
            name: value
            for name, value in given.items()
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler))
        }
        for name, part in self._parts.items():
            setattr(self, name, part)
        self._saved_parts: dict[str, Any] = {}
        super().__init__(**{name: value for name, value in given.items() if name not in self._parts})
        self._save_parts()

    def save(self) -> None:
        self._save_parts()
        super().save()

    def restore(self) -> None:
        for name, part in self._parts.items():
            # Copy: an optimizer keeps the tensors that it loads, and its steps would change the saved ones.
            part.load_state_dict(copy.deepcopy(self._saved_parts[name]))
        super().restore()

    def sync(self) -> None:
        for part in self._parts.values():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root_rank=0)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root_rank=0)
            else:
                part.load_state_dict(broadcast_object(part.state_dict()))
        self._save_parts()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__.get("_parts", {})
        if name in parts and value is not parts[name]:
            parts[name] = value
            self._saved_parts[name] = copy.deepcopy(value.state_dict())
        super().__setattr__(name, value)

    def _save_parts(self) -> None:
        self._saved_parts = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call `func(state, ...)` with a synchronized state, and again from the last commit if an operation failed.

    Every process must survive the failure: see the module's docstring. Other exceptions propagate.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                log.warning("an operation failed; training restarts from the last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
