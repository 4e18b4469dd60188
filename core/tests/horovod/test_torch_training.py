"""netfold.horovod.torch: the optimizer and training with it, against training in one process."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch_cases  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", torch_cases.TRAINING)
def test_training(case: str, size: int) -> None:
    torch_cases.check("training", size, case)
