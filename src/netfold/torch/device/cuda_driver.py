"""What torch does not offer to Python of CUDA, by ctypes from the driver: capture modes, and streams of one's own.

The driver library's names and its ABI do not change with the CUDA release, unlike the runtime library's, of which torch
brings its own. Where there is no such library (ROCm) capture modes are left alone, and there are no own streams.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_LIBRARY = "libcuda.so.1"

# CU_STREAM_CAPTURE_MODE_GLOBAL and _RELAXED. In the global mode, a thread's default, a call such as cudaEventQuery
# fails while any thread captures a graph in that mode, and the capture is lost. In the relaxed mode the calls of this
# thread are of no concern to captures of others (CUDA driver API, cuThreadExchangeStreamCaptureMode).
GLOBAL, RELAXED = 0, 2
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def set_capture_mode(mode: int) -> int:
    """Set the calling thread's capture mode and return the one that it replaces."""
    exchange = _exchange()
    if exchange is None:
        return GLOBAL
    value = ctypes.c_int(mode)
    # An error says that CUDA is not begun in this process: nobody can be capturing.
    return value.value if exchange(ctypes.byref(value)) == 0 else GLOBAL


def create_stream(index: int) -> int | None:
    """A new stream on device `index`, which does not wait for the legacy default stream, nor that one for it.

    The handle is a cudaStream_t, too. None where there is no driver library; RuntimeError where the driver fails. The
    primary context of the device stays retained: the stream lives as long as the process.
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
    # PyDLL keeps the GIL: the call takes less than handing the GIL over.
    library = _library(ctypes.PyDLL)
    return None if library is None else library.cuThreadExchangeStreamCaptureMode


@functools.cache
def _library(kind: Callable[[str], Any]) -> Any:
    try:
        return kind(_LIBRARY)
    except OSError:
        return None
