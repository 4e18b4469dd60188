"""Reductions by torch's operations, in the order and precision of the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Any] = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
_HALVES = (torch.float16, torch.bfloat16)
DTYPES = frozenset({
    torch.float32, torch.float64, *_HALVES, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
})  # fmt: skip


class Operator(NamedTuple):
    """An operator of `reduce_in_order`. scale: each source is multiplied by it first."""

    name: str
    scale: float = 1.0


def operator_of(reduce: str, ranks: int, *, average: bool) -> Operator:
    """The operator of a call of so many ranks. An average adds what `divide` then divides (kernels/reduce.hpp)."""
    return Operator(reduce, 0.5 ** (ranks - 1).bit_length() if average else 1.0)


def can_reduce(dtype: torch.dtype, reduce: str, *, average: bool) -> bool:
    """Whether torch has the reduction on every device. Averages of integers are not supported here."""
    return dtype in DTYPES and reduce in _REDUCTIONS and (not average or dtype.is_floating_point)


def reduce_in_order(sources: Sequence[Tensor], operator: Operator) -> Tensor:
    """Reduce `sources` in their order. Half precision is reduced in f32 and rounded once."""
    wide = [source.float() if source.dtype in _HALVES else source for source in sources]
    if operator.scale != 1.0:
        wide = [source * operator.scale for source in wide]
    total = wide[0]
    for each in wide[1:]:
        total = _REDUCTIONS[operator.name](total, each)
    return total.to(sources[0].dtype)


def divide(values: Tensor, ranks: int) -> None:
    """Make the average of so many ranks, in place, of a sum whose terms `operator_of` scaled.

    Divides by a tensor on the device: for a Python number torch multiplies by the rounded inverse.
    """
    divisor = ranks * operator_of("sum", ranks, average=True).scale
    if divisor != 1.0:
        wide = values.float() if values.dtype in _HALVES else values
        values.copy_(wide / wide.new_full((), divisor))
