"""The device API of torch.cuda."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import AllgatherOptions

from netfold.torch.device import cuda_driver
from netfold.torch.device.device_api import DeviceApi, Gate, NcclGroup
from netfold.torch.memory import writable

log = logging.getLogger("netfold")

Tensor = torch.Tensor

_POLL_S = 0.005

# Handles of netfold's streams that are not in use, by the device's index.
_free_streams: dict[int, list[int]] = collections.defaultdict(list)


def cuda_api() -> DeviceApi | None:
    """Return the API; None if torch was built without CUDA or finds no device.

    The process may fork later: NVML counts the devices, if present, and CUDA is not initialised
    (`torch.cuda.is_available` would).
    """
    return CudaApi() if torch.cuda.device_count() > 0 else None


class CudaApi:
    """See `DeviceApi`. Events and streams are torch's own."""

    kind = "cuda"

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def device_of(self, tensor: Tensor) -> torch.device:
        return tensor.device

    def uuid(self, device: torch.device) -> str:
        return _uuid(_index(device))

    def visible(self) -> Sequence[str]:
        return [_uuid(index) for index in range(torch.cuda.device_count())]

    def enter(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        cuda_driver.set_capture_mode(cuda_driver.RELAXED)

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        # Unlike torch.cuda.stream and set_device, torch.cuda.device makes no context on the device that it restores.
        with torch.cuda.device(device):
            before = cuda_driver.set_capture_mode(cuda_driver.RELAXED)
            try:
                yield
            finally:
                cuda_driver.set_capture_mode(before)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def captures(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        # torch.cuda.Stream(device) returns one of 32 streams that all code of the process shares.
        index = _index(device)
        handle = _free_streams[index].pop() if _free_streams[index] else cuda_driver.create_stream(index)
        if handle is None:
            # Without CUDA's driver library: a stream of torch's high-priority pool, which users use less often.
            return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
        # Never destroyed: torch's allocator records events in a stream as long as memory lives that the stream used.
        weakref.finalize(stream, _free_streams[index].append, handle).atexit = False
        return stream

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(stream), writable():
            work()

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream), writable():
            to.copy_(source, non_blocking=True)

    def native_driver(self, device: torch.device) -> Any:
        return cuda_driver.native_driver(_index(device))

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def register(self, memory: Tensor) -> bool:
        # torch's copies need only the registration: they ask the driver what kind of memory an address is in.
        return cuda_driver.register_host_memory(memory.data_ptr(), memory.nbytes)

    def unregister(self, memory: Tensor) -> None:
        cuda_driver.unregister_host_memory(memory.data_ptr())

    def empty(self, stream: torch.cuda.Stream, nbytes: int) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=stream.device)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def export(self, stream: torch.cuda.Stream, tensor: Tensor) -> dict[str, Any]:
        # torch's own calls, without pickle: a message from another process must be plain data. Each call makes a
        # counter in shared memory, with one user. Memory that is freed while a counter is not 0 goes to torch's list of
        # blocks still in use (CudaIPCSentDataLimbo in CudaIPCTypes.h).
        storage: Any = tensor.untyped_storage()
        # torch records an event in the current stream, or synchronises the stream (on ROCm, and after 1000 exports).
        with torch.cuda.stream(stream):
            _, handle, nbytes, offset, counter, counter_offset, event, _ = storage._share_cuda_()
        return {
            "handle": handle,
            "bytes": nbytes,
            "offset": offset,
            "counter": counter,
            "counter_offset": counter_offset,
            "event": event,
        }

    def open(self, handle: dict[str, Any], device: torch.device) -> Tensor:
        # Map it for this rank's device even if the exporter's device is visible: a kernel takes tensors of one device.
        # Since CUDA 10.1 the driver also maps memory of devices that this process does not see.
        index = _index(device)
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            index,
            handle["handle"],
            handle["bytes"],
            handle["offset"],
            handle["counter"],
            handle["counter_offset"],
            handle["event"],
            False,  # no event to wait for: the exporter's message says when the memory is ready
        )
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)

    def close(self, stream: torch.cuda.Stream, windows: list[Tensor]) -> None:
        with torch.cuda.stream(stream):  # the end of torch's storage synchronises the current stream
            windows.clear()

    def decline(self, handle: dict[str, Any], device: torch.device) -> None:
        counters: Any = torch.UntypedStorage
        counters._release_ipc_counter(handle["counter"], handle["counter_offset"], device=device)

    def new_gate(self, device: torch.device) -> Gate | None:
        index = _index(device)
        return _words[index].gate(self) if _can_wait_for_values(index) else None

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[device])

    def resolve(self, stream: torch.cuda.Stream, future: torch.futures.Future[Any], value: Any) -> None:
        with torch.cuda.stream(stream):
            future.set_result(value)

    def nccl(self, device: torch.device, store: Any, rank: int, size: int) -> NcclGroup:
        return _Nccl(self, device, store, rank, size)


class _Words:
    """The words of one device's gates. Thread-safe.

    A word serves one gate after another, each with a value one larger. A stream that reaches the wait of an earlier
    gate late finds a later value, which ends the wait, too. The memory is never freed, since a stream may wait for it
    as long as the process lives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pages: list[Tensor] = []
        self._words: collections.deque[tuple[Any, int]] = collections.deque()  # each with its last gate's value

    def gate(self, device_api: CudaApi) -> _Gate:
        with self._lock:
            # A word is free once its last gate has opened: a device's write that is still to come would undo the next.
            for _ in range(len(self._words)):
                word, value = self._words.popleft()
                if word.value == value & 0xFFFFFFFF:
                    break
                self._words.append((word, value))
            else:
                page = device_api.pinned(_WORDS_BYTES).zero_()
                self._pages.append(page)
                addresses = range(page.data_ptr(), page.data_ptr() + _WORDS_BYTES, 4)
                self._words.extendleft((ctypes.c_uint32.from_address(address), 0) for address in addresses)
                word, value = self._words.popleft()
            self._words.append((word, value + 1))
        return _Gate(word, value + 1)


class _Gate:
    """See `Gate`. The address of memory that torch pins is the same on the device (unified addressing)."""

    def __init__(self, word: Any, value: int) -> None:
        self._word = word
        self._address = ctypes.addressof(word)
        self._value = value

    def hold(self, stream: torch.cuda.Stream) -> None:
        cuda_driver.wait_for_value(stream.cuda_stream, self._address, self._value)

    def open_after(self, stream: torch.cuda.Stream) -> None:
        cuda_driver.write_value(stream.cuda_stream, self._address, self._value)

    def open(self) -> None:
        self._word.value = self._value


# One page of the host's memory: 1024 gates may be closed at a time before a device gets another page.
_WORDS_BYTES = 4096
_words: dict[int, _Words] = collections.defaultdict(_Words)


@functools.cache
def _can_wait_for_values(index: int) -> bool:
    return cuda_driver.can_wait_for_values(index)


# Variables that ProcessGroupNCCL reads in its constructor. Other values could end the process. netfold's driver handles
# the deadlines and failures of these groups, and raises errors.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither aborts nor throws for a failed or overdue operation
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # if the device fails, only the watchdog's thread ends
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no second thread ends the process when the watchdog hangs
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # wait() orders streams and does not block the host
}
_nccl_environment_lock = threading.Lock()
# NCCL's own timeout. With the settings above it is only logged.
_NCCL_TIMEOUT = timedelta(days=1)
# The wait for an NCCL call that ends a group: the call hangs if a device does.
_NCCL_END_S = 10.0


class _Nccl:
    """See `NcclGroup`: a ProcessGroupNCCL outside of torch's world."""

    def __init__(self, device_api: CudaApi, device: torch.device, store: Any, rank: int, size: int) -> None:
        kind: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
        if kind is None:
            raise ValueError("NETFOLD_INTRA_HOST=nccl: this torch was built without NCCL; auto does without")
        options = kind.Options()
        options._timeout = _NCCL_TIMEOUT
        with _environment(_NCCL_ENVIRONMENT):
            self._group: Any = kind(store, rank, size, options)
        self._device_api = device_api
        self._device = device
        self._store = store
        self._size = size

    def reduce_scatter(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor, reduce: str) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, reduce.upper())
        with torch.cuda.stream(stream):
            self._group._reduce_scatter_base(output, source, options).wait()

    def all_gather(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            self._group._allgather_base(output, source, AllgatherOptions()).wait()

    def abort(self, reason: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._end(group.abort)
            wait_for_all(self._store, self._size, 0)  # count this rank, so that others do not wait for it

    def close(self, wait_s: float) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        wait_for_all(self._store, self._size, wait_s)
        # In torch 2.10 to 2.15 this flushes and destroys the communicator. Older versions abort it, which is harmless
        # once all devices are done.
        self._end(group.shutdown)

    def _end(self, call: Callable[[], None]) -> None:
        def run() -> None:
            self._device_api.enter(self._device)
            try:
                call()
            except RuntimeError as error:
                log.debug("NCCL's group did not end well: %s", error)

        thread = threading.Thread(target=run, name="netfold-nccl-end", daemon=True)
        thread.start()
        thread.join(_NCCL_END_S)


def wait_for_all(store: Any, size: int, wait_s: float) -> None:
    """Return once all of `size` ranks have called this, after `wait_s` at the latest, or when the store is gone."""
    give_up = time.monotonic() + wait_s
    try:
        here = store.add("closing", 1)
        while here < size and time.monotonic() < give_up:
            time.sleep(_POLL_S)
            here = store.add("closing", 0)
    except RuntimeError:
        # The process that serves the store has ended: it had counted all ranks, or its own wait was over.
        return


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set the environment variables `values` inside the context, and restore them at its end."""
    with _nccl_environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
