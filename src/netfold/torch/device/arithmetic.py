"""Reductions by torch's operations, in the order and the precision of the native floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor

_FOLDS: dict[str, Any] = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
_HALVES = (torch.float16, torch.bfloat16)
DTYPES = frozenset({
    torch.float32, torch.float64, *_HALVES, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip


def can_reduce(dtype: torch.dtype, reduce: str, *, average: bool) -> bool:
    """What torch does on every device. Integers are not averaged here."""
    return dtype in DTYPES and reduce in _FOLDS and (not average or dtype.is_floating_point)


def reduce_in_order(sources: Sequence[Tensor], reduce: str) -> Tensor:
    """The reduction of `sources`, in their order; half precision is added up in f32 and rounded once."""
    wide = [source.float() if source.dtype in _HALVES else source for source in sources]
    total = wide[0]
    for each in wide[1:]:
        total = _FOLDS[reduce](total, each)
    return total.to(sources[0].dtype)


def divide(values: Tensor, ranks: int) -> None:
    """In place. By a tensor on the device: torch multiplies by the rounded inverse of a number of the host's."""
    wide = values.float() if values.dtype in _HALVES else values
    values.copy_(wide / wide.new_full((), ranks))
