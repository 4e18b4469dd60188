"""The kernels against NumPy and against their serial oracle, on every instruction set that this CPU has.

f16 and bf16 arrays travel as uint16. Results are compared as bits: every instruction set must give the same.
"""

import os
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from netfold._native import kernels

pytestmark = pytest.mark.native

ISAS = kernels.available_isas()
SIZES = [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 351, 352, 1000, 4099]
SOURCE_COUNTS = [1, 2, 3, 8, 9]
OPS = ["sum", "product", "min", "max", "band", "bor", "bxor"]
MEMORY = {
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "bool": np.uint8,
}
FLOATS = ["f32", "f64", "f16", "bf16"]
BLOCK = kernels.block_elements
U32 = np.uint32


def bf16_from_f32(values):
    """Round to nearest even, in integers; every NaN becomes 0x7fc0."""
    bits = np.ascontiguousarray(values, np.float32).view(U32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def f32_from_bf16(bits):
    return (bits.astype(U32) << 16).view(np.float32)


def f16_from_f32(values):
    with np.errstate(over="ignore"):
        bits = np.asarray(values, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7E00), bits)


def widen(array, dtype):
    """Return the dtype in which a dtype is reduced."""
    if dtype == "bf16":
        return f32_from_bf16(array)
    if dtype == "bool":
        return array != 0
    return array.view(np.float16).astype(np.float32) if dtype == "f16" else array


def narrow(values, dtype):
    """Return the values as stored, with canonical NaNs."""
    if dtype == "bf16":
        return bf16_from_f32(values)
    if dtype == "f16":
        return f16_from_f32(values)
    if dtype in FLOATS:
        return np.where(np.isnan(values), MEMORY[dtype](np.nan), values)
    return values.astype(MEMORY[dtype])


def reduced(op, dtype, sources):
    """Reduce as reduce.hpp defines it, in NumPy."""
    combine = {
        "sum": np.add,
        "product": np.multiply,
        "min": lambda a, b: np.where((b < a) | (b != b), b, a),
        "max": lambda a, b: np.where((b > a) | (b != b), b, a),
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    total = widen(sources[0], dtype)
    with np.errstate(all="ignore"):
        for source in sources[1:]:
            total = combine(total, widen(source, dtype))
    return narrow(total, dtype)


def distinct(dtype, count, seed):
    """Return elements that differ within a source (as far as the dtype has values) and between sources."""
    rng = np.random.default_rng([seed, count, list(MEMORY).index(dtype)])
    if dtype in ("f32", "f64"):
        values = (rng.permutation(count) + 1 + rng.random()) * rng.choice([-1, 1], count)
        return values.astype(MEMORY[dtype])
    if dtype in ("f16", "bf16"):
        values = (rng.permutation(count) + 1).astype(np.float32) / np.float32(64.0) - np.float32(seed)
        return narrow(values, dtype)
    width = MEMORY[dtype]().itemsize * 8
    return (rng.permutation(count).astype(np.uint64) * 0x9E3779B97F4A7C15 >> np.uint64(64 - width)).astype(
        MEMORY[dtype]
    )


def bits_of(array):
    return array.view(f"u{array.itemsize}")


def assert_same_bits(actual, expected, context):
    actual, expected = bits_of(np.ascontiguousarray(actual)), bits_of(np.ascontiguousarray(expected))
    assert actual.shape == expected.shape, context
    wrong = np.flatnonzero(actual != expected)
    if wrong.size:
        i = wrong[0]
        pytest.fail(f"{context}: {wrong.size} wrong, first at {i}: {actual[i]:#x}, expected {expected[i]:#x}")


def unaligned(array):
    """Return the same elements, one byte past an aligned address."""
    memory = np.zeros(array.nbytes + 17, np.uint8)
    start = (-memory.ctypes.data) % 16 + 1
    view = memory[start : start + array.nbytes].view(array.dtype)
    view[:] = array
    return view


def reduce(op, dtype, sources, isa):
    dst = np.full_like(sources[0], 0x55)
    kernels.reduce(op, dtype, dst, sources, isa=isa)
    return dst


def convert(to, from_, src, isa):
    dst = np.full(src.shape, 0x55, MEMORY[to])
    kernels.convert(to, dst, from_, src, isa=isa)
    return dst


PAIRS = [(op, dtype) for op in OPS for dtype in MEMORY if kernels.is_defined(op, dtype)]


# --- reduce ---


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [dtype for dtype in MEMORY if dtype != "bool"])
def test_average_merges_partial_means_and_rounds_once_for_any_bits(dtype, isa):
    """Floats: values / 2^ceil(log2 of all ranks), added in order, divided by what is left. Integers wrap, toward 0."""
    rng = np.random.default_rng(3)
    for ranks in ([1], [1, 1], [1, 1, 1], [2, 1], [3, 5, 4], [1] * 9):
        total_ranks = sum(ranks)
        for count, finishes in ((count, finishes) for count in SIZES for finishes in (True, False)):
            width = MEMORY[dtype]().itemsize
            sources = [np.frombuffer(rng.bytes(count * width), MEMORY[dtype]).copy() for _ in ranks]
            with np.errstate(all="ignore"):
                wide = [widen(source, dtype) for source in sources]
                kind = wide[0].dtype.type
                power = [(each - 1).bit_length() for each in (*ranks, total_ranks)]
                if dtype in FLOATS:
                    wide = [each * kind(2.0 ** (power[i] - power[-1])) for i, each in enumerate(wide)]
                total = wide[0]
                for each in wide[1:]:
                    total = total + each
                if finishes and dtype in FLOATS:
                    total = total / kind(total_ranks * 0.5 ** power[-1])
                elif finishes:
                    whole = [abs(int(each)) // total_ranks * (1 if each >= 0 else -1) for each in total]
                    total = np.array(whole, MEMORY[dtype])
                expected = narrow(total, dtype) if dtype in FLOATS else total.astype(MEMORY[dtype])
            context = f"{dtype} {isa} ranks={ranks} count={count} finishes={finishes}"
            dst = unaligned(np.full_like(sources[0], 0x55))
            kernels.average(dtype, dst, [unaligned(source) for source in sources], ranks, finishes, isa=isa)
            assert_same_bits(dst, expected, context)
            kernels.average(dtype, sources[0], sources, ranks, finishes, isa=isa)
            assert_same_bits(sources[0], expected, context + " in place")


def test_every_pair_is_defined_but_bitwise_operators_on_floats():
    missing = {(op, dtype) for op in OPS for dtype in MEMORY} - set(PAIRS)
    assert missing == {(op, dtype) for op in ("band", "bor", "bxor") for dtype in FLOATS}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_reduce_equals_numpy_for_every_size_and_source_count(op, dtype, isa):
    for count in SIZES:
        for source_count in SOURCE_COUNTS:
            sources = [distinct(dtype, count, seed) for seed in range(source_count)]
            context = f"{op} {dtype} {isa} count={count} sources={source_count}"
            expected = reduced(op, dtype, sources)
            assert_same_bits(reduce(op, dtype, sources, isa), expected, context)

            in_place = sources[0].copy()
            kernels.reduce(op, dtype, in_place, [in_place, *sources[1:]], isa=isa)
            assert_same_bits(in_place, expected, context + " in place")

            dst = unaligned(sources[0])
            kernels.reduce(op, dtype, dst, [unaligned(source) for source in sources], isa=isa)
            assert_same_bits(dst, expected, context + " unaligned")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_reduce_writes_nothing_beyond_its_elements(op, dtype, isa):
    for count in SIZES:
        memory = np.full(count + 128, 0x2A, MEMORY[dtype])
        sources = [distinct(dtype, count, seed) for seed in range(2)]
        kernels.reduce(op, dtype, memory[64 : 64 + count], sources, isa=isa)
        assert (memory[:64] == 0x2A).all() and (memory[64 + count :] == 0x2A).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "product", "min", "max"])
def test_reduce_gives_numpys_bits_for_any_bit_pattern(op, dtype, isa):
    """Pairs of NaNs of any kind, infinities, subnormals, signed zeros and the largest numbers."""
    rng = np.random.default_rng(7)
    memory = MEMORY[dtype]
    special = {
        "f32": [
            0,
            1,
            0x7FFFFF,
            0x800000,
            0x7F7FFFFF,
            0x7F800000,
            0x7F800001,
            0x7FC00000,
            0x7FFFFFFF,
            0x3F800000,
        ],
        "f64": [
            0,
            1,
            0x7FEFFFFFFFFFFFFF,
            0x7FF0000000000000,
            0x7FF0000000000001,
            0x7FF8000000000003,
            1 << 52,
        ],
        "f16": [0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF, 0x3C00],
        "bf16": [0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF, 0x3F80],
    }[dtype]
    bits = np.array(special, f"u{memory().itemsize}")
    bits = np.concatenate([bits, bits | bits.dtype.type(1 << (bits.itemsize * 8 - 1))])
    for source_count in (1, 2, 3):
        grid = np.stack([g.ravel() for g in np.meshgrid(*[bits] * source_count)])
        noise = rng.integers(0, 1 << (bits.itemsize * 8), (source_count, 5000), bits.dtype)
        sources = [np.concatenate(pair).view(memory) for pair in zip(grid, noise, strict=True)]
        actual = reduce(op, dtype, sources, isa)
        assert_same_bits(actual, reduced(op, dtype, sources), f"{op} {dtype} {isa} sources={source_count}")


@pytest.mark.parametrize("isa", ISAS)
def test_half_precision_sums_round_once_and_not_after_every_source(isa):
    one, tiny = np.float32(1), np.float32(2.0**-11)  # f16: 1 + tiny is a tie that rounds back to 1
    sources = [np.full(40, v, np.float32) for v in (one, tiny, tiny)]
    halves = [f16_from_f32(source) for source in sources]
    assert (reduce("sum", "f16", halves, isa).view(np.float16) == np.float16(1 + 2.0**-10)).all()
    sources = [np.full(40, v, np.float32) for v in (1, 2.0**-8, 2.0**-8)]
    brains = [bf16_from_f32(source) for source in sources]
    assert (f32_from_bf16(reduce("sum", "bf16", brains, isa)) == np.float32(1 + 2.0**-7)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [d for d in MEMORY if d not in (*FLOATS, "bool")])
def test_integers_wrap(dtype, isa):
    limits = np.iinfo(MEMORY[dtype])
    most = np.full(70, limits.max, MEMORY[dtype])
    one = np.full(70, 1, MEMORY[dtype])
    assert (reduce("sum", dtype, [most, one], isa) == limits.min).all()
    assert (reduce("product", dtype, [most, most], isa) == 1).all()


# --- convert ---


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_every_half_widens_as_in_numpy_and_narrows_back(half, isa):
    halves = np.arange(65536, dtype=np.uint16)
    wide = convert("f32", half, halves, isa)
    expected = narrow(widen(halves, half), "f32")
    assert_same_bits(wide, expected, f"{half} -> f32 {isa}")

    back = convert(half, "f32", wide, isa)
    quiet_nan = np.uint16({"f16": 0x7E00, "bf16": 0x7FC0}[half])
    assert_same_bits(back, np.where(np.isnan(wide), quiet_nan, halves), f"{half} round trip {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_narrowing_rounds_to_nearest_even_at_every_tie(half, isa):
    halves = np.arange(65536, dtype=np.uint16)
    exact = widen(halves, half)
    exact = exact[np.isfinite(exact)].astype(np.float64)
    between = (exact[:-1] + exact[1:]) / 2  # exact in f32 (one more bit), but for the pair that crosses the sign
    ties = np.concatenate([between, [65520.0, -65520.0, 65519.996, 3.3961775e38, -3.3961775e38]]).astype(np.float32)
    values = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    assert_same_bits(convert(half, "f32", values, isa), narrow(values, half), f"f32 -> {half} {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_narrowing_of_random_bit_patterns_equals_numpy(half, isa):
    patterns = np.random.default_rng(11).integers(0, 1 << 32, 1 << 20, U32).view(np.float32)
    assert_same_bits(convert(half, "f32", patterns, isa), narrow(patterns, half), f"f32 -> {half} {isa}")
    everyday = np.random.default_rng(12).standard_normal(1 << 18, np.float32)
    assert_same_bits(convert(half, "f32", everyday, isa), narrow(everyday, half), f"f32 -> {half} {isa}")


@pytest.mark.parametrize("isa", ISAS)
def test_f64_and_f32_convert_as_numpy_does(isa):
    with np.errstate(all="ignore"):
        wide = np.random.default_rng(13).integers(0, 1 << 64, 4099, np.uint64).view(np.float64)
        wide = np.concatenate([wide, np.logspace(-46, 39, 4099), [0.0, -0.0, np.inf, -np.inf, np.nan]])
        assert_same_bits(convert("f32", "f64", wide, isa), narrow(wide.astype(np.float32), "f32"), isa)
        single = np.random.default_rng(14).integers(0, 1 << 32, 4099, U32).view(np.float32)
        assert_same_bits(convert("f64", "f32", single, isa), narrow(single.astype(np.float64), "f64"), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("to", "from_"), [("f16", "f32"), ("f32", "f16"), ("bf16", "f32"), ("f32", "bf16")])
def test_convert_handles_every_size_and_alignment_and_stays_in_bounds(to, from_, isa):
    for count in SIZES:
        src = distinct(from_, count, 3)
        memory = np.full(count + 128, 0x2A, MEMORY[to])
        kernels.convert(to, memory[64 : 64 + count], from_, unaligned(src), isa=isa)
        expected = narrow(widen(src, from_), to)
        assert_same_bits(memory[64 : 64 + count], expected, f"{from_} -> {to} {isa} count={count}")
        assert (memory[:64] == 0x2A).all() and (memory[64 + count :] == 0x2A).all()
        dst = unaligned(np.zeros(count, MEMORY[to]))
        kernels.convert(to, dst, from_, src, isa=isa)
        assert_same_bits(dst, expected, f"{from_} -> {to} {isa} count={count} unaligned")


@pytest.mark.parametrize("streams", [False, True])
def test_copy_is_exact_at_every_size_and_alignment_and_stays_in_bounds(streams):
    source = np.random.default_rng(16).integers(0, 256, 5000, np.uint8)
    for count in (0, 1, 63, 64, 65, 127, 128, 200, 4096, 4500):
        for target in (0, 1, 17, 63):
            for first in (0, 5):
                memory = np.full(count + 200, 0x2A, np.uint8)
                at = -memory.ctypes.data % 64 + target
                kernels.copy(memory[at : at + count], source[first : first + count], streams=streams)
                assert (memory[at : at + count] == source[first : first + count]).all()
                assert (memory[:at] == 0x2A).all() and (memory[at + count :] == 0x2A).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", MEMORY)
def test_a_dtype_to_itself_is_a_copy_of_the_bits(dtype, isa):
    patterns = np.random.default_rng(15).integers(0, 256, 352 * 8, np.uint8).view(MEMORY[dtype])
    assert_same_bits(convert(dtype, dtype, patterns, isa), patterns, f"{dtype} {isa}")
    before = patterns.copy()
    kernels.convert(dtype, patterns, dtype, patterns, isa=isa)
    assert_same_bits(patterns, before, f"{dtype} {isa} onto itself")


# --- the i32 wire format ---


def block_exponents(values, isa):
    exponents = np.zeros(-(-len(values) // BLOCK), np.int16)
    kernels.block_exponents(exponents, values, isa=isa)
    return exponents


def quantise(values, exponents, headroom_bits, isa, first_element=0):
    dst = np.full(values.shape, 0x55555555, np.int32)
    kernels.quantise(dst, values, exponents, headroom_bits, first_element, isa=isa)
    return dst


def dequantise(integers, exponents, headroom_bits, isa, first_element=0):
    dst = np.full(integers.shape, 77, np.float32)
    kernels.dequantise(dst, integers, exponents, headroom_bits, first_element, isa=isa)
    return dst


def i32_sum(contributions, headroom_bits, isa):
    """Sum as a group does: agree on exponents, quantise, add integers, dequantise; also return the exponents."""
    exponents = np.max([block_exponents(c, isa) for c in contributions], axis=0)
    total = np.zeros(len(contributions[0]), np.int64)
    for contribution in contributions:
        total += quantise(contribution, exponents, headroom_bits, isa)
    assert np.abs(total).max(initial=0) <= 2**31 - 1, "an int32 sum would have overflowed"
    return dequantise(total.astype(np.int32), exponents, headroom_bits, isa), exponents


@pytest.mark.parametrize("isa", ISAS)
def test_an_average_of_integers_with_a_unit_is_rounded_once_and_does_not_overflow(isa):
    rng = np.random.default_rng(5)
    for ranks in (1, 2, 3, 7, 8, 1000):
        headroom = (ranks - 1).bit_length()
        largest = ranks * (2 ** (30 - headroom) - 64)  # of float32's numbers
        integers = rng.integers(-largest, largest, 200, endpoint=True).astype(np.int32)
        for exponent in (-148, -126 + 30, 0, 128):
            exponents = np.full(2, exponent, np.int16)
            found = np.empty(200, np.float32)
            kernels.dequantise(found, integers, exponents, headroom, ranks=ranks, isa=isa)
            power = exponent + headroom - 30
            numerator, denominator = 2 ** max(0, power), 2 ** max(0, -power)
            for value, got in zip(integers.tolist(), found.tolist(), strict=True):
                exact = Fraction(value * numerator, denominator * ranks)
                near = [np.float32(got), *(np.nextafter(np.float32(got), np.float32(way)) for way in (-np.inf, np.inf))]
                errors = [abs(Fraction(float(each)) - exact) for each in near if np.isfinite(each)]
                assert np.isfinite(got) and errors[0] == min(errors), (ranks, exponent, value)


def log_uniform(rng, count, low_exponent, high_exponent):
    signs = rng.choice([-1.0, 1.0], count)
    with np.errstate(under="ignore"):
        return (signs * np.exp2(rng.uniform(low_exponent, high_exponent, count))).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_block_exponent_is_the_least_power_of_two_above_the_magnitudes(isa):
    tiny, largest = np.float32(2.0**-149), np.finfo(np.float32).max
    cases = [1.0, -1.0, 0.75, 1.9999999, tiny, 3 * tiny, 2.0**-126, 2.0**-127, largest, -largest, 2.0**127]
    for value in np.array(cases, np.float32):
        for position in (0, 1, 77, BLOCK - 1):
            block = np.zeros(BLOCK, np.float32)
            block[position] = value
            assert block_exponents(block, isa)[0] == np.frexp(np.float64(value))[1], (value, position)


@pytest.mark.parametrize("isa", ISAS)
def test_block_exponents_cover_the_tail_and_flag_zero_and_non_finite_blocks(isa):
    for count in SIZES:
        values = distinct("f32", count, 5)
        expected = [np.frexp(np.abs(values[b : b + BLOCK]).max())[1] for b in range(0, count, BLOCK)]
        assert block_exponents(unaligned(values), isa).tolist() == expected
        assert (block_exponents(-0.0 * np.abs(values), isa) == kernels.exponent_all_zero).all()
        for bad in (np.inf, -np.inf, np.nan, -np.nan):
            for position in {0, count // 2, count - 1} if count else ():
                poisoned = values.copy()
                poisoned[position] = bad
                flagged = block_exponents(poisoned, isa) == kernels.exponent_non_finite
                assert np.flatnonzero(flagged).tolist() == [position // BLOCK]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("headroom_bits", [0, 1, 3, 7, 8, 14])
def test_quantise_and_dequantise_are_exact_arithmetic_rounded_once(headroom_bits, isa):
    """Against f64, in which every scaled value and every integer is exact, from subnormals to FLT_MAX."""
    rng = np.random.default_rng([headroom_bits, 17])
    for low, high in [(-3, 3), (-152, -140), (-130, -90), (-149, 127.9), (120, 127.99), (-100, -92)]:
        values = log_uniform(rng, 4099, low, high)
        exponents = block_exponents(values, isa)
        unit = np.repeat(exponents.astype(np.float64), BLOCK)[:4099] + headroom_bits - 30
        # An all-zero block has no unit; any unit gives 0.
        unit = np.where(np.repeat(exponents, BLOCK)[:4099] == kernels.exponent_all_zero, 0, unit).astype(np.int64)
        context = f"{isa} headroom={headroom_bits} magnitudes 2^{low}..2^{high}"

        integers = quantise(values, exponents, headroom_bits, isa)
        expected = np.rint(np.ldexp(values.astype(np.float64), -unit)).astype(np.int32)
        assert_same_bits(integers, expected, context)

        sums = rng.integers(-(2**30), 2**30 + 1, 4099).astype(np.int32)
        sums[np.repeat(exponents, BLOCK)[:4099] == kernels.exponent_all_zero] = 0
        with np.errstate(over="ignore", under="ignore"):
            nearest = np.ldexp(sums.astype(np.float64), unit).astype(np.float32)
        assert_same_bits(dequantise(sums, exponents, headroom_bits, isa), nearest, context)


@pytest.mark.parametrize("isa", ISAS)
def test_quantise_rounds_ties_to_even(isa):
    values = np.zeros(BLOCK, np.float32)
    values[0] = 0.75  # exponent 0, so that with 14 bits of headroom a unit is 2^-16
    halves = np.arange(1, BLOCK) - 64 + 0.5
    values[1:] = halves * 2.0**-16
    exponents = block_exponents(values, isa)
    assert exponents.tolist() == [0]
    assert quantise(values, exponents, 14, isa)[1:].tolist() == np.rint(halves).tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("contribution_count", [1, 2, 5, 8, 64])
@pytest.mark.parametrize(("low", "high"), [(-20, 0), (-149, -100), (-149, 119), (100, 119)])
def test_the_sum_stays_within_the_stated_bound(contribution_count, low, high, isa):
    headroom_bits = (contribution_count - 1).bit_length()
    rng = np.random.default_rng([contribution_count, high + 200])
    contributions = [log_uniform(rng, 1000, low, high) for _ in range(contribution_count)]
    total, exponents = i32_sum(contributions, headroom_bits, isa)

    # f64 sums of 64 such floats are not always exact; their error is at most 2^-47 of the block's maximum.
    exact = np.sum(np.array(contributions, np.float64), axis=0)
    exponent = np.repeat(exponents.astype(np.float64), BLOCK)[:1000]
    bound = contribution_count * np.exp2(exponent + headroom_bits - 31)
    rounding = np.maximum(np.abs(exact) * 2.0**-24, 2.0**-150)  # dequantise's own, to float32
    f64_error = contribution_count * np.exp2(exponent + 6 - 53)
    assert (np.abs(total.astype(np.float64) - exact) <= bound * (1 + 2.0**-24) + rounding + f64_error).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("headroom_bits", range(kernels.max_headroom_bits + 1))
def test_the_largest_contributions_cannot_overflow_an_int32_sum(headroom_bits, isa):
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, np.nextafter(largest, 0, dtype=np.float32)] * 30, np.float32)
    integers = quantise(values, block_exponents(values, isa), headroom_bits, isa).astype(np.int64)
    assert np.abs(integers * 2**headroom_bits).max() <= 2**30


@pytest.mark.parametrize("isa", ISAS)
def test_a_sum_beyond_flt_max_is_inf_as_a_float_sum_is(isa):
    largest = np.full(BLOCK, np.finfo(np.float32).max, np.float32)
    total, _ = i32_sum([largest, largest], 1, isa)
    assert np.isposinf(total).all()
    total, _ = i32_sum([largest, -largest], 1, isa)
    assert_same_bits(total, np.zeros(BLOCK, np.float32), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_elements_near_the_maximum_keep_all_their_bits(isa):
    values = np.random.default_rng(19).uniform(0.5, 1, 4099).astype(np.float32)
    for headroom_bits in range(7):
        exponents = block_exponents(values, isa)
        there_and_back = dequantise(quantise(values, exponents, headroom_bits, isa), exponents, headroom_bits, isa)
        assert_same_bits(there_and_back, values, f"{isa} headroom={headroom_bits}")


@pytest.mark.parametrize("isa", ISAS)
def test_non_finite_elements_sum_as_floats_do_and_affect_only_their_block(isa):
    inf, nan = np.inf, np.nan
    a, b = distinct("f32", 3 * BLOCK + 5, 1), distinct("f32", 3 * BLOCK + 5, 2)
    a[BLOCK : BLOCK + 6] = [inf, -inf, inf, nan, 1.0, inf]
    b[BLOCK : BLOCK + 6] = [1.0, 2.0, -inf, 3.0, -nan, inf]
    for headroom_bits in (1, kernels.max_headroom_bits):
        total, exponents = i32_sum([a, b], headroom_bits, isa)
        assert np.flatnonzero(exponents == kernels.exponent_non_finite).tolist() == [1]
        expected = [inf, -inf, nan, nan, nan, inf]
        assert_same_bits(total[BLOCK : BLOCK + 6], np.array(expected, np.float32), isa)
        assert np.isnan(total[BLOCK + 6 : 2 * BLOCK]).all()  # these did not travel
        assert np.isfinite(total[:BLOCK]).all() and np.isfinite(total[2 * BLOCK :]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_counters_of_a_non_finite_block_hold_the_largest_number_of_workers(isa):
    values = np.array([np.inf, -np.inf, np.nan, 4.0], np.float32)
    exponents = block_exponents(values, isa)
    total = quantise(values, exponents, kernels.max_headroom_bits, isa).astype(np.int64) * 2**kernels.max_headroom_bits
    assert total.max() < 2**31
    result = dequantise(total.astype(np.int32), exponents, kernels.max_headroom_bits, isa)
    assert_same_bits(result, np.array([np.inf, -np.inf, np.nan, np.nan], np.float32), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_packets_may_begin_and_end_inside_a_block(isa):
    values = log_uniform(np.random.default_rng(23), 4099, -149, 120)
    values[600], values[1300:1500] = np.nan, 0
    exponents = block_exponents(values, isa)
    whole = quantise(values, exponents, 3, isa)
    for packet in (1, 33, 352):
        for first in range(0, len(values), packet):
            part = slice(first, first + packet)
            integers = quantise(unaligned(values[part]), exponents, 3, isa, first)
            assert_same_bits(integers, whole[part], f"{isa} packet={packet} first={first}")
            back = dequantise(unaligned(integers), exponents, 3, isa, first)
            assert_same_bits(back, dequantise(whole, exponents, 3, isa)[part], f"{isa} packet={packet} first={first}")


@pytest.mark.parametrize("isa", ISAS)
def test_quantise_works_in_place(isa):
    for count in (1, 127, 500, 4099):
        values = log_uniform(np.random.default_rng(count), count, -30, 30)
        exponents = block_exponents(values, isa)
        expected = quantise(values, exponents, 3, isa)
        memory = values.copy()
        kernels.quantise(memory.view(np.int32), memory, exponents, 3, isa=isa)
        assert_same_bits(memory.view(np.int32), expected, f"{isa} count={count}")


@pytest.mark.parametrize("isa", ISAS)
def test_dequantise_works_in_place(isa):
    values = distinct("f32", 1000, 4)
    exponents = block_exponents(values, isa)
    integers = quantise(values, exponents, 2, isa)
    expected = dequantise(integers, exponents, 2, isa)
    kernels.dequantise(integers, integers, exponents, 2, isa=isa)
    assert_same_bits(integers.view(np.float32), expected, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_an_exponent_that_no_float_has_counts_as_the_nearest_exponent_of_a_float(isa):
    sums = np.arange(-64, BLOCK - 64, dtype=np.int32) * 1000003
    for exponent, nearest in ((-32767, -148), (-149, -148), (129, 128), (32766, 128)):
        broken, valid = np.array([exponent], np.int16), np.array([nearest], np.int16)
        expected = dequantise(sums, valid, 14, isa)
        assert_same_bits(dequantise(sums, broken, 14, isa), expected, f"{isa} exponent={exponent}")
        quantise(distinct("f32", BLOCK, 6), broken, 14, isa)  # unspecified integers, but no undefined behaviour


# --- choice of the instruction set, misuse ---


def isa_in_subprocess(setting):
    code = (
        "from netfold._native import kernels; import numpy as np; a = np.ones(40, np.float32);"
        "kernels.reduce('sum', 'f32', a, [a, a]); assert (a == 2).all();"
        "print(kernels.active_isa()); print(kernels.isa_reason())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "NETFOLD_ISA"}
    if setting is not None:
        environment["NETFOLD_ISA"] = setting
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    isa, reason = result.stdout.splitlines()
    return isa, reason


@pytest.mark.parametrize("isa", ISAS)
def test_netfold_isa_forces_an_instruction_set(isa):
    assert isa_in_subprocess(isa) == (isa, f"{isa}: forced by NETFOLD_ISA={isa}")


@pytest.mark.parametrize("setting", [None, ""])
def test_the_best_instruction_set_is_chosen_when_nothing_is_forced(setting):
    isa, reason = isa_in_subprocess(setting)
    assert isa == ISAS[-1]
    assert "the best that this CPU has" in reason


def test_an_unknown_value_of_netfold_isa_is_explained():
    isa, reason = isa_in_subprocess("sse9")
    assert isa == ISAS[-1]
    assert "NETFOLD_ISA=sse9 is not one of serial, avx2, avx512" in reason


def test_misuse_is_refused_with_a_reason():
    f32, f64, i16, i32 = (np.zeros(4, t) for t in (np.float32, np.float64, np.int16, np.int32))
    cases = [
        (
            lambda: kernels.reduce("mean", "f32", f32, [f32]),
            "operator 'mean' is unknown; expected one of sum, ",
        ),
        (lambda: kernels.reduce("sum", "f8", f32, [f32]), "dtype 'f8' is unknown; expected one of f32, "),
        (lambda: kernels.reduce("sum", "f32", f32, []), "at least one source"),
        (lambda: kernels.reduce("sum", "f32", f32, [f32, f32[:3]]), "source 1 has 3 elements, expected 4"),
        (lambda: kernels.reduce("sum", "f32", f64, [f32]), "dst has elements of 8 bytes, expected 4 for f32"),
        (lambda: kernels.reduce("band", "f32", f32, [f32]), "operator 'band' has no meaning for f32"),
        (lambda: kernels.reduce("sum", "f32", f32, [f32], isa="mmx"), "instruction set 'mmx' is unknown"),
        (lambda: kernels.convert("i32", i32, "f32", f32), "no conversion from f32 to i32"),
        (lambda: kernels.convert("f64", f64[:3], "f32", f32), "src has 4 elements, expected 3"),
        (lambda: kernels.block_exponents(i16, f32), "exponents has 4 elements, expected 1"),
        (lambda: kernels.quantise(i32, f32, i16[:0], 3), "exponents cover 0 elements of the operation"),
        (
            lambda: kernels.quantise(i32, f32, i16[:1], 3, BLOCK - 3),
            f"expected at least 4 from element {BLOCK - 3}",
        ),
        (lambda: kernels.dequantise(f32, i32, i16, 15), "headroom_bits is 15, expected 0 to 14"),
    ]
    for call, sentence in cases:
        with pytest.raises(ValueError, match="^.*" + sentence.replace("(", r"\(")):
            call()


@pytest.mark.skipif("avx512" in ISAS, reason="this CPU has every instruction set")
def test_an_instruction_set_that_the_cpu_lacks_is_refused():
    a = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="instruction set 'avx512' is not available on this CPU"):
        kernels.reduce("sum", "f32", a, [a], isa="avx512")
