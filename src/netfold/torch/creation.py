"""What torch calls to make a group, and what ends the groups that nobody ended.

`"cpu:netfold,cuda:nccl"`: torch keeps a Python ProcessGroup alone and forgets the backends of other devices. So the
group makes those itself, and hands calls on their tensors on (`_WithSiblings`).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from netfold.communicator import Group, Options
from netfold.torch.compiled import prepare_for_torch
from netfold.torch.device.cuda import cuda_layer
from netfold.torch.device.layer import DeviceLayer
from netfold.torch.meeting import store_host
from netfold.torch.process_group import ProcessGroupNetfold
from netfold.torch.store import TorchStore

_live: weakref.WeakSet[ProcessGroupNetfold] = weakref.WeakSet()


def create(options: Any, pg_options: Any) -> ProcessGroupNetfold:
    """What torch calls for `init_process_group("netfold")` and `new_group(backend="netfold")`."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise TypeError(f"pg_options must be netfold.Options, not {type(pg_options).__name__}")
    store = _part_of_our_own(options)
    job_ranks = options.global_ranks_in_group or range(options.group_size)  # torch lists none of the default group's
    group = _meet(store, options.group_rank, options.group_size, options.timeout, pg_options, job_ranks)
    try:
        others = _siblings(options, store)
    except BaseException:
        group.close()
        raise
    asked = _asked_for()
    layer = cuda_layer() if not asked or asked.get("cuda") == "netfold" else None
    if others is None:
        return _known(ProcessGroupNetfold(group, options.store, store, layer))
    return _known(_WithSiblings(group, options.store, store, others, layer))


def standalone(store: Store, rank: int, size: int, timeout: timedelta, options: Options | None) -> ProcessGroupNetfold:
    """See `netfold.torch.new_process_group`."""
    part = PrefixStore("netfold", store)
    group = _meet(part, rank, size, timeout, options)
    made = _known(ProcessGroupNetfold(group, store, part, cuda_layer()))
    # torch does not know of this one, so nobody but its user says when it ends; torchft forgets it without a word.
    weakref.finalize(made, _close_apart, group).atexit = False
    return made


def _close_apart(group: Group) -> None:
    """On a thread of its own: objects are collected in any thread, whatever locks it holds."""
    threading.Thread(target=group.close, name="netfold closes", daemon=True).start()


def _meet(
    store: Store, rank: int, size: int, timeout: timedelta, options: Options | None, job_ranks: Sequence[int] = ()
) -> Group:
    prepare_for_torch(ProcessGroupNetfold, _WithSiblings)
    return Group(
        TorchStore(store),
        rank,
        size,
        options=options,
        timeout_s=timeout.total_seconds(),
        join_timeout_s=min(timeout.total_seconds(), _join_timeout_s()),
        store_host=store_host(),
        job_ranks=job_ranks,
    )


def _known(process_group: ProcessGroupNetfold) -> ProcessGroupNetfold:
    _live.add(process_group)
    return process_group


def _part_of_our_own(options: Any) -> Store:
    """Where no other group finds its keys.

    torchrun gives all attempts of a job one store: a restarted worker must not meet its predecessor's keys. And torch
    names groups by counting calls, which ranks that make groups of a group do differently: the members tell them apart.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    members = hashlib.sha256(repr(options.global_ranks_in_group).encode()).hexdigest()[:16]
    return PrefixStore(f"netfold/{attempt}/{members}", options.store)


def _join_timeout_s() -> float:
    text = os.environ.get("NETFOLD_JOIN_TIMEOUT_S", "60")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"NETFOLD_JOIN_TIMEOUT_S={text!r} is not a number of seconds") from None


def _siblings(options: Any, store: Store) -> dist.ProcessGroup | None:
    """A group of the backends that were asked for beside netfold, None where it is alone."""
    devices = {device: name for device, name in _asked_for().items() if name != "netfold"}
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
    distributed_c10d._cleanup_process_group_global_state(group)  # it is ours, and no group of the user's
    assert isinstance(group, dist.ProcessGroup)
    return group


def _asked_for() -> dict[str, str]:
    """Device to backend, as the user wrote it. torch does not pass that on: it is read off the frame that calls us."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is distributed_c10d._new_process_group_helper.__code__:
            config = frame.f_locals.get("backend_config")
            return config.get_device_backend_map() if config is not None else {}
    return {}


class _WithSiblings(ProcessGroupNetfold):
    """The backends of `others` for tensors of their devices; netfold for the rest."""

    def __init__(
        self, group: Group, store: Store, part: Store, others: dist.ProcessGroup, layer: DeviceLayer | None
    ) -> None:
        super().__init__(group, store, part, layer)
        self.others = others
        self._theirs = {device.type for device in others._device_types}
        for device in others._device_types:
            backend = others._get_backend(device)
            kind = dist.Backend.backend_type_map.get(backend.name().lower(), dist.ProcessGroup.BackendType.CUSTOM)
            # One backend a type: ours has CUSTOM.
            if kind == dist.ProcessGroup.BackendType.CUSTOM:
                kind = dist.ProcessGroup.BackendType.UNDEFINED
            self._register_backend(device, kind, backend)

    def barrier(self, opts: Any = None) -> Any:
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._theirs:
            return self.others.barrier(opts)
        return super().barrier(opts)

    def set_timeout(self, timeout: Any) -> None:
        super().set_timeout(timeout)
        self.others.set_timeout(timeout)

    def shutdown(self) -> None:
        super().shutdown()
        self.others.shutdown()

    def abort(self) -> None:
        self.netfold.abort("abort() was called")
        self.others.abort()
        self.shutdown()

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type in self._theirs:
            self.others._start_coalescing(device)
        else:
            super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type in self._theirs:
            return self.others._end_coalescing(device)
        return super()._end_coalescing(device)


def _by_device(name: str) -> Any:
    def call(self: _WithSiblings, *arguments: Any, **options: Any) -> Any:
        tensor = _first_tensor((*arguments, *options.values()))
        if tensor is None or tensor.device.type not in self._theirs:
            return getattr(super(_WithSiblings, self), name)(*arguments, **options)
        return getattr(self.others, name)(*arguments, **options)

    call.__name__ = name
    return call


def _first_tensor(values: Any) -> torch.Tensor | None:
    for value in values:
        found = value if isinstance(value, torch.Tensor) else None
        if isinstance(value, (list, tuple)):
            found = _first_tensor(value)
        if found is not None:
            return found
    return None


for _name in (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather",
    "allgather_coalesced", "all_gather_single", "_allgather_base", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "alltoall_base",
    "send", "recv", "recv_anysource",
):  # fmt: skip
    setattr(_WithSiblings, _name, _by_device(_name))


@atexit.register
def _leave_all() -> None:
    # A process that ends without destroy_process_group still says goodbye, so that nobody takes it for dead; and of
    # what it ends, since the interpreter keeps the exception that nobody caught.
    error = getattr(sys, "last_value", None)
    for process_group in list(_live):
        if error is not None:
            process_group.netfold.abort(f"{type(error).__name__}: {error}")
        if process_group.devices is not None:
            process_group.devices.close("its process ends")
        process_group.netfold.close()
        if process_group.devices is not None:
            process_group.devices.join()
