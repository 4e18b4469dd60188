"""The device API of torch.cuda, over stand-ins for torch.cuda and for the driver: which calls it makes."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from load import seconds  # noqa: E402

from netfold.torch.device import cuda, cuda_driver  # noqa: E402
from netfold.torch.device.cuda import CudaApi  # noqa: E402

pytestmark = pytest.mark.torch

DEVICE = torch.device("cuda", 1)


class StandIn:
    """One thread's current device and capture mode."""

    def __init__(self) -> None:
        self.current = 0
        self.mode = cuda_driver.GLOBAL
        self.contexts: set[int] = set()  # devices that a context was made on

    def set_device(self, device: Any) -> None:
        self.current = torch.device(device).index
        self.contexts.add(self.current)

    def device(self, device: Any) -> Any:
        standin = self

        class Device:
            def __enter__(self) -> None:
                self.before = standin.current
                standin.set_device(device)

            def __exit__(self, *_: Any) -> None:
                standin.current = self.before  # without a context there, as torch's _maybe_exchange_device

        return Device()

    def exchange(self, mode: Any) -> int:
        pointer = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.mode, pointer[0] = pointer[0], self.mode
        return 0


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setattr(torch.cuda, "set_device", made.set_device)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(cuda_driver, "_exchange", lambda: made.exchange)
    yield made


def test_a_thread_of_netfold_keeps_the_device_and_the_relaxed_mode(standin: StandIn) -> None:
    CudaApi().enter(DEVICE)
    assert (standin.current, standin.mode) == (1, cuda_driver.RELAXED)


def test_a_thread_of_the_user_gets_back_its_device_and_mode(standin: StandIn) -> None:
    with pytest.raises(KeyError), CudaApi().on(DEVICE):
        assert (standin.current, standin.mode) == (1, cuda_driver.RELAXED)
        raise KeyError
    assert (standin.current, standin.mode) == (0, cuda_driver.GLOBAL)
    assert standin.contexts == {1}, "none on the device that the thread had before"


class Pooled:
    """As torch.cuda.Stream: 32 a device and priority, by turns."""

    turn = 0

    def __init__(self, device: Any, priority: int = 0) -> None:
        Pooled.turn += 1
        self.cuda_stream = 1000 * (1 - priority) + Pooled.turn % 32


class External:
    def __init__(self, handle: int, device: Any) -> None:
        self.cuda_stream = handle


class Driver:
    """libcuda, of which one function fails if `fails` names it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = ""
        self.made = 0
        self.lacks: set[str] = set()
        self.has_memory_operations = 1
        self.given: list[tuple[Any, ...]] = []  # waits for values, and writes

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetAttribute":
                assert arguments[1].value == 122, "92 is about functions that drivers switch off"
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = self.has_memory_operations
            if name.startswith(("cuStreamWaitValue", "cuStreamWriteValue")):
                self.given.append((name, *(each.value for each in arguments)))
            if name == "cuStreamCreate":
                assert arguments[1].value == 1, "it would wait for the legacy default stream"
                self.made += 1
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 5000 + self.made
            return 2 if name == self.fails else 0

        call.__name__ = name
        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "Stream", Pooled)
    monkeypatch.setattr(torch.cuda, "ExternalStream", External)
    monkeypatch.setattr(cuda_driver, "_library", lambda kind: made, raising=False)
    monkeypatch.setattr(cuda, "_free_streams", collections.defaultdict(list), raising=False)
    monkeypatch.setattr(cuda, "_words", collections.defaultdict(cuda._Words))
    monkeypatch.setattr(CudaApi, "pinned", lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8))
    cuda._can_wait_for_values.cache_clear()
    return made


def test_netfolds_streams_are_never_given_to_the_users_code(driver: Driver) -> None:
    own = [CudaApi().new_stream(DEVICE) for _ in range(8)]
    users = [torch.cuda.Stream(DEVICE) for _ in range(32)]
    handles = {stream.cuda_stream for stream in own}
    assert len(handles) == 8 and handles.isdisjoint(stream.cuda_stream for stream in users)
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2") == 8


def test_an_unused_stream_is_reused_by_the_next_group(driver: Driver) -> None:
    for _ in range(5):
        held = [CudaApi().new_stream(DEVICE) for _ in range(3)]
        elsewhere = CudaApi().new_stream(torch.device("cuda", 2))
        assert elsewhere.cuda_stream not in {stream.cuda_stream for stream in held}
        del held, elsewhere
    assert driver.made == 4


def test_a_failed_stream_creation_is_an_error_and_restores_the_context(driver: Driver) -> None:
    driver.fails = "cuStreamCreate"
    with pytest.raises(RuntimeError, match="cuStreamCreate: CUDA driver error 2"):
        CudaApi().new_stream(DEVICE)
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


def test_without_a_driver_library_streams_are_from_torchs_high_priority_pool(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda kind: None)
    assert CudaApi().new_stream(DEVICE).cuda_stream >= 2000


def memory_of(gate: Any) -> int:
    return int(ctypes.c_uint32.from_address(gate._address).value)


def test_a_gate_is_a_word_of_pinned_memory_that_the_device_or_the_host_writes(driver: Driver) -> None:
    user, own = External(7, DEVICE), External(8, DEVICE)
    first = CudaApi().new_gate(DEVICE)
    assert first is not None
    first.hold(user)
    first.open_after(own)
    address = driver.given[0][2]
    assert driver.given == [
        ("cuStreamWaitValue32_v2", 7, address, 1, 0),
        ("cuStreamWriteValue32_v2", 8, address, 1, 0),
    ]
    assert memory_of(first) == 0, "the device writes it"
    second = CudaApi().new_gate(DEVICE)
    assert second is not None and memory_of(second) == 0
    second.open()
    assert memory_of(second) == 1


def test_a_word_serves_another_gate_only_after_the_devices_write(driver: Driver) -> None:
    """Else the earlier gate's late write would close the later gate again."""
    words = cuda._WORDS_BYTES // 4
    gates = [CudaApi().new_gate(DEVICE) for _ in range(words)]
    assert len({gate._address for gate in gates}) == words
    gates[5].open()  # as the device's write
    assert CudaApi().new_gate(DEVICE)._address == gates[5]._address
    assert driver.given == []
    again = CudaApi().new_gate(DEVICE)
    assert again._address not in {gate._address for gate in gates}, "another page"


def test_the_values_of_a_word_never_end_at_32_bits(driver: Driver) -> None:
    gate = CudaApi().new_gate(DEVICE)
    words = cuda._words[1]
    words._words.clear()
    gate._word.value = 0xFFFFFFFF
    words._words.append((gate._word, 0xFFFFFFFF))
    last = CudaApi().new_gate(DEVICE)
    last.hold(External(7, DEVICE))
    assert driver.given[-1][3] == 0, "the comparison is cyclic"
    last.open()
    assert memory_of(last) == 0 and CudaApi().new_gate(DEVICE)._address == gate._address


def test_without_stream_memory_operations_there_are_no_gates(driver: Driver) -> None:
    driver.has_memory_operations = 0
    assert CudaApi().new_gate(DEVICE) is None
    cuda._can_wait_for_values.cache_clear()
    driver.has_memory_operations, driver.lacks = 1, {"cuStreamWaitValue32_v2"}
    assert CudaApi().new_gate(DEVICE) is None
    cuda._can_wait_for_values.cache_clear()


def test_host_memory_is_registered_for_all_contexts_and_unregistered(driver: Driver) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    assert CudaApi().register(memory)
    CudaApi().unregister(memory)
    assert driver.calls == ["cuMemHostRegister_v2", "cuMemHostUnregister"]
    driver.fails = "cuMemHostRegister_v2"
    with pytest.raises(RuntimeError, match="cuMemHostRegister_v2: CUDA driver error 2"):
        CudaApi().register(memory)


def test_without_a_driver_library_the_capture_mode_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libthere-is-none.so.1")
    caches = (cuda_driver._exchange, cuda_driver._library)
    for cached in caches:
        cached.cache_clear()
    try:
        assert cuda_driver.set_capture_mode(cuda_driver.RELAXED) == cuda_driver.GLOBAL
        assert cuda_driver.create_stream(0) is None
        assert not cuda_driver.can_wait_for_values(0)
        assert not cuda_driver.register_host_memory(4096, 4096)
    finally:
        for cached in caches:
            cached.cache_clear()


class Storage:
    """A storage whose memory is exported, and an opened one: in which stream torch's calls come."""

    def __init__(self, calls: list[Any], current: list[Any]) -> None:
        self._calls, self._current = calls, current

    def untyped_storage(self) -> Storage:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        self._calls.append(("share", self._current[-1]))
        return (0, b"handle", 8, 0, b"counter", 0, b"event", True)

    def __del__(self) -> None:
        self._calls.append(("end", self._current[-1]))


def test_memory_is_exported_and_closed_in_the_given_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may synchronise the current stream, which a thread of netfold shares with the user's default stream."""
    calls: list[Any] = []
    current: list[Any] = ["the default"]

    @contextlib.contextmanager
    def stream(given: Any) -> Iterator[None]:
        current.append(given)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    windows = [Storage(calls, current)]
    assert CudaApi().export("netfold's", windows[0])["handle"] == b"handle"  # type: ignore[arg-type]
    CudaApi().close("netfold's", windows)  # type: ignore[arg-type]
    assert calls == [("share", "netfold's"), ("end", "netfold's")] and not windows


class Nccl:
    """ProcessGroupNCCL: what it found in the environment when it was made, and how it ended."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.found = {name: os.environ.get(name) for name in ENDS_THE_PROCESS}
        self.timeout = options._timeout
        self.ended: list[str] = []
        made_groups.append(self)

    class Options:
        _timeout: Any = None

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


# What torch's documents and ProcessGroupNCCL.hpp say of each: by default it ends the process, or blocks the host.
ENDS_THE_PROCESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
made_groups: list[Nccl] = []


@pytest.fixture
def nccl(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> list[Nccl]:
    monkeypatch.setattr(cuda._distributed_c10d, "ProcessGroupNCCL", Nccl, raising=False)
    made_groups.clear()
    return made_groups


def test_nccl_is_made_so_that_it_ends_no_process_and_the_users_environment_is_as_before(
    nccl: list[Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ENDS_THE_PROCESS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    CudaApi().nccl(DEVICE, dist.HashStore(), 0, 1)
    assert nccl[0].found == ENDS_THE_PROCESS
    assert nccl[0].timeout.total_seconds() >= 86_400, "deadlines are netfold's"
    assert {name: os.environ.get(name) for name in ENDS_THE_PROCESS} == {
        **dict.fromkeys(ENDS_THE_PROCESS),
        "TORCH_NCCL_BLOCKING_WAIT": "1",
    }


def test_an_nccl_group_is_freed_once_all_ranks_are_done_and_aborted_only_on_request(nccl: list[Nccl]) -> None:
    store, device_api = dist.HashStore(), CudaApi()
    first, second = (device_api.nccl(DEVICE, store, rank, 2) for rank in range(2))
    closing = threading.Thread(target=first.close, args=(seconds(20),))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive() and not nccl[0].ended
    second.close(seconds(20))
    closing.join(seconds(20))
    second.close(seconds(20))
    second.abort("late")
    assert nccl[0].ended == nccl[1].ended == ["shutdown"]
    third, fourth = (device_api.nccl(DEVICE, dist.PrefixStore("other", store), rank, 2) for rank in range(2))
    third.abort("a failure")
    began = time.monotonic()
    fourth.close(seconds(60))
    assert time.monotonic() - began < seconds(10), "one that aborted is waited for no longer"
    assert (nccl[2].ended, nccl[3].ended) == (["abort"], ["shutdown"])


def test_an_nccl_group_that_cannot_be_ended_delays_no_rank(nccl: list[Nccl], monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    monkeypatch.setattr(cuda, "_NCCL_END_S", 0.1)
    monkeypatch.setattr(Nccl, "abort", lambda self: held.wait(seconds(20)))
    CudaApi().nccl(DEVICE, dist.HashStore(), 0, 1).abort("the device hangs")
    assert not held.is_set()
    held.set()
