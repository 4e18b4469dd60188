"""The arithmetic of the i32 and i8 wires in torch equals the native layer's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from netfold._native import kernels  # noqa: E402
from netfold.torch.device import byte_format, fixed_point  # noqa: E402

pytestmark = pytest.mark.torch


def inputs(seed: int) -> list[torch.Tensor]:
    """Blocks of every kind, for three ranks: ordinary, of all magnitudes, subnormal, huge, zero, with NaN and Inf."""
    random = np.random.default_rng(seed)
    found = []
    for rank in range(3):
        bits = random.integers(0, 1 << 32, 1000, dtype=np.uint32)
        values = bits.view(np.float32)
        values[~np.isfinite(values)] = 1
        blocks = [
            random.standard_normal(128).astype(np.float32),
            values[:128],
            (values[128:256] * np.float32(1e-38)),
            random.integers(0, 1 << 20, 128).astype(np.uint32).view(np.float32),
            np.full(128, np.finfo(np.float32).max, np.float32) * np.where(random.random(128) < 0.5, -1, 1).astype("f4"),
            np.full(128, -0.0, np.float32),
            random.standard_normal(128).astype(np.float32),
            np.full(128, 2.0 ** (-149 + rank), np.float32),
            random.standard_normal(77).astype(np.float32),  # a short one
        ]
        blocks[6][[3, 9, 27]] = [np.inf, -np.inf if rank == 1 else np.inf, np.nan if rank == 2 else 0.5]
        found.append(torch.from_numpy(np.concatenate(blocks)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_magnitudes_integers_and_sums_are_the_native_ones(seed: int) -> None:
    ranks = inputs(seed)
    count, blocks = len(ranks[0]), fixed_point.block_count(len(ranks[0]))
    headroom = fixed_point.headroom_bits(len(ranks))
    agreed, native_agreed = [], []
    for values in ranks:
        found = np.empty(blocks, np.int32)
        kernels.block_magnitudes(found, values.numpy())
        agreed.append(fixed_point.magnitudes(values))
        native_agreed.append(found)
        assert agreed[-1].tolist() == found.tolist()
    greatest = torch.stack(agreed).amax(0)
    exponents = fixed_point.exponents(greatest)
    assert exponents.dtype == torch.int32
    native_exponents = exponents.numpy().astype(np.int16)
    for number, values in enumerate(ranks):  # each rank's alone, which the kernels give from its values
        alone = np.empty(blocks, np.int16)
        kernels.block_exponents(alone, values.numpy())
        assert fixed_point.exponents(agreed[number]).tolist() == alone.tolist()
    total, native_total = torch.zeros(count, dtype=torch.int32), np.zeros(count, np.int32)
    for values in ranks:
        native = np.empty(count, np.int32)
        kernels.quantise(native, values.numpy(), native_exponents, headroom)
        found = fixed_point.quantise(values, exponents, headroom)
        assert found.tolist() == native.tolist()
        total, native_total = total + found, native_total + native
    native_sum = np.empty(count, np.float32)
    kernels.dequantise(native_sum, native_total, native_exponents, headroom)
    found = fixed_point.dequantise(total, exponents, headroom)
    same = found.view(torch.int32).numpy() == native_sum.view(np.int32)
    assert (same | (np.isnan(found.numpy()) & np.isnan(native_sum))).all(), np.flatnonzero(~same)


def test_headroom_equals_the_native_one() -> None:
    assert [fixed_point.headroom_bits(ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_no_elements_make_no_blocks() -> None:
    none = torch.zeros(0)
    assert len(fixed_point.magnitudes(none)) == 0
    exponents = fixed_point.exponents(fixed_point.magnitudes(none))
    assert len(fixed_point.dequantise(fixed_point.quantise(none, exponents, 1), exponents, 1)) == 0


def finite_inputs(seed: int, count: int) -> np.ndarray:
    """Blocks of ordinary numbers, subnormal ones, huge ones, zeros, and multiples of the unit."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count).astype(np.float32)
    kinds = np.arange(count) // 128 % 6
    values[kinds == 1] *= np.float32(1e-38)
    values[kinds == 2] *= np.float32(1e37)
    values[kinds == 3] = 0
    values[kinds == 4] = (np.arange(count)[kinds == 4] % 127 - 63).astype(np.float32)
    values[kinds == 5] *= np.float32(1e-20)
    return values


@pytest.mark.parametrize("count", [1, 77, 128, 129, 1001])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 32])
def test_bytes_and_rounding_errors_are_the_native_ones(ranks: int, count: int) -> None:
    values = finite_inputs(ranks, count)
    magnitudes, native = np.empty(fixed_point.block_count(count), np.int32), np.empty(count, np.int8)
    native_lost, native_back = np.empty(count, np.float32), np.empty(count, np.float32)
    kernels.block_magnitudes(magnitudes, values)
    kernels.quantise_bytes(native, values, magnitudes, ranks, 70_000, ranks - 1, native_lost)
    kernels.dequantise_bytes(native_back, native, magnitudes, ranks)
    agreed, levels = torch.from_numpy(magnitudes), byte_format.levels_for(ranks)
    non_finite, f64 = (bool(fact) for fact in byte_format.facts(agreed).tolist())
    assert not non_finite and f64 == (count > 128)
    key = byte_format.rounding_key(70_000, ranks - 1)
    found = byte_format.quantise(torch.from_numpy(values), agreed, levels, key, f64=f64)
    assert found.dtype == torch.int8 and found.tolist() == native.tolist()
    back = byte_format.dequantise(found, agreed, levels, f64=f64)
    assert back.view(torch.int32).tolist() == native_back.view(np.int32).tolist()
    lost = torch.from_numpy(values) - back
    assert lost.view(torch.int32).tolist() == native_lost.view(np.int32).tolist()
    whole = slice(512, 640)  # multiples of the unit, if it has 63 levels
    assert ranks != 2 or found[whole].tolist() == values[whole].astype(int).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_found(bad: float) -> None:
    values = finite_inputs(0, 1001)
    values[1000] = bad
    assert byte_format.facts(fixed_point.magnitudes(torch.from_numpy(values))).tolist() == [1, 1]
    plain = torch.from_numpy(values[640:768].copy())
    assert byte_format.facts(fixed_point.magnitudes(plain)).tolist() == [0, 0]


def test_no_elements_make_no_bytes() -> None:
    none = torch.zeros(0)
    magnitudes = fixed_point.magnitudes(none)
    found = byte_format.quantise(none, magnitudes, 63, 1, f64=True)
    assert len(found) == len(byte_format.dequantise(found, magnitudes, 63, f64=True)) == 0
