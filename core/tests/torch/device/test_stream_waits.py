"""`block_current_stream`: the stream waits for the operation, and the host does not. No stream waits for ever."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from device_worlds import ORDERS, distinct, on_devices, reduce_options  # noqa: E402
from load import seconds  # noqa: E402
from ranks import values  # noqa: E402

from netfold.torch.device import work as device_work  # noqa: E402

pytestmark = pytest.mark.torch

OFF = {"intra_host": "off", "pinned_bytes": 120 << 10}
COUNT = 50_001


def doubled(device_api: Any, tensor: Any) -> Any:
    """A kernel of the user's after the operation."""
    after = device_api.tensor(torch.full_like(tensor, -3))
    device_api.compute(lambda: after.copy_(2 * tensor))
    return after


def blocks_before_the_other_rank_calls(group: Any, device_api: Any) -> None:
    tensor, over = device_api.tensor(distinct(group.rank(), COUNT)), device_api.host.is_over
    if group.rank() == 1:
        assert over.wait(seconds(20))
    work = group.allreduce([tensor], reduce_options())
    work.block_current_stream()
    assert group.rank() == 1 or not work._settled.is_set(), "the host did not wait"
    after = doubled(device_api, tensor)
    work.block_current_stream()  # a second stream, or the same one again
    over.set()
    assert torch.equal(device_api.value(after), 2 * (distinct(0, COUNT) + distinct(1, COUNT)))
    while not work.is_completed():
        pass
    work.block_current_stream()
    work.wait()
    assert all(gate.opened for gate in device_api.gates)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("intra_host", ["off", "auto", "nccl"])
def test_the_stream_waits_for_the_result_and_the_host_does_not(intra_host: str, order: Any) -> None:
    values(on_devices(blocks_before_the_other_rank_calls, 2, order, intra_host=intra_host, pinned_bytes=120 << 10))


def blocks_on_everything(group: Any, device_api: Any) -> None:
    other = 1 - group.rank()
    sent, came = device_api.tensor(distinct(group.rank(), 100)), device_api.tensor(torch.zeros(100))
    group.start_coalescing()
    group.send([sent], other, 1)
    group.recv([came], other, 1)
    group.allreduce([device_api.tensor(torch.ones(10))], reduce_options())
    together = group.end_coalescing()
    together.block_current_stream()
    device_api.compute(lambda: sent.fill_(-1))  # the send has read the tensor
    assert torch.equal(device_api.value(came), distinct(other, 100))
    on_cpu = torch.zeros(3)
    if group.rank() == 0:
        group.send([torch.ones(3)], 1, 2).block_current_stream()
    else:
        group.recv([on_cpu], 0, 2).block_current_stream()
        assert on_cpu.eq(1).all()
    together.wait()


@pytest.mark.parametrize("order", ORDERS)
def test_messages_and_coalesced_operations_block_the_stream_too(order: Any) -> None:
    values(on_devices(blocks_on_everything, 2, order, **OFF))


def without_gates(device_api: Any) -> None:
    device_api.has_gates = False


def test_where_a_device_cannot_wait_for_memory_the_host_waits() -> None:
    def act(group: Any, device_api: Any) -> None:
        tensor = device_api.tensor(distinct(group.rank(), 10))
        work = group.allreduce([tensor], reduce_options())
        work.block_current_stream()
        assert work._settled.is_set()
        assert torch.equal(device_api.value(tensor), distinct(0, 10) + distinct(1, 10))

    values(on_devices(act, 2, before=without_gates, **OFF))


def calls_again_behind_the_gate(group: Any, device_api: Any) -> None:
    """The second call's tensor gets its values only after the result of the first, whose last chunk is under way."""
    first, second = device_api.tensor(distinct(group.rank(), 10)), device_api.tensor(torch.full((COUNT,), -1.0))
    if group.rank() == 1:
        assert device_api.host.is_over.wait(seconds(20))
    works = [group.allreduce([first], reduce_options())]
    works[0].block_current_stream()
    device_api.compute(lambda: second.copy_(distinct(group.rank(), COUNT)))
    works.append(group.allreduce([second], reduce_options()))
    device_api.host.is_over.set()
    for work in works:
        work.wait()
    assert torch.equal(device_api.value(first), distinct(0, 10) + distinct(1, 10))
    assert torch.equal(device_api.value(second), distinct(0, COUNT) + distinct(1, COUNT))


@pytest.mark.parametrize("order", ORDERS)
def test_a_call_that_waits_for_an_earlier_result_does_not_keep_that_result_from_its_stream(order: Any) -> None:
    """A former fault: the earlier copy back came behind the wait for the later call's values, until the deadline."""
    values(on_devices(calls_again_behind_the_gate, 2, order, **OFF))


def fails_meanwhile(group: Any, device_api: Any) -> str:
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    if group.rank() == 1:
        assert device_api.host.is_over.wait(seconds(20))
        group.netfold.abort("a wheel came off")
        return ""
    work = group.allreduce([tensor], reduce_options())
    work.block_current_stream()
    after = doubled(device_api, tensor)
    device_api.host.is_over.set()
    device_api.value(after)  # returns: the gate was opened
    assert "a wheel came off" in str(work.exception())
    work.block_current_stream()  # raises nothing, and holds nothing
    device_api.value(after)
    with pytest.raises(Exception, match="a wheel came off"):
        work.wait()
    with pytest.raises(Exception, match="a wheel came off"):
        group.allreduce([tensor], reduce_options())
    return "raised"


@pytest.mark.parametrize("intra_host", ["off", "auto"])
def test_a_failure_opens_the_gate_and_the_next_call_raises_it(intra_host: str) -> None:
    said = values(on_devices(fails_meanwhile, 2, intra_host=intra_host, pinned_bytes=120 << 10))
    assert said[0] == "raised"


def breaks_between(group: Any, device_api: Any) -> str:
    """The device fails after some chunks are back."""
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    if group.rank() == 0:
        copies, original = [0], device_api.copy

        def copy(*of: Any) -> None:
            copies[0] += 1
            if copies[0] > 4:
                device_api.broken = "an uncorrectable ECC error"
            original(*of)

        device_api.copy = copy
    work = group.allreduce([tensor], reduce_options())
    work.block_current_stream()
    device_api.broken = "" if group.rank() else device_api.broken
    assert work._settled.wait(seconds(20))
    assert all(gate.opened or gate.opening is not None for gate in device_api.gates)
    return str(work.exception())


def test_a_failure_in_the_middle_opens_the_gate_on_every_rank() -> None:
    assert all("uncorrectable ECC error" in said for said in values(on_devices(breaks_between, 2, **OFF)))


def alone(group: Any, device_api: Any) -> str:
    """The other rank makes no call."""
    if group.rank() == 1:
        assert device_api.host.is_over.wait(seconds(20))
        return ""
    tensor = device_api.tensor(distinct(0, 10))
    group.allreduce([tensor], reduce_options(timeout_s=0.5)).block_current_stream()
    device_api.value(doubled(device_api, tensor))
    device_api.host.is_over.set()
    with pytest.raises(Exception, match=r"rank 0: ") as raised:
        group.allreduce([tensor], reduce_options())
    return str(raised.value)


def test_the_deadline_opens_the_gate() -> None:
    assert "0.5 s" in values(on_devices(alone, 2, **OFF))[0]


def thread_is_blocked(group: Any, device_api: Any) -> str:
    """netfold's thread waits in a call of CUDA's that ends only when the user's stream goes on."""
    tensor = device_api.tensor(distinct(group.rank(), COUNT))
    group.allreduce([tensor], reduce_options()).wait()
    blocked, original = threading.Event(), device_api.copy

    def copy(*of: Any) -> None:
        if threading.current_thread().name == "netfold-device":
            assert blocked.wait(seconds(20))
        original(*of)

    device_api.copy = copy
    work = group.allreduce([tensor], reduce_options(timeout_s=0.2))
    end_group = work._end_group

    def slowly(error: Exception) -> None:
        time.sleep(0.2)
        end_group(error)

    work._end_group = slowly  # the stream that goes on finds the group ended all the same
    work.block_current_stream()
    after = doubled(device_api, tensor)
    began = time.monotonic()
    device_api.value(after)  # the stream goes on
    waited_s = time.monotonic() - began
    blocked.set()
    assert waited_s < seconds(5)
    with pytest.raises(Exception, match="timed out"):
        group.allreduce([tensor], reduce_options())
    return str(work.exception())


def test_a_blocked_thread_of_netfold_keeps_no_stream_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_work, "_OVERDUE_S", 0.1)
    for said in values(on_devices(thread_is_blocked, 2, **OFF)):
        assert "an operation timed out while a stream on cuda:" in said, said


def closes_meanwhile(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(0, 10))
    if group.rank() == 0:
        group.allreduce([tensor], reduce_options()).block_current_stream()
        group.shutdown()
        device_api.value(tensor)
        device_api.host.is_over.set()
    else:
        assert device_api.host.is_over.wait(seconds(20))


def test_the_end_of_a_group_opens_the_gates() -> None:
    """Groups are closed when the interpreter ends, too."""
    values(on_devices(closes_meanwhile, 2, **OFF))


def captures(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(0, 10))
    work = group.allreduce([tensor], reduce_options())
    with device_api.capture(), pytest.raises(ValueError, match="cannot be captured"):
        work.block_current_stream()
    assert not device_api.gates
    work.wait()


def test_a_capture_takes_no_gate() -> None:
    values(on_devices(captures, 2, **OFF))


def settles_at_once(group: Any, device_api: Any) -> None:
    """The operation ends while a gate for it is made."""
    tensor = device_api.tensor(distinct(group.rank(), 10))
    work = group.allreduce([tensor], reduce_options())
    original = device_api.new_gate

    def new_gate(device: Any) -> Any:
        assert work._settled.wait(seconds(20))
        return original(device)

    device_api.new_gate = new_gate
    work.block_current_stream()
    assert torch.equal(device_api.value(tensor), distinct(0, 10) + distinct(1, 10))
    assert all(gate.opened for gate in device_api.gates), "its word is free again"


def test_a_gate_that_comes_too_late_holds_nothing() -> None:
    values(on_devices(settles_at_once, 2, **OFF))
    gc.collect()
