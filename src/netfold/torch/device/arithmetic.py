"""Reductions by torch's operations, in the order and precision of the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Any] = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
_HALVES = (torch.float16, torch.bfloat16)
DTYPES = frozenset({
    torch.float32, torch.float64, *_HALVES, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip


def can_reduce(dtype: torch.dtype, reduce: str, *, average: bool) -> bool:
    """Whether torch has the reduction on every device. Averages of integers are not supported here."""
    return dtype in DTYPES and reduce in _REDUCTIONS and (not average or dtype.is_floating_point)


def reduce_in_order(sources: Sequence[Tensor], reduce: str) -> Tensor:
    """Reduce `sources` in their order. Half precision is reduced in f32 and rounded once."""
    wide = [source.float() if source.dtype in _HALVES else source for source in sources]
    total = wide[0]
    for each in wide[1:]:
        total = _REDUCTIONS[reduce](total, each)
    return total.to(sources[0].dtype)


def divide(values: Tensor, ranks: int) -> None:
    """Divide in place, by a tensor on the device: for a Python number torch multiplies by the rounded inverse."""
    wide = values.float() if values.dtype in _HALVES else values
    values.copy_(wide / wide.new_full((), ranks))
