"""Collectives in three steps: inside each host, between hosts, inside each host again.

Ranks with the same position on their hosts are peers. They run the step between hosts, by the staged path:

    all_reduce       reduce-scatter in a host; all_reduce of each shard among peers; all-gather in a host
    reduce_scatter   each rank reduces each of its peers' parts over its host; reduce_scatter among peers
    all_gather       all_gather among peers; all_gather of the peers' blocks in a host

Each of a host's L ranks sends 1/L of the bytes that it would send alone. For the i32 wire format the GPU quantises the
values first, so the bits equal those of a sum made on hosts. The other wire formats are for the step between hosts.

A tensor is processed in chunks, of which two are under way: while one is between hosts, the next one is inside the
hosts. A chunk is a generator, which yields while it is between hosts. All ranks advance their chunks in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from netfold.communicator import Group
from netfold.torch.calls import DTYPE_NAMES, Prepared
from netfold.torch.device import arithmetic, fixed_point, ipc
from netfold.torch.device.arithmetic import Operator
from netfold.torch.device.chunks import BLOCK_ELEMENTS, as_bytes
from netfold.torch.device.compressed_sums import make_compressed_sums, wire_of
from netfold.torch.device.device_api import DeviceApi, Event, NcclGroup
from netfold.torch.device.host_staging import HostStaging, advance_in_turn

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

    shares: bool  # whether `share` exists: all_gather and reduce_scatter, too

    def announce(self, signature: str) -> None:
        """A call begins. Where this needs no further message, ranks whose signatures differ get an error."""

    def scatter(self, values: Tensor, operator: Operator, slot: int, deadline: float) -> Tensor:
        """Reduce-scatter `values`. Returns this rank's shard, a view that is valid until `gather`, which sends it.

        slot: 0 to `ipc.SLOTS` - 1, in turn. Two chunks may be between `scatter` and `gather`, in one order.
        The shard may be empty. It is as long as the same shard on other hosts.
        """

    def gather(self, values: Tensor, slot: int, deadline: float) -> None:
        """All-gather the shards of `slot` into `values`."""

    def release(self, *, settled: bool) -> None:
        """Free the resources. settled: the device has finished all work."""


class NcclReducer:
    """An `IntraHostReducer` by NCCL."""

    chunk_bytes = _NCCL_BYTES
    dtypes = _NCCL_DTYPES
    kernels_wait = True
    shares = False

    def __init__(self, device_api: DeviceApi, stream: Any, nccl_group: NcclGroup, size: int) -> None:
        self._device_api = device_api
        self._stream = stream
        self._nccl_group = nccl_group
        self._size = size
        spare = size * BLOCK_ELEMENTS * 8
        self._whole = device_api.empty(stream, _NCCL_BYTES + spare)
        # The stream orders the uses of `_whole`. A shard is also used between hosts.
        self._shards = [device_api.empty(stream, _NCCL_BYTES // size + spare) for _ in range(ipc.SLOTS)]

    def announce(self, signature: str) -> None:
        """Do nothing: ranks whose calls differ wait for each other until the deadline."""

    def scatter(self, values: Tensor, operator: Operator, slot: int, deadline: float) -> Tensor:
        whole, shard = self._buffers(values, slot)
        self._device_api.copy(self._stream, whole[: values.numel()], values)
        # The padding after the values is reduced with them. By i8 it must not raise the magnitude of its block.
        if values.numel() < len(whole):
            self._device_api.launch(self._stream, lambda: whole[values.numel() :].zero_())
        if operator.scale != 1.0:
            self._device_api.launch(self._stream, lambda: whole.mul_(operator.scale))
        self._nccl_group.reduce_scatter(self._stream, shard, whole, operator.name)
        return shard

    def gather(self, values: Tensor, slot: int, deadline: float) -> None:
        whole, shard = self._buffers(values, slot)
        self._nccl_group.all_gather(self._stream, whole, shard)
        self._device_api.copy(self._stream, values, whole[: values.numel()])

    def release(self, *, settled: bool) -> None:
        """Do nothing: no memory here is shared with other processes."""

    def _buffers(self, values: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        each = -(-values.numel() // (self._size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        nbytes = each * values.element_size()
        return self._whole[: self._size * nbytes].view(values.dtype), self._shards[slot][:nbytes].view(values.dtype)


class IntraHostPath:
    """The intra-host path of one group and one device. Not thread-safe."""

    def __init__(
        self,
        group: Group,
        device_api: DeviceApi,
        stream: Any,
        sums: IntraHostReducer,
        between: HostStaging | None,
        among: Group | None,
        watch: Group | None,
    ) -> None:
        """Make the path.

        between: stages among this rank's peers, in the order of hosts; None with one host.
        among: the group of the peers; None with one host.
        watch: a group of the host's ranks in which the driver detects failures while kernels wait for each other.
        """
        self._group = group
        self._device_api = device_api
        self.stream = stream
        self._sums = sums
        self.between = between
        self._compressed = make_compressed_sums(among, device_api, stream, between) if among and between else None
        self.watch = watch
        self.kernels_wait = sums.kernels_wait
        # By host, then by position: the ranks of the group.
        self._hosts = ranks_by_host(group.nodes)
        (self._position,) = (host.index(group.rank) for host in self._hosts if group.rank in host)
        self._slot = 0

    @property
    def streams(self) -> list[Any]:
        """All streams that this path uses."""
        between = self.between
        return [self.stream, *((between.out, between.back) if between is not None else ())]

    def release(self, *, settled: bool) -> None:
        """See `IntraHostReducer.release`."""
        self._sums.release(settled=settled)

    def takes(self, call: Prepared) -> bool:
        """Whether this path runs the call; the same on all ranks. A residual is of this rank's values alone."""
        if call.kind == "all_reduce":
            if call.inputs or call.outputs[0].nbytes < MIN_BYTES:
                return False
            return self._can_reduce(call, call.outputs[0])
        if call.kind not in ("all_gather", "reduce_scatter") or not self._sums.shares:
            return False
        # All ranks know the sizes of all parts.
        tensors = [*call.inputs, *call.outputs]
        if len({tensor.nbytes for tensor in tensors}) > 1 or tensors[0].nbytes * self._group.size < MIN_BYTES:
            return False
        return call.kind == "all_gather" or self._can_reduce(call, tensors[0])

    def _can_reduce(self, call: Prepared, tensor: Tensor) -> bool:
        dtype = _plain(tensor).dtype
        return dtype in self._sums.dtypes and arithmetic.can_reduce(dtype, call.reduce, average=call.average)

    def run(self, call: Prepared, ready: Sequence[Event], deadline: float) -> Event:
        """Run the call after all events of `ready`. Returns the event after which the result is in place."""
        tensors = [*call.inputs, *call.outputs]
        for tensor in tensors:
            self._device_api.keep(tensor, self.stream)
        for event in ready:
            self.stream.wait_event(event)
        self._sums.announce(_signature(call, tensors[0].numel()))
        chunks = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
        }
        advance_in_turn(chunks[call.kind](call, deadline))
        if call.average and wire_of(self._group, call) != "i32":
            result = _plain(call.outputs[0])
            self._device_api.launch(self.stream, lambda: arithmetic.divide(result, self._group.size))
        done: Event = self.stream.record_event()
        return done

    # --- chunks ----------------------------------------------------------------------------------------------------

    def _all_reduce(self, call: Prepared, deadline: float) -> Iterator[Iterator[None]]:
        values = _plain(call.outputs[0])
        operator = arithmetic.operator_of(call.reduce, self._group.size, average=call.average)
        sum_up: Callable[[Tensor, Operator, float], Iterator[None]] = self._sum
        wire = wire_of(self._group, call)
        if wire == "i32":
            sum_up = partial(self._fixed, ranks=self._group.size if call.average else 1)
            operator = Operator(call.reduce)
        elif wire == "i8":
            sum_up = self._sum_by_bytes
        local = len(self._hosts[0])
        elements = self._sums.chunk_bytes // values.element_size()
        if self.between is not None:  # a shard in one slot
            shard = Prepared("all_reduce", outputs=[values])
            elements = min(elements, local * self.between.elements_a_slot(shard))
        for piece in torch.split(values, _whole_blocks(elements, local)):
            yield sum_up(piece, operator, deadline)

    def _sum(self, values: Tensor, operator: Operator, deadline: float) -> Iterator[None]:
        slot = self._next_slot()
        shard = self._sums.scatter(values, operator, slot, deadline)
        if len(shard):
            peers = Prepared("all_reduce", dtype=DTYPE_NAMES[shard.dtype], reduce=operator.name, outputs=[shard])
            yield from self._among_peers(peers, deadline)
        elif self.between is not None:
            yield  # ranks with and without a shard advance alike
        self._sums.gather(values, slot, deadline)

    def _sum_by_bytes(self, values: Tensor, operator: Operator, deadline: float) -> Iterator[None]:
        """Sum in floats inside the hosts, and by i8 between them."""
        slot = self._next_slot()
        shard = self._sums.scatter(values, operator, slot, deadline)
        if self._compressed is not None:
            yield from self._compressed.sum_chunk(shard, deadline=deadline)
        self._sums.gather(values, slot, deadline)

    def _fixed(self, values: Tensor, operator: Operator, deadline: float, *, ranks: int) -> Iterator[None]:
        device_api, stream, headroom = self._device_api, self.stream, fixed_point.headroom_bits(self._group.size)
        count = values.numel()
        found = self._integers(fixed_point.block_count(count))
        device_api.launch(stream, lambda: found.copy_(fixed_point.magnitudes(values)))
        yield from self._sum(found, Operator("max"), deadline)
        integers = self._integers(count)
        device_api.launch(stream, lambda: found.copy_(fixed_point.exponents(found)))
        device_api.launch(stream, lambda: integers.copy_(fixed_point.quantise(values, found, headroom)))
        yield from self._sum(integers, operator, deadline)
        device_api.launch(stream, lambda: values.copy_(fixed_point.dequantise(integers, found, headroom, ranks)))

    def _all_gather(self, call: Prepared, deadline: float) -> Iterator[Iterator[None]]:
        own, outputs = as_bytes(call.inputs[0]), [as_bytes(tensor) for tensor in call.outputs]
        nbytes = self._sums.chunk_bytes // len(self._hosts)
        for begin in range(0, own.numel(), _whole_blocks(nbytes, 1)):
            end = begin + _whole_blocks(nbytes, 1)
            yield self._gather_chunk(own[begin:end], [each[begin:end] for each in outputs], deadline)

    def _gather_chunk(self, own: Tensor, outputs: Sequence[Tensor], deadline: float) -> Iterator[None]:
        mine = [outputs[host[self._position]] for host in self._hosts]
        if self.between is None:
            self._device_api.copy(self.stream, mine[0], own)
        else:
            yield from self._among_peers(Prepared("all_gather", inputs=[own], outputs=mine), deadline)
        shared = self._shared(mine, deadline)
        for position, blocks in enumerate(shared):
            for host, block in zip(self._hosts, blocks, strict=True):
                if position != self._position:
                    self._device_api.copy(self.stream, outputs[host[position]], block)

    def _reduce_scatter(self, call: Prepared, deadline: float) -> Iterator[Iterator[None]]:
        output, parts = _plain(call.outputs[0]), [_plain(tensor) for tensor in call.inputs]
        operator = arithmetic.operator_of(call.reduce, self._group.size, average=call.average)
        elements = _whole_blocks(self._sums.chunk_bytes // (len(parts) * output.element_size()), 1)
        for begin in range(0, output.numel(), elements):
            end = begin + elements
            yield self._scatter_chunk(output[begin:end], [each[begin:end] for each in parts], operator, deadline)

    def _scatter_chunk(
        self, output: Tensor, parts: Sequence[Tensor], operator: Operator, deadline: float
    ) -> Iterator[None]:
        shared = self._shared(parts, deadline)
        sums: Any = self._sums
        shards = [sums.reduce_part(shared, host[self._position], operator) for host in self._hosts]
        if self.between is None:
            self._device_api.copy(self.stream, output, shards[0])
            return
        dtype = DTYPE_NAMES[output.dtype]
        peers = Prepared("reduce_scatter", dtype=dtype, reduce=operator.name, inputs=shards, outputs=[output])
        yield from self._among_peers(peers, deadline)

    def _shared(self, values: Sequence[Tensor], deadline: float) -> list[list[Tensor]]:
        sums: Any = self._sums
        shared: list[list[Tensor]] = sums.share(values, self._next_slot(), deadline)
        return shared

    def _among_peers(self, call: Prepared, deadline: float) -> Iterator[None]:
        """Run a call among this rank's peers, after the stream's work so far. Yields while it is on the way."""
        if self.between is None:
            return
        yield from self.between.between_steps(call, self.stream, deadline)

    def _next_slot(self) -> int:
        self._slot = (self._slot + 1) % ipc.SLOTS
        return self._slot

    def _integers(self, count: int) -> Tensor:
        return self._device_api.empty(self.stream, 4 * count).view(torch.int32)


def _signature(call: Prepared, elements: int) -> str:
    """Values that must be the same on all ranks."""
    reduce = "" if call.kind == "all_gather" else f" by {'mean' if call.average else call.reduce}"
    return f"{call.kind} of {elements} {call.dtype}{reduce}"


def _whole_blocks(elements: int, parts: int) -> int:
    """The largest multiple of `parts` blocks up to `elements`, at least one."""
    return max(1, elements // (parts * BLOCK_ELEMENTS)) * parts * BLOCK_ELEMENTS


def _plain(tensor: Tensor) -> Tensor:
    """Flatten the tensor; view bool as bytes, which reductions keep 0 or 1."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8) if flat.dtype is torch.bool else flat


def host_groups(nodes: Sequence[int], rank: int) -> tuple[list[int], list[int], str]:
    """Split ranks by host. The reason is the same on all ranks.

    Returns the ranks of this rank's host, the ranks with this rank's index on every host, and the reason why the
    intra-host path is impossible, or an empty string.
    """
    hosts = ranks_by_host(nodes)
    (mine,) = (host for host in hosts if rank in host)
    counts = sorted({len(host) for host in hosts})
    if counts == [1]:
        return mine, [], "no two ranks share a host's memory"
    if len(counts) > 1:
        return mine, [], f"hosts have different numbers of ranks, {counts[0]} to {counts[-1]}"
    return mine, [host[mine.index(rank)] for host in hosts], ""


def ranks_by_host(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their numbers."""
    return [[rank for rank, node in enumerate(nodes) if node == host] for host in sorted(set(nodes))]
