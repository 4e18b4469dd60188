"""A device's failure is an error of one sentence on every rank, within seconds."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import distinct, on_devices, reduce_options, threads_named  # noqa: E402
from load import seconds  # noqa: E402
from ranks import Outcome, values  # noqa: E402

from netfold.errors import GroupAborted  # noqa: E402
from netfold.torch.device import driver  # noqa: E402

pytestmark = pytest.mark.torch

OFF = {"intra_host": "off", "pinned_bytes": 120 << 10}


def reduce_once(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(group.rank(), 20_000))
    group.allreduce([tensor], reduce_options()).wait()
    device_api.value(tensor)


def says(outcomes: list[Outcome], rank: int, kind: str, *words: str) -> None:
    found = outcomes[rank]
    assert found.error == kind and all(word in found.text.split("\n")[0] for word in words), found


def test_every_rank_reports_that_pinned_memory_is_short() -> None:
    def before(device_api: Any) -> None:
        device_api.pinned_left = 1 if device_api.device.index == 1 else 1 << 30

    outcomes = on_devices(reduce_once, 2, before=before, **OFF)
    for rank in range(2):
        says(outcomes, rank, "NetfoldError", "rank 1: the host gave no 122880 bytes", "NETFOLD_PINNED_BYTES")


def test_slots_too_small_for_the_group_are_an_error() -> None:
    outcomes = on_devices(reduce_once, 2, intra_host="off", pinned_bytes=900)
    says(outcomes, 0, "ValueError", "300 bytes of pinned memory a slot are too few", "NETFOLD_PINNED_BYTES")


def breaks_down(group: Any, device_api: Any) -> None:
    reduce_once(group, device_api)
    if group.rank() == 1:
        device_api.broken = "CUDA error: an illegal memory access was encountered"
    reduce_once(group, device_api)


def test_a_device_that_fails_ends_the_group_on_all_ranks() -> None:
    outcomes = on_devices(breaks_down, 2, "late", **OFF)
    says(outcomes, 1, "NetfoldError", "rank 1: all_reduce on cuda:1 failed", "illegal memory access")
    assert "illegal memory access" in outcomes[0].text and outcomes[0].error in ("GroupAborted", "PeerLost"), outcomes


def hangs(group: Any, device_api: Any) -> tuple[str, str, float]:
    """The error's type and text, and the seconds that the call waited. Only the call's own timeout is short."""
    reduce_once(group, device_api)
    device_api.hangs = group.rank() == 0
    began = time.monotonic()
    try:
        tensor = device_api.tensor(torch.ones(4))
        group.allreduce([tensor], reduce_options(timeout_s=0.5)).wait()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        device_api.hangs = False
    return "", "nothing went wrong", time.monotonic() - began


def test_a_hanging_device_is_waited_for_until_the_deadline_of_the_call() -> None:
    outcomes = on_devices(hangs, 2, "late", timeout_s=60.0, **OFF)
    (error, text, waited_s), (other_error, other_text, other_s) = values(outcomes)
    assert error == "CollectiveTimeout", text
    assert "all_reduce: the copy to the host timed out after 0.5 s" in text
    # Rank 1 waits for rank 0: it gets rank 0's error or the same timeout.
    assert other_error in ("CollectiveTimeout", "PeerLost", "GroupAborted"), other_text
    assert "rank 0" in other_text
    assert 0.5 <= waited_s < seconds(10) and other_s < seconds(10), "not the group's 60 s"


def one_on_the_cpu(group: Any, device_api: Any) -> None:
    tensor = torch.ones(500) if group.rank() == 1 else device_api.tensor(torch.ones(500))
    group.allreduce([tensor], reduce_options()).wait()


def test_tensors_on_different_kinds_of_devices_are_an_error_on_every_rank() -> None:
    outcomes = on_devices(one_on_the_cpu, 2, **OFF)
    says(outcomes, 0, "Mismatch", "this rank's tensor is on cuda:0", "not some on the CPU")
    assert outcomes[1].error == "Mismatch", outcomes


def other_kind(device_api: Any) -> None:
    if device_api.device.index == 1:
        device_api.kind = "xpu"


def test_mixed_kinds_of_devices_are_refused_for_collectives() -> None:
    outcomes = on_devices(reduce_once, 2, before=other_kind, **OFF)
    for rank in range(2):
        says(outcomes, rank, "NetfoldError", "a collective takes tensors on devices of one kind")


def mixed(group: Any, device_api: Any) -> None:
    reduce_once(group, device_api)
    outs = [torch.zeros(3), device_api.tensor(torch.zeros(3))]
    group.allgather([outs], [device_api.tensor(torch.zeros(3))])


def test_an_operation_takes_tensors_of_one_device() -> None:
    outcomes = on_devices(mixed, 2, **OFF)
    says(outcomes, 0, "ValueError", "all_gather has tensors on cpu, cuda:0")


def closes(group: Any, device_api: Any) -> str:
    reduce_once(group, device_api)
    tensor = device_api.tensor(torch.ones(10))
    if group.rank() == 0:
        work = group.allreduce([tensor], reduce_options())
        group.shutdown()
        try:
            work.wait()
        except dist.DistBackendError as error:
            return str(error)
        except RuntimeError as error:
            return str(error)
    return "the group was closed"


def test_closing_a_group_fails_operations_under_way_and_ends_its_threads() -> None:
    assert "closed" in values(on_devices(closes, 2, **OFF))[0]
    assert not threads_named("netfold-device") and not threads_named("netfold-sends")


def no_receiver(group: Any, device_api: Any) -> None:
    if group.rank() == 0:
        device_api.broken = "the device fell off the bus"
        group.send([device_api.tensor(torch.ones(10))], 1, 0).wait()


def test_a_send_from_a_failed_device_is_an_error_on_both_ranks() -> None:
    outcomes = on_devices(no_receiver, 2, **OFF)
    says(outcomes, 0, "NetfoldError", "rank 0: send to rank 1 from cuda:0 failed: the device fell off the bus")


def test_a_cuda_tensor_in_a_group_without_devices_is_refused() -> None:
    from netfold.torch import calls

    with pytest.raises(ValueError, match="CPU tensors and those of CUDA devices, this one is on meta"):
        calls.copy_call("broadcast", [], [torch.ones(1, device="meta")])


def sends_late(group: Any, device_api: Any) -> None:
    group.shutdown()
    group.send([device_api.tensor(torch.ones(10))], 1, 0)


def test_a_send_in_a_closed_group_is_refused() -> None:
    says(on_devices(sends_late, 2, **OFF), 0, "ValueError", "this group was closed")


def crowded(group: Any, device_api: Any, pinned_left: int) -> None:
    """Messages beyond what may be pinned, or what the host gives, go through ordinary memory."""
    device_api.pinned_left = pinned_left
    group._transfers._device._memory._left = 3000
    other = 1 - group.rank()
    tensors = [device_api.tensor(torch.full((500,), float(each))) for each in range(5)]
    came = [device_api.tensor(torch.zeros(500)) for _ in range(5)]
    works = [group.recv([into], other, tag) for tag, into in enumerate(came)]
    works += [group.send([tensor], other, tag) for tag, tensor in enumerate(tensors)]
    for work in works:
        work.wait()
    for each, into in enumerate(came):
        assert device_api.value(into).eq(each).all()


@pytest.mark.parametrize("pinned_left", [1 << 20, 3000, 0])
def test_messages_never_wait_for_pinned_memory(pinned_left: int) -> None:
    values(on_devices(functools.partial(crowded, pinned_left=pinned_left), 2, **OFF))


def breaks_between_hosts(group: Any, device_api: Any) -> float:
    began = time.monotonic()
    try:
        for turn in range(2):
            device_api.broken = "an uncorrectable ECC error" if turn and group.rank() == 3 else ""
            tensor = device_api.tensor(distinct(group.rank(), 40_000))
            group.allreduce([tensor], reduce_options()).wait()
            device_api.value(tensor)
    except RuntimeError:
        assert device_api.broken or time.monotonic() - began < seconds(10)
        raise
    return 0.0


def test_ranks_that_wait_inside_and_between_hosts_get_the_failure_of_a_device() -> None:
    outcomes = on_devices(breaks_between_hosts, 4, "late", hosts=(0, 0, 1, 1), timeout_s=30.0)
    for outcome in outcomes:
        assert outcome.error and "uncorrectable ECC error" in outcome.text, outcome


def cannot_abort(group: Any, device_api: Any) -> None:
    made = device_api.nccl

    def nccl(*of: Any) -> Any:
        found = made(*of)

        def abort(reason: str) -> None:
            raise RuntimeError("ncclCommAbort: unhandled cuda error")

        found.abort = abort
        return found

    device_api.nccl = nccl
    breaks_down(group, device_api)


def test_a_device_failure_reaches_all_ranks_if_nccl_cannot_be_aborted() -> None:
    """A former fault: an error of the abort ended the driver's thread before it had notified the waiting threads."""
    outcomes = on_devices(cannot_abort, 2, intra_host="nccl")
    says(outcomes, 1, "NetfoldError", "rank 1: all_reduce on cuda:1 failed", "illegal memory access")


def captures(group: Any, device_api: Any) -> None:
    other, tensor = 1 - group.rank(), device_api.tensor(distinct(group.rank(), 20_000))
    begun = group.allreduce([tensor], reduce_options())
    with device_api.capture():
        for what in (
            lambda: group.allreduce([tensor], reduce_options()),
            lambda: group.send([tensor], other, 0),
            lambda: group.recv([tensor], other, 0),
            begun.wait,
        ):
            with pytest.raises(ValueError, match=r"rank \d: .* cannot be captured into a cuda graph: .*leave it out"):
                what()
    begun.wait()
    torch.testing.assert_close(device_api.value(tensor), sum(distinct(rank, 20_000) for rank in range(2)))
    reduce_once(group, device_api)


def test_a_call_in_a_graph_capture_is_refused_and_the_group_works_afterwards() -> None:
    values(on_devices(captures, 2, **OFF))


def of_another_mind(group: Any, device_api: Any) -> None:
    if group.rank() == 1:
        group.netfold.options = replace(group.netfold.options, intra_host="auto")
    reduce_once(group, device_api)


def test_ranks_with_different_settings_get_an_error() -> None:
    for rank in range(2):
        says(
            on_devices(of_another_mind, 2, **OFF), rank, "ValueError", "rank 1 has NETFOLD_INTRA_HOST=auto, rank 0 off"
        )


def on_two_devices(group: Any, device_api: Any) -> None:
    reduce_once(group, device_api)
    device_api.device = torch.device("cuda", 3)
    reduce_once(group, device_api)


def test_a_rank_uses_one_device_in_a_group() -> None:
    says(on_devices(on_two_devices, 2, **OFF), 0, "ValueError", "all_reduce came with tensors on cuda:3", "cuda:0")


def leaves_at_once(group: Any, device_api: Any) -> None:
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    work = group.allreduce([tensor], reduce_options())
    if group.rank() == 0:
        work.wait()
        group.shutdown()
    else:
        time.sleep(0.02)
        work.wait()
    assert torch.equal(device_api.value(tensor), distinct(0, 60_000) + distinct(1, 60_000))


def leaves_while_others_gather(group: Any, device_api: Any) -> None:
    """Rank 0's device is done and rank 0 leaves; the kernels of rank 1 have yet to read what rank 0 gave them."""
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    device_api.lingers = group.rank() == 1
    work = group.allreduce([tensor], reduce_options())
    if group.rank() == 0:
        work.wait()
        device_api.host.is_over.set()
        group.shutdown()
    else:
        assert device_api.host.is_over.wait(seconds(20))
        time.sleep(0.5)  # rank 0 closes its group meanwhile
        device_api.lingers = False
        work.wait()
    assert torch.equal(device_api.value(tensor), distinct(0, 60_000) + distinct(1, 60_000))


def test_a_rank_that_leaves_does_not_end_the_kernels_of_other_ranks() -> None:
    """A former fault: closing a group aborted NCCL during another rank's last all-gather."""
    values(on_devices(leaves_while_others_gather, 2, "late", intra_host="nccl"))


def closes_before_its_device_is_done(group: Any, device_api: Any) -> None:
    """A started sum without a waiting caller is complete when the group is closed."""
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    device_api.lingers = True
    work = group.allreduce([tensor], reduce_options())
    while not group.devices._awaited:
        time.sleep(0.001)
    threading.Timer(0.2, lambda: setattr(device_api, "lingers", False)).start()
    group.shutdown()
    assert not device_api.lingers
    work.wait()
    assert torch.equal(device_api.value(tensor), distinct(0, 60_000) + distinct(1, 60_000))


def test_closing_waits_for_work_that_the_device_has_begun() -> None:
    values(on_devices(closes_before_its_device_is_done, 2, "late", intra_host="nccl"))


def hangs_when_closed(group: Any, device_api: Any) -> float:
    """The device of rank 0 does not come to an end."""
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    device_api.lingers = group.rank() == 0
    work = group.allreduce([tensor], reduce_options())
    if group.rank() == 1:
        work.wait()
        device_api.host.is_over.set()
        return 1.0
    assert device_api.host.is_over.wait(seconds(20))
    began = time.monotonic()
    group.shutdown()
    took = time.monotonic() - began
    with pytest.raises(GroupAborted, match="the group was closed"):
        work.wait()
    assert device_api.host.communicators[0].gone[0] == "an abort"
    return took


def test_closing_waits_for_a_hanging_device_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "SETTLE_S", 0.3)
    took, _ = values(on_devices(hangs_when_closed, 2, "late", intra_host="nccl"))
    assert 0.3 <= took < seconds(5)


def launches_alone(group: Any, device_api: Any) -> tuple[str, float]:
    """Rank 1 makes no second call: the kernel of rank 0 waits."""
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    group.allreduce([tensor], reduce_options()).wait()
    began, said = time.monotonic(), ""
    if group.rank() == 0:
        try:
            group.allreduce([tensor], reduce_options(timeout_s=0.5)).wait()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        device_api.host.is_over.set()
    else:
        assert device_api.host.is_over.wait(seconds(20))
    return said, time.monotonic() - began


def test_a_kernel_waits_for_another_rank_until_the_deadline_of_its_operation() -> None:
    """A former fault: only NCCL's timeout ended it, and torch then ends the process."""
    (said, took), _ = values(on_devices(launches_alone, 2, "late", intra_host="nccl"))
    assert said.startswith("CollectiveTimeout: rank 0: all_reduce on cuda:0 timed out"), said
    assert 0.5 <= took < seconds(5)


def dies_before_it_launches(group: Any, device_api: Any) -> tuple[str, float]:
    tensor = device_api.tensor(distinct(group.rank(), 60_000))
    group.allreduce([tensor], reduce_options()).wait()
    began, said = time.monotonic(), ""
    if group.rank() == 0:
        try:
            group.allreduce([tensor], reduce_options()).wait()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    else:
        group.netfold.abort("a wheel came off")
        for part in group.devices._paths.parts:
            if part is group.devices._paths.intra_host.watch:
                part.abort("a wheel came off")
    return said, time.monotonic() - began


def test_a_kernel_that_waits_for_a_failed_rank_is_aborted_long_before_the_deadline() -> None:
    (said, took), _ = values(on_devices(dies_before_it_launches, 2, "late", intra_host="nccl", timeout_s=60.0))
    assert "a wheel came off" in said and took < seconds(8), (said, took)


@pytest.mark.parametrize("intra_host", ["off", "auto", "nccl"])
def test_a_finished_rank_that_leaves_does_not_end_operations_that_other_ranks_wait_for(intra_host: str) -> None:
    for _ in range(5):
        values(on_devices(leaves_at_once, 2, "late", intra_host=intra_host, pinned_bytes=120 << 10))


def fails_before_a_future_resolves(group: Any, device_api: Any) -> list[str]:
    """The operation is done, and the device fails before an event of its result is recorded."""
    other, original = 1 - group.rank(), device_api.resolve

    def resolve(*of: Any) -> None:
        device_api.broken = "an uncorrectable ECC error"
        original(*of)

    tensor, came = device_api.tensor(distinct(group.rank(), 100)), device_api.tensor(torch.zeros(100))
    work, receive = group.allreduce([tensor], reduce_options()), group.recv([came], other, 1)
    group.send([tensor], other, 1).wait()
    for each in (work, receive):
        each.wait()
    device_api.resolve = resolve
    said = []
    for each in (work, receive):
        with pytest.raises(Exception, match="the result on cuda") as raised:
            each.get_future().wait()
        said.append(str(raised.value))
        device_api.broken = ""
    return said


def test_a_future_raises_if_the_device_fails_before_it_resolves() -> None:
    """It never resolved, and its callbacks and waiting threads waited for ever."""
    for rank, said in enumerate(values(on_devices(fails_before_a_future_resolves, 2, **OFF))):
        assert all(f"rank {rank}: the result on cuda:{rank} is lost: an uncorrectable" in each for each in said), said
