"""The i8 wire format's arithmetic by torch's operations, on any device.

The bits equal those of core/native/kernels (byte_quantise.hpp, which has the error bounds). Each product and quotient
is one operation of torch's, rounded once. Only blocks whose greatest magnitude is below 2^-100 or above 2^100 need f64,
as in the native layer.
"""

from __future__ import annotations

import torch

from netfold.torch.device.fixed_point import NON_FINITE_BITS, rows_with_blocks

Tensor = torch.Tensor

_SMALLEST_PLAIN, _LARGEST_PLAIN = 2.0**-100, 2.0**100
_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B9
_BLOCK_STRIDE = 0x9E3779B97F4A7C15


def levels_for(ranks: int) -> int:
    """The bytes of one rank are at most this, so that the sum of all ranks' bytes is a byte."""
    return 127 // ranks


def rounding_key(operation: int, worker: int) -> int:
    """The key of the random bits of one operation of one worker, 64 bits."""
    bits = ((operation << 32 | worker) + _BLOCK_STRIDE) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def facts(magnitudes: Tensor) -> Tensor:
    """[2] i32: whether a block holds NaN or Inf, and whether a block needs f64.

    magnitudes: [blocks] i32, not empty, as `fixed_point.magnitudes` has them.
    """
    return torch.stack([(magnitudes >= NON_FINITE_BITS).any(), _needs_f64(magnitudes.view(torch.float32)).any()]).int()


def quantise(values: Tensor, magnitudes: Tensor, levels: int, key: int, *, f64: bool) -> Tensor:
    """[n] i8: `values`, [n] f32, in units of their blocks, rounded up or down at random.

    magnitudes: [blocks] i32: the greatest of all ranks, all finite.
    f64: whether a block needs it.
    """
    of_blocks = magnitudes.view(torch.float32)
    scale, limit = of_blocks.new_full((), levels) / of_blocks, float(levels)
    seeds = _seeds(key, len(magnitudes), magnitudes.device)
    parts = []
    for rows, (magnitude, factor, seed) in rows_with_blocks(values, of_blocks, scale, seeds):
        bits = _random_bits(seed, rows.shape[1])
        found = _rounded(rows * factor, bits)
        if f64:
            exact = _rounded(rows.double() * (1 / (magnitude.double() / limit)), bits)
            found = torch.where(_needs_f64(magnitude), exact, found.double())
        parts.append(found.clamp(-limit, limit).masked_fill(magnitude == 0, 0).to(torch.int8).reshape(-1))
    return torch.cat(parts) if parts else values.to(torch.int8)


def dequantise(integers: Tensor, magnitudes: Tensor, levels: int, *, f64: bool) -> Tensor:
    """[n] f32: the numbers that `integers`, [n] i8, mean in their blocks' units."""
    of_blocks = magnitudes.view(torch.float32)
    unit = of_blocks / of_blocks.new_full((), levels)
    parts = []
    for rows, (magnitude, factor) in rows_with_blocks(integers, of_blocks, unit):
        found = rows.float() * factor
        if f64:
            exact = (rows.double() * (magnitude.double() / levels)).float()
            found = torch.where(_needs_f64(magnitude), exact, found)
        parts.append(found.reshape(-1))
    return torch.cat(parts) if parts else integers.to(torch.float32)


def _needs_f64(magnitudes: Tensor) -> Tensor:
    return (magnitudes != 0) & ((magnitudes < _SMALLEST_PLAIN) | (magnitudes > _LARGEST_PLAIN))


def _rounded(scaled: Tensor, bits: Tensor) -> Tensor:
    below = scaled.floor()
    return below + ((scaled - below) * 2.0**24 > bits)


def _seeds(key: int, blocks: int, device: torch.device) -> Tensor:
    """[blocks] i32: the upper halves of SplitMix64 of key + block * _BLOCK_STRIDE."""
    bits = torch.arange(blocks, device=device, dtype=torch.int64) * _signed(_BLOCK_STRIDE, 64) + _signed(key, 64)
    bits = (bits ^ _shifted(bits, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    bits = (bits ^ _shifted(bits, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    bits = bits ^ _shifted(bits, 31, 64)
    return (bits >> 32).to(torch.int32)


def _random_bits(seeds: Tensor, count: int) -> Tensor:
    """[blocks, count] f32: whole numbers below 2^24. seeds: [blocks, 1] i32."""
    bits = torch.arange(count, device=seeds.device, dtype=torch.int32) * _signed(_STRIDE, 32) + seeds
    bits = (bits ^ _shifted(bits, 16, 32)) * _signed(0x7FEB352D, 32)
    bits = (bits ^ _shifted(bits, 15, 32)) * _signed(0x846CA68B, 32)
    return _shifted(bits ^ _shifted(bits, 16, 32), 8, 32).float()


def _shifted(bits: Tensor, count: int, width: int) -> Tensor:
    """Shift right and fill with zeros; torch's shift repeats the sign."""
    return (bits >> count) & ((1 << (width - count)) - 1)


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) else bits
