"""State that netfold's calls leave on the threads that make them: the current device, and other threads' captures."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from device_worlds import distinct, on_devices, reduce_options  # noqa: E402
from load import seconds  # noqa: E402
from ranks import values  # noqa: E402

pytestmark = pytest.mark.torch

OFF = {"intra_host": "off", "pinned_bytes": 120 << 10}
COUNT = 50_001


def use_everything(group: Any, device_api: Any) -> None:
    """Collectives, messages and Futures, from a thread whose current device is another one."""
    other, elsewhere = 1 - group.rank(), torch.device("cuda", 7)
    device_api._own.device = elsewhere
    tensor, came = device_api.tensor(distinct(group.rank(), COUNT)), device_api.tensor(torch.zeros(300, 300)).t()
    work = group.allreduce([tensor], reduce_options())
    future = work.get_future()
    send = group.send([device_api.tensor(distinct(group.rank(), COUNT))], other, 3)
    # Not contiguous, and no caller waits: a thread that serves all groups copies it.
    receive = group.recv([came[:1]], other, 4)
    group.send([device_api.tensor(torch.full((300,), 3.0 + group.rank()))], other, 4)
    swapped = device_api.tensor(torch.zeros(COUNT))
    second = group.recv([swapped], other, 3)
    arrived = second.get_future()
    for each in (future, arrived, receive.get_future(), send.get_future()):
        each.wait()
    work.wait()
    while not all(each.is_completed() for each in (work, send, second, receive)):
        pass
    assert device_api.current_device() == elsewhere, "the caller's device is the caller's again"
    assert torch.equal(device_api.value(swapped), distinct(other, COUNT))
    assert torch.equal(device_api.value(tensor), distinct(0, COUNT) + distinct(1, COUNT))
    assert device_api.value(came[:1]).eq(3 + other).all()


@pytest.mark.parametrize("intra_host", ["off", "auto", "nccl"])
def test_every_thread_makes_the_tensors_device_current_before_it_calls(intra_host: str) -> None:
    """`on_devices` raises where one did not. In CUDA such a thread leaves a context on GPU 0."""
    values(on_devices(use_everything, 2, intra_host=intra_host, pinned_bytes=120 << 10))


def capture_while_works_go_on(group: Any, device_api: Any, *, blocking: bool) -> None:
    """The group's threads query events and pin memory while this thread captures, and so does `is_completed`."""
    other = 1 - group.rank()
    tensor, came = device_api.tensor(distinct(group.rank(), COUNT)), device_api.tensor(torch.zeros(9000))
    give_up = time.monotonic() + seconds(30)
    works = [
        group.recv([came], other, 0),
        group.send([device_api.tensor(torch.full((9000,), 1.0 + group.rank()))], other, 0),
        group.allreduce([tensor], reduce_options()),
    ]
    with device_api.capture(blocking=blocking):
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < give_up
            time.sleep(0.001)
    for work in works:
        work.wait()
    assert device_api.value(came).eq(1 + other).all()
    assert torch.equal(device_api.value(tensor), distinct(0, COUNT) + distinct(1, COUNT))


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("intra_host", ["off", "auto", "nccl"])
def test_works_under_way_end_no_capture_of_another_thread(intra_host: str, blocking: bool) -> None:
    """The driver's query of an event ended a capture in the default mode, and the group with it."""
    act = functools.partial(capture_while_works_go_on, blocking=blocking)
    values(on_devices(act, 2, "late", intra_host=intra_host, pinned_bytes=120 << 10))


def unsafe_call(group: Any, device_api: Any) -> str:
    """Calls that the fake device_api refuses for a thread in the default mode."""
    with device_api.on(device_api.device):
        event = device_api._default.record_event()
    said: list[str] = []

    def query() -> None:
        device_api._own.device = device_api.device
        try:
            event.query()
        except RuntimeError as error:
            said.append(str(error))

    with (
        pytest.raises(AssertionError, match="the capture was ended by cudaEventQuery of a-user's"),
        device_api.capture(),
    ):
        thread = threading.Thread(target=query, name="a-user's")
        thread.start()
        thread.join()
    return said[0]


def test_the_fake_device_api_ends_a_capture_for_an_unsafe_call() -> None:
    (said,) = values(on_devices(unsafe_call, 1, **OFF))
    assert "not permitted when stream is capturing" in said


def uses_a_captured_stream(group: Any, device_api: Any) -> list[str]:
    """Calls of another thread, of which each ends the capture, whatever the mode."""
    said: list[str] = []

    def add_work(stream: Any) -> None:
        device_api.enter(device_api.device)
        try:
            device_api.copy(stream, torch.zeros(1), torch.zeros(1))
        except RuntimeError as error:
            said.append(str(error))

    for legacy in (False, True):
        with (
            pytest.raises(AssertionError, match="the capture was ended by"),
            device_api.capture("relaxed", blocking=legacy) as capture,
        ):
            stream = device_api.make_stream("default too") if legacy else capture.stream
            if legacy:
                with pytest.raises(RuntimeError, match="the legacy stream's use"):
                    stream.give(lambda: None)
            else:
                thread = threading.Thread(target=add_work, args=(stream,))
                thread.start()
                thread.join()
    return said


def test_the_fake_device_api_ends_a_capture_for_another_threads_work_and_for_the_legacy_stream() -> None:
    (said,) = values(on_devices(uses_a_captured_stream, 1, **OFF))
    assert len(said) == 1 and "in the captured stream" in said[0]
