"""The carrier of netfold's operations on torch 2.14 and newer: a subclass of torch's C++ class `Backend`.

torch makes the ProcessGroup itself and calls this class through trampolines (c10d/py/PyBackend.hpp in torch's wheel).
So everything that torch does around a backend works as for its own ones: hooks, the NaN check, the flight recorder,
boxed groups, groups of several backends, `split_group`, `TORCH_DISTRIBUTED_DEBUG=DETAIL`.

A Work that a method returns reaches the caller inside a C++ holder: `forwarding` tells what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as _c10d
from torch._C._distributed_c10d import Store

from netfold.communicator import Group
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.operations import Operations


class NetfoldBackend(Operations, _c10d.Backend):
    """One group's backend on this rank."""

    def __init__(
        self,
        group: Group,
        part: Store,
        layer: DeviceApi | None = None,
        join: Callable[[Store, Sequence[int], timedelta], NetfoldBackend] | None = None,
    ) -> None:
        """`part`: a store with keys that no other group uses. `layer`: the devices that the group serves beside the
        CPU. `join(store, ranks, timeout)` makes the backend of the part of this group that `ranks` are."""
        _c10d.Backend.__init__(self, group.rank, group.size)
        self.attach(group, part, layer)
        self._join = join

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "netfold"

    @property
    def options(self) -> Any:
        """torch's own options of this backend. `netfold.options` has ours."""
        made: Any = _c10d.Backend.Options("netfold", timedelta(seconds=self.netfold.timeout_s))
        made.global_ranks_in_group = list(self.netfold.job_ranks)
        return made

    # --- parts of this group ---------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        return self._join is not None

    def split(self, store: Store, ranks: list[int], opts: Any) -> NetfoldBackend:
        """The backend of the ranks `ranks` of this group. `store`: for this part alone, with keys of its own.

        This rank is one of them (see `split_group`).
        """
        assert self._join is not None
        timeout = opts._timeout if opts is not None else timedelta(seconds=self.netfold.timeout_s)
        return self._join(store, ranks, timeout)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """torch calls this on the ranks that stay outside of a new group. Only members take part here."""

    # --- what torch asks about -------------------------------------------------------------------------------------

    # torch reads these through Python. An inherited one would call itself without end (PyBackend::getPropertyOverride).

    @property
    def supports_coalescing(self) -> bool:
        """False: `batch_isend_irecv` need not merge sends and receives, since none waits for another here. Each has a
        Work of its own then, as over gloo. A coalescing manager works all the same."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        return False

    @property
    def supports_reconfigure(self) -> bool:
        return False

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
        kind = self.netfold.failure_kind
        kinds = _c10d.ErrorType
        return {None: kinds.SUCCESS, "timeout": kinds.TIMEOUT, "peer_lost": kinds.REMOTE_ERROR}.get(
            kind, kinds.COMM_ERROR
        )

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """See `netfold.torch.monitored_barrier`."""
        timeout = opts.timeout if opts is not None and opts.timeout.days >= 0 else None  # negative: none is named
        self.run_monitored_barrier(timeout, wait_all_ranks)

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number()

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers begin at 0 on every rank: there is nothing to agree on."""
