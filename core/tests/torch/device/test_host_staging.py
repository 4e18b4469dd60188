"""Collectives on a device's memory through the host, on fake devices that run actions as late or early as they can."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import ORDERS, distinct, on_devices, reduce_options  # noqa: E402
from load import seconds  # noqa: E402
from ranks import values  # noqa: E402

pytestmark = pytest.mark.torch

SIZE = 3
# Slots of 40 KB: what is tested is many pieces long.
SMALL = {"pinned_bytes": 120 << 10, "intra_host": "off"}
COUNT = 50_001


def total(count: int, size: int = SIZE) -> Any:
    return sum(distinct(rank, count) for rank in range(size))


def every_collective(group: Any, device_api: Any) -> None:
    """All of them under way before any is waited for; kernels before and after, in the caller's stream."""
    rank, size = group.rank(), group.size()

    def late(values: Any) -> Any:
        """A tensor that gets its values from a kernel."""
        tensor = device_api.tensor(torch.full_like(values, -1))
        device_api.compute(lambda: tensor.copy_(values))
        return tensor

    def blank(count: int) -> Any:
        return late(torch.full((count,), -2.0))  # the kernel that writes this must not come after the result

    mine = distinct(rank, COUNT)
    summed, cast, reduced = late(mine), late(mine if rank == 1 else torch.zeros(COUNT)), late(mine)
    outs = [blank(COUNT - each) for each in range(size)]
    scattered, own, swapped = blank(COUNT), blank(COUNT), [blank(7 * rank + 1000 * each) for each in range(size)]
    gathered = [blank(COUNT) for _ in range(size)] if rank == 2 else []
    root = dist.BroadcastOptions()
    root.rootRank = 1
    to_two = dist.ReduceOptions()
    to_two.rootRank = 2
    gather, scatter = dist.GatherOptions(), dist.ScatterOptions()
    gather.rootRank, scatter.rootRank = 2, 0
    works = [
        group.allreduce([summed], reduce_options()),
        group.broadcast([cast], root),
        group.reduce([reduced], to_two),
        group.allgather([outs], [late(mine[: COUNT - rank])]),
        group.reduce_scatter([own], [[late(mine + 7 * each) for each in range(size)]]),
        group.gather([gathered] if gathered else [], [late(mine)], gather),
        group.scatter([scattered], [[late(mine + 3 * each) for each in range(size)]] if rank == 0 else [], scatter),
        group.alltoall(swapped, [late(mine[: 7 * each + 1000 * rank] + each) for each in range(size)]),
    ]
    found = []
    for work in works:
        work.wait()
    for tensor in (summed, cast, reduced, *outs, own, *gathered, scattered, *swapped):
        after = device_api.tensor(torch.full_like(tensor, -3))
        device_api.compute(lambda after=after, tensor=tensor: after.copy_(tensor))  # type: ignore[misc]
        found.append(after)
    found = [device_api.value(tensor) for tensor in found]
    due = [total(COUNT), distinct(1, COUNT)]
    assert torch.equal(found[0], due[0]) and torch.equal(found[1], due[1])
    assert rank != 2 or torch.equal(found[2], due[0])
    for each in range(size):
        assert torch.equal(found[3 + each], distinct(each, COUNT)[: COUNT - each]), each
    assert torch.equal(found[6], due[0] + 7 * rank * size)
    rest = found[7:]
    if rank == 2:
        for each in range(size):
            assert torch.equal(rest.pop(0), distinct(each, COUNT)), each
    assert torch.equal(rest.pop(0), distinct(0, COUNT) + 3 * rank)
    for each in range(size):
        assert torch.equal(rest.pop(0), distinct(each, COUNT)[: 7 * rank + 1000 * each] + rank), each


@pytest.mark.parametrize("order", ORDERS)
def test_every_collective_is_ordered_by_streams_and_events(order: Any) -> None:
    values(on_devices(every_collective, SIZE, order, **SMALL))


def pools(device_api: Any, streams: int) -> None:
    """torch's streams: netfold's may be one, and the user's, too. There are no gates without streams of netfold's."""
    device_api.pool, device_api.has_gates = streams, False


def in_a_pooled_stream(group: Any, device_api: Any) -> None:
    with device_api.on(device_api.device):
        stream = device_api.new_stream(device_api.device)
    with device_api.using(stream):
        every_collective(group, device_api)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("streams", [1, 2])
def test_streams_that_are_the_same_one_keep_the_order(streams: int, order: Any) -> None:
    values(on_devices(in_a_pooled_stream, SIZE, order, before=lambda api: pools(api, streams), **SMALL))


def again_and_again(group: Any, device_api: Any) -> list[float]:
    """Calls on the same memory, none waited for before the last, of one piece and of many."""
    found = []
    for count in (100, COUNT):
        tensor = device_api.tensor(distinct(group.rank(), count))
        for pause in (False, True):
            before = device_api.value(tensor)
            first = group.allreduce([tensor], reduce_options())
            if pause:
                assert first._settled.wait(seconds(10))  # on its way back, but maybe not there
            group.allreduce([tensor], reduce_options(dist.ReduceOp.MAX))
            group.allreduce([tensor], reduce_options(dist.ReduceOp.AVG)).wait()
            due = before * SIZE if pause else total(count)
            found.append(float((device_api.value(tensor) - due).abs().max()))
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_a_call_reads_the_result_of_an_earlier_call_on_the_same_memory(order: Any) -> None:
    for found in values(on_devices(again_and_again, SIZE, order, **SMALL)):
        assert found == [0, 0, 0, 0]


def only_received(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(torch.zeros(100))
    device_api.compute(lambda: tensor.fill_(group.rank()))
    root = dist.BroadcastOptions()
    root.rootRank = 1
    work = group.broadcast([tensor], root)
    work.wait()
    while not work.is_completed():  # the copy is done, and with it what it waits for; nothing else needs be
        pass
    assert device_api.value(tensor).eq(1).all()


@pytest.mark.parametrize("order", ORDERS)
def test_a_result_is_written_after_the_callers_earlier_writes(order: Any) -> None:
    values(on_devices(only_received, SIZE, order, **SMALL))


def on_one_storage(group: Any, device_api: Any) -> tuple[int, int]:
    """Calls on two halves of one storage, then on bytes of both. Returns how often the pipeline was emptied."""
    storage = device_api.tensor(distinct(group.rank(), COUNT))
    halves = storage[:20_000], storage[20_000:40_000]
    group.allreduce([device_api.tensor(torch.ones(1))], reduce_options()).wait()
    staged = group.devices._paths.staged
    drains, drain = [0], staged.drain

    def counted() -> None:
        drains[0] += 1
        drain()

    staged.drain = counted
    works = [group.allreduce([half], reduce_options()) for half in halves]
    for work in works:
        work.wait()
    apart = drains[0]
    works = [group.allreduce([half], reduce_options()) for half in (storage[:20_000], storage[19_990:40_000])]
    for work in works:
        work.wait()
    due = total(COUNT)
    assert torch.equal(device_api.value(storage)[:19_990], due[:19_990] * SIZE)
    assert torch.equal(device_api.value(storage)[20_000:40_000], due[20_000:40_000] * SIZE)
    assert torch.equal(device_api.value(storage)[19_990:20_000], due[19_990:20_000] * SIZE * SIZE)
    assert len(staged._landing) < 5, "chunks of one result are one range"
    return apart, drains[0] - apart


@pytest.mark.parametrize("order", ORDERS)
def test_calls_wait_for_each_other_only_where_their_bytes_overlap(order: Any) -> None:
    """DDP's buckets and FSDP's parameters are views of one storage."""
    for apart, _ in values(on_devices(on_one_storage, SIZE, order, **SMALL)):
        assert apart == 0


def reduces_one_tensor_again(group: Any, device_api: Any) -> list[int]:
    """The waits for events that each of ten calls on the same memory adds to the streams, as DDP's buckets are."""
    tensor, found = device_api.tensor(torch.zeros(COUNT)), []
    group.allreduce([tensor], reduce_options()).wait()
    staged, waits = group.devices._paths.staged, [0]
    wait_event = staged.out.wait_event

    def counted(event: Any) -> None:
        waits[0] += 1
        wait_event(event)

    staged.out.wait_event = counted
    for _ in range(10):
        found.append(waits[0])
        group.allreduce([tensor], reduce_options()).wait()
    assert len(staged._landing) == 1
    return [after - before for before, after in itertools.pairwise(found)]


def test_a_call_waits_for_no_more_events_the_more_calls_came_before_it() -> None:
    """Each call's last chunk left the earlier call's range in the list: up to 256 waits in each of two streams."""
    for waits in values(on_devices(reduces_one_tensor_again, 2, "late", **SMALL)):
        assert len(set(waits)) == 1, waits


def shares_slots(group: Any, device_api: Any) -> tuple[int, str]:
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    assert torch.equal(device_api.value(tensor), total(COUNT, group.size()))
    group.shutdown()
    return device_api.registrations, group.devices.why()


def test_slots_are_in_shared_memory_that_the_device_has_pinned() -> None:
    """Ranks of one host reduce the slots in place."""
    layers: list[Any] = []
    for count, said in values(on_devices(shares_slots, SIZE, before=layers.append, **SMALL)):
        assert count == 3 and said.endswith("staged through 3 x 40960 bytes of shared, pinned memory"), said
    assert all(not device_api.registered for device_api in layers), "all are unregistered at the end"


def test_slots_grow_with_the_ranks_up_to_a_bound() -> None:
    from netfold.torch.device import pinned

    assert [pinned.default_bytes(ranks) >> 20 for ranks in (1, 8, 16, 64, 1000)] == [12, 12, 24, 96, 96]


def registers_nothing(device_api: Any) -> None:
    device_api.registers = False


def test_where_memory_cannot_be_registered_the_device_allocates_it() -> None:
    for count, said in values(on_devices(shares_slots, 2, before=registers_nothing, **SMALL)):
        assert count == 0 and said.endswith("bytes of pinned memory"), said


def test_ranks_that_share_no_memory_have_slots_of_their_own() -> None:
    found = values(on_devices(shares_slots, 2, transport="tcp", **SMALL))
    assert [count for count, _ in found] == [0, 0]


def hangs_at_the_end(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    device_api.hangs = group.rank() == 0  # with copies from slots still to do
    group.shutdown()
    device_api.hangs = False


def test_a_hanging_device_keeps_the_slots_that_it_may_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from netfold.torch.device import paths, pinned

    monkeypatch.setattr(paths, "SETTLE_S", 0.2)
    monkeypatch.setattr(paths, "AFTER_ABORT_S", 0.2)
    monkeypatch.setattr(pinned, "_never_released", [])
    layers: list[Any] = []
    values(on_devices(hangs_at_the_end, 2, before=layers.append, **SMALL))
    assert len(pinned._never_released) == 3
    assert sorted(len(device_api.registered) for device_api in layers) == [0, 3]
