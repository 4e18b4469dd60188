"""torch's operations as calls of a `Group`. Operations on device memory go to the group's device driver.

`Operations` is a mixin with torch's names for the operations. Two classes inherit it: `backend.NetfoldBackend` on torch
2.14 and newer, `legacy.NetfoldProcessGroup` on older torch. Both are Python classes, so one native build serves every
torch version. torch calls the methods from Python and, through trampolines, from C++ (DDP, functional collectives).
"""

# torch declares each operation with two overloads, of which only the one with `opts` reaches a backend.
# mypy: disable-error-code="override"

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, Store

from netfold._native import engine
from netfold.communicator import Group
from netfold.communicator.group import ANY_SOURCE, KINDS, Region
from netfold.communicator.reconfigure import Generations
from netfold.communicator.refusals import noted
from netfold.options import timeout_seconds
from netfold.torch import calls, forwarding, monitored_barriers, sparse
from netfold.torch.buckets import RegisteredBuckets, SharedBuckets
from netfold.torch.calls import Prepared, copy_call
from netfold.torch.device.device_api import DeviceApi
from netfold.torch.device.driver import DeviceDriver
from netfold.torch.device.work import CoalescedWork, DeviceWork
from netfold.torch.memory import is_plain
from netfold.torch.transfers import Transfers
from netfold.torch.work import CompletedWork, NetfoldWork
from netfold.torch.work import Work as HostWork

Tensor = torch.Tensor
Work = HostWork | DeviceWork | CoalescedWork
AnyWork = TypeVar("AnyWork", bound=Work)

_ALL_REDUCE = KINDS["all_reduce"]
_noted = noted("netfold")
_profiling = torch._C._autograd._profiler_enabled
_profiled = torch._C._profiler._RecordFunctionFast  # this variant takes tensors, so the profiler shows their shapes

# Errors name the user's calling line, not torch's.
engine.hide_from_call_sites(os.path.dirname(torch.__file__) + os.sep)


class Operations:
    """The operations of one group on this rank; `netfold` is its `netfold.communicator.Group`."""

    # Leaves the group and forms the next; None where there is no next.
    generations: Generations | None = None

    def attach(self, group: Group, part: Store, device_api: DeviceApi | None = None) -> None:
        """Take over an open group. The inheriting class calls this once, from its constructor.

        part: a store whose keys no other group uses.
        device_api: the devices whose tensors the group takes beside CPU tensors; None for CPU tensors alone.
        """
        self.netfold = group
        self._buckets: SharedBuckets | RegisteredBuckets
        if group.over_fabric and not group.shares_buckets:
            self._buckets = RegisteredBuckets(group.lease)
        else:
            self._buckets = SharedBuckets(enabled=group.shares_buckets, ranks=group.size)
        self.devices = DeviceDriver(group, device_api) if device_api is not None else None
        self._transfers = Transfers(group, device_api)
        self._coalesced = _Coalesced()
        self._barriers = monitored_barriers.MonitoredBarriers(part, group.rank, group.size)

    # --- timeout and end of the group ------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations that have none of their own."""
        self.netfold.timeout_s = timeout_seconds(forwarding.seconds_of(timeout))

    def shutdown(self) -> None:
        if self.devices is not None:
            self.devices.close("the group was closed")
        self.netfold.close()
        self._transfers.close()
        if self.devices is not None:
            self.devices.join()
        self._buckets.close()

    def abort(self) -> None:
        self.netfold.abort("abort() was called")
        if self.devices is not None:
            self.devices.close("abort() was called", failed=True)
        self.shutdown()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "netfold"

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives that this rank has submitted."""
        return self.netfold.collectives_submitted

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers begin at 0 on every rank."""

    # --- reductions ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        if opts is None or not hasattr(opts, "asyncOp"):
            tensors, opts = calls.as_list(tensors), calls.with_op(AllreduceOptions(), opts)
        if len(tensors) == 1:
            plain = self._plain_all_reduce(tensors[0], opts)
            if plain is not None and not opts.asyncOp:
                self._in_turn()
                self.netfold.run_in_place(_ALL_REDUCE, *plain, _region(tensors[0]), tensors[0], calls.timeout_of(opts))
                return CompletedWork(tensors)
            if tensors[0].is_sparse:
                return sparse.all_reduce(self, tensors[0], opts)
            if not self._on_device(tensors):
                self._buckets.consider(tensors[0])
            if plain is not None:
                self._in_turn()
                operation = self.netfold.start_in_place(
                    _ALL_REDUCE, *plain, _region(tensors[0]), tensors[0], calls.timeout_of(opts), wait_here=False
                )
                return self._plain_work(operation, tensors)
        return self._all_reduce(tensors, opts)

    @_noted
    def _all_reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        prepared = calls.all_reduces(tensors, opts.reduceOp, merges=self._merges([tensors]))
        return self._together(prepared, tensors, opts)

    def _plain_all_reduce(self, tensor: Tensor, opts: Any) -> tuple[int, int, bool] | None:
        """The native codes (dtype, reduction, average) of a call that needs no preparation, else None.

        Preparation costs more time than a small operation.
        """
        dtype = calls.DTYPE_CODES.get(tensor.dtype)
        reduce = calls.REDUCE_CODES.get(hash(opts.reduceOp))
        if (
            dtype is None
            or reduce is None
            or not tensor.is_cpu
            or (self.devices is not None and self.devices.device_api.holds(tensor))
            or tensor.layout is not torch.strided
            or not is_plain(tensor)
            or not tensor.data_ptr()
            or self._coalesced.works is not None
            or _profiling()
        ):
            return None
        return dtype, *reduce

    def _plain_work(self, operation: Any, tensors: list[Tensor]) -> Work:
        """Make the Work of an in-place operation, which may be complete already."""
        if operation.done and operation.failure is None:
            return CompletedWork(tensors)
        return NetfoldWork(self.netfold, [operation], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        return self.allreduce(tensors, opts)

    def allreduce_sparse(self, tensors: list[Tensor], opts: Any = None) -> Work | None:
        return self.allreduce(tensors, opts)

    @_noted
    def reduce(self, tensors: list[Tensor], opts: Any) -> Work | None:
        (tensor,) = tensors
        is_root = opts.rootRank == self.netfold.rank
        call = calls.reduction_call("reduce", tensor, opts.reduceOp, root=opts.rootRank, result_here=is_root)
        return self._together([call], tensors, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work | None:
        return self._reduce_scatter(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_noted
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work | None:
        pairs = zip(outputs, inputs, strict=True)
        return self._reduce_scatter(
            outputs, [calls.by_rank(whole, part, self.netfold.size) for part, whole in pairs], opts
        )

    @_noted
    def _reduce_scatter(self, outputs: list[Tensor], parts: Sequence[Sequence[Tensor]], opts: Any) -> Work | None:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        for each in parts:
            self._one_a_rank("reduce_scatter", "input", each)
        merges = self._merges([outputs, *parts])
        prepared = calls.reduce_scatters(outputs, parts, opts.reduceOp, self.netfold.rank, merges=merges)
        return self._together(prepared, outputs, opts)

    # --- copies ----------------------------------------------------------------------------------------------------

    @_noted
    def broadcast(self, tensors: list[Tensor], opts: Any = 0) -> Work | None:
        if isinstance(opts, int):  # one of torch's overloads
            tensors, opts = calls.as_list(tensors), calls.with_root(dist.BroadcastOptions(), opts)
        prepared = [copy_call("broadcast", [], [tensor], root=opts.rootRank) for tensor in tensors]
        return self._together(prepared, tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work | None:
        if isinstance(inputs, torch.Tensor):  # one of torch's overloads
            outputs, inputs = [outputs], [inputs]
        return self._all_gather(outputs, inputs, outputs, opts)

    @_noted
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work | None:
        # torch lists outputs by rank, then by tensor.
        self._one_a_rank("all_gather_coalesced", "output", outputs)
        by_tensor = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self._all_gather(by_tensor, inputs, outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work | None:
        return self.all_gather_single_coalesced([output], [input], opts)

    @_noted
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work | None:
        pairs = zip(outputs, inputs, strict=True)
        by_tensor = [calls.by_rank(whole, part, self.netfold.size) for whole, part in pairs]
        return self._all_gather(by_tensor, inputs, outputs, opts)

    @_noted
    def _all_gather(
        self, parts: Sequence[Sequence[Tensor]], inputs: list[Tensor], result: Any, opts: Any
    ) -> Work | None:
        """parts: for each input, one output a rank. The outputs may differ in size."""
        for each in parts:
            self._one_a_rank("all_gather", "output", each)
        prepared = calls.all_gathers(parts, inputs, self.netfold.rank, merges=self._merges([inputs, *parts]))
        return self._together(prepared, result, opts)

    @_noted
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work | None:
        (own,) = inputs
        parts = outputs[0] if outputs else []
        if opts.rootRank == self.netfold.rank:
            self._one_a_rank("gather", "output", parts)
        return self._together([copy_call("gather", [own], parts, root=opts.rootRank)], outputs, opts)

    @_noted
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work | None:
        (own,) = outputs
        parts = inputs[0] if inputs else []
        if opts.rootRank == self.netfold.rank:
            self._one_a_rank("scatter", "input", parts)
            if any(part.numel() != own.numel() or part.dtype != own.dtype for part in parts):
                raise ValueError("scatter: every input tensor must have the output's size and dtype")
        return self._together([copy_call("scatter", parts, [own], root=opts.rootRank)], outputs, opts)

    @_noted
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work | None:
        self._one_a_rank("all_to_all", "input", inputs)
        self._one_a_rank("all_to_all", "output", outputs)
        return self._together([copy_call("all_to_all", inputs, outputs)], outputs, opts)

    @_noted
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work | None:
        if not output.is_contiguous() or not input.is_contiguous():
            raise ValueError("all_to_all_single: tensors must be contiguous")
        to = calls.by_splits(input, input_splits, self.netfold.size)
        into = calls.by_splits(output, output_splits, self.netfold.size)
        return self._together([copy_call("all_to_all", to, into)], [output], opts)

    # --- barriers --------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Work | None:
        return self._together([Prepared("barrier")], [], opts)

    def run_monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `netfold.torch.monitored_barrier`."""
        seconds = self.netfold.timeout_s if timeout is None else timeout.total_seconds()
        self._barriers.wait_all(seconds, wait_all_ranks)

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work | None:
        return self._handed_out(self._transfers.transfer("send", tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work | None:
        return self._handed_out(self._transfers.transfer("receive", tensors, source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work | None:
        return self._handed_out(self._transfers.transfer("receive", tensors, ANY_SOURCE, tag))

    # --- submission ------------------------------------------------------------------------------------------------

    def _one_a_rank(self, kind: str, which: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.netfold.size:
            raise ValueError(f"{kind}: {len(tensors)} {which} tensors on {self.netfold.size} ranks")

    def _together(self, prepared: list[Prepared], result: Any, opts: Any) -> Work | None:
        """Submit calls that are one operation to torch. Returns its Work; for None see `_handed_out`."""
        if _profiling() and prepared:
            first = prepared[0]
            with _profiled(f"netfold:{first.kind}", [*first.inputs, *first.outputs]):
                return self._submit(prepared, result, opts)
        return self._submit(prepared, result, opts)

    def _submit(self, prepared: list[Prepared], result: Any, opts: Any) -> Work | None:
        if any(self._on_device(call.outputs) or self._on_device(call.inputs) for call in prepared):
            assert self.devices is not None
            for call in prepared:
                calls.copy_overlapped(call)
            return self._handed_out(self.devices.submit(prepared, result, calls.timeout_of(opts)), opts)
        self._in_turn()
        wait_here = not getattr(opts, "asyncOp", True) and len(prepared) == 1 and self._coalesced.works is None
        seconds = calls.timeout_of(opts)
        operations = [call.submit(self.netfold, seconds, wait_here=wait_here) for call in prepared]
        finishes = [call.finish for call in prepared if call.finish is not None]

        def finish() -> None:
            for each in finishes:
                each()

        work = NetfoldWork(self.netfold, operations, result, finish=finish if finishes else None)
        return self._handed_out(work, opts)

    def _merges(self, tensors: Sequence[Sequence[Tensor]]) -> bool:
        """Whether small calls among these may share an operation: there are several, of tensors in the CPU's memory."""
        return len(tensors[0]) > 1 and not any(self._on_device(each) for each in tensors)

    def _on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any tensor is in device memory. ValueError for a device that this group does not serve."""
        if self.devices is not None:
            return any(self.devices.device_api.holds(tensor) for tensor in tensors)
        for tensor in tensors:
            if not tensor.is_cpu:
                raise ValueError(
                    f"this group takes CPU tensors, and one is on {tensor.device}; init_process_group('netfold') or "
                    "'cuda:netfold' makes a group for CUDA devices, if torch finds one"
                )
        return False

    def _in_turn(self) -> None:
        """Wait until earlier calls on device memory are submitted, so that all ranks match calls in one order."""
        if self.devices is not None:
            self.devices.wait_until_idle()

    def _handed_out(self, work: AnyWork, opts: Any = None) -> AnyWork | None:
        """Return the Work for the caller; None for a synchronous call inside a coalescing manager, which waits itself.

        C++ callers always call asynchronously and use the Work.
        """
        if self._coalesced.works is None:
            return work
        self._coalesced.works.append(work)
        return work if getattr(opts, "asyncOp", False) else None

    def average(self, tensor: Tensor, residual: Tensor | None = None) -> torch.futures.Future[Tensor]:
        """Average over all ranks, in place, for DDP's hooks.

        residual: as long as the tensor, for groups with i8 as wire dtype. It is added to this rank's input and then
        replaced by the rounding error of that input.
        """
        call = calls.reduction_call("all_reduce", tensor, dist.ReduceOp.AVG)
        if residual is not None:
            call.inputs = [residual]
        work = self._together([call], tensor, None)
        assert work is not None, "in a backward pass no coalescing manager is open"
        return work.get_future()

    def wait_for(self, call: Prepared, opts: Any) -> None:
        """Run a call that is one step of an operation, within the operation's timeout."""
        self._in_turn()
        self.netfold.wait(call.submit(self.netfold, calls.timeout_of(opts), wait_here=True))

    # --- the coalescing manager ------------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        """Collect the Works of this thread's next operations until `end_coalescing`."""
        if self._coalesced.works is not None:
            raise RuntimeError("a coalescing manager is already open in this thread for this group")
        self._coalesced.works = []

    def end_coalescing(self) -> CoalescedWork:
        """Return one Work for all operations since `start_coalescing`."""
        works, self._coalesced.works = self._coalesced.works, None
        if works is None:
            raise RuntimeError("no coalescing manager is open in this thread for this group")
        return CoalescedWork(works)


def _region(tensor: Tensor) -> Region:
    return tensor.data_ptr(), tensor.nbytes


class _Coalesced(threading.local):
    """The Works of the coalescing manager that is open in this thread; None if none is open."""

    works: list[Work] | None = None


def operations_of(group: dist.ProcessGroup) -> Operations | None:
    """Return the netfold operations of a torch group; None if netfold serves no device of the group."""
    untyped: Any = group
    if isinstance(untyped, Operations):  # torch before 2.14
        return untyped
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # set by TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, Operations):
            return backend
    return None
