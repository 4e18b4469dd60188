"""Keep torch.compile out of netfold's Python.

Dynamo tries to compile every Python frame that runs inside compiled code, including frames that C++ calls: DDP's hooks
reach netfold's methods that way. netfold's methods hold nothing to compile.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch


@functools.cache
def skip_netfold() -> None:
    """Have Dynamo skip all functions of netfold's loaded torch modules. Idempotent; called before the first group."""
    for name, module in list(sys.modules.items()):
        if name.startswith("netfold.torch.") and module is not None:
            _skip(vars(module).values())


def _skip(values: Any) -> None:
    frames = torch._C._dynamo.eval_frame
    skip: Any = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for value in values:
        if isinstance(value, types.FunctionType) and value.__module__.startswith("netfold."):
            frames.set_code_exec_strategy(value.__code__, skip)
        elif isinstance(value, type) and value.__module__.startswith("netfold."):
            _skip(vars(value).values())
