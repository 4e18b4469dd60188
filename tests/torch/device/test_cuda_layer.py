"""The device layer of torch.cuda, over stand-ins for torch.cuda and for the driver: what it asks of them, no more."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from netfold.torch.device import cuda_driver  # noqa: E402
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


def test_without_a_driver_library_the_mode_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "libthere-is-none.so.1")
    cuda_driver._exchange.cache_clear()
    try:
        assert cuda_driver.set_capture_mode(cuda_driver.RELAXED) == cuda_driver.GLOBAL
    finally:
        cuda_driver._exchange.cache_clear()
