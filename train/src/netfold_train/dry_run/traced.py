"""Run a module forward and backward on fake tensors, and make the planner's model of it."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from netfold_plan.model import Gradient, Part, Traced
from netfold_train.dry_run.module_spec import Input, TraceError
from netfold_train.dry_run.tracer import OnAnAccelerator, TraceMode, tensors
from netfold_train.models.model import Model
from netfold_train.recipe.errors import error_sentence

# torch's errors for operations whose result or size depends on values: of fake tensors, and of meta tensors.
_NEEDS_VALUES = ("DataDependent", "DynamicOutputShape", "UnsupportedFakeTensor", "GuardOnDataDependent")
_NEEDS_VALUES_TEXTS = ("data-dependent", "meta tensors", ".numpy() is not supported", ".tolist() is not supported")
# A trace ignores the values of weights, and some rules (trunc_normal_) depend on values.
_NO_INITIALISATION: dict[str, Any] = {
    name: lambda tensor, *_, **__: tensor
    for name in vars(nn.init)
    if name.endswith("_") and not name.startswith("_")
}  # fmt: skip


def trace_module(make: Callable[[], Any], inputs: Sequence[Input], name: str = "") -> Traced:
    """Trace a step of the module that `make` returns (a module, or netfold_train's Model) on `inputs`.

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
    # Fake tensors log errors with stacks; here they become a sentence.
    log = logging.getLogger(FakeTensorMode.__module__)
    with warnings.catch_warnings(), mock.patch.object(log, "disabled", True):
        # Deprecation warnings of libraries do not concern a plan.
        warnings.simplefilter("ignore")
        # Without mkldnn an LSTM is several kernels, as on accelerators.
        with torch.backends.mkldnn.flags(enabled=False), FakeTensorMode(allow_non_fake_inputs=True):
            module = _make(make, name or "the module")
            name = name or type(module).__name__
            once, twice = (_run(module, inputs, times, name) for times in (1, 2))
    parts, more = _parts(once), _parts(twice)
    if [_outline(each) for each in parts] != [_outline(each) for each in more]:
        raise TraceError(
            f"{name}: runs different operations for {2 * counts[0]} samples than for {counts[0]}, so other "
            "microbatches cannot be predicted; trace it with more samples"
        )
    gradients = tuple(Gradient(each.numel(), min(at, len(parts) - 1)) for each, at in once.gradients)
    return Traced(name, counts[0], parts, more, gradients, tuple(_notes(name, once)))


def _make(make: Callable[[], Any], name: str) -> nn.Module:
    try:
        with mock.patch.multiple(nn.init, **_NO_INITIALISATION):
            made = make()
    except Exception as error:
        raise TraceError(f"{name} cannot be made of fake tensors: {error_sentence(error)}") from error
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
            if ends:
                # A trace does not count allocations.
                torch.autograd.backward(ends, [torch.empty_like(each) for each in ends])
    except Exception as error:
        raise TraceError(_sentence(error, name, inputs)) from error
    if not ends:
        raise TraceError(f"{name}: no output has a gradient, so there is nothing to train")
    module.zero_grad()
    return watch


def _ends(returned: Any) -> list[Tensor]:
    loss = getattr(returned, "loss", None)
    if isinstance(loss, Tensor):
        returned = loss
    elif is_dataclass(returned):
        returned = dict(vars(returned))
    return [each for each in tensors(returned) if each.requires_grad]


def _parts(watch: TraceMode) -> tuple[Part, ...]:
    """Parameters that no working part has read count in the first part."""
    made = [
        Part(
            each.module or "itself", each.forward.kernels, each.backward.kernels, each.parameters, each.kept, *received
        )
        for each, received in zip(watch.seen, watch.received(), strict=True)
        if each.worked
    ]
    left = sum(watch.unused.values()) + sum(each.parameters for each in watch.seen if not each.worked)
    if made:
        made[0] = replace(made[0], parameters=made[0].parameters + left)
    return tuple(made)


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


def _sentence(error: Exception, name: str, inputs: Sequence[Input]) -> str:
    """A trace's error, with the innermost line outside of torch."""
    what = " ".join(str(error).split()).partition(" Exception raised from")[0]
    kind = type(error).__name__
    ours = (Path(torch.__file__).parent, Path(__file__).parent)
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_absolute() and not any(path.is_relative_to(each) for each in ours):
            place = f" at {frame.filename}:{frame.lineno}"
    if kind.startswith(_NEEDS_VALUES) or any(each in what for each in _NEEDS_VALUES_TEXTS):
        return (
            f"{name}: depends on a computed value{place}, but a trace has only shapes; trace a part that does not, or "
            "give the model by its dimensions"
        )
    return f"{name}: fails with inputs of {', '.join(each.text for each in inputs)}{place}: {kind}: {what[:300]}"
