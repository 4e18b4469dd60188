"""The ProcessGroup: torch's collectives on CPU tensors, mapped to calls of a `Group`.

It is a Python ProcessGroup, so that one native build serves every torch version; torch calls it from Python and,
through trampolines, from C++ (DDP, functional collectives). Both the present and the former names of operations are
defined.
"""

# torch declares each operation with two overloads, of which only the one with `opts` reaches a backend.
# mypy: disable-error-code="override"

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, PrefixStore, Store

from netfold.communicator import Group, Options
from netfold.torch.buckets import SharedBuckets
from netfold.torch.store import TorchStore
from netfold.torch.transfers import Transfers
from netfold.torch.work import NetfoldWork

Tensor = torch.Tensor

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}
_REDUCE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}

_live: weakref.WeakSet[ProcessGroupNetfold] = weakref.WeakSet()


def create(options: Any, pg_options: Any) -> ProcessGroupNetfold:
    """What torch calls for `init_process_group("netfold")` and `new_group(backend="netfold")`."""
    if pg_options is not None and not isinstance(pg_options, Options):
        raise TypeError(f"pg_options must be netfold.Options, not {type(pg_options).__name__}")
    # torchrun gives all attempts of a job one store: a restarted worker must not meet its predecessor's keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = TorchStore(PrefixStore(f"netfold/{attempt}", options.store))
    group = Group(
        store,
        options.group_rank,
        options.group_size,
        options=pg_options,
        timeout_s=options.timeout.total_seconds(),
        join_timeout_s=min(options.timeout.total_seconds(), _join_timeout_s()),
        store_host=_store_host(),
    )
    process_group = ProcessGroupNetfold(group, options.store)
    _live.add(process_group)
    return process_group


def _join_timeout_s() -> float:
    text = os.environ.get("NETFOLD_JOIN_TIMEOUT_S", "60")
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"NETFOLD_JOIN_TIMEOUT_S={text!r} is not a number of seconds") from None


def _store_host() -> str | None:
    return os.environ.get("MASTER_ADDR") or None


class ProcessGroupNetfold(dist.ProcessGroup):
    """`netfold` is its `netfold.communicator.Group`."""

    def __init__(self, group: Group, store: Store) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the stubs lack this overload
        self.netfold = group
        self._store = store
        self._buckets = SharedBuckets(enabled=group.shares_buckets)
        self._transfers = Transfers(group, _DTYPES)
        # torch reads a group's devices off its backends; this one trips on whatever reaches it past this class.
        fake: Any = FakeProcessGroup  # the stubs do not know its options
        anchor_options = fake.Options()
        anchor_options.error_on_collective = True
        anchor = fake._create_internal(group.rank, group.size, anchor_options)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, anchor)

    # --- what torch asks about -------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "netfold"

    def getRank(self) -> int:  # noqa: N802
        return self.netfold.rank

    def getSize(self) -> int:  # noqa: N802
        return self.netfold.size

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self.netfold.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self.netfold.close()
        self._buckets.close()

    def abort(self) -> None:
        self.netfold.abort("abort() was called")
        self.shutdown()

    # --- reductions ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> NetfoldWork:
        if len(tensors) == 1:
            self._buckets.consider(tensors[0])
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> NetfoldWork:
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: list[Tensor], opts: Any) -> NetfoldWork:
        opts = opts if opts is not None else dist.AllreduceOptions()
        return self._together([self._reduction("all_reduce", tensor, opts) for tensor in tensors], tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> NetfoldWork:
        (tensor,) = tensors
        return self._together([self._reduction("reduce", tensor, opts, root=opts.rootRank)], tensors, opts)

    def _reduction(self, kind: str, tensor: Tensor, opts: Any, root: int = 0) -> _Prepared:
        reduce, average = _reduce_op(opts.reduceOp)
        real = _real(tensor, reduce)
        staged = real.contiguous()
        finish = None
        if staged.data_ptr() != real.data_ptr() and (kind == "all_reduce" or root == self.netfold.rank):
            finish = lambda: real.copy_(staged)
        return _Prepared(
            kind,
            dtype=_dtype(staged, reduce),
            reduce=reduce,
            average=average,
            root=root,
            outputs=[staged],
            finish=finish,
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> NetfoldWork:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        calls = [self._reduce_scatter(output, parts, opts) for output, parts in zip(outputs, inputs, strict=True)]
        return self._together(calls, outputs, opts)

    def _reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], opts: Any) -> _Prepared:
        reduce, average = _reduce_op(opts.reduceOp)
        real = _real(output, reduce)
        own = parts[self.netfold.rank]
        if own.numel() != output.numel():
            raise ValueError(
                f"reduce_scatter: this rank's input has {own.numel()} elements, its output {output.numel()}"
            )
        staged_output = real.contiguous()
        finish = (lambda: real.copy_(staged_output)) if staged_output.data_ptr() != real.data_ptr() else None
        staged = [_real(part, reduce).contiguous() for part in parts]
        for part in parts:
            if part.dtype != output.dtype:
                raise ValueError(f"reduce_scatter: inputs are {part.dtype}, the output {output.dtype}")
        return _Prepared(
            "reduce_scatter",
            dtype=_dtype(staged_output, reduce),
            reduce=reduce,
            average=average,
            inputs=staged,
            outputs=[staged_output],
            finish=finish,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> NetfoldWork:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        return self._together([self._reduce_scatter(output, self._split(input, output), opts)], [output], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> NetfoldWork:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> NetfoldWork:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        calls = [
            self._reduce_scatter(output, self._split(input, output), opts)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return self._together(calls, outputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> NetfoldWork:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    # --- copies ----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> NetfoldWork:
        calls = [self._copies("broadcast", [], [tensor], root=opts.rootRank) for tensor in tensors]
        return self._together(calls, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> NetfoldWork:
        calls = [self._copies("all_gather", [mine], parts) for parts, mine in zip(outputs, inputs, strict=True)]
        return self._together(calls, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> NetfoldWork:
        # torch lists outputs by rank, then by tensor.
        calls = [
            self._copies("all_gather", [mine], [outputs[rank][index] for rank in range(self.netfold.size)])
            for index, mine in enumerate(inputs)
        ]
        return self._together(calls, outputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> NetfoldWork:
        return self._together([self._all_gather_into(output, input)], [output], opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> NetfoldWork:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> NetfoldWork:
        calls = [self._all_gather_into(output, input) for output, input in zip(outputs, inputs, strict=True)]
        return self._together(calls, outputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> NetfoldWork:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _all_gather_into(self, output: Tensor, input: Tensor) -> _Prepared:
        return self._copies("all_gather", [input], self._split(output, input))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> NetfoldWork:
        (mine,) = inputs
        parts = outputs[0] if outputs else []
        if opts.rootRank == self.netfold.rank and len(parts) != self.netfold.size:
            raise ValueError(f"gather: the root needs {self.netfold.size} output tensors, not {len(parts)}")
        return self._together([self._copies("gather", [mine], parts, root=opts.rootRank)], outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> NetfoldWork:
        (mine,) = outputs
        parts = inputs[0] if inputs else []
        if opts.rootRank == self.netfold.rank:
            if len(parts) != self.netfold.size:
                raise ValueError(f"scatter: the root needs {self.netfold.size} input tensors, not {len(parts)}")
            if any(part.numel() != mine.numel() or part.dtype != mine.dtype for part in parts):
                raise ValueError("scatter: every input tensor must have the output's size and dtype")
        return self._together([self._copies("scatter", parts, [mine], root=opts.rootRank)], outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> NetfoldWork:
        return self._together([self._copies("all_to_all", inputs, outputs)], outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> NetfoldWork:
        if not output.is_contiguous() or not input.is_contiguous():
            raise ValueError("all_to_all_single: tensors must be contiguous")
        to, into = self._by_splits(input, input_splits), self._by_splits(output, output_splits)
        return self._together([self._copies("all_to_all", to, into)], [output], opts)

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> NetfoldWork:
        return self.all_to_all_single(output, input, output_splits, input_splits, opts)

    def barrier(self, opts: Any = None) -> NetfoldWork:
        return self._together([_Prepared("barrier")], [], opts)

    # --- point to point --------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> NetfoldWork:
        return self._transfers.send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> NetfoldWork:
        return self._transfers.receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> NetfoldWork:
        return self._transfers.receive(tensors, None, tag)

    def _by_splits(self, tensor: Tensor, splits: list[int]) -> list[Tensor]:
        size = self.netfold.size
        if not splits:
            if tensor.size(0) % size:
                raise ValueError(f"all_to_all_single: {tensor.size(0)} rows do not divide by {size} ranks")
            splits = [tensor.size(0) // size] * size
        if len(splits) != size or sum(splits) != tensor.size(0):
            raise ValueError(f"all_to_all_single: splits {splits} do not cover {tensor.size(0)} rows on {size} ranks")
        return list(torch.split(tensor, splits))

    def _split(self, whole: Tensor, part: Tensor) -> list[Tensor]:
        """`whole` as one flat piece a rank, each of `part`'s size."""
        if whole.numel() != part.numel() * self.netfold.size or whole.dtype != part.dtype:
            raise ValueError(
                f"a tensor of {whole.numel()} {whole.dtype} is not {self.netfold.size} times one of {part.numel()} "
                f"{part.dtype}"
            )
        if not whole.is_contiguous():
            raise ValueError("the tensor that holds every rank's part must be contiguous")
        flat = whole.view(-1)
        return [flat.narrow(0, rank * part.numel(), part.numel()) for rank in range(self.netfold.size)]

    def _copies(self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], root: int = 0) -> _Prepared:
        """A call that moves bytes as they are, whatever they mean."""
        for tensor in (*inputs, *outputs):
            _check(tensor)
        staged = [tensor.contiguous() for tensor in outputs]
        moved = [
            (tensor, copy) for tensor, copy in zip(outputs, staged, strict=True) if copy.data_ptr() != tensor.data_ptr()
        ]

        def finish() -> None:
            for tensor, copy in moved:
                tensor.copy_(copy)

        return _Prepared(
            kind,
            root=root,
            inputs=[tensor.contiguous() for tensor in inputs],
            outputs=staged,
            finish=finish if moved else None,
        )

    # --- submission ------------------------------------------------------------------------------------------------

    def _together(self, calls: list[_Prepared], result: Any, opts: Any) -> NetfoldWork:
        asynchronous = bool(getattr(opts, "asyncOp", True))
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        operations = []
        for call in calls:
            operations.append(call.submit(self.netfold, seconds, wait_here=not asynchronous and len(calls) == 1))
        finishes = [call.finish for call in calls if call.finish is not None]

        def finish() -> None:
            for each in finishes:
                each()

        return NetfoldWork(self.netfold, operations, result, keep=(calls, result), finish=finish if finishes else None)


class _Prepared:
    """A call whose tensors are contiguous CPU memory."""

    def __init__(
        self,
        kind: str,
        *,
        dtype: str = "u8",
        reduce: str = "sum",
        average: bool = False,
        root: int = 0,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        finish: Callable[[], Any] | None = None,
    ) -> None:
        self.kind = kind
        self.dtype = dtype
        self.reduce = reduce
        self.average = average
        self.root = root
        self.inputs = inputs
        self.outputs = outputs
        self.finish = finish

    def submit(self, group: Group, timeout_s: float | None, *, wait_here: bool) -> Any:
        return group.submit(
            self.kind,
            dtype=self.dtype,
            reduce=self.reduce,
            average=self.average,
            root=self.root,
            inputs=[(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in self.inputs],
            outputs=[(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in self.outputs],
            timeout_s=timeout_s,
            wait_here=wait_here,
        )


def _check(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"netfold takes CPU tensors, this one is on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"netfold takes dense tensors, this one is {tensor.layout}")


def _real(tensor: Tensor, reduce: str) -> Tensor:
    """Complex numbers add by their parts."""
    _check(tensor)
    if not tensor.is_complex():
        return tensor
    if reduce != "sum":
        raise ValueError(f"{reduce} is not defined for {tensor.dtype}")
    return torch.view_as_real(tensor)


def _dtype(tensor: Tensor, reduce: str) -> str:
    if tensor.dtype == torch.bool:
        # Bytes of 0 and 1: each of these keeps them so, as torch means it.
        if reduce in ("product", "min", "max", "band", "bor", "bxor"):
            return "u8"
        raise ValueError("a sum of bool tensors is not defined; use MAX for any, MIN for all, or an integer tensor")
    name = _DTYPES.get(tensor.dtype)
    if name is None:
        raise ValueError(
            f"netfold cannot reduce {tensor.dtype}; it can {', '.join(map(str, _DTYPES))}, bool and complex"
        )
    return name


def _reduce_op(op: Any) -> tuple[str, bool]:
    kind = op.op if hasattr(op, "op") else op
    name = _REDUCE_OPS.get(kind)
    if name is None:
        raise ValueError(f"netfold does not reduce by {op}")
    return name, kind == dist.ReduceOp.AVG


@atexit.register
def _leave_all() -> None:
    # A process that ends without destroy_process_group still says goodbye, so that nobody takes it for dead; and of
    # what it ends, since the interpreter keeps the exception that nobody caught.
    error = getattr(sys, "last_value", None)
    for process_group in list(_live):
        if error is not None:
            process_group.netfold.abort(f"{type(error).__name__}: {error}")
        process_group.netfold.close()
