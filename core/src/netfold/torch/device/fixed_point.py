"""The i32 wire format's arithmetic by torch's operations, on any device.

The bits equal those of core/native/kernels (block_quantise.hpp, which has the proof), so a sum made on GPUs equals a
sum made on a host. All products are in f64, where they are exact and rounded once. The native engine does the same for
the smallest units; for other units it uses f32, where its products are exact, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from netfold.torch.device.chunks import BLOCK_ELEMENTS

Tensor = torch.Tensor

# The bits of Inf. Those of NaN are greater.
NON_FINITE_BITS = 0x7F800000
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -148, 128
# Reserved exponents.
_ALL_ZERO, _NON_FINITE = -(1 << 15), (1 << 15) - 1
# In a non-finite block, an integer holds two counts: of ranks with +Inf or NaN, and of ranks with -Inf or NaN.
_COUNTER_BITS = 15
_PLUS, _MINUS = 1, 1 << _COUNTER_BITS


def headroom_bits(ranks: int) -> int:
    return (ranks - 1).bit_length()


def block_count(elements: int) -> int:
    return -(-elements // BLOCK_ELEMENTS)


def magnitudes(values: Tensor) -> Tensor:
    """[blocks] i32: the bits of the greatest magnitude in each block of `values`, [n] f32."""
    bits = values.view(torch.int32).bitwise_and(0x7FFFFFFF)
    return torch.cat([rows.amax(1) for rows in _rows(bits)] or [bits])


def exponents(agreed: Tensor) -> Tensor:
    """[blocks] i32: the least e with |x| < 2^e for magnitudes up to `agreed`, or a reserved exponent."""
    biased = agreed >> 23
    subnormal = torch.frexp(agreed.double()).exponent - 149
    found = torch.where(biased != 0, biased - 126, subnormal)
    found = torch.where(agreed >= NON_FINITE_BITS, _NON_FINITE, found)
    return torch.where(agreed == 0, _ALL_ZERO, found)


def quantise(values: Tensor, exponents: Tensor, headroom: int) -> Tensor:
    """[n] i32: `values`, [n] f32, in units of their blocks, rounded to nearest even."""
    scale = _power_of_two(-_units(exponents, headroom))
    parts = []
    for rows, blocks in rows_with_blocks(values, exponents, scale):
        plain = (rows.double() * blocks[1]).round()
        counts = rows.isposinf() * _PLUS + rows.isneginf() * _MINUS + rows.isnan() * (_PLUS + _MINUS)
        parts.append(torch.where(blocks[0] == _NON_FINITE, counts.double(), plain).to(torch.int32).reshape(-1))
    return torch.cat(parts) if parts else values.to(torch.int32)


def dequantise(integers: Tensor, exponents: Tensor, headroom: int, ranks: int = 1) -> Tensor:
    """[n] f32: the numbers nearest to `integers`, [n] i32, of their blocks' units, divided by the ranks."""
    scale = _power_of_two(_units(exponents, headroom))
    parts = []
    for rows, blocks in rows_with_blocks(integers, exponents, scale):
        exact = rows.double() * blocks[1]
        plain = (exact / exact.new_full((), ranks)).float()
        plus, minus = (rows & (_MINUS - 1)) != 0, (rows >> _COUNTER_BITS) != 0
        infinite = torch.where(plus, torch.inf, -torch.inf).masked_fill(plus == minus, torch.nan).float()
        found = torch.where(blocks[0] == _NON_FINITE, infinite, plain)
        parts.append(found.masked_fill(blocks[0] == _ALL_ZERO, 0.0).reshape(-1))
    return torch.cat(parts) if parts else integers.to(torch.float32)


def _units(exponents: Tensor, headroom: int) -> Tensor:
    """log2 of the value of the integer 1."""
    return exponents.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT) + (headroom - 30)


def _power_of_two(exponent: Tensor) -> Tensor:
    # Built from bits: the rounding of pow() depends on the device.
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _rows(flat: Tensor) -> list[Tensor]:
    """View the whole blocks as rows, and the short last block as one row."""
    whole = flat.numel() // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    found = [flat[:whole].view(-1, BLOCK_ELEMENTS), flat[whole:].view(1, -1)]
    return [rows for rows in found if rows.numel()]


def rows_with_blocks(flat: Tensor, *of_blocks: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the blocks of `flat` as rows, each time with the rows' elements of `of_blocks`, [rows, 1]."""
    at = 0
    for rows in _rows(flat):
        yield rows, [each[at : at + len(rows), None] for each in of_blocks]
        at += len(rows)
