"""The stand-ins for CUDA's driver and for libfabric that tests of memory of GPUs share."""

from __future__ import annotations

import pytest
from fabrics import need_libfabric


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    from nccl.test_net_cuda import built  # only once pytest has prepared its asserts

    return built(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="session")
def libfabric() -> None:
    """Not at import, which ranks do too: it would load the real library before one that stands in for it."""
    need_libfabric()


@pytest.fixture(scope="session")
def hostile_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    from nccl.hostile import built_hostile

    return built_hostile(tmp_path_factory.mktemp("hostile"))
