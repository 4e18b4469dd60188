"""The state that training resumes from, and the loop that resumes."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from netfold.horovod.torch.elastic.sampler import ElasticSampler
from netfold.horovod.torch.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from netfold.horovod.torch.lifecycle import init, shutdown
from netfold.horovod.torch.negotiation import HorovodInternalError

log = logging.getLogger("netfold")


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Ranks are to be added or removed. netfold raises it never; scripts that catch it still load."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class State:
    """What `run` commits, restores and synchronizes."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Called after the job was joined again, before `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the values of now in memory: `restore` returns to them. Costs a copy of everything."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Does nothing: a netfold job keeps its ranks."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last commit."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's values, on every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses: the job was joined again."""


class ObjectState(State):
    """Objects that can be pickled, as attributes."""

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        """bcast_object, get_rank: as Horovod's; the second is not needed here."""
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
    """Models, optimizers and ElasticSamplers by their `state_dict`, everything else as an object; all as attributes."""

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
            # A copy: an optimizer keeps the tensors that it is given, and steps would change what is saved.
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
    """Call `func(state, ...)` with a synchronized state, and again from the last commit when an operation failed.

    Every process must survive the failure: see the package's own page. Other exceptions go through.
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
                log.warning("an operation failed, and training starts over from the last commit: %s", error)
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
