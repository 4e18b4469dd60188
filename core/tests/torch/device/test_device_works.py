"""Works, Futures, messages and the order of calls, where tensors are on devices."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import ORDERS, distinct, on_devices, reduce_options  # noqa: E402
from load import seconds  # noqa: E402
from ranks import values  # noqa: E402

pytestmark = pytest.mark.torch

OFF = {"intra_host": "off", "pinned_bytes": 120 << 10}


def wait_does_not_wait_for_the_device(group: Any, device_api: Any) -> bool:
    tensor = device_api.tensor(distinct(group.rank(), 10))
    work = group.allreduce([tensor], reduce_options())
    work.wait()
    early = bool(tensor.eq(distinct(group.rank(), 10)).all())  # the copy back is still to be done
    assert torch.equal(device_api.value(tensor), distinct(0, 10) + distinct(1, 10))
    assert work.is_completed() and work.is_success() and work.exception() is None
    return early


def test_wait_has_the_stream_wait_and_not_the_host() -> None:
    assert values(on_devices(wait_does_not_wait_for_the_device, 2, "late", **OFF)) == [True, True]


def hook_in_half(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(torch.arange(10).half() + 100 * group.rank())
    work = group.allreduce([tensor], reduce_options())
    called_by: list[int] = []
    future = work.make_future_of_tensors()
    future.then(lambda _: called_by.append(threading.get_ident()))
    assert called_by == [threading.get_ident()]
    assert torch.equal(device_api.value(tensor), 2 * torch.arange(10).half() + 100)


def test_a_hook_in_c_continues_in_the_callers_stream() -> None:
    """DDP's FP16_COMPRESS under torch.cuda.stream(...). A former fault, found on a GPU: it continued on a thread of
    TorchScript, in the default stream, and gradients were read before they were there."""
    values(on_devices(hook_in_half, 2, "late", **OFF))


def futures(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(group.rank(), 10))
    later = device_api.tensor(torch.ones(10))
    seen = []
    future = group.allreduce([tensor], reduce_options()).get_future()
    blocked = threading.Event()

    def callback(done: Any) -> Any:
        # As PowerSGD's: a callback that starts another operation and waits for it.
        group.allreduce([later], reduce_options()).get_future().wait()
        seen.append(device_api.value(later).tolist())
        blocked.set()
        return done.value()

    chained = future.then(callback)
    future.wait()
    assert torch.equal(device_api.value(tensor), distinct(0, 10) + distinct(1, 10))
    chained.wait()
    assert blocked.wait(seconds(10)) and seen == [[2.0] * 10]


@pytest.mark.parametrize("order", ORDERS)
def test_futures_order_streams_and_their_callbacks_may_block(order: Any) -> None:
    values(on_devices(futures, 2, order, **OFF))


def order_of_calls(group: Any, device_api: Any) -> None:
    """On the CPU a call comes after one on the device: were it submitted first, ranks would mix them up."""
    on_device, on_cpu = device_api.tensor(distinct(group.rank(), 30_000)), torch.full((3,), 1.0 + group.rank())
    for asynchronous in (False, True):
        group.allreduce([on_device], reduce_options())
        group.allreduce([on_cpu], reduce_options(asynchronous=asynchronous)).wait()
        group.barrier().wait()
    group.allreduce([on_device], reduce_options()).wait()
    assert on_cpu.eq(6).all()
    assert torch.equal(device_api.value(on_device), 4 * (distinct(0, 30_000) + distinct(1, 30_000)))


@pytest.mark.parametrize("order", ORDERS)
def test_calls_on_the_cpu_do_not_overtake_those_on_a_device(order: Any) -> None:
    values(on_devices(order_of_calls, 2, order, **OFF))


def messages(group: Any, device_api: Any) -> list[int]:
    """Both send first; then a ring; the other end of one is on the CPU; one comes from anywhere."""
    rank, other = group.rank(), 1 - group.rank()

    def late(values: Any) -> Any:
        tensor = device_api.tensor(torch.full_like(values, -1))
        device_api.compute(lambda: tensor.copy_(values))
        return tensor

    found = []
    for count in (10, 300_000):
        came = [late(torch.zeros(count)) for _ in range(2)]
        sends = [group.send([late(distinct(rank, count) + tag)], other, tag) for tag in range(2)]
        receives = [group.recv([came[tag]], other, tag) for tag in (1, 0)][::-1]
        receives[0].get_future().wait()
        receives[1].wait()
        for tag in range(2):
            assert torch.equal(device_api.value(came[tag]), distinct(other, count) + tag), (count, tag)
        for send in sends:
            send.wait()
            assert send.is_success()
    if rank == 0:
        group.send([late(distinct(5, 100))], 1, 7).wait()
    else:
        on_cpu = torch.zeros(100)
        group.recv([on_cpu], 0, 7).wait()
        assert torch.equal(on_cpu, distinct(5, 100))
    anywhere = late(torch.zeros(4, 4)).t()
    last = group.send([late(torch.full((4, 4), 3.0 + rank))], other, 9)
    received = group.recv_anysource([anywhere], 9)
    received.wait()
    last.wait()
    assert device_api.value(anywhere).eq(3 + other).all()
    found.append(received._source_rank())
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_messages_between_devices_arrive(order: Any) -> None:
    assert values(on_devices(messages, 2, order, **OFF)) == [[1], [0]]


def messages_in_order(group: Any, device_api: Any) -> list[float]:
    """Rank 0 sends with one tag from the device, from the CPU and from both again, while its device hangs."""
    if group.rank() == 1:
        came = [torch.zeros(100) for _ in range(6)]
        for into, tag in zip(came, (8, 5, 5, 5, 5, 5), strict=True):
            group.recv([into], 0, tag).wait()
        return [float(each.unique()) for each in came]
    device_api.hangs = True
    first = [
        group.send([device_api.tensor(torch.full((100,), 1.0))], 1, 5),
        group.send([torch.full((100,), 2.0)], 1, 5),
        group.send([device_api.tensor(torch.full((100,), 3.0))], 1, 5),
        group.send([torch.full((10, 20), 4.0)[:, ::2]], 1, 5),
    ]
    group.send([torch.full((100,), 0.0)], 1, 8).wait()  # another tag: nothing to wait for
    future = first[1].get_future()
    assert not any(work.is_completed() for work in first)
    with pytest.raises(Exception, match="rank 0: the wait timed out"):
        first[1].wait(timedelta(seconds=0.01))
    device_api.hangs = False
    for work in first:
        work.wait()
    future.wait()
    assert first[1].is_success() and first[1]._source_rank() == 1
    give_up = time.monotonic() + seconds(10)
    while group._transfers._device._queued and time.monotonic() < give_up:
        time.sleep(0.001)
    group.send([torch.full((100,), 5.0)], 1, 5).wait()
    assert not isinstance(group.send([torch.zeros(1)], 1, 77), type(first[1])), "the thread is for those in the queue"
    return []


def test_messages_with_one_tag_keep_the_order_of_the_calls_whatever_memory_they_are_in() -> None:
    _, came = values(on_devices(messages_in_order, 2, **OFF))
    assert came == [0, 1, 2, 3, 4, 5]


def first_send_fails(group: Any, device_api: Any) -> float:
    if group.rank() == 0:
        device_api.hangs = True
        first = group.send([device_api.tensor(torch.ones(10))], 1, 5)
        second = group.send([torch.full((10,), 2.0)], 1, 5)
        device_api.broken = "the device fell off the bus"
        device_api.hangs = False
        for work in (first, second):
            with pytest.raises(RuntimeError, match="the device fell off the bus"):
                work.wait()
        return 0
    came = torch.zeros(10)
    group.recv([came], 0, 5).wait()
    return float(came[0])


def test_no_message_is_received_in_place_of_one_that_a_device_failed_to_send() -> None:
    outcomes = on_devices(first_send_fails, 2, **OFF)
    assert not outcomes[0].error, outcomes[0]
    assert outcomes[1].error and "the device fell off the bus" in outcomes[1].text, outcomes[1]


def coalesced(group: Any, device_api: Any) -> None:
    tensors = [device_api.tensor(distinct(group.rank(), count)) for count in (5, 9000)]
    group.start_coalescing()
    assert group.allreduce([tensors[0]], reduce_options(asynchronous=False)) is None
    assert group.allreduce([tensors[1]], reduce_options()) is not None, "C++ waits for it"
    group.send([tensors[0]], 1 - group.rank())
    came = device_api.tensor(torch.zeros(5))
    group.recv([came], 1 - group.rank())
    work = group.end_coalescing()
    work.wait()
    device_api.synchronize()
    assert work.is_success() and work.exception() is None
    for tensor in tensors:
        assert torch.equal(device_api.value(tensor), distinct(0, len(tensor)) + distinct(1, len(tensor)))
    device_api.value(came)
    several = [device_api.tensor(torch.full((count,), 1.0)) for count in (1, 5000)]
    group.allreduce(several, reduce_options()).get_future().wait()
    assert all(device_api.value(tensor).eq(2).all() for tensor in several)


@pytest.mark.parametrize("order", ORDERS)
def test_several_operations_may_be_in_progress(order: Any) -> None:
    values(on_devices(coalesced, 2, order, **OFF))


def kinds_of_tensors(group: Any, device_api: Any) -> None:
    size = group.size()
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.uint8):
        tensor = device_api.tensor(torch.arange(300, dtype=torch.int64).remainder(29).to(dtype))
        group.allreduce([tensor], reduce_options()).wait()
        assert torch.equal(device_api.value(tensor), (size * torch.arange(300).remainder(29)).to(dtype)), dtype
    for tensor, due in (
        (torch.tensor([True, False]), [True, False]),
        (torch.tensor([1 + 2j]), [size * (1 + 2j)]),
        (torch.tensor(3.0), size * 3.0),
        (torch.zeros(0), []),
    ):
        tensor = device_api.tensor(tensor)
        group.allreduce([tensor], reduce_options()).wait()
        assert device_api.value(tensor).tolist() == due


def lets_go(group: Any, device_api: Any) -> None:
    other = 1 - group.rank()
    # Views: what the fake device keeps is what they are of.
    tensors = [device_api.tensor(torch.ones(20_000))[:] for _ in range(3)]
    held = [weakref.ref(tensor) for tensor in tensors]
    group.allreduce([tensors[0]], reduce_options()).wait()
    works = [group.recv([tensors[2]], other, 0), group.send([tensors[1]], other, 0)]
    for work in works:
        work.wait()
    device_api.synchronize()
    del tensors, works, work
    give_up = time.monotonic() + seconds(5)
    while any(each() is not None for each in held) and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.001)
    assert [each() is None for each in held] == [True] * 3


@pytest.mark.parametrize("intra_host", ["off", "auto"])
def test_a_finished_call_is_released_before_the_next_call(intra_host: str) -> None:
    """A former fault: the threads kept the last tensor, such as a bucket, until the next call."""
    values(on_devices(lets_go, 2, intra_host=intra_host, pinned_bytes=120 << 10))


def test_every_kind_of_tensor_is_reduced() -> None:
    values(on_devices(kinds_of_tensors, 2, "late", **OFF))


def parameters(group: Any, device_api: Any) -> None:
    parameter = torch.nn.Parameter(distinct(group.rank(), 60))
    device_api.takes_everything = True
    group.allreduce([parameter], reduce_options()).wait(timedelta(seconds=10))
    device_api.takes_everything = False
    assert torch.equal(device_api.value(parameter.detach()), distinct(0, 60) + distinct(1, 60))


def test_parameters_that_require_gradients_are_reduced_in_place() -> None:
    values(on_devices(parameters, 2, **OFF))


def sparse(group: Any, device_api: Any) -> None:
    device_api.takes_everything = True  # what is gathered is made on the way
    rank = group.rank()
    tensor = torch.sparse_coo_tensor(
        torch.tensor([[0, rank + 1]]), distinct(rank, 2), (4,), is_coalesced=True, check_invariants=True
    )
    work = group.allreduce([tensor], reduce_options())
    work.wait()
    device_api.synchronize()
    due = torch.zeros(4)
    for each in range(group.size()):
        due[[0, each + 1]] += distinct(each, 2)
    assert torch.equal(tensor.to_dense(), due) and work.is_success()
    assert work._stream.given == 1, "a Future's stream waits for the caller's, which adds up"
    work.get_future().wait()


def test_sparse_tensors_are_added_up_on_the_device() -> None:
    values(on_devices(sparse, 2, "early", **OFF))


def premultiplied(group: Any, device_api: Any) -> None:
    device_api.takes_everything = True  # the scaled copy is made on the way
    tensor = distinct(group.rank(), 500)
    group.allreduce([tensor], reduce_options(dist._make_nccl_premul_sum(0.5))).wait()
    device_api.synchronize()
    assert torch.equal(tensor, (distinct(0, 500) + distinct(1, 500)) / 2)
    strided = device_api.tensor(torch.arange(40_000.0).view(200, 200)).t()
    group.allreduce([strided], reduce_options()).wait()
    device_api.synchronize()
    assert torch.equal(strided, 2 * torch.arange(40_000.0).view(200, 200).t())


@pytest.mark.parametrize("order", ORDERS)
def test_staged_results_are_copied_to_their_tensors(order: Any) -> None:
    values(on_devices(premultiplied, 2, order, **OFF))


def residuals(group: Any, device_api: Any) -> None:
    """By i8 what rounding takes from a rank's part is given back: with the sum it makes up the parts."""
    tensor, kept = device_api.tensor(distinct(group.rank(), 30_000)), device_api.tensor(torch.zeros(30_000))
    group.average(tensor, kept).wait()
    lost = device_api.value(kept)
    assert lost.abs().max() > 0
    group.allreduce([kept], reduce_options()).wait()  # by i8, too, so only roughly
    due = (distinct(0, 30_000) + distinct(1, 30_000)) / 2
    assert (device_api.value(tensor) + lost - due).abs().max() < due.abs().max() / 10


def test_compressed_gradients_leave_their_residual_on_the_device() -> None:
    values(on_devices(residuals, 2, "late", wire_dtype="i8", **OFF))
