"""Futures that C++ reads as a list of tensors.

A Future made in Python holds a Python object. DDP's built-in hook FP16_COMPRESS is C++ and needs a list of tensors.
TorchScript can make such a Future: a TorchScript task waits for netfold's Future. TorchScript suspends the task, so it
occupies no thread.
"""

# TorchScript parses the functions' source, including comments, so mypy's exemptions stand here.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch


def future_of_tensors(done: torch.futures.Future[Any], tensors: list[torch.Tensor]) -> torch.futures.Future[Any]:
    """A Future of `tensors` that completes with `done`, or fails as `done` fails."""
    return _compiled()(done, tensors)


def _when_done(done: torch.jit.Future[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.jit.wait(done)
    return tensors


def _start(done: torch.jit.Future[int], tensors: list[torch.Tensor]) -> torch.jit.Future[list[torch.Tensor]]:
    return torch.jit.fork(_when_done, done, tensors)


@functools.cache
def _compiled() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit.script is deprecated, but no other call makes such a Future
        return torch.jit.script(_start)
