"""The stand-in for CUDA's driver that tests of memory of GPUs share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    from nccl.test_net_cuda import built  # only once pytest has prepared its asserts

    return built(tmp_path_factory.mktemp("cuda"))
