"""The native pipeline of staged collectives, over a fake CUDA driver that a C compiler makes: no Python a chunk."""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from device_worlds import distinct, on_devices, reduce_options  # noqa: E402
from fake_cuda import ILLEGAL_ADDRESS, FakeCudaApi, Library, wait_until  # noqa: E402
from load import seconds  # noqa: E402
from ranks import Outcome, values  # noqa: E402

from netfold._native import device as native  # noqa: E402

pytestmark = pytest.mark.torch

# Slots of 40 KB: 10,112 f32.
CHUNK = 10_112
OFF = {"intra_host": "off", "pinned_bytes": 120 << 10}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def library(built: Library) -> Iterator[Library]:
    built.call("fake_reset")
    yield built
    built.call("fake_reset")


def on_cuda(act: Any, size: int, library: Library, *arguments: Any, **options: Any) -> list[Outcome]:
    def make_api(rank: int, host: Any) -> FakeCudaApi:
        return FakeCudaApi(library, rank, host)

    of = functools.partial(act, *arguments)
    return on_devices(lambda group, api: of(group, api), size, make_api=make_api, **{**OFF, **options})


def total(size: int, count: int, dtype: Any = torch.float32) -> Any:
    return sum(distinct(rank, count, torch.float64) for rank in range(size)).to(dtype)


# --- sums ----------------------------------------------------------------------------------------------------------


def sums(group: Any, api: Any) -> None:
    """All under way before any is waited for; the values come late, in the caller's stream."""
    rank, size, works = group.rank(), group.size(), []
    for count in (0, 1, 127, 128, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 10 * CHUNK + 77):
        for dtype in (torch.float32, torch.int64, torch.uint8, torch.bfloat16):
            mine = (distinct(rank, count) % 31).to(dtype)
            tensor = api.tensor(torch.full_like(mine, 77))
            if count:
                api.write_late(tensor, mine)
            works.append((group.allreduce([tensor], reduce_options()), tensor))
    for work, tensor in works:
        work.wait()
        due = sum(distinct(each, len(tensor)) % 31 for each in range(size)).to(tensor.dtype)
        assert torch.equal(api.value(tensor), due), (tensor.dtype, len(tensor))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_right_at_many_sizes_and_dtypes(size: int, library: Library) -> None:
    values(on_cuda(sums, size, library, timeout_s=60.0))


def every_kind(group: Any, api: Any) -> None:
    rank, size, count = group.rank(), group.size(), 4 * CHUNK + 5
    blank = lambda length=count: api.tensor(torch.full((length,), -2.0))
    mine = distinct(rank, count)
    cast, reduced, own = api.tensor(mine), api.tensor(mine), blank()
    outs, swapped = [blank() for _ in range(size)], [blank(7 * rank + 3000 * each) for each in range(size)]
    cast_options, reduce_opts = dist.BroadcastOptions(), dist.ReduceOptions()
    cast_options.rootRank, reduce_opts.rootRank = 1, 0
    works = [
        group.broadcast([cast], cast_options),
        group.reduce([reduced], reduce_opts),
        group.allgather([outs], [api.tensor(mine)]),
        group.reduce_scatter([own], [[api.tensor(mine + 7 * each) for each in range(size)]]),
        group.alltoall(swapped, [api.tensor(mine[: 7 * each + 3000 * rank] + each) for each in range(size)]),
    ]
    for work in works:
        work.wait()
    assert torch.equal(api.value(cast), distinct(1, count))
    assert rank or torch.equal(api.value(reduced), total(size, count))
    assert torch.equal(api.value(own), total(size, count) + 7 * rank * size)
    for each in range(size):
        assert torch.equal(api.value(outs[each]), distinct(each, count))
        assert torch.equal(api.value(swapped[each]), distinct(each, count)[: 7 * rank + 3000 * each] + rank)


def test_every_kind_of_collective_goes_through_the_pipeline(library: Library) -> None:
    values(on_cuda(every_kind, 3, library))


# --- the GIL -------------------------------------------------------------------------------------------------------


def reduces_while_nobody_has_the_gil(library: Library, chunks: int, group: Any, api: Any) -> None:
    """The tensors' values come only once a thread keeps the GIL, and every rank's thread waits for them."""
    rank, size = group.rank(), group.size()
    tensor = api.tensor(distinct(rank, 10))
    group.allreduce([tensor], reduce_options()).wait()
    wait_until(lambda: library.copies()[1] == size, seconds(20))
    big = api.tensor(distinct(rank, chunks * CHUNK))
    with api.on(api.device):
        library.call("fake_hold", ctypes.c_void_p(api.stream.cuda_stream))
    queries = library.queries(rank)
    work = group.allreduce([big], reduce_options())
    wait_until(lambda: library.queries(rank) > queries + 100, seconds(20))
    api.host.closed.append(rank)
    if rank == 0:
        wait_until(lambda: len(api.host.closed) == size, seconds(20))
        due = size + chunks * size
        library.holding.fake_release()
        found = library.holding.fake_await_copies(1, due, int(seconds(5)))
        api.host.is_over.set()
        assert found >= due, f"{found} of {due} copies back without the GIL"
    assert api.host.is_over.wait(seconds(60))
    work.wait()
    assert torch.equal(api.value(big), total(size, chunks * CHUNK))


@pytest.mark.parametrize("chunks", [1, 50])
def test_an_operation_ends_while_another_thread_keeps_the_gil(chunks: int, library: Library) -> None:
    """The driver's Python needed the GIL for each chunk."""
    values(on_cuda(reduces_while_nobody_has_the_gil, 2, library, library, chunks))


def counts_python(chunks: int, group: Any, api: Any) -> int:
    """The Python functions that the device thread calls in one all_reduce."""
    calls, big = [0], api.tensor(distinct(group.rank(), chunks * CHUNK))

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[0] += 1

    group.allreduce([big], reduce_options()).wait()
    begin = group.devices._begin

    def counted(job: Any) -> None:
        sys.setprofile(count)
        try:
            begin(job)
        finally:
            sys.setprofile(None)

    group.devices._begin = counted
    work = group.allreduce([big], reduce_options())
    work.wait()
    wait_until(lambda: not group.devices._paths.staged.busy, seconds(10))
    assert calls[0]
    return calls[0]


def test_an_operation_needs_as_much_python_for_many_chunks_as_for_two(library: Library) -> None:
    few, many = (values(on_cuda(functools.partial(counts_python, chunks), 1, library))[0] for chunks in (2, 100))
    assert abs(many - few) < 50, f"{few} calls for 2 chunks, {many} for 100"


# --- failures ------------------------------------------------------------------------------------------------------


def fails_at(library: Library, name: str, after: int, group: Any, api: Any) -> tuple[str, str]:
    tensor = api.tensor(distinct(group.rank(), 10))
    group.allreduce([tensor], reduce_options()).wait()
    api.value(tensor)
    big = api.tensor(distinct(group.rank(), 20 * CHUNK))
    if group.rank() == 1:
        library.call("fake_fail", name.encode(), ctypes.c_long(after), ILLEGAL_ADDRESS)
        api.host.is_over.set()
    assert api.host.is_over.wait(seconds(20))
    try:
        group.allreduce([big], reduce_options()).wait()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("cuMemcpyDtoHAsync", r"the copy to the host of 40448 bytes \(chunk \d+ of 20\): cuMemcpyDtoHAsync: "),
        ("cuMemcpyHtoDAsync", r"the copy to the device of 40448 bytes \(chunk \d+ of 20\): cuMemcpyHtoDAsync: "),
        ("cuEventQuery", "the copy to the (host|device): cuEventQuery: "),
    ],
)
def test_a_failed_copy_is_named_with_rank_operation_and_size(name: str, what: str, library: Library) -> None:
    outcomes = values(on_cuda(fails_at, 2, library, library, name, 15))
    of = [text for _, text in outcomes if "CUDA driver error 700" in text and "aborted the group" not in text]
    assert len(of) == 1, outcomes
    (text,) = of
    rank = "1" if "rank 1: " in text else "0"
    assert re.match(
        rf"rank {rank}: all_reduce on cuda:{rank} failed: {what}an illegal memory access was encountered", text
    ), text
    assert all(error in ("NetfoldError", "GroupAborted", "PeerLost") for error, _ in outcomes), outcomes
    assert all("illegal memory access" in text for _, text in outcomes), outcomes


def aborts_in_the_middle(library: Library, group: Any, api: Any) -> float:
    """The device of rank 0 hangs in the middle of an operation whose deadline is far away; another thread aborts."""
    tensor = api.tensor(distinct(group.rank(), 10))
    group.allreduce([tensor], reduce_options()).wait()
    before = library.copies()[0]
    work = group.allreduce([api.tensor(distinct(group.rank(), 500 * CHUNK))], reduce_options())
    if group.rank() == 0:
        wait_until(lambda: library.copies()[0] > before + 5, seconds(20))
        library.call("fake_set_hangs", 0, 1)
        threading.Timer(0.1, lambda: group.netfold.abort("enough")).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="enough"):
        work.wait()
    took = time.monotonic() - began
    library.call("fake_set_hangs", 0, 0)
    return took


def test_an_abort_ends_an_operation_in_the_middle_while_the_device_hangs(library: Library) -> None:
    """The thread waited for its device until the operation's deadline."""
    for took in values(on_cuda(aborts_in_the_middle, 2, library, library, timeout_s=120.0)):
        assert took < seconds(20)


def hangs(library: Library, group: Any, api: Any) -> str:
    tensor = api.tensor(distinct(group.rank(), 10))
    group.allreduce([tensor], reduce_options()).wait()
    api.value(tensor)
    if group.rank() == 0:
        library.call("fake_set_hangs", 0, 1)
    try:
        group.allreduce([tensor], reduce_options(timeout_s=0.5)).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        library.call("fake_set_hangs", 0, 0)
    return ""


def test_each_wait_for_a_device_ends_at_the_operations_deadline(library: Library) -> None:
    said = values(on_cuda(hangs, 2, library, library, timeout_s=60.0))
    assert said[0].startswith("CollectiveTimeout: rank 0: all_reduce: the copy to the host timed out after 0.5 s"), said


def no_driver(group: Any, api: Any) -> None:
    group.allreduce([api.tensor(torch.ones(10))], reduce_options()).wait()


def test_without_a_driver_library_every_rank_gets_the_reason() -> None:
    def lacks(device_api: Any) -> None:
        if device_api.device.index == 1:
            device_api.no_driver = "CUDA's driver library libcuda.so.1 cannot be opened (no such file)"

    for outcome in on_devices(no_driver, 2, before=lacks, **OFF):
        assert (
            outcome.error == "NetfoldError" and "rank 1: cuda:1 cannot be used: CUDA's driver library" in outcome.text
        )


def test_a_library_that_is_absent_or_lacks_a_function_is_an_error_of_one_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"CUDA's driver library libthere-is-none\.so\.1 cannot be opened \(.*\)"):
        native.CudaDriver.open("libthere-is-none.so.1", 0)
    with pytest.raises(RuntimeError, match=r"library libc\.so\.6 has no cuDeviceGet; install a later driver"):
        native.CudaDriver.open("libc.so.6", 0)


# --- the fake ------------------------------------------------------------------------------------------------------


def test_the_fake_driver_refuses_calls_that_cuda_forbids(library: Library) -> None:
    calls, context, stream, event = library.calls, ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    calls.cuCtxSetCurrent(context)
    calls.cuStreamCreate(ctypes.byref(stream), 1)
    calls.cuEventCreate(ctypes.byref(event), 2)

    def refused(name: str, *arguments: Any) -> str:
        assert getattr(calls, name)(*arguments) not in (0, 600), name
        return library.fault

    assert "never recorded" in refused("cuEventQuery", event)
    library.call("fake_reset")
    assert "never recorded" in refused("cuStreamWaitEvent", stream, event, 0)
    library.call("fake_reset")
    memory = torch.zeros(8, dtype=torch.uint8)
    place = ctypes.c_void_p(memory.data_ptr())
    assert "not the device's" in refused("cuMemcpyDtoHAsync_v2", place, place, ctypes.c_size_t(8), stream)
    library.call("fake_reset")
    library.call("fake_own", place, ctypes.c_size_t(8), 0)
    assert "not pinned" in refused("cuMemcpyDtoHAsync_v2", place, place, ctypes.c_size_t(8), stream)
    library.call("fake_reset")
    calls.cuCtxSetCurrent(None)
    assert "another context" in refused("cuEventRecord", event, stream)
