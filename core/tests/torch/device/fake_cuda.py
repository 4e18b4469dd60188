"""A device API over fake_cuda.c, which netfold's native code opens as CUDA's driver. No torch code of CUDA's runs.

Where `FakeLayer` is strict about torch and about every path, this one needs no GIL: a stream's thread does its work.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from c_library import compile_library

from netfold._native import device as native

Tensor = torch.Tensor

SOURCE = Path(__file__).with_name("fake_cuda.c")
# CUDA_ERROR_ILLEGAL_ADDRESS.
ILLEGAL_ADDRESS = 700
_RELAXED = 2


class Library:
    """The compiled library. The calls of `calls` release the GIL, those of `holding` keep it."""

    def __init__(self, folder: Path) -> None:
        self.path = compile_library(SOURCE, folder / "libfake_cuda.so")
        self.calls = ctypes.CDLL(self.path)
        self.holding = ctypes.PyDLL(self.path)
        for library in (self.calls, self.holding):
            library.fake_await_copies.restype = ctypes.c_long
            library.fake_await_copies.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self.calls.fake_fault.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        error = getattr(self.calls, name)(*arguments)
        if error:
            raise RuntimeError(f"{name}: CUDA driver error {error}: {self.fault}")

    def copies(self) -> tuple[int, int]:
        """The copies that are done: to the host, and back."""
        return self.calls.fake_copies(0), self.calls.fake_copies(1)

    def queries(self, device: int) -> int:
        return int(self.calls.fake_queries(device))

    @property
    def fault(self) -> str:
        return str(self.calls.fake_fault().decode())


class Event:
    def __init__(self, api: FakeCudaApi, stream: Stream) -> None:
        self._api = api
        handle = ctypes.c_void_p()
        api.library.call("cuEventCreate", ctypes.byref(handle), 2)
        self.cuda_event = handle.value
        api.library.call("cuEventRecord", handle, ctypes.c_void_p(stream.cuda_stream))

    def query(self) -> bool:
        error = self._api.library.calls.cuEventQuery(ctypes.c_void_p(self.cuda_event))
        if error not in (0, 600):
            raise RuntimeError(f"CUDA error {error}")
        return error == 0

    def wait(self, stream: Stream) -> None:
        self._api.library.call(
            "cuStreamWaitEvent", ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p(self.cuda_event), 0
        )


class Stream:
    def __init__(self, api: FakeCudaApi) -> None:
        self._api = api
        handle = ctypes.c_void_p()
        api.library.call("cuStreamCreate", ctypes.byref(handle), 1)
        self.cuda_stream = handle.value

    def record_event(self) -> Event:
        return Event(self._api, self)

    def wait_event(self, event: Any) -> None:
        event.wait(self)


class FakeCudaApi:
    """See `DeviceApi`. Its tensors are the CPU's. Only what staged collectives use."""

    kind = "cuda"

    def __init__(self, library: Library, number: int, host: Any) -> None:
        self.library, self.host = library, host
        self.device = torch.device("cuda", number)
        self._tensors: dict[int, Tensor] = {}
        self._context = ctypes.c_void_p()
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)
        self._driver = native.CudaDriver.open(library.path, number)
        with self.on(self.device):
            self.stream = Stream(self)

    # --- what tests do ---------------------------------------------------------------------------------------------

    def tensor(self, values: Tensor) -> Tensor:
        """Memory of the device, which holds `values` from the start."""
        made = values.clone()
        self._tensors[made.untyped_storage().data_ptr()] = made
        if made.nbytes:
            self.library.call(
                "fake_own", ctypes.c_void_p(made.data_ptr()), ctypes.c_size_t(made.nbytes), self.device.index
            )
        return made

    def write_late(self, tensor: Tensor, values: Tensor) -> None:
        """Have the caller's stream write `values`, as a kernel does."""
        source = self.pinned(values.nbytes)
        source.copy_(values.view(torch.uint8))
        with self.on(self.device):
            self.library.call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(tensor.data_ptr()),
                ctypes.c_void_p(source.data_ptr()),
                ctypes.c_size_t(values.nbytes),
                ctypes.c_void_p(self.stream.cuda_stream),
            )
        self._tensors[source.data_ptr()] = source

    def value(self, tensor: Tensor) -> Tensor:
        """The values that the caller's stream would read."""
        self.library.call("cuStreamSynchronize", ctypes.c_void_p(self.stream.cuda_stream))
        return tensor.clone()

    @property
    def faults(self) -> list[str]:
        return [self.library.fault] if self.library.fault else []

    def unkept(self) -> list[str]:
        return []

    # --- the device API --------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._tensors

    def device_of(self, tensor: Tensor) -> torch.device:
        return self.device

    def uuid(self, device: torch.device) -> str:
        return f"FAKE-{device.index:04}"

    def enter(self, device: torch.device) -> None:
        self.library.call("cuCtxSetCurrent", self._context)
        self._exchange(_RELAXED)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        self.library.call("cuCtxSetCurrent", self._context)
        before = self._exchange(_RELAXED)
        try:
            yield
        finally:
            self._exchange(before)
            self.library.call("cuCtxSetCurrent", None)

    def _exchange(self, mode: int) -> int:
        value = ctypes.c_int(mode)
        self.library.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
        return value.value

    def current_stream(self, device: torch.device) -> Stream:
        return self.stream

    def captures(self) -> bool:
        return False

    def new_stream(self, device: torch.device) -> Stream:
        return Stream(self)

    def native_driver(self, device: torch.device) -> Any:
        return self._driver

    def pinned(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.register(memory)
        return memory

    def register(self, memory: Tensor) -> bool:
        self.library.call("cuMemHostRegister_v2", ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), 1)
        return True

    def unregister(self, memory: Tensor) -> None:
        self.library.call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: the tensors live as long as this object."""

    def new_gate(self, device: torch.device) -> None:
        return None


def wait_until(holds: Any, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up, "not within the time"
        time.sleep(0.001)
