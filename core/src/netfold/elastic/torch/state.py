"""The objects that make up a rank's state: what a repeated step restores, and what a newcomer is sent.

A step that is repeated begins again with the values from before it. Weights and optimizers need no copy for this: they
change only after the vote. The other parts change before it, and are copied when an attempt begins (`State.begin`):

    modules          their buffers (batch norm's statistics)
    optimizers       nothing
    other objects    their state_dict: schedulers, samplers, averages of weights
    random numbers   of torch, its GPUs, Python and NumPy's own generator

Gradients are removed before a step is repeated.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

_SHARDED = (
    "every rank of an elastic job must hold the whole state, because a lost rank takes its part along; use "
    "DistributedDataParallel, or checkpoints and a restart"
)


class State:
    """Named objects, the same on every rank: modules, optimizers, and any object with state_dict and load_state_dict.

    Borrowed: the objects stay the caller's, and are changed in place.
    Cost: each attempt copies the modules' buffers, the state_dict of objects that are neither modules nor optimizers,
    and the generators' states. Weights and optimizers are not copied. A rank that is sent the state needs the memory of
    the largest part beside its own, and 64 MB.
    Raises TypeError for an object without these methods, ValueError for one of which a rank holds only a part.
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            _check(name, part)
        self.parts: dict[str, Any] = parts
        self.modules: list[nn.Module] = [each for each in parts.values() if isinstance(each, nn.Module)]
        self.optimizers: list[Optimizer] = [each for each in parts.values() if isinstance(each, Optimizer)]
        self._scalers = [each for each in parts.values() if isinstance(each, torch.amp.GradScaler)]
        self._others = [
            each
            for each in parts.values()
            if not isinstance(each, (nn.Module, Optimizer)) and each not in self._scalers
        ]
        self._buffers: list[Tensor] = []
        self._buffers_before: list[Tensor] = []
        self._others_before: list[Any] = []
        self._random_before: Callable[[], None] | None = None

    def begin(self) -> None:
        """Copy what an attempt may change before its vote. Cost: a copy of the buffers and of the other objects."""
        buffers = list(self._all_buffers())
        # Buffers that stay the same tensors are copied into the copies of the step before.
        same = len(buffers) == len(self._buffers) and all(a is b for a, b in zip(buffers, self._buffers, strict=True))
        if not same:
            self._buffers, self._buffers_before = buffers, [each.detach().clone() for each in buffers]
        elif buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers_before, buffers)
        self._others_before = [copy.deepcopy(each.state_dict()) for each in self._others]
        self._random_before = _random_state()

    def restore(self) -> None:
        """Go back to the values that `begin` copied, without gradients."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._buffers_before)
        for each, before in zip(self._others, self._others_before, strict=True):
            each.load_state_dict(copy.deepcopy(before))
        for scaler in self._scalers:
            # `unscale_` of the attempt that failed. A scale changes only after the vote.
            scaler._per_optimizer_states.clear()
        if self._random_before is not None:
            self._random_before()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Remove the gradients of all modules' and optimizers' parameters."""
        for parameter in self._parameters():
            parameter.grad = None

    def on_step(self, vote: Callable[[], object], lr_factor: Callable[[], float]) -> Callable[[], None]:
        """Have every optimizer call `vote` before it changes anything; returns the function that ends this.

        A GradScaler calls it before it decides whether to leave the optimizer out.
        lr_factor: multiplies the learning rates within each step.
        """
        ends: list[Callable[[], Any]] = []
        for optimizer in self.optimizers:
            hooks = _StepHooks(vote, lr_factor)
            ends.append(optimizer.register_step_pre_hook(hooks.before).remove)
            ends.append(optimizer.register_step_post_hook(hooks.after).remove)
        for scaler in self._scalers:
            ends.append(_vote_first(scaler, vote))

        def end() -> None:
            for each in ends:
                each()

        return end

    def _parameters(self) -> Iterator[Tensor]:
        for module in self.modules:
            yield from module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _all_buffers(self) -> Iterator[Tensor]:
        for module in self.modules:
            yield from module.buffers()


class _StepHooks:
    """One optimizer's hooks."""

    def __init__(self, vote: Callable[[], object], lr_factor: Callable[[], float]) -> None:
        self._vote, self._lr_factor = vote, lr_factor
        self._rates: list[Any] = []

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # torch passes the optimizer itself among its arguments.
        if any(callable(each) for each in (*args, *kwargs.values()) if each is not optimizer):
            raise ValueError(
                "netfold.elastic: a closure computes gradients after the vote on them; compute the gradients before "
                "step(), without a closure"
            )
        self._vote()
        factor, self._rates = self._lr_factor(), []
        if factor != 1.0:
            # Restored after the step: a scheduler computes the next rates from these.
            self._rates = [group["lr"] for group in optimizer.param_groups]
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate


def _vote_first(scaler: Any, vote: Callable[[], object]) -> Callable[[], None]:
    """Wrap `scaler.step`, on this object alone: it skips the optimizer, and so its hook, where gradients overflow."""
    original = scaler.step

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        vote()
        return original(optimizer, *args, **kwargs)

    scaler.step = step

    def end() -> None:
        del scaler.step

    return end


def _check(name: str, part: Any) -> None:
    if isinstance(part, DistributedDataParallel):
        raise ValueError(
            f"elastic.State: {name} is a DistributedDataParallel, which belongs to one generation of the job: give the "
            "module that it wraps, and make the wrapper in World.on_change"
        )
    if isinstance(part, ZeroRedundancyOptimizer):
        raise ValueError(f"elastic.State: {name} is a ZeroRedundancyOptimizer, which divides its state: {_SHARDED}")
    if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
        raise TypeError(
            f"elastic.State: {name} is a {type(part).__name__}, which has no state_dict and load_state_dict methods"
        )
    for key, tensor in _tensors_of(part):
        # Flat parameters are FSDP1's.
        if isinstance(tensor, DTensor) or getattr(tensor, "_is_flat_param", False):
            raise ValueError(f"elastic.State: {key} of {name} is divided among the ranks: {_SHARDED}")


def _tensors_of(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, nn.Module):
        yield from part.named_parameters()
        yield from part.named_buffers()
    elif isinstance(part, Optimizer):
        for number, group in enumerate(part.param_groups):
            yield from ((f"a parameter of group {number}", each) for each in group["params"])


def _random_state() -> Callable[[], None]:
    """A function that sets the generators of random numbers to their states of now."""
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    # A process that has not begun to use its GPUs has drawn no numbers there.
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]

    def restore() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)

    return restore
