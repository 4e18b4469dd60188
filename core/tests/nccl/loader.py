"""Loads the plugin and calls it as NCCL does, by the tables of each version of the interface."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Sequence
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int16,
    c_int64,
    c_size_t,
    c_uint64,
    c_ulong,
    c_void_p,
)
from pathlib import Path
from typing import Any

from load import seconds

VERSIONS = (8, 9, 10, 11, 12)
SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 2, 3, 4, 5, 6
HOST, CUDA, DMABUF = 1, 2, 4
WARN, INFO = 2, 3
HANDLE_BYTES = 128
MAX_REQUESTS = 32

# ncclProfilerCallback_t: event, action, of, plugin, data.
ProfilerCallback = CFUNCTYPE(c_int, POINTER(c_void_p), c_int, c_void_p, c_int64, c_void_p)
_Logger = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)


def shared_object() -> Path:
    """The file that `pip install` installs."""
    spec = importlib.util.find_spec("netfold._native")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "nccl" / "libnccl-net-netfold.so"


def _properties(version: int) -> type[ctypes.Structure]:
    fields: list[tuple[str, Any]] = [("name", c_char_p), ("pci_path", c_char_p), ("guid", c_uint64)]
    fields += [("pointers", c_int), ("registers_globally", c_int)]
    fields += [("must_flush", c_int)] if version >= 9 else []
    fields += [("speed", c_int), ("port", c_int), ("latency", c_float), ("max_comms", c_int), ("max_receives", c_int)]
    fields += [("offload", c_int), ("offload_version", c_int)]
    if version >= 9:
        fields += [("of_count", c_int), ("of", c_int * (8 if version >= 12 else 4))]
        fields += [("max_message", c_size_t), ("max_collective", c_size_t)]
    fields += [("max_multi_request", c_int)] if version >= 11 else []
    fields += [("rail", c_int16), ("plane", c_int16)] if version >= 12 else []
    return type(f"PropertiesV{version}", (ctypes.Structure,), {"_fields_": fields})


def _table(version: int) -> type[ctypes.Structure]:
    size = c_int if version == 8 else c_size_t
    context = [c_void_p] if version >= 11 else []
    profiled = [c_void_p] if version >= 10 else []

    def function(*arguments: Any) -> Any:
        return CFUNCTYPE(c_int, *arguments)

    new_init: list[Any] = [POINTER(c_void_p), c_uint64, c_void_p, _Logger, ProfilerCallback]
    init = {8: [_Logger], 9: [_Logger], 10: [_Logger, ProfilerCallback]}.get(version, new_init)
    connect = [c_int, c_void_p, c_void_p] if version == 10 else [*context, c_int, c_void_p]
    fields = [
        ("name", c_char_p),
        ("init", function(*init)),
        ("devices", function(POINTER(c_int))),
        ("properties", function(c_int, c_void_p)),
        ("listen", function(*context, c_int, c_void_p, POINTER(c_void_p))),
        ("connect", function(*connect, POINTER(c_void_p), c_void_p)),
        ("accept", function(c_void_p, POINTER(c_void_p), c_void_p)),
        ("register_memory", function(c_void_p, c_void_p, c_size_t, c_int, POINTER(c_void_p))),
        ("register_dmabuf", function(c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, POINTER(c_void_p))),
        ("deregister_memory", function(c_void_p, c_void_p)),
        ("send", function(c_void_p, c_void_p, size, c_int, c_void_p, *profiled, POINTER(c_void_p))),
        (
            "receive",
            function(
                c_void_p,
                c_int,
                POINTER(c_void_p),
                POINTER(size),
                POINTER(c_int),
                POINTER(c_void_p),
                *([POINTER(c_void_p)] if profiled else []),
                POINTER(c_void_p),
            ),
        ),
        ("flush", function(c_void_p, c_int, c_void_p, c_void_p, c_void_p, POINTER(c_void_p))),
        ("test", function(c_void_p, POINTER(c_int), POINTER(c_int))),
        ("close_send", function(c_void_p)),
        ("close_receive", function(c_void_p)),
        ("close_listen", function(c_void_p)),
        ("device_registration", function(c_void_p, c_void_p, c_void_p)),
        ("consumed", function(c_void_p, c_int, c_void_p)),
    ]
    fields += [("make_virtual_device", function(POINTER(c_int), c_void_p))] if version >= 9 else []
    fields += [("finalize", function(c_void_p)), ("set_attributes", function(c_void_p, c_void_p))] if context else []
    return type(f"NetV{version}", (ctypes.Structure,), {"_fields_": fields})


class NcclError(Exception):
    """The plugin returned this code; the text is its last line in NCCL's log."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}: {text}")
        self.code = code


class Loaded:
    """The plugin's table `symbol` in this process, and NCCL's log. A subclass calls `init`."""

    def __init__(self, version: int, table: type[ctypes.Structure], symbol: str) -> None:
        self.version = version
        self.log: list[tuple[int, str]] = []
        self._library = ctypes.CDLL(str(shared_object()))
        self.table: Any = table.in_dll(self._library, f"{symbol}_v{version}")
        self._logger = _Logger(self._write)
        self._context: list[Any] = [c_void_p(1)] if version >= 11 else []

    def _write(self, level: int, _: int, file: bytes, line: int, format_: bytes, text: bytes) -> None:
        assert file and line and format_ == b"NET/netfold: %s"
        self.log.append((level, text.decode()))

    def _check(self, code: int) -> None:
        if code != SUCCESS:
            raise NcclError(code, self.log[-1][1] if self.log else "")

    def devices(self) -> list[Any]:
        count = c_int(-1)
        self._check(self.table.devices(byref(count)))
        found = []
        for number in range(count.value):
            properties = _properties(self.version)()
            self._check(self.table.properties(number, byref(properties)))
            found.append(properties)
        return found

    def listen(self, device: int = 0) -> tuple[bytes, c_void_p]:
        """The handle, and the listener."""
        handle = ctypes.create_string_buffer(b"\xff" * HANDLE_BYTES, HANDLE_BYTES)
        listener = c_void_p()
        self._check(self.table.listen(*self._context, device, handle, byref(listener)))
        return handle.raw, listener


class Plugin(Loaded):
    """The plugin in this process, by one version of the interface. `log` holds NCCL's log: level and text."""

    def __init__(self, version: int = VERSIONS[-1], profiler: Any = None) -> None:
        """profiler: a ProfilerCallback."""
        super().__init__(version, _table(version), "ncclNetPlugin")
        self._size = c_int if version == 8 else c_size_t
        self._profiler = profiler or ProfilerCallback()
        new: list[Any] = [*map(byref, self._context), 7, None, self._logger, self._profiler]
        arguments = {8: [self._logger], 9: [self._logger], 10: [self._logger, self._profiler]}.get(version, new)
        self._check(self.table.init(*arguments))

    def connect(self, handle: bytes, device: int = 0, quiet_s: float = 20) -> c_void_p:
        own = ctypes.create_string_buffer(handle, HANDLE_BYTES)
        settings = [None] if self.version == 10 else []

        def once() -> c_void_p | None:
            comm = c_void_p(1)
            self._check(self.table.connect(*self._context, device, *settings, own, byref(comm), None))
            return comm if comm.value else None

        comm: c_void_p = _until(once, quiet_s, "a connection")
        return comm

    def accept(self, listener: c_void_p, quiet_s: float = 20) -> c_void_p:
        def once() -> c_void_p | None:
            comm = c_void_p(1)
            self._check(self.table.accept(listener, byref(comm), None))
            return comm if comm.value else None

        comm: c_void_p = _until(once, quiet_s, "a connection from the other rank")
        return comm

    def register(self, comm: c_void_p, data: Any, kind: int) -> c_void_p:
        registration = c_void_p()
        self._check(self.table.register_memory(comm, data.ctypes.data, data.nbytes, kind, byref(registration)))
        return registration

    def send(
        self,
        comm: c_void_p,
        data: Any,
        tag: int = 0,
        profiled_by: int | None = None,
        registration: c_void_p | None = None,
    ) -> c_void_p | None:
        """data: an array that the caller keeps. None: the plugin cannot take it now."""
        request = c_void_p(1)
        profiled = [profiled_by] if self.version >= 10 else []
        self._check(self.table.send(comm, data.ctypes.data, data.nbytes, tag, registration, *profiled, byref(request)))
        return request if request.value else None

    def receive(
        self,
        comm: c_void_p,
        into: Sequence[Any],
        tags: Sequence[int] = (0,),
        profiled_by: Sequence[int] = (),
        registrations: Sequence[c_void_p | None] = (),
    ) -> c_void_p | None:
        request = c_void_p(1)
        count = len(into)
        data = (c_void_p * count)(*(each.ctypes.data for each in into))
        sizes = (self._size * count)(*(each.nbytes for each in into))
        held = (c_void_p * count)(*registrations)
        profiled = [(c_void_p * count)(*profiled_by)] if self.version >= 10 else []
        self._check(
            self.table.receive(comm, count, data, sizes, (c_int * count)(*tags), held, *profiled, byref(request))
        )
        return request if request.value else None

    def test(self, request: c_void_p, count: int = 1) -> list[int] | None:
        """The sizes of the request's messages; None while it is under way."""
        done, sizes = c_int(-1), (c_int * count)()
        self._check(self.table.test(request, byref(done), sizes))
        return list(sizes) if done.value else None

    def wait(self, *requests: c_void_p | None, counts: Sequence[int] | None = None, quiet_s: float = 20) -> list[Any]:
        """The sizes of each request's messages. As NCCL does, asks each in turn: only that moves any of them."""
        counts = counts or [1] * len(requests)
        found: list[Any] = [None] * len(requests)

        def all_done() -> bool:
            for i, request in enumerate(requests):
                assert request is not None
                if found[i] is None:
                    found[i] = self.test(request, counts[i])
            return None not in found

        _until(all_done, quiet_s, "a request")
        return found

    def close(self, send: c_void_p | None = None, receive: c_void_p | None = None) -> None:
        if send is not None:
            self._check(self.table.close_send(send))
        if receive is not None:
            self._check(self.table.close_receive(receive))

    def close_listen(self, listener: c_void_p) -> None:
        self._check(self.table.close_listen(listener))


def _until(once: Callable[[], Any], quiet_s: float, what: str) -> Any:
    deadline = time.monotonic() + seconds(quiet_s)
    while not (found := once()):
        assert time.monotonic() < deadline, f"{what} is not there after {quiet_s} s of a quiet machine"
    return found
