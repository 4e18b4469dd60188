"""The device layer of torch.cuda."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import AllgatherOptions

from netfold.torch.device import cuda_driver
from netfold.torch.device.layer import DeviceLayer, Inside

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}

# Handles of own streams that nobody has, by the device's index.
_free_streams: dict[int, list[int]] = collections.defaultdict(list)


def cuda_layer() -> DeviceLayer | None:
    """None where torch was built without CUDA or finds no device. A fork may come after: devices are counted by NVML,
    where there is one, and CUDA itself is not begun, as `torch.cuda.is_available` would."""
    return CudaLayer() if torch.cuda.device_count() > 0 else None


class CudaLayer:
    """See `DeviceLayer`. Events and streams are torch's own."""

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

    def future(self, device: torch.device) -> torch.futures.Future[Any]:
        return torch.futures.Future(devices=[device])

    def resolve(self, stream: torch.cuda.Stream, future: torch.futures.Future[Any], value: Any) -> None:
        with torch.cuda.stream(stream):
            future.set_result(value)

    def nccl(self, store: Any, rank: int, size: int, timeout_s: float) -> Inside:
        return _Nccl(store, rank, size, timeout_s)


class _Nccl:
    """See `Inside`: torch's own group, by itself."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        kind: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
        if kind is None:
            raise ValueError("NETFOLD_INSIDE=nccl: this torch was built without NCCL; auto does without")
        options = kind.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._group = kind(store, rank, size, options)

    def reduce_scatter(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor, reduce: str) -> None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCTIONS[reduce]
        with torch.cuda.stream(stream):
            self._group._reduce_scatter_base(output, source, options).wait()

    def all_gather(self, stream: torch.cuda.Stream, output: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            self._group._allgather_base(output, source, AllgatherOptions()).wait()

    def abort(self, reason: str) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.abort()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


@functools.cache
def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
