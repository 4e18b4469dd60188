"""The device layer of torch.cuda, over stand-ins for torch.cuda and for the driver: what it asks of them, no more."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from netfold.torch.device import cuda, cuda_driver  # noqa: E402
from netfold.torch.device.cuda import CudaLayer  # noqa: E402

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


def test_a_thread_of_netfolds_takes_the_device_and_the_relaxed_mode_for_good(standin: StandIn) -> None:
    CudaLayer().enter(DEVICE)
    assert (standin.current, standin.mode) == (1, cuda_driver.RELAXED)


def test_a_thread_of_the_users_gets_back_its_device_and_its_mode(standin: StandIn) -> None:
    with pytest.raises(KeyError), CudaLayer().on(DEVICE):
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

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
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
    return made


def test_own_streams_are_none_that_the_users_code_gets_from_torch(driver: Driver) -> None:
    own = [CudaLayer().new_stream(DEVICE) for _ in range(8)]
    users = [torch.cuda.Stream(DEVICE) for _ in range(32)]
    handles = {stream.cuda_stream for stream in own}
    assert len(handles) == 8 and handles.isdisjoint(stream.cuda_stream for stream in users)
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2") == 8


def test_a_stream_that_nobody_holds_is_given_to_the_next_group(driver: Driver) -> None:
    for _ in range(5):
        held = [CudaLayer().new_stream(DEVICE) for _ in range(3)]
        elsewhere = CudaLayer().new_stream(torch.device("cuda", 2))
        assert elsewhere.cuda_stream not in {stream.cuda_stream for stream in held}
        del held, elsewhere
    assert driver.made == 4


def test_a_driver_that_gives_no_stream_is_an_error_and_the_context_is_as_before(driver: Driver) -> None:
    driver.fails = "cuStreamCreate"
    with pytest.raises(RuntimeError, match="cuStreamCreate: CUDA driver error 2"):
        CudaLayer().new_stream(DEVICE)
    assert driver.calls[-1] == "cuCtxPopCurrent_v2"


def test_without_a_driver_library_streams_are_of_torchs_other_pool(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "_library", lambda kind: None)
    assert CudaLayer().new_stream(DEVICE).cuda_stream >= 2000


def test_without_a_driver_library_the_mode_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libthere-is-none.so.1")
    caches = (cuda_driver._exchange, cuda_driver._library)
    for cached in caches:
        cached.cache_clear()
    try:
        assert cuda_driver.set_capture_mode(cuda_driver.RELAXED) == cuda_driver.GLOBAL
        assert cuda_driver.create_stream(0) is None
    finally:
        for cached in caches:
            cached.cache_clear()
