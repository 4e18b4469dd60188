"""The two functions of CUDA's driver that torch does not offer to Python, by ctypes.

The driver library's names and its ABI do not change with the CUDA release, unlike the runtime library's, of which torch
brings its own. Where there is no such library (ROCm) these functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_LIBRARY = "libcuda.so.1"

# CU_STREAM_CAPTURE_MODE_GLOBAL and _RELAXED. In the global mode, a thread's default, a call such as cudaEventQuery
# fails while any thread captures a graph in that mode, and the capture is lost. In the relaxed mode the calls of this
# thread are of no concern to captures of others (CUDA driver API, cuThreadExchangeStreamCaptureMode).
GLOBAL, RELAXED = 0, 2


def set_capture_mode(mode: int) -> int:
    """Set the calling thread's capture mode and return the one that it replaces."""
    exchange = _exchange()
    if exchange is None:
        return GLOBAL
    value = ctypes.c_int(mode)
    # An error says that CUDA is not begun in this process: nobody can be capturing.
    return value.value if exchange(ctypes.byref(value)) == 0 else GLOBAL


@functools.cache
def _exchange() -> Any:
    try:
        # PyDLL keeps the GIL: the call takes less than handing the GIL over.
        library = ctypes.PyDLL(_LIBRARY)
    except OSError:
        return None
    function = library.cuThreadExchangeStreamCaptureMode
    function.argtypes, function.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
    return function
