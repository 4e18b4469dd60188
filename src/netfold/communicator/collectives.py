"""The collectives of a group, on arrays of any kind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from netfold.communicator.arrays import Array, ArrayView, array_view, empty_like, transfer_type
from netfold.communicator.group import ANY_SOURCE, REDUCE_OPS, Group, Region, region
from netfold.communicator.minloc import LOC_OPS, pack, unpack
from netfold.communicator.work import ReceiveWork, Work

# op -> what the native floor calls it, for the short way.
_SHORT = {op: (code, False) for op, code in REDUCE_OPS.items() if op not in LOC_OPS}
_SHORT["avg"] = (REDUCE_OPS["sum"], True)


class Collectives:
    """Every rank makes the same calls in the same order, with the same sizes and dtypes.

    Arrays are C-contiguous and in host memory: NumPy's, or anything with DLPack or the buffer protocol (JAX, torch,
    array.array), which is read and written where it lies. An immutable array can be an input but takes no result: that
    is refused. Elements: floats of 16 to 64 bits, bf16, integers of 8 to 64 bits, bool, complex. `op` is sum, avg
    (floats and complex), product, min, max, band, bor or bxor (integers); a bool knows all but sums (max is any, min is
    all), a complex number sum and avg. Floats keep NaN and Inf.

    Every operation takes `timeout_s`, its deadline (default: the group's), and `asynchronous`: True returns at once,
    with a `Work` whose `wait` gives what the blocking call would have. A flag, as torch's `async_op`, and not a second
    set of methods: there is one signature an operation, only a word changes in a call, and results are typed Any in
    either case since they are the caller's own arrays.

    Raises ValueError and TypeError for a call that can never be right; PeerLost, SwitchLost, Mismatch,
    CollectiveTimeout when others fail. After one of the latter the group has ended: make a new one.
    """

    group: Group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(
        self,
        buffer: Any,
        out: Any = None,
        *,
        op: str = "sum",
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """The elementwise reduction over all ranks, in `buffer`, or in `out` where one is given; that array.

        buffer, out: any shape, as many elements. In-network and direct reductions fold in rank order. Cost:
        `Group.why`; with `out`, one copy more. Plain numbers reduced in place go a short way: about 1 us of Python.
        """
        if out is None and not asynchronous:
            short = _SHORT.get(op)
            if short is not None and self.group.all_reduce_here(buffer, *short, timeout_s):
                return buffer
        result, lent = _in_place("all_reduce", buffer, out)
        return self._run("all_reduce", lent, [], [lent.region], result, op, 0, timeout_s, asynchronous)

    def all_reduce_loc(self, values: Any, indices: Any, *, op: str, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Replace `values` by the least (op="min_loc") or greatest ("max_loc") of all ranks, element by element, and
        `indices` by the index that came with it; both arrays. For an argmin over ranks, or over what each rank holds.

        values: floats, integers or bools; indices: integers that fit int64, of the same shape; both NumPy arrays (a
        copy is made in any case: a pair travels as 16 bytes). Among equal values the lowest index wins, -0 equals +0; a
        NaN comes before every number, as in numpy.argmin and argmax, and among NaNs the lowest index wins.
        """
        if op not in LOC_OPS:
            raise ValueError(f"all_reduce_loc: no operator {op!r}; there are {', '.join(LOC_OPS)}")
        for name, array in (("values", values), ("indices", indices)):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"all_reduce_loc: {name} must be a NumPy array, not {type(array).__name__}")
            if not array.flags.writeable:
                raise ValueError(f"all_reduce_loc: {name} are read-only and cannot take the result; pass a copy")
        pairs, dtype = pack(values, indices)
        operation = self.group.submit(
            "all_reduce", dtype=dtype, reduce=op, outputs=[region(pairs)], timeout_s=timeout_s, wait_here=True
        )
        self.group.wait(operation)
        unpack(pairs, values, indices)
        return values, indices

    def reduce(
        self,
        buffer: Any,
        root: int = 0,
        *,
        out: Any = None,
        op: str = "sum",
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As all_reduce, on the root alone; the others' buffers stay as they are, and None is returned there."""
        if self.rank == root:
            result, lent = _in_place("reduce", buffer, out)
        else:
            result, lent = None, array_view(buffer, writable=False)
        return self._run("reduce", lent, [], [lent.region], result, op, root, timeout_s, asynchronous)

    def broadcast(
        self, buffer: Any, root: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Replace `buffer` on every rank by the root's; that array."""
        lent = array_view(buffer, writable=self.rank != root)
        return self._run("broadcast", lent, [], [lent.region], buffer, None, root, timeout_s, asynchronous)

    def all_gather(
        self, buffer: Any, into: Any = None, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Every rank's buffer on every rank; `into`.

        into: a list, into[r] for rank r's buffer, whose sizes may differ; or one array of size times as many elements,
        in rank order; or None: a new NumPy array of the shape [size, *buffer's].
        """
        lent = array_view(buffer, writable=False)
        if into is None:
            into = empty_like(lent, buffer, (self.size, *lent.shape))
        outputs, held = self._pieces("all_gather", into, lent, None, writable=True)
        return self._run("all_gather", lent, [lent.region], outputs, into, None, 0, timeout_s, asynchronous, held)

    def gather(
        self,
        buffer: Any,
        into: Any = None,
        root: int = 0,
        *,
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As all_gather, on the root alone; elsewhere `into` is not looked at and None is returned."""
        lent = array_view(buffer, writable=False)
        outputs: list[Region] = []
        held: list[ArrayView] = []
        if self.rank != root:
            into = None
        else:
            if into is None:
                into = empty_like(lent, buffer, (self.size, *lent.shape))
            outputs, held = self._pieces("gather", into, lent, None, writable=True)
        return self._run("gather", lent, [lent.region], outputs, into, None, root, timeout_s, asynchronous, held)

    def scatter(
        self, buffers: Any, into: Any, root: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Fill `into` from the root's buffers[this rank]; `into`.

        buffers: on the root a list, whose sizes may differ, or one array cut into equal parts; elsewhere not looked at.
        """
        lent = array_view(into, writable=True)
        inputs: list[Region] = []
        held: list[ArrayView] = []
        if self.rank == root:
            inputs, held = self._pieces("scatter", buffers, lent, None, writable=False)
        return self._run("scatter", lent, inputs, [lent.region], into, None, root, timeout_s, asynchronous, held)

    def reduce_scatter(
        self,
        buffers: Any,
        into: Any = None,
        *,
        op: str = "sum",
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """Fill `into` with the reduction of every rank's buffers[this rank]; `into`.

        buffers: a list, one array a rank, or one array cut into equal parts. into: an array of that part's size; None:
        a new NumPy array, shaped as buffers[this rank], or [rows / size, ...] of one array.
        """
        if into is None:
            into = self._part_like("reduce_scatter", buffers)
        lent = array_view(into, writable=True)
        inputs, held = self._pieces("reduce_scatter", buffers, lent, None, writable=False)
        return self._run("reduce_scatter", lent, inputs, [lent.region], into, op, 0, timeout_s, asynchronous, held)

    def all_to_all(
        self,
        buffers: Any,
        into: Any,
        *,
        send_rows: Sequence[int] | None = None,
        receive_rows: Sequence[int] | None = None,
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """Send buffers[r] to rank r and fill into[r] from it; `into`.

        Each of the two is a list, one array a rank, or one array that is cut along its first axis: into equal parts, or
        into send_rows[r] (receive_rows[r]) rows for (from) rank r.
        """
        if isinstance(buffers, list | tuple):
            lent = (
                array_view(buffers[0], writable=False) if buffers else array_view(np.empty(0, np.uint8), writable=False)
            )
        else:
            lent = array_view(buffers, writable=False)
        inputs, held = self._pieces("all_to_all", buffers, lent, send_rows, writable=False)
        outputs, more = self._pieces("all_to_all", into, lent, receive_rows, writable=True)
        return self._run("all_to_all", lent, inputs, outputs, into, None, 0, timeout_s, asynchronous, [*held, *more])

    def barrier(self, *, timeout_s: float | None = None, asynchronous: bool = False) -> Any:
        """Return when every rank has called."""
        operation = self.group.submit("barrier", timeout_s=timeout_s, wait_here=not asynchronous)
        return Work(self.group, operation, None, None) if asynchronous else self.group.wait(operation)

    def send(
        self, buffer: Any, to: int, tag: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Send `buffer` to rank `to`, whose `receive` names the same tag, size and dtype.

        Done when the buffer may be reused: at once for up to 128 KB while the receiver has room (1 MB a sender), else
        when the receiver has asked for it. Messages to one rank with one tag arrive in the order of sending;
        collectives are neither waited for nor held up. Cost: 1 way (eager) or 3 (rendezvous).
        """
        lent = array_view(buffer, writable=False)
        operation = self._transfer("send", lent, to, tag, timeout_s, asynchronous, inputs=[lent.region])
        if asynchronous:
            return Work(self.group, operation, lent, None)
        self.group.wait(operation)
        return None

    def receive(
        self,
        buffer: Any,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """Fill `buffer` with what rank `source`, or any rank, sent with this tag; the rank that sent it.

        A message of another size or dtype is a Mismatch here, and ends the group; the sender hears of it.
        """
        lent = array_view(buffer, writable=True)
        root = ANY_SOURCE if source is None else source
        operation = self._transfer("receive", lent, root, tag, timeout_s, asynchronous, outputs=[lent.region])
        if asynchronous:
            return ReceiveWork(self.group, operation, lent, None)
        self.group.wait(operation)
        return int(operation.peer)

    def _transfer(
        self,
        kind: str,
        lent: ArrayView,
        root: int,
        tag: int,
        timeout_s: float | None,
        asynchronous: bool,
        *,
        inputs: Sequence[Region] = (),
        outputs: Sequence[Region] = (),
    ) -> Any:
        return self.group.submit(
            kind,
            dtype=transfer_type(kind, lent.dtype, None)[0],
            root=root,
            tag=tag,
            inputs=inputs,
            outputs=outputs,
            timeout_s=timeout_s,
            wait_here=not asynchronous,
        )

    def _run(
        self,
        kind: str,
        lent: ArrayView,
        inputs: Sequence[Region],
        outputs: Sequence[Region],
        result: Any,
        op: str | None,
        root: int,
        timeout_s: float | None,
        asynchronous: bool,
        held: Sequence[ArrayView] = (),
    ) -> Any:
        dtype, reduce, average = transfer_type(kind, lent.dtype, op)
        operation = self.group.submit(
            kind,
            dtype=dtype,
            reduce=reduce,
            average=average,
            root=root,
            inputs=inputs,
            outputs=outputs,
            timeout_s=timeout_s,
            wait_here=not asynchronous,
        )
        if asynchronous:
            return Work(self.group, operation, (lent, held), result)
        self.group.wait(operation)
        return result

    def _pieces(
        self, kind: str, arrays: Any, lent: ArrayView, rows: Sequence[int] | None, *, writable: bool
    ) -> tuple[list[Region], list[ArrayView]]:
        """A part a rank: of a list, each its array; of one array, cut along its first axis."""
        if isinstance(arrays, list | tuple):
            if rows is not None:
                raise ValueError(f"{kind}: a list of arrays needs no rows: they are what they are")
            held = [array_view(array, writable=writable) for array in arrays]
            regions = [piece.region for piece in held]
        else:
            held = [array_view(arrays, writable=writable)]
            regions = held[0].rows(self._rows(kind, held[0], rows))
        for piece in held:
            if piece.dtype != lent.dtype:
                raise TypeError(f"{kind}: every array must be {lent.dtype}, like the others, not {piece.dtype}")
        return regions, held

    def _rows(self, kind: str, lent: ArrayView, rows: Sequence[int] | None) -> Sequence[int]:
        there = lent.shape[0] if lent.shape else 1
        if rows is None:
            if there % self.size:
                raise ValueError(f"{kind}: {there} rows cannot be cut into equal parts for {self.size} ranks")
            return [there // self.size] * self.size
        if len(rows) != self.size or sum(rows) != there or min(rows) < 0:
            raise ValueError(f"{kind}: rows {list(rows)} must be {self.size} numbers whose sum is the array's {there}")
        return rows

    def _part_like(self, kind: str, buffers: Any) -> Array:
        if isinstance(buffers, list | tuple):
            if len(buffers) != self.size:
                raise ValueError(f"{kind}: needs {self.size} arrays, one a rank, not {len(buffers)}")
            mine = array_view(buffers[self.rank], writable=False)
            return empty_like(mine, buffers[self.rank], mine.shape)
        whole = array_view(buffers, writable=False)
        return empty_like(whole, buffers, (self._rows(kind, whole, None)[0], *whole.shape[1:]))


def _in_place(kind: str, buffer: Any, out: Any) -> tuple[Any, ArrayView]:
    """The array that is reduced in place: the buffer, or `out` with the buffer's values in it."""
    if out is None:
        return buffer, array_view(buffer, writable=True)
    source, target = array_view(buffer, writable=False), array_view(out, writable=True)
    if source.dtype != target.dtype or source.region[1] != target.region[1]:
        raise ValueError(
            f"{kind}: the buffer has {source.elements} elements of {source.dtype}, "
            f"out {target.elements} of {target.dtype}"
        )
    ctypes.memmove(target.region[0], source.region[0], source.region[1])
    return out, target
