"""The torch.distributed backend: `init_process_group("netfold")`.

torch finds `register` through entry points and calls it at the end of `import torch`. So `register` imports nothing
heavy, loads nothing native and never raises. `init_process_group` makes the ProcessGroup.
May import: communicator, plan, profile, torch.

Always: tensors live until their operation is done; no native code waits for the GIL; no thread starts before the first
group; a Future's callbacks may block without delaying other Futures.

Tests: `.venv/bin/pytest core/tests/torch`
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

    from netfold.communicator import Options
    from netfold.profile import Records
    from netfold.torch.compression import GradientCompression
    from netfold.torch.operations import Operations

__all__ = ["compress_gradients", "device_paths", "events", "monitored_barrier", "new_process_group", "register", "why"]


def register() -> None:
    """Make `netfold` a backend of torch.distributed, and start the recording that NETFOLD_PROFILE asks for.

    Idempotent. Does nothing if torch was built without distributed.
    """
    try:
        import torch.distributed as dist

        if not dist.is_available() or hasattr(dist.Backend, "NETFOLD"):
            return
        dist.Backend.register_backend("netfold", _create, extended_api=True, devices=["cpu", "cuda"])
        # torch has no public way to extend env://. A torch without this table raises its own error under mpirun.
        handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
        if "env" in handlers:
            handlers["env"] = functools.partial(_env_rendezvous, handlers["env"])
        if "NETFOLD_PROFILE" in os.environ:
            from netfold.profile import recording

            recording.start_if_requested()
    except Exception as error:
        # torch would turn an exception here into a failure of `import torch`.
        import warnings

        warnings.warn(f"netfold could not register with torch.distributed: {error}", RuntimeWarning, stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from netfold.torch.release import check_release

    check_release(options.group_rank)
    from netfold.torch.factory import create

    return create(options, pg_options)


def _env_rendezvous(torch_handler: Any, url: str, **options: Any) -> Any:
    from netfold.torch.env_rendezvous import env_rendezvous

    return env_rendezvous(torch_handler, url, **options)


def new_process_group(
    store: Store, rank: int, size: int, *, timeout: timedelta = timedelta(minutes=30), options: Options | None = None
) -> dist.ProcessGroup:
    """Make a group outside of torch's world, for programs that create and replace groups themselves (torchft).

    store: a `PrefixStore` that only this generation of the group uses.
    timeout: of each operation.
    The group's `shutdown()` ends the group. Programs that call `init_process_group` need no such group.
    Raises what `netfold.communicator.Group` raises.
    """
    from netfold.torch.release import check_release

    check_release(rank)
    from netfold.torch.factory import standalone

    return standalone(store, rank, size, timeout, options)[0]


def compress_gradients(model: DistributedDataParallel) -> GradientCompression:
    """Send the f32 gradients of `model` as i8 from now on: a quarter of the bytes. A collective call of all ranks.

    Error feedback: each rank adds the rounding error of a step to the gradient of its next step.
    Gradients of other dtypes are averaged uncompressed. On one rank nothing is compressed.
    Cost: 4 bytes per parameter, and one more group of the model's ranks. Other collectives are not compressed.
    Checkpoints do not hold the rounding errors: a restart drops those of one step.

    Returns the rounding errors, by parameter.
    Raises ValueError for a model that is not on a netfold group and for more than 32 ranks; RuntimeError for a model
    that already has a communication hook.
    """
    from netfold.torch.compression import compress

    return compress(model, _operations(model.process_group))


def events(group: dist.ProcessGroup | None = None) -> Records:
    """Return the newest event records of a group (`netfold.profile.RECORD`), oldest first."""
    return _operations(group).netfold.events()


def why(group: dist.ProcessGroup | None = None, *, operation: str = "all_reduce", size_bytes: int = 1 << 24) -> str:
    """Name the algorithm that runs `operation` of `size_bytes` in this group, and the reason."""
    return _operations(group).netfold.why(operation, size_bytes)


def device_paths(group: dist.ProcessGroup | None = None) -> str:
    """Describe the path of this group's collectives on GPU memory, and why no faster path is in use.

    The ranks choose the path at their first collective on GPU memory.
    """
    devices = _operations(group).devices
    return devices.why() if devices is not None else "IPC disabled because torch finds no CUDA device here"


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until every rank of `group` has called this. After the timeout, raise on all ranks that called.

    As `torch.distributed.monitored_barrier`, which takes gloo groups only. The barrier uses the store, not the group's
    connections, so it also works on a group whose collectives hang.
    timeout: a timedelta or seconds; None: the group's.
    wait_all_ranks: rank 0's message lists the missing ranks first. The message names them in either case.
    Raises CollectiveTimeout (a RuntimeError and a TimeoutError); its `rank` is the first missing rank.
    """
    seconds = timeout if timeout is None or not isinstance(timeout, (int, float)) else timedelta(seconds=timeout)
    _operations(group).run_monitored_barrier(seconds, wait_all_ranks)


def _operations(group: dist.ProcessGroup | None) -> Operations:
    import torch.distributed as dist

    from netfold.torch.operations import operations_of

    chosen = group if group is not None else dist.group.WORLD
    found = operations_of(chosen) if isinstance(chosen, dist.ProcessGroup) else None
    if found is None:
        raise ValueError(f"not a netfold group but {chosen!r}; init_process_group('netfold') makes one")
    return found
