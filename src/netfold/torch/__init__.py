"""The torch.distributed backend: `init_process_group("netfold")`.

torch finds `register` through entry points and calls it at the end of `import torch`; so it imports nothing heavy,
loads nothing native and never raises. The ProcessGroup is made when a script asks for it. May import: communicator,
plan, profile, torch.

Always: tensors live until their operation is done; no native code waits for the GIL; no thread starts before the first
group; a Future's callbacks may block without holding up other Futures.

Tests: `.venv/bin/pytest tests/torch`
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from netfold.extras import need_at_import

need_at_import("netfold.torch", "torch")

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store
    from torch.nn.parallel import DistributedDataParallel

    from netfold.communicator import Group, Options
    from netfold.profile import Records
    from netfold.torch.compression import GradientCompression
    from netfold.torch.operations import Operations

__all__ = ["compress_gradients", "device_paths", "events", "monitored_barrier", "new_process_group", "register", "why"]


def register() -> None:
    """Make `netfold` a backend of torch.distributed, and record the process where NETFOLD_PROFILE asks for it.

    Idempotent; does nothing where torch has no distributed.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "NETFOLD"):
            return
        dist.Backend.register_backend("netfold", _create, extended_api=True, devices=["cpu", "cuda"])
        # torch has no public way to add to env://; one without this table says itself what it misses under mpirun.
        handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
        if "env" in handlers:
            handlers["env"] = functools.partial(_meet, handlers["env"])
        if "NETFOLD_PROFILE" in os.environ:
            from netfold.profile import recording

            recording.start_if_requested()
    except Exception as error:
        # torch turns an exception here into a failure of `import torch` itself: a warning is enough.
        import warnings

        warnings.warn(f"netfold could not register with torch.distributed: {error}", RuntimeWarning, stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from netfold.torch.release import check_release

    check_release(options.group_rank)
    from netfold.torch.factory import create

    return create(options, pg_options)


def _meet(torchs: Any, url: str, **options: Any) -> Any:
    from netfold.torch.env_rendezvous import env_rendezvous

    return env_rendezvous(torchs, url, **options)


def new_process_group(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout: timedelta = timedelta(minutes=30),
    options: Options | None = None,
) -> dist.ProcessGroup:
    """A group that torch's world does not know, for programs that make and remake groups themselves (torchft).

    `store`: a part for this life of the group alone (`PrefixStore`); `timeout`: of each operation. Not needed with
    `init_process_group`. Its `shutdown()` ends it. Raises what `netfold.communicator.Group` raises.
    """
    from netfold.torch.release import check_release

    check_release(rank)
    from netfold.torch.factory import standalone

    return standalone(store, rank, size, timeout, options)[0]


def compress_gradients(model: DistributedDataParallel) -> GradientCompression:
    """Send the f32 gradients of `model` as i8 from now on, a quarter of the bytes; every rank calls this, in order.

    What rounding takes from a step's gradient is kept and added to the next step's: over many steps nothing is lost.
    Costs 4 bytes a parameter, and a group more of the model's ranks: everything else they say to each other travels as
    before. Gradients of other dtypes are averaged as they are. On one rank nothing is compressed. What is kept is no
    part of a checkpoint: a restart drops one step's rounding errors.

    Returns what is kept, a parameter at a time. Raises ValueError for a model that is not on a netfold group and for
    more than 32 ranks, RuntimeError where the model has a hook already.
    """
    from netfold.torch.compression import compress

    return compress(model, _operations(model.process_group))


def events(group: dist.ProcessGroup | None = None) -> Records:
    """The newest event records of a group (`netfold.profile.RECORD`), oldest first."""
    return _group(group).events()


def why(group: dist.ProcessGroup | None = None, *, operation: str = "all_reduce", size_bytes: int = 1 << 24) -> str:
    """The algorithm that runs `operation` of `size_bytes` in this group, and the reason."""
    return _group(group).why(operation, size_bytes)


def device_paths(group: dist.ProcessGroup | None = None) -> str:
    """How this group's collectives on GPUs' memory go, and why no better: found by its ranks when the first came."""
    devices = _operations(group).devices
    return devices.why() if devices is not None else "IPC disabled because torch finds no CUDA device here"


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Return once every rank of `group` has called this; else raise on all that did, with the ranks that did not.

    As `torch.distributed.monitored_barrier`, which takes gloo groups only. `timeout`: a timedelta or seconds, that of
    the group if None. With `wait_all_ranks` rank 0's message lists the missing ranks first; they are named either way.
    It goes over the store, so that it works on a group whose collectives hang. Raises CollectiveTimeout (a
    RuntimeError and a TimeoutError); its `rank` is the first missing one.
    """
    seconds = timeout if timeout is None or not isinstance(timeout, (int, float)) else timedelta(seconds=timeout)
    _operations(group).run_monitored_barrier(seconds, wait_all_ranks)


def _group(group: dist.ProcessGroup | None) -> Group:
    return _operations(group).netfold


def _operations(group: dist.ProcessGroup | None) -> Operations:
    import torch.distributed as dist

    from netfold.torch.operations import operations_of

    chosen = group if group is not None else dist.group.WORLD
    found = operations_of(chosen) if isinstance(chosen, dist.ProcessGroup) else None
    if found is None:
        raise ValueError(f"not a netfold group but {chosen!r}; init_process_group('netfold') makes one")
    return found
