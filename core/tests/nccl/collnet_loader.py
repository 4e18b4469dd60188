"""Calls the plugin's collective network (CollNet) as NCCL does, by the tables of each version of the interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
from nccl.loader import HANDLE_BYTES, Loaded, _Logger, _until

from netfold import FileStore

# ncclDataType_t by NumPy's name, and ncclRedOp_t.
TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
}
BF16, FLOAT8 = 9, 10
SUM, PRODUCT, MAX, MIN, AVERAGE = 0, 1, 2, 3, 4


def _part(version: int) -> type[ctypes.Structure]:
    size = c_uint32 if version == 8 else c_size_t
    fields = [("registration", c_void_p), ("address", c_void_p), ("size", size)]
    return type(f"PartV{version}", (ctypes.Structure,), {"_fields_": fields})


def _table(version: int) -> type[ctypes.Structure]:
    context = [c_void_p] if version >= 11 else []
    count = c_int if version == 8 else c_size_t
    request = POINTER(c_void_p)

    def function(*arguments: Any) -> Any:
        return CFUNCTYPE(c_int, *arguments)

    window = [c_size_t, c_size_t, c_size_t]
    reduction = [c_int, c_int]
    fields = [
        ("name", c_char_p),
        ("init", function(*([POINTER(c_void_p), c_uint64] if context else []), _Logger)),
        ("devices", function(POINTER(c_int))),
        ("properties", function(c_int, c_void_p)),
        ("listen", function(*context, c_int, c_void_p, POINTER(c_void_p))),
        ("connect", function(POINTER(c_void_p), c_int, c_int, c_void_p, POINTER(c_void_p))),
        ("supports", function(*reduction, POINTER(c_int))),
        ("register_memory", function(c_void_p, c_void_p, c_size_t, c_int, POINTER(c_void_p))),
        ("register_dmabuf", function(c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, POINTER(c_void_p))),
        ("deregister_memory", function(c_void_p, c_void_p)),
        ("all_reduce", function(c_void_p, c_void_p, c_void_p, count, *reduction, c_void_p, c_void_p, request)),
        ("all_gather", function(c_void_p, c_void_p, c_int, c_void_p, *window, c_void_p, request)),
        ("reduce_scatter", function(c_void_p, c_int, c_void_p, c_void_p, *window, *reduction, c_void_p, request)),
        ("flush", function(c_void_p, c_void_p, c_int, c_void_p, request)),
        ("test", function(c_void_p, POINTER(c_int), POINTER(c_int))),
        ("close", function(c_void_p)),
        ("close_listen", function(c_void_p)),
    ]
    fields += [("make_virtual_device", function(POINTER(c_int), c_void_p))] if version >= 9 else []
    fields += [("finalize", function(c_void_p))] if context else []
    return type(f"CollNetV{version}", (ctypes.Structure,), {"_fields_": fields})


class CollNet(Loaded):
    """CollNet in this process, by one version of the interface. `log` holds NCCL's log: level and text."""

    def __init__(self, version: int = 12) -> None:
        super().__init__(version, _table(version), "ncclCollNetPlugin")
        self._part = _part(version)
        self._check(self.table.init(*([byref(self._context[0]), 7] if self._context else []), self._logger))

    def connect(self, handles: Sequence[bytes], rank: int, listener: c_void_p) -> c_void_p | None:
        """A comm; None: NCCL is to go on without CollNet. Closes the listener, as NCCL does."""
        own = [ctypes.create_string_buffer(handle, HANDLE_BYTES) for handle in handles]
        pointers = (c_void_p * len(own))(*(ctypes.addressof(each) for each in own))
        comm = c_void_p(1)
        self._check(self.table.connect(pointers, len(own), rank, listener, byref(comm)))
        self._check(self.table.close_listen(listener))
        return comm if comm.value else None

    def supports(self, type_: int, reduction: int) -> bool:
        supported = c_int(-1)
        self._check(self.table.supports(type_, reduction, byref(supported)))
        return bool(supported.value)

    def all_reduce(
        self, comm: c_void_p, data: Any, into: Any, reduction: int = SUM, type_: int | None = None
    ) -> c_void_p | None:
        """data, into: arrays that the caller keeps. None: the plugin cannot take it now."""
        type_ = TYPES[data.dtype.name] if type_ is None else type_
        request = c_void_p(1)
        arguments = (data.ctypes.data, into.ctypes.data, data.size, type_, reduction, None, None)
        self._check(self.table.all_reduce(comm, *arguments, byref(request)))
        return request if request.value else None

    def all_gather(
        self, comm: c_void_p, data: Any, into: Any, bytes_per_rank: int, window: tuple[int, int]
    ) -> c_void_p | None:
        """window: offset and bytes. data: this rank's block in the window."""
        request = c_void_p(1)
        part = self._part(None, into.ctypes.data, into.nbytes)
        arguments = (data.ctypes.data, 1, byref(part), bytes_per_rank, *window, None)
        self._check(self.table.all_gather(comm, *arguments, byref(request)))
        return request if request.value else None

    def reduce_scatter(
        self, comm: c_void_p, data: Any, into: Any, bytes_per_rank: int, window: tuple[int, int], reduction: int = SUM
    ) -> c_void_p | None:
        request = c_void_p(1)
        part = self._part(None, data.ctypes.data, data.nbytes)
        type_ = TYPES[data.dtype.name]
        arguments = (1, byref(part), into.ctypes.data, bytes_per_rank, *window, type_, reduction, None)
        self._check(self.table.reduce_scatter(comm, *arguments, byref(request)))
        return request if request.value else None

    def test(self, request: c_void_p) -> int | None:
        """The size of the result; None while it is under way."""
        done, size = c_int(-1), c_int(-1)
        self._check(self.table.test(request, byref(done), byref(size)))
        return size.value if done.value else None

    def wait(self, *requests: c_void_p | None, quiet_s: float = 30) -> list[int]:
        """The size of each request's result. As NCCL does, asks for them in order."""
        found = []
        for request in requests:
            assert request is not None
            size = _until(lambda request=request: _boxed(self.test(request)), quiet_s, "an operation")
            found.append(size[0])
        return found

    def close(self, comm: c_void_p) -> None:
        self._check(self.table.close(comm))


def _boxed(size: int | None) -> list[int] | None:
    return None if size is None else [size]


def joined(plugin: CollNet, rank: int, size: int, folder: str, name: str = "") -> c_void_p | None:
    """The comm of all ranks, which exchange their handles through `folder`. None: none of them uses CollNet."""
    store = FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"collnet {name}/{rank}", handle)
    handles = [store.get(f"collnet {name}/{each}", 30) for each in range(size)]
    return plugin.connect(handles, rank, listener)


def contribution(rank: int, count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Another value in every element; small integers, so that every sum is exact in every type and order."""
    return ((np.arange(count) * 7 + rank * 3 + seed) % 11).astype(dtype)


def expected(size: int, count: int, dtype: str, seed: int = 0, reduction: int = SUM) -> np.ndarray:
    all_ = [contribution(rank, count, dtype, seed) for rank in range(size)]
    by = {SUM: np.add, PRODUCT: np.multiply, MAX: np.maximum, MIN: np.minimum}[reduction]
    return by.reduce(all_, dtype=dtype)  # type: ignore[no-any-return]
