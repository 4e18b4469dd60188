"""CUDA functions that torch lacks in Python, called in the driver by ctypes: capture modes, and new streams.

The driver library's names and ABI do not change with the CUDA release. The runtime library's do, and torch has its own
copy. Without the driver library (ROCm), capture modes are not changed, and there are no new streams.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_LIBRARY = "libcuda.so.1"

# CU_STREAM_CAPTURE_MODE_GLOBAL and _RELAXED. In the global mode, a thread's default, a call such as cudaEventQuery
# fails while any thread captures a graph in that mode, and the capture is lost. In the relaxed mode this thread's calls
# do not affect captures of other threads (CUDA driver API, cuThreadExchangeStreamCaptureMode).
GLOBAL, RELAXED = 0, 2
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


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
