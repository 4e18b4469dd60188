"""Calls the plugin's profiler as NCCL does, by the tables of each version of the interface.

`python profiler_loader.py SCENARIO` runs one scenario in a process of its own: a process has one recording.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    Union,
    byref,
    c_bool,
    c_char_p,
    c_int,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_ulong,
    c_void_p,
)
from typing import Any

from nccl.loader import shared_object

VERSIONS = (4, 5, 6)
COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL, NET = (1 << bit for bit in (1, 2, 3, 4, 6, 7))
GROUP_API, COLL_API, P2P_API, LAUNCH, CE_COLL = (1 << bit for bit in (8, 9, 10, 11, 12))
SEND_GPU_WAIT, SEND_WAIT, RECEIVE_WAIT, RECEIVE_FLUSH, RECEIVE_GPU_WAIT = 8, 9, 10, 11, 12
SEND_PEER_WAIT, NET_UPDATE, KERNEL_STOP = 20, 21, 22
NETFOLD_EVENTS = 0x4E46 << 16 | 1

_Logger = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)


def _fields(*fields: tuple[str, Any]) -> type[Structure]:
    return type("Fields", (Structure,), {"_fields_": list(fields)})


class _Kinds(Union):
    """As in NCCL's headers, with NCCL's names."""

    _fields_ = (
        ("groupApi", _fields(("graphCaptured", c_bool), ("groupDepth", c_int))),
        (
            "collApi",
            _fields(
                ("func", c_char_p),
                ("count", c_size_t),
                ("datatype", c_char_p),
                ("root", c_int),
                ("stream", c_void_p),
                ("graphCaptured", c_bool),
            ),
        ),
        (
            "coll",
            _fields(
                ("seqNumber", c_uint64),
                ("func", c_char_p),
                ("sendBuff", c_void_p),
                ("recvBuff", c_void_p),
                ("count", c_size_t),
                ("root", c_int),
                ("datatype", c_char_p),
                ("nChannels", c_uint8),
                ("nWarps", c_uint8),
                ("algo", c_char_p),
                ("proto", c_char_p),
                ("parentGroup", c_void_p),
            ),
        ),
        (
            "p2p",
            _fields(
                ("func", c_char_p),
                ("buff", c_void_p),
                ("datatype", c_char_p),
                ("count", c_size_t),
                ("peer", c_int),
                ("nChannels", c_uint8),
                ("parentGroup", c_void_p),
            ),
        ),
        (
            "proxyOp",
            _fields(
                ("pid", c_int),
                ("channelId", c_uint8),
                ("peer", c_int),
                ("nSteps", c_int),
                ("chunkSize", c_int),
                ("isSend", c_int),
            ),
        ),
        ("proxyStep", _fields(("step", c_int))),
        ("kernelCh", _fields(("channelId", c_uint8), ("pTimer", c_uint64))),
        ("netPlugin", _fields(("id", c_int64), ("data", c_void_p))),
        (
            "ceColl",
            _fields(
                ("seqNumber", c_uint64),
                ("func", c_char_p),
                ("sendBuff", c_void_p),
                ("recvBuff", c_void_p),
                ("count", c_size_t),
                ("root", c_int),
                ("datatype", c_char_p),
                ("syncStrategy", c_char_p),
                ("intraBatchSync", c_bool),
                ("batchSize", c_uint32),
                ("numBatches", c_uint32),
                ("ceSeqNum", c_uint32),
                ("stream", c_void_p),
            ),
        ),
    )


class _Description(Structure):
    _fields_ = (("type", c_uint64), ("parentObj", c_void_p), ("rank", c_int), ("of", _Kinds))


class NetData(Structure):
    """The data of netfold's network events."""

    _fields_ = (("bytes", c_uint64), ("is_send", c_uint32), ("reserved", c_uint32))


def _table(version: int) -> type[Structure]:
    comm = [c_char_p, c_uint64] if version == 4 else [c_char_p]
    init = [POINTER(c_void_p), *([] if version == 4 else [c_uint64]), POINTER(c_int), *comm]
    return _fields(
        ("name", c_char_p),
        ("init", CFUNCTYPE(c_int, *init, c_int, c_int, c_int, _Logger)),
        ("start", CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p), POINTER(_Description))),
        ("stop", CFUNCTYPE(c_int, c_void_p)),
        ("state", CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)),
        ("finalize", CFUNCTYPE(c_int, c_void_p)),
    )


class Profiler:
    """The plugin's profiler by one version, and NCCL's log: level and text."""

    def __init__(self, version: int = VERSIONS[-1]) -> None:
        self.version = version
        self.log: list[tuple[int, str]] = []
        self.mask = c_int(0x5555)
        self.library = ctypes.CDLL(str(shared_object()))
        self.table: Any = _table(version).in_dll(self.library, f"ncclProfiler_v{version}")
        self._logger = _Logger(self._write)

    def _write(self, level: int, _: int, file: bytes, line: int, format_: bytes, text: bytes) -> None:
        assert file and line and format_ == b"PROFILER/netfold: %s"
        self.log.append((level, text.decode()))

    def comm(self, comm_id: int, rank: int, ranks: int, name: str | None = None, nodes: int = 1) -> Comm:
        context = c_void_p(1)
        called = None if name is None else name.encode()
        before = [byref(context), byref(self.mask), called, comm_id]
        if self.version > 4:
            before = [byref(context), comm_id, byref(self.mask), called]
        assert self.table.init(*before, nodes, ranks, rank, self._logger) == 0
        return Comm(self, context, rank)


class Comm:
    """A communicator of this process."""

    def __init__(self, profiler: Profiler, context: c_void_p, rank: int) -> None:
        self.profiler, self.context, self.rank = profiler, context, rank

    def start(self, type_: int, parent: int | None = None, *, of: str | None = None, **fields: Any) -> int | None:
        description = _Description(type=type_, parentObj=parent, rank=self.rank)
        if self.profiler.version == 4:  # which writes one byte of it
            description.type = type_ & 0xFF | 0xABCD00
        for name, value in fields.items():
            setattr(getattr(description.of, of or ""), name, value)
        handle = c_void_p(1)
        assert self.profiler.table.start(self.context, byref(handle), byref(description)) == 0
        return handle.value

    def stop(self, event: int | None) -> None:
        if event is not None:  # as NCCL does
            assert self.profiler.table.stop(event) == 0

    def state(self, event: int | None, state: int, value: int | NetData = 0) -> None:
        if event is not None:
            argument = value if isinstance(value, NetData) else c_uint64(value)
            pointer = c_uint64(ctypes.addressof(argument)) if isinstance(value, NetData) else argument
            assert self.profiler.table.state(event, state, byref(pointer)) == 0

    def finalize(self) -> None:
        assert self.profiler.table.finalize(self.context) == 0

    # --- what NCCL does ---

    @contextmanager
    def call(self, function: str, count: int, dtype: str = "ncclFloat32") -> Iterator[int | None]:
        """ncclAllReduce and the like: events since version 5."""
        if self.profiler.version == 4:
            yield None
            return
        group = self.start(GROUP_API, of="groupApi", groupDepth=1)
        api = self.start(COLL_API, group, of="collApi", func=function.encode(), count=count, datatype=dtype.encode())
        yield api
        self.stop(api)
        launch = self.start(LAUNCH, group)
        self.stop(launch)
        self.stop(group)

    def submit(
        self,
        api: int | None,
        function: str = "AllReduce",
        *,
        sequence: int = 0,
        count: int = 1 << 20,
        channels: int = 2,
        dtype: str = "ncclFloat32",
        algorithm: str = "RING",
        protocol: str = "SIMPLE",
    ) -> int | None:
        return self.start(
            COLL,
            api,
            of="coll",
            seqNumber=sequence,
            func=function.encode(),
            count=count,
            datatype=dtype.encode(),
            nChannels=channels,
            algo=algorithm.encode(),
            proto=protocol.encode(),
        )

    def kernel(self, operation: int | None, channel: int = 0, at: int = 1000) -> int | None:
        return self.start(KERNEL, operation, of="kernelCh", channelId=channel, pTimer=at)

    def kernel_stop(self, event: int | None, at: int = 2000) -> None:
        self.state(event, KERNEL_STOP, at)
        self.stop(event)

    def proxy(
        self, operation: int | None, *, channel: int = 0, peer: int = 1, send: bool = True, pid: int = 0
    ) -> int | None:
        fields = {"pid": pid or os.getpid(), "channelId": channel, "peer": peer, "nSteps": 4, "isSend": int(send)}
        return self.start(PROXY_OP, operation, of="proxyOp", **fields)

    def step(self, proxy: int | None, number: int, size: int, *, send: bool = True, net: bool = False) -> None:
        """One step of a proxy operation, with netfold's own event under it."""
        step = self.start(PROXY_STEP, proxy, of="proxyStep", step=number)
        for state in (SEND_GPU_WAIT, SEND_PEER_WAIT, SEND_WAIT) if send else (RECEIVE_WAIT,):
            self.state(step, state, size if state == SEND_WAIT else 0)
        if net:
            data = NetData(size, int(send), 0)
            event = self.start(NET, step, of="netPlugin", id=NETFOLD_EVENTS, data=ctypes.addressof(data))
            self.state(event, NET_UPDATE, data)
            self.stop(event)
        if not send:
            self.state(step, RECEIVE_GPU_WAIT, size)
        self.stop(step)

    def collective(
        self, sequence: int = 0, count: int = 1 << 20, channels: int = 2, *, function: str = "AllReduce", **more: Any
    ) -> None:
        """One collective from the call to the end: two transfers and a kernel on each channel."""
        with self.call(function, count) as api:
            pass
        operation = self.submit(api, function, sequence=sequence, count=count, channels=channels, **more)
        self.stop(operation)
        kernels = [self.kernel(operation, channel) for channel in range(channels)]
        for channel in range(channels):
            for send in (False, True):
                proxy = self.proxy(operation, channel=channel, send=send)
                for number in range(2):
                    self.step(proxy, number, count, send=send, net=True)
                self.stop(proxy)
        for kernel in kernels:
            self.kernel_stop(kernel)
