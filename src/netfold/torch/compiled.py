"""What torch.compile and torch's C++ need to know about our Python, told once, when the first group is made."""

from __future__ import annotations

import functools
import types
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from netfold.torch import calls, process_group, sparse, transfers, work
from netfold.torch.device import driver
from netfold.torch.device import transfers as device_transfers
from netfold.torch.device import work as device_work
from netfold.torch.process_group import ProcessGroupNetfold

_library: list[Any] = []  # what is registered lives as long as this


@functools.cache
def prepare_for_torch(*classes: type) -> None:
    """Idempotent."""
    for room in (process_group, work, calls, sparse, transfers, driver, device_transfers, device_work):
        _skip(vars(room).values())
    for each in classes:
        _skip(vars(each).values())
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another kernel was there: ours passes on to it
        for device in ("CPU", "CUDA"):
            library.impl("_allgather_base_", _all_gather_base, device)
    _library.append(library)


def _skip(values: Any) -> None:
    """Dynamo tries to compile whatever Python runs while compiled code does, also what C++ calls: DDP's hooks reach our
    methods so. There is nothing in them to compile."""
    frames = torch._C._dynamo.eval_frame
    skip: Any = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for value in values:
        if isinstance(value, types.FunctionType) and value.__module__.startswith("netfold."):
            frames.set_code_exec_strategy(value.__code__, skip)
        elif isinstance(value, type) and value.__module__.startswith("netfold."):
            _skip(vars(value).values())


def _all_gather_base(output: Any, input: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    """`_c10d_functional.all_gather_into_tensor_out` calls this operator past the group's methods. It is one for all
    groups: those of other backends are passed on to theirs."""
    found: Any = dist.ProcessGroup.unbox(group)
    opts = AllgatherOptions()
    opts.asyncOp = async_op
    if timeout >= 0:
        opts.timeout = timedelta(milliseconds=timeout)
    if isinstance(found, ProcessGroupNetfold):
        done: Any = found._allgather_base(output, input, opts)
    else:
        done = found._get_backend(output.device)._allgather_base(output, input, opts)
    return output, done.boxed()
