"""netfold.horovod.torch: operations, join, process sets; against values computed here, on 2 and 4 ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch_cases  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", torch_cases.OPERATIONS)
def test_operations(case: str, size: int) -> None:
    torch_cases.check("operations", size, case)
