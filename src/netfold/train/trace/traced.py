"""Run a module forward and backward on fake tensors, and make the planner's model of it."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from netfold.plan.model import Gradient, Kernels, Part, Traced
from netfold.train.model import Model
from netfold.train.trace.module_spec import Input, TraceError
from netfold.train.trace.tracer import OnAnAccelerator, Ran, TraceMode, tensors

# torch's errors for operations whose result or size depends on values: of fake tensors, and of meta tensors.
_NEEDS_VALUES = ("DataDependent", "DynamicOutputShape", "UnsupportedFakeTensor", "GuardOnDataDependent")
_NEEDS_VALUES_TEXTS = ("data-dependent", "meta tensors", ".numpy() is not supported", ".tolist() is not supported")


def trace_module(make: Callable[[], Any], inputs: Sequence[Input], name: str = "") -> Traced:
    """Trace a step of the module that `make` returns (a module, or netfold.train's Model) on `inputs`.

    name: of the traced model; by default its class's. The backward pass starts from every output with a gradient, or
    only from an output's `loss` if it has one. Raises TraceError, a sentence, for a wrong module or input, and for a
    forward pass that depends on values.
    """
    if not inputs:
        raise TraceError("a trace needs the module's inputs: give each, such as --input 32x3x224x224")
    counts = sorted({each.shape[0] for each in inputs})
    if len(counts) > 1:
        raise TraceError(
            f"inputs of {' and '.join(map(str, counts))} samples; the first dimension is the sample, equal in all"
        )
    with warnings.catch_warnings(), _quiet():
        # Deprecation warnings of libraries do not concern a plan.
        warnings.simplefilter("ignore")
        # Without mkldnn an LSTM is several kernels, as on accelerators.
        with torch.backends.mkldnn.flags(enabled=False), FakeTensorMode(allow_non_fake_inputs=True):
            with _no_initialisation():
                module = _make(make)
            name = name or type(module).__name__
            once, twice = (_run(module, inputs, times, name) for times in (1, 2))
    parts, place = _parts(once)
    more, _ = _parts(twice)
    if [_outline(each) for each in parts] != [_outline(each) for each in more]:
        raise TraceError(
            f"{name}: runs different operations for {2 * counts[0]} samples than for {counts[0]}, so other "
            "microbatches cannot be predicted; trace it with more samples"
        )
    gradients = tuple(Gradient(each.numel(), place[at]) for each, at in once.gradients)
    return Traced(name, counts[0], parts, more, gradients, tuple(_notes(name, once)))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of fake tensors' errors and stacks: the caller raises a sentence instead."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _no_initialisation() -> Iterator[None]:
    """Skip the initialisation of weights: a trace ignores values, and some rules (trunc_normal_) depend on them."""
    rules = {name: rule for name, rule in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")}
    try:
        for name in rules:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        yield
    finally:
        for name, rule in rules.items():
            setattr(nn.init, name, rule)


def _make(make: Callable[[], Any]) -> nn.Module:
    made = make()
    module = made.module if isinstance(made, Model) else made
    if not isinstance(module, nn.Module):
        raise TraceError(f"the factory returned {type(made).__name__} and not a torch.nn.Module; return the module")
    return module.train()


def _run(module: nn.Module, inputs: Sequence[Input], times: int, name: str) -> TraceMode:
    given = [(each, torch.zeros((times * each.shape[0], *each.shape[1:]), dtype=each.dtype)) for each in inputs]
    positional = [tensor for each, tensor in given if not each.name]
    named = {each.name: tensor for each, tensor in given if each.name}
    watch = TraceMode(module)
    try:
        with watch.hooked(), OnAnAccelerator():
            returned = module(*positional, **named)
            ends = _ends(returned)
            with watch.aside():
                given_back = [torch.ones_like(each) for each in ends]
            if ends:
                torch.autograd.backward(ends, given_back)
    except Exception as error:
        _explain(error, name, inputs)
    if not ends:
        raise TraceError(f"{name}: no output has a gradient, so there is nothing to train")
    module.zero_grad()
    return watch


def _ends(returned: Any) -> list[Tensor]:
    loss = getattr(returned, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else tensors(returned)
    return [each for each in found if each.requires_grad]


def _parts(watch: TraceMode) -> tuple[tuple[Part, ...], dict[int, int]]:
    """(parts without idle stretches; the index of the part for each index of `watch.seen`)."""
    made: list[Part] = []
    place: dict[int, int] = {}
    left = sum(watch.unused.values())
    for index, (seen, (received, count)) in enumerate(zip(watch.seen, watch.received(), strict=True)):
        if seen.worked:
            forward, backward = _kernels(seen.forward), _kernels(seen.backward)
            parameters = seen.parameters + left
            left = 0
            made.append(Part(seen.module or "itself", forward, backward, parameters, seen.kept, received, count))
        else:
            left += seen.parameters
        place[index] = max(0, len(made) - 1)
    if made and left:
        made[-1] = replace(made[-1], parameters=made[-1].parameters + left)
    return tuple(made), place


def _kernels(ran: Ran) -> Kernels:
    return Kernels(tuple(ran.matmuls), ran.moved, ran.count)


def _outline(part: Part) -> tuple[object, ...]:
    return part.name, part.parameters, len(part.forward.matmuls), len(part.backward.matmuls)


def _notes(name: str, watch: TraceMode) -> list[str]:
    found = []
    if watch.custom:
        found.append(
            f"{name}: {', '.join(sorted(watch.custom))}: custom kernels are counted by the bytes that they move, "
            "without their arithmetic"
        )
    if watch.unused:
        found.append(
            f"{name}: {sum(watch.unused.values()):,} parameters are unused; DDP needs find_unused_parameters=True for "
            "them, and then uses another order of buckets"
        )
    return found


def _explain(error: Exception, name: str, inputs: Sequence[Input]) -> NoReturn:
    """Raise a trace's error as a sentence."""
    what = " ".join(str(error).split()).partition(" Exception raised from")[0]
    kind = type(error).__name__
    place = _place(error)
    if kind.startswith(_NEEDS_VALUES) or any(each in what for each in _NEEDS_VALUES_TEXTS):
        raise TraceError(
            f"{name}: depends on a computed value{place}, but a trace has only shapes; trace a part that does not, or "
            "give the model by its dimensions"
        ) from error
    shapes = ", ".join(each.text for each in inputs)
    raise TraceError(f"{name}: fails with inputs of {shapes}{place}: {kind}: {what[:300]}") from error


def _place(error: Exception) -> str:
    """The innermost line outside of torch, or ""."""
    torch_s = Path(torch.__file__).parent
    here = Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and not path.is_relative_to(torch_s) and not path.is_relative_to(here):
            return f" at {frame.filename}:{frame.lineno}"
    return ""
