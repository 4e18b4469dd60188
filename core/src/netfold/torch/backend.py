"""netfold's operations on torch 2.14 and newer: a subclass of torch's C++ class `Backend`.

torch makes the ProcessGroup and calls this class through trampolines (c10d/py/PyBackend.hpp in torch's wheel). So
torch's features work as with its own backends: hooks, the NaN check, the flight recorder, boxed groups, groups of
several backends, `split_group`, `TORCH_DISTRIBUTED_DEBUG=DETAIL`.

A returned Work reaches the caller inside a C++ holder: see `forwarding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from netfold.communicator import CollectiveTimeout, Group, GroupAborted, PeerLost
from netfold.communicator.reconfigure import Generations, in_order
from netfold.options import timeout_seconds
from netfold.torch import backend_rank, forwarding, global_ranks
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.operations import Operations, operations_of
from netfold.torch.work import CompletedWork


class NetfoldBackend(Operations, _c10d.Backend):
    """One group's backend on this rank."""

    def __init__(
        self,
        group: Group,
        part: Store,
        device_api: DeviceApi | None = None,
        join: Callable[[Store, Sequence[int], timedelta, Group], NetfoldBackend] | None = None,
        generations: Generations | None = None,
        *,
        stays_after_abort: bool = False,
    ) -> None:
        """Make the backend of an open group.

        part: a store whose keys no other group uses.
        device_api: the devices that the group serves beside the CPU.
        join: `join(store, ranks, timeout, group)` makes the backend of a subgroup of `ranks` of the group of now.
        generations: leaves the group and forms the next; None: there is no next. Owned by this object.
        stays_after_abort: whether `reconfigure` is possible after `abort`.
        """
        _c10d.Backend.__init__(self, group.rank, group.size)
        self.attach(group, part, device_api)
        self._part, self._device_api, self._join = part, device_api, join
        self.generations = generations
        self._stays_after_abort = stays_after_abort
        self._aborted = False  # by a call of `abort` on this rank

    @property
    def options(self) -> Any:
        """torch's options of this backend. `netfold.options` has netfold's."""
        options: Any = _c10d.Backend.Options("netfold", timedelta(seconds=self.netfold.timeout_s))
        options.global_ranks_in_group = list(self.netfold.job_ranks)
        return options

    # --- subgroups -------------------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        return self._join is not None

    def split(self, store: Store, ranks: list[int], opts: Any) -> NetfoldBackend:
        """Make the backend of the subgroup of `ranks`, of which this rank is one (see `split_group`).

        store: only this subgroup uses its keys.
        """
        assert self._join is not None
        timeout = opts._timeout if opts is not None else timedelta(seconds=self.netfold.timeout_s)
        return self._join(store, ranks, timeout, self.netfold)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: torch calls this on ranks outside of the new group, and only members take part."""

    # --- the next group over handles: communicator/reconfigure.py ----------------------------------------------------

    def get_reconfigure_handle(self) -> str:
        """This rank's handle. It stays the same until `shutdown`."""
        if self.generations is None:
            raise RuntimeError("this netfold group was not made by torch, and is not reconfigured")
        return self.generations.handle

    def reconfigure(self, opts: Any) -> CompletedWork:
        """Leave the group, and form the one of `opts.handles`; see `Communicator.reconfigure`.

        Returns when the group is formed.
        opts: torch's ReconfigureOptions. A list orders the ranks; a set is sorted. Hints: `Options.with_hints`.
        """
        if self.generations is None:
            raise RuntimeError("this netfold group was not made by torch, and is not reconfigured")
        timeout_s = forwarding.seconds_of(opts.timeout)
        former, group_timeout_s = self.netfold, self.netfold.timeout_s
        options = self.generations.options.with_hints(opts.hints)
        ranks = global_ranks.of_next(self, in_order(opts.handles))
        try:
            group = self.generations.reconfigure(
                str(opts.uuid), opts.handles, group_timeout_s, timeout_s, options, global_ranks.job_ranks(ranks)
            )
        finally:
            if self.generations.group is not former:
                self._end_group("the group was reconfigured")
        self.attach(group, PrefixStore(f"reconfigure/{group.name}", self._part), self._device_api)
        self._aborted = False
        backend_rank.set_rank(self, group.rank, group.size)
        global_ranks.publish(self, ranks)
        return CompletedWork([])

    def shrink(self, ranks_to_exclude: list[int], shrink_flags: int = 0, opts_override: Any = None) -> NetfoldBackend:
        """Form the group of all other ranks; see `Communicator.shrink`.

        This group ends, whatever the flags are. Returns the backend of the new one.
        """
        if self.generations is None:
            raise RuntimeError("this netfold group was not made by torch, and is not reconfigured")
        generations, timeout_s = self.generations, self.netfold.timeout_s
        if opts_override is not None:
            timeout_s = timeout_seconds(forwarding.seconds_of(opts_override._timeout))
        uuid, left = generations.survivors(ranks_to_exclude)
        ranks = global_ranks.job_ranks(global_ranks.of_next(self, left))
        group = generations.reconfigure(uuid, left, timeout_s, job_ranks=ranks)
        self.generations = None  # the new backend's from here on
        self._end_group("the group was shrunk")
        part = PrefixStore(f"shrink/{group.name}", self._part)
        return NetfoldBackend(
            group, part, self._device_api, self._join, generations, stays_after_abort=self._stays_after_abort
        )

    def abort(self) -> None:
        self._aborted = True
        if not self._stays_after_abort:
            super().abort()
            return
        self.netfold.abort("abort() was called")
        self._end_group("abort() was called")

    def shutdown(self) -> None:
        super().shutdown()
        if self.generations is not None:
            self.generations.close()

    def _end_group(self, why: str) -> None:
        """End the group of now, and all that serves it."""
        if self.devices is not None:
            self.devices.close(why, failed=True)
        Operations.shutdown(self)

    # --- properties that torch reads -------------------------------------------------------------------------------

    # An inherited property would recurse without end: torch reads each through Python (PyBackend::getPropertyOverride).

    @property
    def supports_coalescing(self) -> bool:
        """False: no netfold send or receive waits for another, so `batch_isend_irecv` need not merge them.

        Each has its own Work then, as over gloo. A coalescing manager works all the same.
        """
        return False

    @property
    def supports_shrinking(self) -> bool:
        return self.generations is not None

    @property
    def supports_reconfigure(self) -> bool:
        return self.generations is not None and backend_rank.is_possible()

    @property
    def supports_window(self) -> bool:
        return False

    @property
    def supports_abort_hooks(self) -> bool:
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def get_error(self) -> Any:
        """torch's ErrorType for what ended this group. SUCCESS also after this rank's own `abort`, as over gloo."""
        kinds, failure = _c10d.ErrorType, self.netfold.failure
        if self._aborted and isinstance(failure, GroupAborted):
            return kinds.SUCCESS
        known = {type(None): kinds.SUCCESS, CollectiveTimeout: kinds.TIMEOUT, PeerLost: kinds.REMOTE_ERROR}
        return known.get(type(failure), kinds.COMM_ERROR)

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """See `netfold.torch.monitored_barrier`."""
        timeout = opts.timeout if opts is not None and opts.timeout.days >= 0 else None  # negative: the group's
        self.run_monitored_barrier(timeout, wait_all_ranks)


@functools.cache
def patch_split_group() -> None:
    """Have `split_group` return NON_GROUP_MEMBER on ranks of netfold groups that are in no new group. Idempotent.

    torch calls the backend on such a rank, too. torch's trampoline ends the process if a Python backend returns None
    (PyBackend::initSlotAndCast). netfold needs no call on such a rank, so the patched function skips it.
    """
    module: Any = distributed_c10d  # the stubs of older torch lack the function
    original = module.split_group

    @functools.wraps(original)
    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **options: Any) -> Any:
        parent = parent_pg if parent_pg is not None else dist.group.WORLD
        if (
            split_ranks
            and isinstance(parent, dist.ProcessGroup)
            and operations_of(parent) is not None
            and not any(parent.rank() in ranks for ranks in split_ranks)
        ):
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(parent_pg, split_ranks, *args, **options)

    for module in (dist, distributed_c10d):
        module.split_group = split_group


@functools.cache
def patch_shrink_group() -> None:
    """Have `shrink_group` give the new group netfold's own backend type and devices, and its ranks. Idempotent.

    torch registers every shrunk backend of CPU tensors as gloo's, and DDP then reads it as a ProcessGroupGloo.
    """
    module: Any = distributed_c10d
    original = getattr(module, "shrink_group", None)
    if original is None:
        return

    @functools.wraps(original)
    def shrink_group(*args: Any, **options: Any) -> Any:
        shrunk = original(*args, **options)
        backend: Any = operations_of(shrunk)
        if backend is not None:
            custom = dist.ProcessGroup.BackendType.CUSTOM
            device_api = backend.devices.device_api if backend.devices is not None else None
            for kind in ("cpu",) if device_api is None else ("cpu", device_api.kind):
                shrunk._register_backend(torch.device(kind), custom, backend)
            shrunk._set_default_backend(custom)
            global_ranks.publish(backend, backend.netfold.job_ranks)
        return shrunk

    for module in (dist, distributed_c10d):
        module.shrink_group = shrink_group
