"""The functions of CUDA's driver that netfold's native code calls, over a `FakeLayer`."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from netfold._native import device as native

if TYPE_CHECKING:
    from fake_device_api import FakeEvent, FakeLayer, FakeStream

_SUCCESS, _NOT_READY, _FAILED, _BROKEN = 0, 600, 700, 999
_Size, _Handle, _Int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_Out = ctypes.POINTER(ctypes.c_void_p)

# Handles of streams and events of all devices: none is 0, and none is given out twice.
_handles = itertools.count(0x1000, 0x10)


class FakeDriver:
    """One device's functions. An error of the fake is a fault there, and an error's number here.

    - An event is queried and waited for only after it was recorded: CUDA takes it for done before, silently.
    - The calling thread's current context must be the stream's, or the event's.
    - Host memory of a copy is pinned, until the copy is done; device memory is the device's.
    """

    def __init__(self, layer: FakeLayer) -> None:
        self._layer = layer
        self._streams: dict[int, FakeStream] = {}
        self._events: dict[int, FakeEvent | None] = {}
        self._own = threading.local()
        self._text = ctypes.create_string_buffer(b"", 500)
        named = {
            "cuDeviceGet": (self._get_device, [ctypes.POINTER(_Int), _Int]),
            "cuDevicePrimaryCtxRetain": (self._retain, [_Out, _Int]),
            "cuCtxSetCurrent": (self._set_context, [_Handle]),
            "cuMemcpyDtoHAsync_v2": (self._copy_to_host, [_Handle, _Handle, _Size, _Handle]),
            "cuMemcpyHtoDAsync_v2": (self._copy_to_device, [_Handle, _Handle, _Size, _Handle]),
            "cuEventCreate": (self._create_event, [_Out, ctypes.c_uint]),
            "cuEventRecord": (self._record_event, [_Handle, _Handle]),
            "cuEventQuery": (self._query_event, [_Handle]),
            "cuStreamWaitEvent": (self._wait_event, [_Handle, _Handle, ctypes.c_uint]),
            "cuGetErrorString": (self._error_string, [_Int, ctypes.POINTER(ctypes.c_char_p)]),
        }
        self._functions = [
            ctypes.CFUNCTYPE(_Int, *kinds)(self._guarded(function)) for function, kinds in named.values()
        ]
        addresses = [ctypes.cast(function, _Handle).value for function in self._functions]
        self.native = native.CudaDriver.over(list(zip(named, addresses, strict=True)), layer.device.index)

    def handle_of_stream(self, stream: FakeStream) -> int:
        handle = next(_handles)
        self._streams[handle] = stream
        return handle

    def handle_of_event(self, event: FakeEvent) -> int:
        handle = next(_handles)
        self._events[handle] = event
        return handle

    def _guarded(self, function: Callable[..., int | None]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            try:
                return function(*arguments) or _SUCCESS
            except RuntimeError as error:
                self._text.value = str(error).encode()[:499]
                return _FAILED
            except BaseException as error:
                self._layer.faults.append(f"{function.__name__}: {error!r}")
                self._text.value = f"a rule was broken: {error}".encode()[:499]
                return _BROKEN

        return call

    def _get_device(self, device: Any, index: int) -> None:
        device[0] = index

    def _retain(self, context: Any, device: int) -> None:
        context[0] = 7000 + device

    def _set_context(self, context: int) -> None:
        self._own.context = context

    def _stream(self, handle: int) -> FakeStream:
        stream = self._streams[handle]
        device = stream.device.index
        assert getattr(self._own, "context", None) == 7000 + device, "the current context is not the stream's"
        return stream

    def _copy_to_host(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), host=to, device=source, nbytes=nbytes, to_host=True)

    def _copy_to_device(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), host=source, device=to, nbytes=nbytes, to_host=False)

    def _copy(self, stream: FakeStream, *, host: int, device: int, nbytes: int, to_host: bool) -> None:
        assert nbytes, "an empty copy"
        in_host = self._layer.pinned_at(host, nbytes)
        in_device = self._layer.memory_at(device, nbytes)
        to, source = (in_host, in_device) if to_host else (in_device, in_host)
        self._own.copies = True
        try:
            self._layer.copy(stream, to, source)
        finally:
            self._own.copies = False

    @property
    def copies_here(self) -> bool:
        """Whether the calling thread is in a copy of this driver's."""
        return getattr(self._own, "copies", False)

    def _create_event(self, event: Any, flags: int) -> None:
        assert flags == 2, "it would take a time"
        event[0] = next(_handles)
        self._events[event[0]] = None

    def _record_event(self, event: int, stream: int) -> None:
        self._events[event] = self._stream(stream).record_event()

    def _recorded(self, event: int) -> FakeEvent:
        found = self._events[event]
        assert found is not None, "an event that was never recorded: CUDA says that it is done"
        return found

    def _query_event(self, event: int) -> int:
        return _SUCCESS if self._recorded(event).query() else _NOT_READY

    def _wait_event(self, stream: int, event: int, flags: int) -> None:
        assert flags == 0
        self._recorded(event).wait(self._stream(stream))

    def _error_string(self, error: int, text: Any) -> None:
        text[0] = ctypes.addressof(self._text)


def view_of(address: int, nbytes: int) -> torch.Tensor:
    """[nbytes] u8: the memory at `address`."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
