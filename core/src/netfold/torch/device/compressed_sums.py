"""Sums of f32 by the i8 wire format, quantised on the device: a quarter of the bytes crosses the bus to the host.

    1. the greatest magnitude of each block: a max over the ranks        staged, n / 128 i32
    2. whether all blocks are finite: the host reads two numbers         8 bytes
    3. the values as bytes, or as i32 if a block is not finite           staged, n i8 or n i32
    4. back to floats

These are the steps of core/native/collective/quantised.cpp, with the same rounding. Each sum of a step is one staged
collective of integers. Step 2 is the only wait for the device that staged copies do not have: the host must know the
dtype of the next collective. Meanwhile the chunk before is on its way.

A chunk needs 5 bytes of device memory an element, and 24 to 44 bytes an element for temporaries of the arithmetic.
All of it is torch's, allocated in the path's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from netfold.communicator import Group
from netfold.torch.calls import Prepared
from netfold.torch.device import byte_format, fixed_point
from netfold.torch.device.device_api import DeviceApi, Event, Stream, wait_for
from netfold.torch.device.host_staging import HostStaging, advance_in_turn

Tensor = torch.Tensor

# Below this size, the second collective's copies are assumed to cost more than the bytes that they save; not measured.
MIN_BYTES = 64 << 10
# f32 elements of a chunk: 4 MB before it is quantised. Not measured.
CHUNK_ELEMENTS = 1 << 20
# `sum_chunk` yields as often on every rank.
YIELDS = 3
_FACT_BYTES = 8


def wire_of(group: Group, call: Prepared) -> str:
    """The wire dtype of an all_reduce by sum of f32; empty for other calls."""
    if call.kind != "all_reduce" or call.reduce != "sum" or call.outputs[0].dtype is not torch.float32:
        return ""
    return str(group.table.choose("all_reduce", call.outputs[0].nbytes).wire)


def make_compressed_sums(
    group: Group, device_api: DeviceApi, stream: Stream, staging: HostStaging
) -> CompressedSums | None:
    """Make the path; None if the group's wire dtype is another one."""
    if group.table.choose("all_reduce", MIN_BYTES).wire != "i8":
        return None
    return CompressedSums(group, device_api, stream, staging)


class CompressedSums:
    """The sums by i8 of one group and one device, which `staging` stages. Not thread-safe."""

    kernels_wait = False

    def __init__(self, group: Group, device_api: DeviceApi, stream: Stream, staging: HostStaging) -> None:
        self._group = group
        self._device_api = device_api
        self.stream = stream
        self._staging = staging
        self._levels = byte_format.levels_for(group.size)
        # Two chunks are under way.
        self._facts = [device_api.pinned(_FACT_BYTES) for _ in range(2)]
        self._chunks = 0

    def takes(self, call: Prepared) -> bool:
        """Whether this path runs the call; the same on all ranks."""
        return wire_of(self._group, call) == "i8" and call.outputs[0].nbytes >= MIN_BYTES

    def run(self, call: Prepared, ready: Sequence[Event], deadline: float) -> Event:
        """Run the call after all events of `ready`. Returns the event after which the result is in place.

        call.inputs: a residual, as long as the tensor, or nothing. See core/native/collective/quantised.cpp.
        """
        for tensor in (*call.inputs, *call.outputs):
            self._device_api.keep(tensor, self.stream)
        for event in ready:
            self.stream.wait_event(event)
        values, *residual = [tensor.detach().reshape(-1) for tensor in (*call.outputs, *call.inputs)]
        parts = [torch.split(tensor, CHUNK_ELEMENTS) for tensor in (values, *residual)]
        ranks = self._group.size if call.average else 1
        advance_in_turn(self.sum_chunk(*chunk, ranks=ranks, deadline=deadline) for chunk in zip(*parts, strict=True))
        done: Event = self.stream.record_event()
        return done

    def sum_chunk(
        self, values: Tensor, residual: Tensor | None = None, *, ranks: int = 1, deadline: float
    ) -> Iterator[None]:
        """Sum `values`, [n] f32, in place, in the stream's order. Yields `YIELDS` times, while it is on the way.

        ranks: what the sum is divided by.

        Two chunks may be under way, in one order on all ranks. No values: yields as often.
        """
        if not values.numel():
            yield from (None for _ in range(YIELDS))
            return
        device_api, stream, group = self._device_api, self.stream, self._group
        if residual is not None:
            device_api.launch(stream, lambda: values.add_(residual))
        agreed = device_api.empty(stream, 4 * fixed_point.block_count(values.numel())).view(torch.int32)
        device_api.launch(stream, lambda: agreed.copy_(fixed_point.magnitudes(values)))
        greatest = Prepared("all_reduce", dtype="i32", reduce="max", outputs=[agreed])
        yield from self._staging.between_steps(greatest, stream, deadline)
        self._chunks += 1
        key = byte_format.rounding_key(self._chunks & 0xFFFFFFFF, group.rank)
        facts = self._facts[self._chunks % 2]
        found = device_api.empty(stream, _FACT_BYTES)
        device_api.launch(stream, lambda: found.view(torch.int32).copy_(byte_format.facts(agreed)))
        device_api.copy(stream, facts, found)
        known = stream.record_event()
        yield
        wait_for(known, deadline, group.rank, "all_reduce by i8: the blocks' magnitudes")
        non_finite, f64 = (bool(fact) for fact in facts.view(torch.int32).tolist())
        if non_finite:
            yield from self._sum_as_i32(values, residual, agreed, ranks, deadline)
        else:
            yield from self._sum_as_i8(values, residual, agreed, key, ranks, deadline, f64=f64)

    def _sum_as_i8(
        self,
        values: Tensor,
        residual: Tensor | None,
        agreed: Tensor,
        key: int,
        ranks: int,
        deadline: float,
        *,
        f64: bool,
    ) -> Iterator[None]:
        device_api, stream, levels = self._device_api, self.stream, self._levels
        integers = device_api.empty(stream, values.numel()).view(torch.int8)
        device_api.launch(stream, lambda: integers.copy_(byte_format.quantise(values, agreed, levels, key, f64=f64)))
        if residual is not None:
            device_api.launch(
                stream,
                lambda: torch.sub(values, byte_format.dequantise(integers, agreed, levels, f64=f64), out=residual),
            )
        total = Prepared("all_reduce", dtype="i8", reduce="sum", outputs=[integers])
        yield from self._staging.between_steps(total, stream, deadline)
        device_api.launch(
            stream, lambda: values.copy_(byte_format.dequantise(integers, agreed, levels * ranks, f64=f64))
        )

    def _sum_as_i32(
        self, values: Tensor, residual: Tensor | None, agreed: Tensor, ranks: int, deadline: float
    ) -> Iterator[None]:
        """A byte cannot count NaN and Inf. The residual becomes 0."""
        device_api, stream = self._device_api, self.stream
        headroom = fixed_point.headroom_bits(self._group.size)
        if residual is not None:
            device_api.launch(stream, lambda: residual.zero_())
        integers = device_api.empty(stream, 4 * values.numel()).view(torch.int32)
        device_api.launch(stream, lambda: agreed.copy_(fixed_point.exponents(agreed)))
        device_api.launch(stream, lambda: integers.copy_(fixed_point.quantise(values, agreed, headroom)))
        total = Prepared("all_reduce", dtype="i32", reduce="sum", outputs=[integers])
        yield from self._staging.between_steps(total, stream, deadline)
        device_api.launch(stream, lambda: values.copy_(fixed_point.dequantise(integers, agreed, headroom, ranks)))
