"""The collectives of a group, on arrays of any kind."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from netfold.communicator.arrays import Array, ArrayView, array_view, empty_like, reduction
from netfold.communicator.group import ANY_SOURCE, REDUCE_OPS, Group, Region, region
from netfold.communicator.minloc import LOC_OPS, pack, unpack
from netfold.communicator.refusals import noted
from netfold.communicator.work import ReceiveWork, Work

# By op: native code and whether to average, for calls that `Group.all_reduce_here` can do.
_PLAIN = {op: (code, False) for op, code in REDUCE_OPS.items() if op not in LOC_OPS}
_PLAIN["avg"] = (REDUCE_OPS["sum"], True)

_noted = noted("group")


class Collectives:
    """Every rank makes the same calls in the same order, with the same sizes and dtypes.

    Arrays are C-contiguous and in host memory: NumPy's, or any with DLPack or the buffer protocol (JAX, torch,
    array.array). They are read and written in place. An immutable array can be an input, and is refused for a result.
    Elements: floats of 16 to 64 bits, bf16, integers of 8 to 64 bits, bool, complex. Floats keep NaN and Inf.

    op: sum, avg, product, min, max, band, bor or bxor (integers). For bool: product, min (all), max (any), band, bor,
    bxor. For complex: sum and avg. An average of floats overflows in no type; one of integers is their sum, which may
    wrap, divided toward zero.
    timeout_s: the operation's deadline; default: the group's.
    asynchronous: True returns at once, with a `Work` whose `wait` returns the blocking call's result. This is a flag,
    as torch's `async_op`, and not a second set of methods. Results are typed Any, since they are the caller's arrays.

    Raises ValueError and TypeError for a call that can never be right. The group goes on where all ranks refuse alike;
    ranks that wait in the call fail after a second, with this rank's reason. Raises PeerLost, SwitchLost, Mismatch or
    CollectiveTimeout when other ranks fail; the group has then ended, and a new one is needed.
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
        """Reduce elementwise over all ranks, into `buffer`, or into `out` where one is given; returns that array.

        buffer, out: any shape, as many elements.
        In-network and direct algorithms reduce in rank order.
        Cost: `Group.why`; with `out`, one copy more. Plain numbers in place cost about 1 us of Python.
        """
        if out is None and not asynchronous:
            plain = _PLAIN.get(op)
            if plain is not None and self.group.all_reduce_here(buffer, *plain, timeout_s):
                return buffer
        return self._all_reduce(buffer, out, op, timeout_s, asynchronous)

    @_noted
    def _all_reduce(self, buffer: Any, out: Any, op: str, timeout_s: float | None, asynchronous: bool) -> Any:
        result, view = _in_place("all_reduce", buffer, out)
        return self._run("all_reduce", view, [], [view.region], result, op, 0, timeout_s, asynchronous)

    @_noted
    def all_reduce_loc(self, values: Any, indices: Any, *, op: str, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Reduce `values` elementwise to the least (min_loc) or greatest (max_loc) of all ranks, with its index.

        `indices` becomes the index that came with each value: an argmin over ranks, or over all ranks' elements.
        Returns both arrays.

        values: a NumPy array of floats, integers or bools. indices: one of integers that fit int64, of the same shape.
        Both are copied: a pair travels as 16 bytes.
        Among equal values the lowest index wins; -0 equals +0. As in numpy.argmin and argmax, a NaN wins over every
        number; among NaNs the lowest index wins.
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
            "all_reduce",
            dtype=dtype,
            reduce=op,
            outputs=[region(pairs)],
            owner=pairs,
            timeout_s=timeout_s,
            wait_here=True,
        )
        self.group.wait(operation)
        unpack(pairs, values, indices)
        return values, indices

    @_noted
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
        """As all_reduce, on the root alone. Other ranks' buffers do not change, and these ranks return None."""
        if self.rank == root:
            result, view = _in_place("reduce", buffer, out)
        else:
            result, view = None, array_view(buffer, writable=False)
        return self._run("reduce", view, [], [view.region], result, op, root, timeout_s, asynchronous)

    @_noted
    def broadcast(
        self, buffer: Any, root: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Replace `buffer` on every rank by the root's; returns that array."""
        view = array_view(buffer, writable=self.rank != root)
        return self._run("broadcast", view, [], [view.region], buffer, None, root, timeout_s, asynchronous)

    @_noted
    def all_gather(
        self, buffer: Any, into: Any = None, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Gather every rank's buffer on every rank; returns `into`.

        into: a list, into[r] for rank r's buffer, of any sizes; or one array for all buffers in rank order; or None
        for a new NumPy array of the shape [size, *buffer's].
        """
        view = array_view(buffer, writable=False)
        if into is None:
            into = empty_like(view, buffer, (self.size, *view.shape))
        outputs, views = self._parts("all_gather", into, view, None, writable=True)
        return self._run("all_gather", view, [view.region], outputs, into, None, 0, timeout_s, asynchronous, views)

    @_noted
    def gather(
        self,
        buffer: Any,
        into: Any = None,
        root: int = 0,
        *,
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As all_gather, on the root alone. Other ranks ignore `into` and return None."""
        view = array_view(buffer, writable=False)
        outputs: list[Region] = []
        views: list[ArrayView] = []
        if self.rank != root:
            into = None
        else:
            if into is None:
                into = empty_like(view, buffer, (self.size, *view.shape))
            outputs, views = self._parts("gather", into, view, None, writable=True)
        return self._run("gather", view, [view.region], outputs, into, None, root, timeout_s, asynchronous, views)

    @_noted
    def scatter(
        self, buffers: Any, into: Any, root: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Fill `into` from the root's buffers[this rank]; returns `into`.

        buffers: on the root a list of arrays of any sizes, or one array that is cut into equal parts; else ignored.
        """
        view = array_view(into, writable=True)
        inputs: list[Region] = []
        views: list[ArrayView] = []
        if self.rank == root:
            inputs, views = self._parts("scatter", buffers, view, None, writable=False)
        return self._run("scatter", view, inputs, [view.region], into, None, root, timeout_s, asynchronous, views)

    @_noted
    def reduce_scatter(
        self,
        buffers: Any,
        into: Any = None,
        *,
        op: str = "sum",
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """Fill `into` with the reduction of every rank's buffers[this rank]; returns `into`.

        buffers: a list, one array a rank, or one array that is cut into equal parts.
        into: an array of that part's size; or None for a new NumPy array, shaped as buffers[this rank], or
        [rows / size, ...] of one array.
        """
        if into is None:
            into = self._part_like("reduce_scatter", buffers)
        view = array_view(into, writable=True)
        inputs, views = self._parts("reduce_scatter", buffers, view, None, writable=False)
        return self._run("reduce_scatter", view, inputs, [view.region], into, op, 0, timeout_s, asynchronous, views)

    @_noted
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
        """Send buffers[r] to rank r and fill into[r] from rank r; returns `into`.

        buffers, into: a list, one array a rank, or one array that is cut along its first axis.
        send_rows, receive_rows: how many rows are for (from) each rank; equal parts where None.
        """
        first = (buffers[0] if buffers else np.empty(0, np.uint8)) if isinstance(buffers, list | tuple) else buffers
        view = array_view(first, writable=False)
        inputs, views = self._parts("all_to_all", buffers, view, send_rows, writable=False)
        outputs, more = self._parts("all_to_all", into, view, receive_rows, writable=True)
        return self._run("all_to_all", view, inputs, outputs, into, None, 0, timeout_s, asynchronous, [*views, *more])

    def barrier(self, *, timeout_s: float | None = None, asynchronous: bool = False) -> Any:
        """Return when every rank has called."""
        operation = self.group.submit("barrier", timeout_s=timeout_s, wait_here=not asynchronous)
        return Work(self.group, operation, None) if asynchronous else self.group.wait(operation)

    def send(
        self, buffer: Any, to: int, tag: int = 0, *, timeout_s: float | None = None, asynchronous: bool = False
    ) -> Any:
        """Send `buffer` to rank `to`, whose `receive` names the same tag, size and dtype.

        Done when the buffer may be reused. This is at once (eager) for up to 128 KB while the receiver has space (1 MB
        a sender), else once the receiver has asked for the message (rendezvous). Messages to one rank with one tag
        arrive in the order of sending. Messages and collectives do not wait for each other.
        Cost: 1 one-way delay (eager) or 3 (rendezvous).
        """
        view = array_view(buffer, writable=False)
        return self._run("send", view, [view.region], [], None, None, to, timeout_s, asynchronous, tag=tag)

    def receive(
        self,
        buffer: Any,
        source: int | None = None,
        tag: int = 0,
        *,
        timeout_s: float | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """Fill `buffer` with a message of rank `source`, or of any rank, with this tag; returns the sender's rank.

        A message of another size or dtype raises Mismatch here and ends the group, and the sender gets the reason.
        """
        view = array_view(buffer, writable=True)
        root = ANY_SOURCE if source is None else source
        return self._run("receive", view, [], [view.region], None, None, root, timeout_s, asynchronous, tag=tag)

    def _run(
        self,
        kind: str,
        view: ArrayView,
        inputs: Sequence[Region],
        outputs: Sequence[Region],
        result: Any,
        op: str | None,
        root: int,
        timeout_s: float | None,
        asynchronous: bool,
        views: Sequence[ArrayView] = (),
        tag: int = 0,
    ) -> Any:
        reduce, average = reduction(kind, view.dtype, op)
        operation = self.group.submit(
            kind,
            dtype=view.dtype,
            reduce=reduce,
            average=average,
            root=root,
            tag=tag,
            inputs=inputs,
            outputs=outputs,
            owner=(view, views),
            timeout_s=timeout_s,
            wait_here=not asynchronous,
        )
        if asynchronous:
            work = ReceiveWork if kind == "receive" else Work
            return work(self.group, operation, result)
        self.group.wait(operation)
        return int(operation.peer) if kind == "receive" else result

    def _parts(
        self, kind: str, arrays: Any, view: ArrayView, rows: Sequence[int] | None, *, writable: bool
    ) -> tuple[list[Region], list[ArrayView]]:
        """A region for each rank, and the views that own them. One array is cut along its first axis.

        Every array must have the elements of `view`.
        """
        if isinstance(arrays, list | tuple):
            if rows is not None:
                raise ValueError(f"{kind}: rows are for one array that is cut; a list of arrays has its own sizes")
            views = [array_view(array, writable=writable) for array in arrays]
            regions = [each.region for each in views]
        else:
            views = [array_view(arrays, writable=writable)]
            regions = views[0].rows(self._rows(kind, views[0], rows))
        for each in views:
            if each.dtype != view.dtype:
                raise TypeError(f"{kind}: every array must be {view.dtype}, like the others, not {each.dtype}")
        return regions, views

    def _rows(self, kind: str, view: ArrayView, rows: Sequence[int] | None) -> Sequence[int]:
        """The number of the array's rows for each rank."""
        total = view.shape[0] if view.shape else 1
        if rows is None:
            if total % self.size:
                raise ValueError(f"{kind}: {total} rows cannot be cut into equal parts for {self.size} ranks")
            return [total // self.size] * self.size
        try:
            rows = [operator.index(each) for each in rows]
        except TypeError:
            raise TypeError(f"{kind}: rows {list(rows)} must be integers") from None
        if len(rows) != self.size or sum(rows) != total or min(rows) < 0:
            raise ValueError(f"{kind}: rows {list(rows)} must be {self.size} numbers whose sum is the array's {total}")
        return rows

    def _part_like(self, kind: str, buffers: Any) -> Array:
        if isinstance(buffers, list | tuple):
            if len(buffers) != self.size:
                raise ValueError(f"{kind}: needs {self.size} arrays, one a rank, not {len(buffers)}")
            part = array_view(buffers[self.rank], writable=False)
            return empty_like(part, buffers[self.rank], part.shape)
        whole = array_view(buffers, writable=False)
        return empty_like(whole, buffers, (self._rows(kind, whole, None)[0], *whole.shape[1:]))


def _in_place(kind: str, buffer: Any, out: Any) -> tuple[Any, ArrayView]:
    """The array to reduce in place: the buffer, or `out` after a copy of the buffer's values."""
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
