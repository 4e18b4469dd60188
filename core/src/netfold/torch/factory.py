"""Make a group's backend for torch, and close the groups that are still open when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from netfold.communicator import Group, Options
from netfold.communicator.meeting import Meeting, StoreMeeting
from netfold.communicator.message_links import ParentLost
from netfold.communicator.reconfigure import Generations, outside_group
from netfold.options import timeout_seconds
from netfold.torch.device.cuda import cuda_api as cuda_api
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.env_rendezvous import store_host
from netfold.torch.forwarding import seconds_of
from netfold.torch.operations import Operations, operations_of
from netfold.torch.store import TorchStore, store_lost

# The first release in which Python can subclass torch's C++ class Backend.
BACKEND_SINCE = (2, 14)
takes_backends = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= BACKEND_SINCE

_live: weakref.WeakSet[Operations] = weakref.WeakSet()
# Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper keeps only the C++ half of a backend alive.
_kept_alive: list[Operations] = []
# A group that is offered to torch (`default_group_of`).
_offered: Group | None = None


def create(options: Any, pg_options: Any) -> Any:
    """Make a group: torch calls this for `init_process_group("netfold")` and `new_group(backend="netfold")`.

    options: torch's `_DistributedBackendOptions`.
    Returns a backend; on torch older than 2.14 a ProcessGroup.
    Raises TypeError for `pg_options` that are not `netfold.Options`, and what `netfold.communicator.Group` raises.
    """
    if pg_options is not None and not isinstance(pg_options, Options):
        raise TypeError(f"pg_options must be netfold.Options, not {type(pg_options).__name__}")
    if not takes_backends:
        from netfold.torch import legacy

        return legacy.create(options, pg_options)
    _refuse_second_custom_backend(getattr(options, "process_group", None))
    part = store_for_group(options.store, options.global_ranks_in_group)
    return _backend(
        part,
        options.group_rank,
        options.group_size,
        options.timeout,
        pg_options,
        job_ranks_of(options),
        parent=parent_of(options),
        enable_reconfigure=getattr(options, "enable_reconfigure", False),
        formed=formed_group(options),
    )


@contextlib.contextmanager
def default_group_of(group: Group) -> Iterator[None]:
    """Within this context `init_process_group("netfold", store=..., rank=..., world_size=...)` takes this group.

    It is formed already, and torch's default group ends it; its owner may have another one follow. `new_group` forms
    groups of its ranks by it (`parent_of`). So torch's store, whose process may be gone, serves only
    `monitored_barrier` and other backends beside netfold.
    """
    global _offered
    _offered = group
    try:
        yield
    finally:
        _offered = None


def formed_group(options: Any) -> Group | None:
    """The group that is offered, where torch asks for its default group (`default_group_of`); else None.

    options: torch's `_DistributedBackendOptions`.
    """
    formed = _offered
    if formed is None or options.global_ranks_in_group:
        return None
    if (options.group_rank, options.group_size) != (formed.rank, formed.size):
        raise ValueError(
            f"this process is rank {formed.rank} of {formed.size} in the group that is formed; init_process_group has "
            f"rank={options.group_rank}, world_size={options.group_size}"
        )
    _skip_netfold()
    formed.job_ranks, formed.timeout_s = range(formed.size), timeout_seconds(seconds_of(options.timeout))
    return formed


def job_ranks_of(options: Any) -> list[int]:
    """The group's ranks in the job. For the default group torch's list is empty."""
    return list(options.global_ranks_in_group) or list(range(options.group_size))


def standalone(
    store: Store, rank: int, size: int, timeout: timedelta, options: Options | None
) -> tuple[dist.ProcessGroup, Operations]:
    """See `netfold.torch.new_process_group`."""
    part = PrefixStore("netfold", store)
    operations: Any
    if takes_backends:
        operations = _backend(part, rank, size, timeout, options, ())
        group: Any = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in _devices(operations):
            group._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, operations)
    else:
        operations = group = close_at_exit(
            make_process_group(open_group(part, rank, size, timeout, options), store, part, cuda_api())
        )
    # torchft drops a group without calling shutdown().
    weakref.finalize(group, _close_in_thread, operations.generations or operations.netfold).atexit = False
    return group, operations


def make_process_group(group: Group, store: Store, part: Store, device_api: DeviceApi | None) -> Operations:
    """Make the object that torch calls for an open group: a backend; on torch older than 2.14 a ProcessGroup."""
    if takes_backends:
        from netfold.torch.backend import NetfoldBackend

        return NetfoldBackend(group, part, device_api)
    from netfold.torch.legacy import NetfoldProcessGroup

    return NetfoldProcessGroup(group, store, part, device_api)


class Parent(NamedTuple):
    """An open group that a new one's members are in."""

    group: Group
    ranks: Sequence[int]  # of the members in it


def parent_of(options: Any) -> Parent | None:
    """torch's default group, where it is netfold's and has all members of the new group.

    options: torch's `_DistributedBackendOptions`.
    """
    default = distributed_c10d._world.default_pg
    operations = operations_of(default) if default is not None else None
    members = options.global_ranks_in_group
    if operations is None or not members or not set(members) <= set(operations.netfold.job_ranks):
        return None
    group = operations.netfold
    return Parent(group, [group.job_ranks.index(rank) for rank in members])


def open_group(
    part: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options | None,
    job_ranks: Sequence[int] = (),
    parent: Parent | None = None,
) -> Group:
    """Connect to the other ranks, within the group's timeout and NETFOLD_JOIN_TIMEOUT_S.

    As ranks of a parent, where there is one that works; else over the store.
    """
    _skip_netfold()

    def connect(meeting: Meeting) -> Group:
        return Group(
            meeting,
            rank,
            size,
            options=options,
            timeout_s=timeout_seconds(seconds_of(timeout)),
            join_timeout_s=min(timeout_seconds(seconds_of(timeout)), _join_timeout_s()),
            store_host=store_host(),
            job_ranks=job_ranks,
        )

    if parent is not None:
        # A parent fails on all of its ranks, so they all go on over the store.
        with contextlib.suppress(ParentLost):
            # Without torch's name of the group: it counts the calls of this rank, and ranks make different subgroups.
            return connect(parent.group.meeting(parent.ranks, "torch", store_host()))
    former_switch = None if parent is None else parent.group.options.switch
    try:
        return connect(StoreMeeting(TorchStore(part), rank, size, store_host(), former_switch))
    except dist.DistNetworkError as error:
        raise store_lost(f"rank {rank} of {size} of a new group", error) from None


def close_at_exit(operations: Any) -> Any:
    """Have the group closed when the process ends. Returns the argument."""
    _live.add(operations)
    return operations


def store_for_group(store: Store, members: Sequence[int]) -> Store:
    """Return a view of `store` whose keys no other group uses.

    The prefix holds the attempt: torchrun gives all attempts of a job one store, and a restarted worker must not read
    its predecessor's keys. The prefix holds the members, too: torch names groups by counting calls, and ranks that
    make subgroups count differently.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    return PrefixStore(f"netfold/{attempt}/{digest}", store)


def _backend(
    part: Store,
    rank: int,
    size: int,
    timeout: timedelta,
    options: Options | None,
    job_ranks: Sequence[int],
    *,
    parent: Parent | None = None,
    enable_reconfigure: bool = False,
    formed: Group | None = None,
) -> Any:
    """enable_reconfigure: as torch's; the backend is in no group until `reconfigure`, and nobody is waited for.

    formed: a group that is open already.
    """
    from netfold.torch.backend import NetfoldBackend, patch_shrink_group, patch_split_group
    from netfold.torch.forwarding import forward_work_methods

    forward_work_methods()
    patch_split_group()
    patch_shrink_group()
    join_timeout_s = min(timeout_seconds(seconds_of(timeout)), _join_timeout_s())
    generations: Generations | None
    if enable_reconfigure:
        _skip_netfold()
        generations = Generations.outside(options, join_timeout_s, store_host())
        group = outside_group(generations, rank, size, timeout_seconds(seconds_of(timeout)))
    else:
        group = formed or open_group(part, rank, size, timeout, options, job_ranks, parent)
        # A group that was formed already has an owner, which forms the next one.
        generations = None if formed is not None else Generations.of(group, join_timeout_s)

    def join(store: Store, ranks: Sequence[int], child_timeout: timedelta, parent: Group) -> NetfoldBackend:
        child_store = PrefixStore("netfold", store)
        members = [parent.job_ranks[each] for each in ranks] if parent.job_ranks else ()
        place = ranks.index(parent.rank)
        from_parent = Parent(parent, ranks)
        child: NetfoldBackend = _backend(
            child_store, place, len(ranks), child_timeout, options, members, parent=from_parent
        )
        return child

    backend = close_at_exit(
        NetfoldBackend(group, part, cuda_api(), join, generations, stays_after_abort=enable_reconfigure)
    )
    if _c10d.get_debug_level() == _c10d.DebugLevel.DETAIL:
        _kept_alive.append(backend)
    return backend


def _refuse_second_custom_backend(group: Any) -> None:
    """Raise ValueError if a group already has a backend that is not torch's own.

    torch keeps one backend of each type in a group, and all backends from outside of torch have one type. So the group
    would pass netfold's tensors to the other backend.
    """
    custom = dist.ProcessGroup.BackendType.CUSTOM
    for device in group._device_types if group is not None else ():
        name = group._get_backend(device).name()
        if dist.Backend.backend_type_map.get(name.lower(), custom) == custom:
            raise ValueError(
                f"{device.type}:{name} and netfold cannot share a process group: torch keeps only one backend there "
                "that is not its own. Make two groups"
            )


@functools.cache
def _skip_netfold() -> None:
    """Have torch.compile skip all functions of netfold's loaded torch modules. Idempotent; before the first group.

    Dynamo tries to compile every Python frame that runs inside compiled code, including frames that C++ calls: DDP's
    hooks reach netfold's methods that way. netfold's methods hold nothing to compile.
    """
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


def _devices(operations: Operations) -> list[torch.device]:
    device_api: DeviceApi | None = operations.devices.device_api if operations.devices is not None else None
    return [torch.device(kind) for kind in (("cpu",) if device_api is None else ("cpu", device_api.kind))]


def _close_in_thread(group: Group | Generations) -> None:
    """Close on a new thread: the garbage collector may run in a thread that holds any locks."""
    threading.Thread(target=group.close, name="netfold-close", daemon=True).start()


def _join_timeout_s() -> float:
    text = os.environ.get("NETFOLD_JOIN_TIMEOUT_S", "60")
    try:
        return timeout_seconds(float(text))
    except ValueError:
        raise ValueError(f"NETFOLD_JOIN_TIMEOUT_S={text!r} is not a number of seconds") from None


@atexit.register
def _close_all() -> None:
    # Without this, peers would take a process that ends without destroy_process_group for lost. The peers also get the
    # uncaught exception that ends this process: the interpreter keeps the exception in sys.last_value.
    error = getattr(sys, "last_value", None)
    for operations in list(_live):
        if error is not None:
            operations.netfold.abort(f"{type(error).__name__}: {error}")
        if operations.devices is not None:
            operations.devices.close("its process ends")
        (operations.generations or operations.netfold).close()
        if operations.devices is not None:
            operations.devices.join()
