"""CUDA functions that torch lacks in Python, called in the driver by ctypes.

They are: capture modes, new streams, waits of streams for values in memory, and the registration of host memory.

The driver library's names and ABI do not change with the CUDA release. The runtime library's do, and torch has its own
copy. Without the driver library (ROCm), capture modes are not changed, and there are no new streams, no waits for
values, no registrations, and no native copies: collectives raise the reason.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from netfold._native import device as native

_LIBRARY = "libcuda.so.1"

# CU_STREAM_CAPTURE_MODE_GLOBAL and _RELAXED. In the global mode, a thread's default, a call such as cudaEventQuery
# fails while any thread captures a graph in that mode, and the capture is lost. In the relaxed mode this thread's calls
# do not affect captures of other threads (CUDA driver API, cuThreadExchangeStreamCaptureMode).
GLOBAL, RELAXED = 0, 2
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
# CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS: of the functions named _v2, which CUDA 11.7 brought. The attribute
# CAN_USE_STREAM_MEM_OPS (92) is about the older functions, which drivers switch off by default. The functions for 32
# bits have no attribute of their own.
_CAN_USE_STREAM_MEM_OPS = 122
# CU_STREAM_WAIT_VALUE_GEQ compares as (int32_t)(*address - value) >= 0. CU_STREAM_WRITE_VALUE_DEFAULT has a memory
# barrier: a stream that sees the value sees all earlier writes of the writing stream.
_WAIT_GEQ, _WRITE_DEFAULT = 0, 0
# CU_MEMHOSTREGISTER_PORTABLE: pinned for the contexts of all devices.
_PORTABLE = 1


def set_capture_mode(mode: int) -> int:
    """Set the calling thread's capture mode and return the one that it replaces."""
    exchange = _exchange()
    if exchange is None:
        return GLOBAL
    value = ctypes.c_int(mode)
    # An error means that CUDA is not initialised in this process, so no thread is capturing.
    return value.value if exchange(ctypes.byref(value)) == 0 else GLOBAL


def create_stream(index: int) -> int | None:
    """Make a stream on device `index`, not synchronised with the legacy default stream.

    Returns the handle, which is also a cudaStream_t; None without the driver library. Raises RuntimeError if the driver
    fails. The device's primary context stays retained: the stream lives as long as the process.
    """
    library = _library(ctypes.CDLL)
    if library is None:
        return None
    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _call(library.cuDeviceGet, ctypes.byref(device), ctypes.c_int(index))
    _call(library.cuDevicePrimaryCtxRetain, ctypes.byref(context), device)
    _call(library.cuCtxPushCurrent_v2, context)
    try:
        _call(library.cuStreamCreate, ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    finally:
        _call(library.cuCtxPopCurrent_v2, ctypes.byref(context))
    return stream.value


@functools.cache
def native_driver(index: int) -> native.CudaDriver:
    """The native functions for device `index`: one object, so that all groups share its events."""
    return native.CudaDriver.open(_LIBRARY, index)


def can_wait_for_values(index: int) -> bool:
    """Whether streams of device `index` can wait for a value in memory."""
    library = _library(ctypes.CDLL)
    if library is None or not hasattr(library, "cuStreamWaitValue32_v2"):
        return False
    device, found = ctypes.c_int(), ctypes.c_int()
    _call(library.cuDeviceGet, ctypes.byref(device), ctypes.c_int(index))
    _call(library.cuDeviceGetAttribute, ctypes.byref(found), ctypes.c_int(_CAN_USE_STREAM_MEM_OPS), device)
    return bool(found.value)


def wait_for_value(stream: int, address: int, value: int) -> None:
    """Have later work of the stream wait until the u32 at `address`, pinned memory, is `value` or later."""
    _memory_operation("cuStreamWaitValue32_v2", stream, address, value, _WAIT_GEQ)


def write_value(stream: int, address: int, value: int) -> None:
    """Have the stream write `value` to the u32 at `address`, pinned memory, after all its work so far."""
    _memory_operation("cuStreamWriteValue32_v2", stream, address, value, _WRITE_DEFAULT)


def _memory_operation(name: str, stream: int, address: int, value: int, flags: int) -> None:
    _call(
        getattr(_library(ctypes.CDLL), name),
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value & 0xFFFFFFFF),
        ctypes.c_uint(flags),
    )


def register_host_memory(address: int, nbytes: int) -> bool:
    """Pin mapped memory for the copy engines. False without the driver library. Raises RuntimeError if CUDA refuses."""
    library = _library(ctypes.CDLL)
    if library is None:
        return False
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
    _call(library.cuMemHostRegister_v2, *arguments)
    return True


def unregister_host_memory(address: int) -> None:
    """End the registration that begins at `address`. No copy may use the memory any more."""
    _call(_library(ctypes.CDLL).cuMemHostUnregister, ctypes.c_void_p(address))


def _call(function: Any, *arguments: Any) -> None:
    error = function(*arguments)
    if error:
        raise RuntimeError(f"{function.__name__}: CUDA driver error {error}")


@functools.cache
def _exchange() -> Any:
    # PyDLL keeps the GIL: the call takes less time than releasing and reacquiring the GIL.
    library = _library(ctypes.PyDLL)
    return None if library is None else library.cuThreadExchangeStreamCaptureMode


@functools.cache
def _library(kind: Callable[[str], Any]) -> Any:
    try:
        return kind(_LIBRARY)
    except OSError:
        return None
