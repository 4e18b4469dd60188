"""Too old a torch is refused with a sentence, and a torch newer than the tested one gets a warning. A CUDA build works
on the CPU of a host without a driver."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch
import torch.distributed as dist

from netfold.torch import release
from netfold.torch.device.cuda import cuda_api

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def unasked() -> None:
    release._check.cache_clear()


@pytest.mark.parametrize("version", ["2.8.1+cpu", "1.13.1", "2.0.0a0+git1234"])
def test_making_a_group_with_too_old_a_torch_is_refused(version, monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        dist.init_process_group("netfold", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()
    oldest = ".".join(map(str, release.OLDEST))
    said = f"netfold needs torch {oldest} or newer, and this is {version}: pip install --upgrade torch"
    assert str(error.value) == said


def test_a_newer_torch_than_the_tested_works_and_rank_0_warns_once(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu140")
    with pytest.warns(RuntimeWarning, match=r"torch 2\.99\.0\+cu140 is newer than 2\.\d+, the newest that"):
        release.check_release(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        release.check_release(0)
        release.check_release(1)


def test_the_oldest_torch_equals_the_packages_requirement() -> None:
    requirements = importlib.metadata.requires("netfold") or []
    bounds = [each.split(";")[0].strip() for each in requirements if each.startswith("torch>=")]
    assert set(bounds) == {"torch>=" + ".".join(map(str, release.OLDEST))}


def test_a_cuda_build_without_a_driver_has_no_device_api_and_no_warning(monkeypatch) -> None:
    # As torch 2.15.0+cu132 answers on a host without a driver.
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_api() is None
