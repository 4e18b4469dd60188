"""netfold's operations on torch older than 2.14: a ProcessGroup written in Python.

Python cannot subclass Backend in these releases. This file holds all workarounds that a Python ProcessGroup needs.
Delete the file when netfold no longer supports torch 2.13.

- C++ and Python use former names of some operations.
- torch reads a group's devices from its backends, so the group registers a backend that refuses all calls (the anchor).
- `"cpu:netfold,cuda:nccl"`: torch keeps only the Python ProcessGroup and drops the backends of other devices. So the
  group makes these backends and forwards calls on their tensors (`_GroupWithSiblings`). torch does not pass the
  requested devices: they are read from the calling frame.
- `_c10d_functional.all_gather_into_tensor_out` calls an operator, not the group's method: the operator is overridden.
- torch's box of a Python Work keeps only the C++ half, whose wait() never returns
  (see `forwarding.NetfoldWorkBase.boxed`).
"""

# torch declares each operation with two overloads, of which only the one with `opts` reaches a backend.
# mypy: disable-error-code="override, misc, assignment"

from __future__ import annotations

import functools
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import AllgatherOptions, FakeProcessGroup, PrefixStore, Store
from torch.distributed import distributed_c10d

from netfold.communicator import Group
from netfold.torch import factory
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.forwarding import resolved_future
from netfold.torch.operations import Operations

Tensor = torch.Tensor


def create(options: Any, pg_options: Any) -> NetfoldProcessGroup:
    """See `factory.create`."""
    part = factory.store_for_group(options.store, options.global_ranks_in_group)
    _override_all_gather()
    group = factory.formed_group(options) or factory.open_group(
        part,
        options.group_rank,
        options.group_size,
        options.timeout,
        pg_options,
        factory.job_ranks_of(options),
        factory.parent_of(options),
    )
    try:
        siblings = _siblings(options, part)
    except BaseException:
        group.close()
        raise
    requested = _requested_backends()
    device_api = factory.cuda_api() if not requested or requested.get("cuda") == "netfold" else None
    process_group = (
        NetfoldProcessGroup(group, options.store, part, device_api)
        if siblings is None
        else _GroupWithSiblings(group, options.store, part, siblings, device_api)
    )
    factory.close_at_exit(process_group)
    return process_group


class NetfoldProcessGroup(Operations, dist.ProcessGroup):
    """One group on this rank."""

    def __init__(self, group: Group, store: Store, part: Store, device_api: DeviceApi | None = None) -> None:
        """Make the process group of an open group.

        store: torch's store.
        part: a store whose keys no other group uses.
        device_api: the devices that the group serves beside the CPU.
        """
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[call-arg]  # stubs lack this overload
        self.attach(group, part, device_api)
        self._store = store
        fake: Any = FakeProcessGroup  # the stubs do not know its options
        anchor_options = fake.Options()
        anchor_options.error_on_collective = True
        anchor = fake._create_internal(group.rank, group.size, anchor_options)
        for kind in ("cpu",) if device_api is None else ("cpu", device_api.kind):
            self._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.CUSTOM, anchor)

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self.netfold.rank

    def getSize(self) -> int:  # noqa: N802
        return self.netfold.size

    def get_group_store(self) -> Store:
        return self._store

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self.run_monitored_barrier(timeout, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_coalescing()

    # --- former names ----------------------------------------------------------------------------------------------

    _reduce_scatter_base = Operations.reduce_scatter_single
    reduce_scatter_tensor_coalesced = Operations.reduce_scatter_single_coalesced
    _allgather_base = Operations.all_gather_single
    allgather_into_tensor_coalesced = Operations.all_gather_single_coalesced
    alltoall_base = Operations.all_to_all_single


@functools.cache
def _override_all_gather() -> Any:
    """Override the operator. Idempotent. The registration lasts as long as the result, which the cache keeps."""
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this replaces a kernel
        for device in ("CPU", "CUDA"):
            library.impl("_allgather_base_", _all_gather_base, device)
    return library


def _all_gather_base(output: Any, input: Any, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    """The operator for all groups. For a group of another backend, call that backend."""
    process_group: Any = dist.ProcessGroup.unbox(group)
    opts = AllgatherOptions()
    opts.asyncOp = async_op
    if timeout >= 0:
        opts.timeout = timedelta(milliseconds=timeout)
    if isinstance(process_group, NetfoldProcessGroup):
        work: Any = process_group._allgather_base(output, input, opts)
    else:
        work = process_group._get_backend(output.device)._allgather_base(output, input, opts)
    # NCCL returns no Work for a synchronous call: the caller's stream waits already.
    return output, (_completed_work() if work is None else work).boxed()


def _completed_work() -> Any:
    untyped: Any = _c10d
    return untyped._create_work_from_future(resolved_future([]))


def _siblings(options: Any, store: Store) -> dist.ProcessGroup | None:
    """Make a group of the other requested backends; None if netfold is the only one."""
    devices = {device: name for device, name in _requested_backends().items() if name != "netfold"}
    if not devices:
        return None
    name = distributed_c10d.GroupName(f"{options.group_id}/beside netfold")
    group, _ = distributed_c10d._new_process_group_helper(
        options.group_size,
        options.group_rank,
        options.global_ranks_in_group,
        ",".join(f"{device}:{backend}" for device, backend in devices.items()),
        PrefixStore("beside", store),
        group_name=name,
        timeout=options.timeout,
        group_desc=name,
    )
    distributed_c10d._cleanup_process_group_global_state(group)  # keep torch from listing it as a user's group
    assert isinstance(group, dist.ProcessGroup)
    return group


def _requested_backends() -> dict[str, str]:
    """Device to backend, as the user wrote it, read from the frame of torch's caller: torch does not pass it on."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is distributed_c10d._new_process_group_helper.__code__:
            config = frame.f_locals.get("backend_config")
            return config.get_device_backend_map() if config is not None else {}
    return {}


class _GroupWithSiblings(NetfoldProcessGroup):
    """Uses the backends of `siblings` for tensors of their devices, and netfold for other tensors."""

    def __init__(
        self, group: Group, store: Store, part: Store, siblings: dist.ProcessGroup, device_api: DeviceApi | None
    ) -> None:
        super().__init__(group, store, part, device_api)
        self.siblings = siblings
        self._sibling_devices = {device.type for device in siblings._device_types}
        for device in siblings._device_types:
            backend = siblings._get_backend(device)
            kind = dist.Backend.backend_type_map.get(backend.name().lower(), dist.ProcessGroup.BackendType.CUSTOM)
            # A group has one backend of each type, and netfold's anchor has CUSTOM.
            if kind == dist.ProcessGroup.BackendType.CUSTOM:
                kind = dist.ProcessGroup.BackendType.UNDEFINED
            self._register_backend(device, kind, backend)

    def barrier(self, opts: Any = None) -> Any:
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._sibling_devices:
            return self.siblings.barrier(opts)
        return super().barrier(opts)

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self.siblings.set_timeout(timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self.siblings.shutdown()

    def abort(self) -> None:
        self.netfold.abort("abort() was called")
        self.siblings.abort()
        self.shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type in self._sibling_devices:
            self.siblings._start_coalescing(device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type in self._sibling_devices:
            return self.siblings._end_coalescing(device)
        return super()._end_coalescing(device)


def _by_device(name: str) -> Any:
    def call(self: _GroupWithSiblings, *arguments: Any, **options: Any) -> Any:
        tensor = _first_tensor((*arguments, *options.values()))
        if tensor is None or tensor.device.type not in self._sibling_devices:
            return getattr(super(_GroupWithSiblings, self), name)(*arguments, **options)
        return getattr(self.siblings, name)(*arguments, **options)

    call.__name__ = name
    return call


def _first_tensor(values: Any) -> torch.Tensor | None:
    for value in values:
        tensor = value if isinstance(value, torch.Tensor) else None
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
        if tensor is not None:
            return tensor
    return None


for _name in (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather",
    "allgather_coalesced", "all_gather_single", "_allgather_base", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "alltoall_base",
    "send", "recv", "recv_anysource",
):  # fmt: skip
    setattr(_GroupWithSiblings, _name, _by_device(_name))
