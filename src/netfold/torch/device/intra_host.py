"""all_reduce in three steps: reduce-scatter in a host, all_reduce of each shard between hosts, all-gather in a host.

The all_reduce runs among the ranks that have the same shard on their hosts. Each of a host's L ranks sends 1/L of the
bytes that it would send alone. For the i32 wire format the GPU quantises the values first, so the bits equal those of a
sum made on hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from netfold.communicator import Group
from netfold.torch.calls import DTYPE_NAMES, Prepared
from netfold.torch.device import arithmetic, fixed_point
from netfold.torch.device.chunks import BLOCK_ELEMENTS
from netfold.torch.device.device_api import DeviceApi, Event, NcclGroup
from netfold.torch.device.host_staging import HostStaging

Tensor = torch.Tensor

# Below this size, two barriers of a host's ranks are assumed to cost more than one collective of all ranks; not
# measured.
MIN_BYTES = 64 << 10
_NCCL_BYTES = 16 << 20
# The dtypes of `arithmetic.DTYPES` for which NCCL has a datatype (ncclDataType_t): all but int16.
_NCCL_DTYPES = arithmetic.DTYPES - {torch.int16}


class IntraHostReducer(Protocol):
    """Reductions among the ranks of one host, in one stream's order. All ranks pass chunks of one size and dtype."""

    chunk_bytes: int
    dtypes: frozenset[torch.dtype]  # other dtypes are staged, on every rank
    # Whether kernels wait for other ranks' kernels. Then only the passing of its event shows that a sum is complete.
    kernels_wait: bool

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        """Reduce-scatter `values`. Returns this rank's shard, a view that is valid until `gather`, which sends it.

        The shard may be empty. It is as long as the same shard on other hosts.
        """

    def gather(self, values: Tensor, deadline: float) -> None:
        """All-gather the shards into `values`."""

    def release(self, *, settled: bool) -> None:
        """Free the resources. settled: the device has finished all work."""


class NcclReducer:
    """An `IntraHostReducer` by NCCL."""

    chunk_bytes = _NCCL_BYTES
    dtypes = _NCCL_DTYPES
    kernels_wait = True

    def __init__(self, device_api: DeviceApi, stream: Any, nccl_group: NcclGroup, size: int) -> None:
        self._device_api = device_api
        self._stream = stream
        self._nccl_group = nccl_group
        self._size = size
        spare = size * BLOCK_ELEMENTS * 8
        self._whole = device_api.empty(stream, _NCCL_BYTES + spare)
        self._shard = device_api.empty(stream, _NCCL_BYTES // size + spare)

    def scatter(self, values: Tensor, reduce: str, deadline: float) -> Tensor:
        whole, shard = self._buffers(values)
        self._device_api.copy(self._stream, whole[: values.numel()], values)
        # The padding after the values is reduced with them and never read.
        self._nccl_group.reduce_scatter(self._stream, shard, whole, reduce)
        return shard

    def gather(self, values: Tensor, deadline: float) -> None:
        whole, shard = self._buffers(values)
        self._nccl_group.all_gather(self._stream, whole, shard)
        self._device_api.copy(self._stream, values, whole[: values.numel()])

    def release(self, *, settled: bool) -> None:
        """Do nothing: no memory here is shared with other processes."""

    def _buffers(self, values: Tensor) -> tuple[Tensor, Tensor]:
        each = -(-values.numel() // (self._size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        nbytes = each * values.element_size()
        return self._whole[: self._size * nbytes].view(values.dtype), self._shard[:nbytes].view(values.dtype)


class IntraHostPath:
    """The intra-host path of one group and one device. Not thread-safe."""

    def __init__(
        self,
        group: Group,
        device_api: DeviceApi,
        stream: Any,
        sums: IntraHostReducer,
        between: HostStaging | None,
        watch: Group | None,
    ) -> None:
        """Make the path.

        between: stages among the ranks with this rank's index on their hosts; None with one host.
        watch: a group of the host's ranks in which the driver detects failures while kernels wait for each other.
        """
        self._group = group
        self._device_api = device_api
        self._stream = stream
        self._sums = sums
        self._between = between
        self.watch = watch
        self.kernels_wait = sums.kernels_wait

    @property
    def streams(self) -> list[Any]:
        """All streams that this path uses."""
        between = self._between
        return [self._stream, *((between.out, between.back) if between is not None else ())]

    def release(self, *, settled: bool) -> None:
        """See `IntraHostReducer.release`."""
        self._sums.release(settled=settled)

    def takes(self, call: Prepared) -> bool:
        """Whether this path runs the call; the same on all ranks. Excludes i8, which natively rounds at random."""
        if call.kind != "all_reduce" or call.inputs or call.outputs[0].nbytes < MIN_BYTES:
            return False
        dtype = _plain(call.outputs[0]).dtype
        if dtype not in self._sums.dtypes:
            return False
        return arithmetic.can_reduce(dtype, call.reduce, average=call.average) and self._wire(call) != "i8"

    def run(self, call: Prepared, ready: Sequence[Event], deadline: float) -> Event:
        """Run the call after all events of `ready`. Returns the event after which the result is in place."""
        values = _plain(call.outputs[0])
        self._device_api.keep(values, self._stream)
        for event in ready:
            self._stream.wait_event(event)
        sum_up: Callable[[Tensor, str, float], None] = self._fixed if self._wire(call) == "i32" else self._sum
        elements = self._sums.chunk_bytes // values.element_size()
        for piece in torch.split(values, elements):
            sum_up(piece, call.reduce, deadline)
        if call.average:
            self._device_api.launch(self._stream, lambda: arithmetic.divide(values, self._group.size))
        done: Event = self._stream.record_event()
        return done

    def _wire(self, call: Prepared) -> str:
        """The wire dtype of a sum of f32; empty for other reductions and dtypes."""
        tensor = call.outputs[0]
        if call.reduce != "sum" or tensor.dtype is not torch.float32:
            return ""
        return str(self._group.table.choose("all_reduce", tensor.nbytes).wire)

    def _sum(self, values: Tensor, reduce: str, deadline: float) -> None:
        shard = self._sums.scatter(values, reduce, deadline)
        if self._between is not None and len(shard):
            call = Prepared("all_reduce", dtype=DTYPE_NAMES[shard.dtype], reduce=reduce, outputs=[shard])
            returned: list[Event] = []
            self._between.begin(call, self._stream.record_event(), deadline, returned.append)
            self._between.drain()
            self._stream.wait_event(returned[0])
        self._sums.gather(values, deadline)

    def _fixed(self, values: Tensor, reduce: str, deadline: float) -> None:
        device_api, stream, headroom = self._device_api, self._stream, fixed_point.headroom_bits(self._group.size)
        count = values.numel()
        found = self._integers(fixed_point.block_count(count))
        device_api.launch(stream, lambda: found.copy_(fixed_point.magnitudes(values)))
        self._sum(found, "max", deadline)
        integers = self._integers(count)
        device_api.launch(stream, lambda: found.copy_(fixed_point.exponents(found)))
        device_api.launch(stream, lambda: integers.copy_(fixed_point.quantise(values, found, headroom)))
        self._sum(integers, reduce, deadline)
        device_api.launch(stream, lambda: values.copy_(fixed_point.dequantise(integers, found, headroom)))

    def _integers(self, count: int) -> Tensor:
        return self._device_api.empty(self._stream, 4 * count).view(torch.int32)


def _plain(tensor: Tensor) -> Tensor:
    """Flatten the tensor; view bool as bytes, which reductions keep 0 or 1."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def host_groups(nodes: Sequence[int], rank: int) -> tuple[list[int], list[int], str]:
    """Split ranks by host. The reason is the same on all ranks.

    Returns the ranks of this rank's host, the ranks with this rank's index on every host, and the reason why the
    intra-host path is impossible, or an empty string.
    """
    hosts = [[each for each, node in enumerate(nodes) if node == host] for host in sorted(set(nodes))]
    mine = hosts[sorted(set(nodes)).index(nodes[rank])]
    counts = sorted({len(host) for host in hosts})
    if counts == [1]:
        return mine, [], "no two ranks share a host's memory"
    if len(counts) > 1:
        return mine, [], f"hosts have different numbers of ranks, {counts[0]} to {counts[-1]}"
    return mine, [host[mine.index(rank)] for host in hosts], ""
