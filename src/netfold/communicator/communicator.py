"""Collectives for NumPy arrays, in place, blocking."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from netfold.communicator.group import ANY_SOURCE, REDUCE_OPS, Group, Region, region
from netfold.communicator.options import Options
from netfold.communicator.store import Store

Array: TypeAlias = "np.ndarray[Any, Any]"

_DTYPES = {
    "float32": "f32",
    "float64": "f64",
    "float16": "f16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
}


class Communicator:
    """A rank's end of a group, for C-contiguous arrays. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
    ) -> None:
        self.group = Group(store, rank, size, options=options, timeout_s=timeout_s, join_timeout_s=join_timeout_s)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, buffer: Array, *, op: str = "sum", timeout_s: float | None = None) -> None:
        """Replace `buffer` on every rank with the elementwise reduction over all ranks.

        buffer: C-contiguous; any NumPy float or integer dtype of 8 to 64 bits. op: sum, avg, product, min, max, band,
        bor, bxor. Floats keep NaN and Inf. In-network and direct reductions fold in rank order.
        Cost: see `Group.why`. Raises ValueError, PeerLost, SwitchLost, Mismatch, CollectiveTimeout.
        """
        self._run("all_reduce", buffer, op=op, outputs=[_region(buffer)], timeout_s=timeout_s)

    def reduce(self, buffer: Array, root: int = 0, *, op: str = "sum", timeout_s: float | None = None) -> None:
        """As all_reduce, on the root alone; the others' buffers stay as they are."""
        self._run("reduce", buffer, op=op, root=root, outputs=[_region(buffer)], timeout_s=timeout_s)

    def broadcast(self, buffer: Array, root: int = 0, *, timeout_s: float | None = None) -> None:
        """Replace `buffer` on every rank with the root's."""
        self._run("broadcast", buffer, root=root, outputs=[_region(buffer)], timeout_s=timeout_s)

    def all_gather(self, buffer: Array, into: Sequence[Array], *, timeout_s: float | None = None) -> None:
        """Fill into[r] with rank r's buffer; sizes may differ between ranks, into[r] has rank r's."""
        self._run("all_gather", buffer, inputs=[_region(buffer)], outputs=_regions(into), timeout_s=timeout_s)

    def reduce_scatter(
        self, buffers: Sequence[Array], into: Array, *, op: str = "sum", timeout_s: float | None = None
    ) -> None:
        """Fill `into` with the reduction of every rank's buffers[this rank]."""
        if any(buffer.dtype != into.dtype for buffer in buffers):
            raise TypeError(f"reduce_scatter: every buffer must be {into.dtype}, like the result")
        self._run(
            "reduce_scatter",
            into,
            op=op,
            inputs=_regions(buffers),
            outputs=[_region(into)],
            timeout_s=timeout_s,
        )

    def all_to_all(self, buffers: Sequence[Array], into: Sequence[Array], *, timeout_s: float | None = None) -> None:
        """Send buffers[r] to rank r and fill into[r] from it."""
        like = into[0] if into else np.empty(0, np.uint8)
        self._run("all_to_all", like, inputs=_regions(buffers), outputs=_regions(into), timeout_s=timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called."""
        self.group.wait(self.group.submit("barrier", timeout_s=timeout_s, wait_here=True))

    def send(self, buffer: Array, to: int, tag: int = 0, *, timeout_s: float | None = None) -> None:
        """Send `buffer` to rank `to`, whose `receive` names the same tag, size and dtype.

        buffer: C-contiguous; its bytes travel as they are. Returns when the buffer may be reused: at once for up to
        128 KB while the receiver has room (1 MB a sender), else when the receiver has asked for it. Messages to one
        rank with one tag arrive in the order of sending; collectives are neither waited for nor held up.
        Cost: 1 way (eager) or 3 (rendezvous). Raises ValueError, PeerLost, Mismatch, CollectiveTimeout.
        """
        self._transfer("send", buffer, to, tag, timeout_s, inputs=[_region(buffer)])

    def receive(self, buffer: Array, source: int | None = None, tag: int = 0, *, timeout_s: float | None = None) -> int:
        """Fill `buffer` with what rank `source`, or any rank, sent with this tag; the rank that sent it.

        A message of another size or dtype is a Mismatch here, and ends the group; the sender hears of it.
        """
        root = ANY_SOURCE if source is None else source
        return self._transfer("receive", buffer, root, tag, timeout_s, outputs=[_region(buffer)])

    def close(self) -> None:
        self.group.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.group.abort(f"{type(error).__name__}: {error}")  # the others hear what it was
        self.close()

    def _transfer(
        self,
        kind: str,
        buffer: Array,
        root: int,
        tag: int,
        timeout_s: float | None,
        *,
        inputs: Sequence[Region] = (),
        outputs: Sequence[Region] = (),
    ) -> int:
        operation = self.group.submit(
            kind,
            dtype=_DTYPES.get(buffer.dtype.name, "u8"),
            root=root,
            tag=tag,
            inputs=inputs,
            outputs=outputs,
            timeout_s=timeout_s,
            wait_here=True,
        )
        self.group.wait(operation)
        return int(operation.peer)

    def _run(
        self,
        kind: str,
        like: Array,
        *,
        op: str = "sum",
        root: int = 0,
        inputs: Sequence[Region] = (),
        outputs: Sequence[Region] = (),
        timeout_s: float | None,
    ) -> None:
        dtype = _DTYPES.get(like.dtype.name)
        if dtype is None:
            raise TypeError(f"{kind}: arrays of {like.dtype} cannot travel; there are {', '.join(_DTYPES)}")
        reduce = "sum" if op == "avg" else op
        if reduce not in REDUCE_OPS:
            raise ValueError(f"{kind}: no operator {op!r}; there are avg, {', '.join(REDUCE_OPS)}")
        operation = self.group.submit(
            kind,
            dtype=dtype,
            reduce=reduce,
            average=op == "avg",
            root=root,
            inputs=inputs,
            outputs=outputs,
            timeout_s=timeout_s,
            wait_here=True,
        )
        self.group.wait(operation)


def _region(array: Array) -> Region:
    if not array.flags.c_contiguous:
        raise ValueError("the array must be C-contiguous; pass numpy.ascontiguousarray(array)")
    return region(array)


def _regions(arrays: Sequence[Array]) -> list[Region]:
    return [_region(array) for array in arrays]
