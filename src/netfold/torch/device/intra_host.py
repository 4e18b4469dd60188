"""all_reduce in three steps: a reduce-scatter among the GPUs of a host, an all_reduce of each shard among the ranks
that hold it on their hosts, an all-gather inside. What leaves a host is 1/L of what each of its L ranks would send.

By the i32 wire the values become integers on the GPU first, so that the bits are those of a host's own sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from netfold.communicator import Group
from netfold.torch.calls import Prepared
from netfold.torch.device import arithmetic, fixed_point
from netfold.torch.device.chunks import BLOCK_ELEMENTS
from netfold.torch.device.device_api import DeviceApi, Event, NcclGroup
from netfold.torch.device.host_staging import HostStaging

Tensor = torch.Tensor

# Below, two meetings of a host's ranks are taken to cost more than one collective of them all; that is not measured.
MIN_BYTES = 64 << 10
_NCCL_BYTES = 16 << 20
# Those of the dtypes that are reduced here for which NCCL has a datatype (ncclDataType_t): not int16.
_NCCL_DTYPES = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip

_NAMES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
}  # fmt: skip


class IntraHostReducer(Protocol):
    """Reductions among the ranks of one host, in one stream's order; all give pieces of one size and dtype."""

    chunk_bytes: int
    dtypes: frozenset[torch.dtype]  # others are staged, on every rank: ranks call with one dtype
    # Whether kernels wait for other ranks' kernels. Then a sum is made once its event has passed, and not before.
    kernels_wait: bool

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        """This rank's shard of the reduction: a view that is good until `gather`, which takes what is there then. It
        may be empty; it is as long as that of its peers on other hosts."""

    def gather(self, values: Tensor, deadline: float) -> None:
        """Every rank's shard, in its place."""

    def release(self, *, settled: bool) -> None:
        """No call comes any more. `settled`: whether the device is done with what it was given."""


class NcclReducer:
    """See `IntraHostReducer`: by NCCL."""

    chunk_bytes = _NCCL_BYTES
    dtypes = _NCCL_DTYPES
    kernels_wait = True

    def __init__(self, layer: DeviceApi, stream: Any, inside: NcclGroup, size: int) -> None:
        self._layer = layer
        self._stream = stream
        self._inside = inside
        self._size = size
        spare = size * BLOCK_ELEMENTS * 8
        self._whole = layer.empty(stream, _NCCL_BYTES + spare)
        self._shard = layer.empty(stream, _NCCL_BYTES // size + spare)

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        whole, shard = self._buffers(values)
        self._layer.copy(self._stream, whole[: values.numel()], values)
        # What is behind the values is reduced with them, and read by nobody.
        self._inside.reduce_scatter(self._stream, shard, whole, reduce)
        return shard

    def gather(self, values: Tensor, deadline: float) -> None:
        whole, shard = self._buffers(values)
        self._inside.all_gather(self._stream, whole, shard)
        self._layer.copy(self._stream, values, whole[: values.numel()])

    def release(self, *, settled: bool) -> None:
        """Nothing here is another process's."""

    def _buffers(self, values: Tensor) -> tuple[Tensor, Tensor]:
        each = -(-values.numel() // (self._size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        nbytes = each * values.element_size()
        return self._whole[: self._size * nbytes].view(values.dtype), self._shard[:nbytes].view(values.dtype)


class IntraHostPath:
    """One group's, for one device. Not thread-safe."""

    def __init__(
        self,
        group: Group,
        layer: DeviceApi,
        stream: Any,
        sums: IntraHostReducer,
        between: HostStaging | None,
        watch: Group | None,
    ) -> None:
        """`between`: among the ranks that have this one's place on their hosts; None where there is one host. `watch`:
        of the host's ranks where kernels wait for each other, for what the driver must hear of them meanwhile."""
        self._group = group
        self._layer = layer
        self._stream = stream
        self._sums = sums
        self._between = between
        self.watch = watch
        self.kernels_wait = sums.kernels_wait

    @property
    def streams(self) -> list[Any]:
        """Those that it gives work to."""
        between = self._between
        return [self._stream, *((between.out, between.back) if between is not None else ())]

    def release(self, *, settled: bool) -> None:
        """See `Sums.release`."""
        self._sums.release(settled=settled)

    def takes(self, call: Prepared) -> bool:
        """By what all ranks know alike. i8 rounds at random, natively."""
        if call.kind != "all_reduce" or call.inputs or call.outputs[0].nbytes < MIN_BYTES:
            return False
        dtype = _plain(call.outputs[0]).dtype
        if dtype not in self._sums.dtypes:
            return False
        return arithmetic.can_reduce(dtype, call.reduce, average=call.average) and self._wire(call) != "i8"

    def run(self, call: Prepared, ready: Sequence[Event], deadline: float) -> Event:
        """The event after which the result is in place. Its tensor holds its values after all of `ready`."""
        values = _plain(call.outputs[0])
        self._layer.keep(values, self._stream)
        for event in ready:
            self._stream.wait_event(event)
        sum_up: Callable[[Tensor, str, float], None] = self._fixed if self._wire(call) == "i32" else self._sum
        elements = self._sums.chunk_bytes // values.element_size()
        for piece in torch.split(values, elements):
            sum_up(piece, call.reduce, deadline)
        if call.average:
            self._layer.launch(self._stream, lambda: arithmetic.divide(values, self._group.size))
        done: Event = self._stream.record_event()
        return done

    def _wire(self, call: Prepared) -> str:
        """What this sum travels as; other reductions, and other dtypes, travel as they are."""
        tensor = call.outputs[0]
        if call.reduce != "sum" or tensor.dtype is not torch.float32:
            return ""
        return str(self._group.table.choose("all_reduce", tensor.nbytes).wire)

    def _sum(self, values: Tensor, reduce: str, deadline: float) -> None:
        shard = self._sums.scatter(values, reduce, deadline)
        if self._between is not None and len(shard):
            call = Prepared("all_reduce", dtype=_NAMES[shard.dtype], reduce=reduce, outputs=[shard])
            returned: list[Event] = []
            self._between.begin(call, self._stream.record_event(), deadline, returned.append)
            self._between.drain()
            self._stream.wait_event(returned[0])
        self._sums.gather(values, deadline)

    def _fixed(self, values: Tensor, reduce: str, deadline: float) -> None:
        layer, stream, headroom = self._layer, self._stream, fixed_point.headroom_bits(self._group.size)
        count = values.numel()
        found = self._integers(fixed_point.block_count(count))
        layer.launch(stream, lambda: found.copy_(fixed_point.magnitudes(values)))
        self._sum(found, "max", deadline)
        integers = self._integers(count)
        layer.launch(stream, lambda: found.copy_(fixed_point.exponents(found)))
        layer.launch(stream, lambda: integers.copy_(fixed_point.quantise(values, found, headroom)))
        self._sum(integers, reduce, deadline)
        layer.launch(stream, lambda: values.copy_(fixed_point.dequantise(integers, found, headroom)))

    def _integers(self, count: int) -> Tensor:
        return self._layer.empty(self._stream, 4 * count).view(torch.int32)


def _plain(tensor: Tensor) -> Tensor:
    """Flat; of bool its bytes, which reductions keep 0 or 1."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def host_groups(nodes: Sequence[int], rank: int) -> tuple[list[int], list[int], str]:
    """The ranks of this rank's host; those with its place on every host; and why there is nothing to do inside hosts,
    which is found alike by all."""
    hosts = [[each for each, node in enumerate(nodes) if node == host] for host in sorted(set(nodes))]
    mine = hosts[sorted(set(nodes)).index(nodes[rank])]
    counts = sorted({len(host) for host in hosts})
    if counts == [1]:
        return mine, [], "no two ranks share a host's memory"
    if len(counts) > 1:
        return mine, [], f"hosts have different numbers of ranks, {counts[0]} to {counts[-1]}"
    return mine, [host[mine.index(rank)] for host in hosts], ""
