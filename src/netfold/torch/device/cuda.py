"""The device layer of torch.cuda."""

from __future__ import annotations

import collections
import contextlib
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
from netfold.torch.device.device_api import DeviceApi, NcclGroup

log = logging.getLogger("netfold")

Tensor = torch.Tensor

_LOOK_S = 0.005
_REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

# Handles of own streams that nobody has, by the device's index.
_free_streams: dict[int, list[int]] = collections.defaultdict(list)


def cuda_api() -> DeviceApi | None:
    """None where torch was built without CUDA or finds no device. A fork may come after: devices are counted by NVML,
    where there is one, and CUDA itself is not begun, as `torch.cuda.is_available` would."""
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
        # torch.cuda.device makes no context on the device that it restores; torch.cuda.stream and set_device do.
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
        # torch.cuda.Stream(device) is one of 32 that all code of the process shares, by turns.
        index = _index(device)
        handle = _free_streams[index].pop() if _free_streams[index] else cuda_driver.create_stream(index)
        if handle is None:
            # Without CUDA's driver: from the other pool of torch's, from which users take less often.
            return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        stream = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
        # Not destroyed: torch's allocator records events in streams for as long as memory lives that they used.
        weakref.finalize(stream, _free_streams[index].append, handle).atexit = False
        return stream

    def launch(self, stream: torch.cuda.Stream, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            work()

    def copy(self, stream: torch.cuda.Stream, to: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream), torch.no_grad():
            to.copy_(source, non_blocking=True)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, stream: torch.cuda.Stream, nbytes: int) -> Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=stream.device)

    def keep(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        tensor.record_stream(stream)

    def export(self, tensor: Tensor) -> dict[str, Any]:
        # torch's own calls for this, without the pickle around them: what comes from another process is data here.
        # Each call makes a counter of its own, in shared memory, with one user. What is freed while any of them is not
        # zero goes to torch's list of blocks that others still use (CudaIPCSentDataLimbo in CudaIPCTypes.h).
        storage: Any = tensor.untyped_storage()
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
        # Mapped for this rank's own device, also where that of the exporter is visible: a kernel takes tensors of one
        # device. The driver does so for devices that the process does not see, too, since CUDA 10.1.
        index = _index(device)
        storage: Any = torch.UntypedStorage._new_shared_cuda(
            index,
            handle["handle"],
            handle["bytes"],
            handle["offset"],
            handle["counter"],
            handle["counter_offset"],
            handle["event"],
            False,  # no event to wait for: who exports says when the memory is ready
        )
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)

    def decline(self, handle: dict[str, Any], device: torch.device) -> None:
        counters: Any = torch.UntypedStorage
        counters._release_ipc_counter(handle["counter"], handle["counter_offset"], device=device)

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[device])

    def resolve(self, stream: torch.cuda.Stream, future: torch.futures.Future[Any], value: Any) -> None:
        with torch.cuda.stream(stream):
            future.set_result(value)

    def nccl(self, device: torch.device, store: Any, rank: int, size: int) -> NcclGroup:
        return _Nccl(self, device, store, rank, size)


# What ProcessGroupNCCL reads from the environment in its constructor, and what of it would end the process. Deadlines
# and failures of the groups that are made here are those of netfold's driver, and end with an error.
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog neither aborts nor throws when an operation fails or is late
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the watchdog's thread ends where the device fails, and nothing else does
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no second thread that ends the process when the watchdog is silent
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # wait() orders streams, and does not hold the host
}
_nccl_environment_lock = threading.Lock()
# NCCL's own timeout, which with the above is only logged.
_NCCL_TIMEOUT = timedelta(days=1)
# For a call of NCCL's that ends a group: it may hang where a device does.
_NCCL_END_S = 10.0


class _Nccl:
    """See `NcclGroup`: torch's own group, by itself."""

    def __init__(self, layer: CudaApi, device: torch.device, store: Any, rank: int, size: int) -> None:
        kind: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
        if kind is None:
            raise ValueError("NETFOLD_INTRA_HOST=nccl: this torch was built without NCCL; auto does without")
        options = kind.Options()
        options._timeout = _NCCL_TIMEOUT
        with _environment(_NCCL_ENVIRONMENT):
            self._group: Any = kind(store, rank, size, options)
        self._layer = layer
        self._device = device
        self._store = store
        self._size = size

    def reduce_scatter(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor, reduce: str) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCTIONS[reduce]
        with torch.cuda.stream(stream):
            self._group._reduce_scatter_base(output, source, options).wait()

    def all_gather(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            self._group._allgather_base(output, source, AllgatherOptions()).wait()

    def abort(self, reason: str) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._end(group.abort)
            wait_for_all(self._store, self._size, 0)  # others wait for this rank no longer

    def close(self, wait_s: float) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        wait_for_all(self._store, self._size, wait_s)
        # Of torch 2.10 to 2.15 this flushes the communicator and destroys it. Older ones abort it, which does no harm
        # once all devices are done.
        self._end(group.shutdown)

    def _end(self, call: Callable[[], None]) -> None:
        def run() -> None:
            self._layer.enter(self._device)
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
            time.sleep(_LOOK_S)
            here = store.add("closing", 0)
    except RuntimeError:
        # The process that served the store has ended, and it ended after it had seen all, or had waited long enough.
        return


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Have the environment hold `values` as long as the context lasts; what the user has set comes back."""
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
