"""The i8 wire format's arithmetic: unbiased, within its bound, no overflow, the same bits on every instruction set.

The statistical tests draw from a hash of fixed numbers: they give the same on every run.
"""

import numpy as np
import pytest

from netfold._native import kernels

pytestmark = pytest.mark.native

ISAS = kernels.available_isas()
BLOCK = kernels.block_elements
MOST = kernels.max_byte_contributions
SIZES = [0, 1, 7, 8, 15, 16, 17, 127, 128, 129, 1000, 4099]


def magnitudes_of(values, isa=None):
    magnitudes = np.zeros(-(-len(values) // BLOCK), np.int32)
    kernels.block_magnitudes(magnitudes, values, isa=isa)
    return magnitudes


def quantise(values, magnitudes, contributions, *, operation=0, worker=0, lost=None, isa=None):
    dst = np.full(len(values), 0x55, np.int8)
    kernels.quantise_bytes(dst, values, magnitudes, contributions, operation, worker, lost, isa=isa)
    return dst


def dequantise(integers, magnitudes, contributions, isa=None):
    dst = np.full(len(integers), 77, np.float32)
    kernels.dequantise_bytes(dst, integers, magnitudes, contributions, isa=isa)
    return dst


def units_of(magnitudes, contributions, count):
    return np.repeat(magnitudes.view(np.float32).astype(np.float64) / (127 // contributions), BLOCK)[:count]


def log_uniform(rng, count, low, high):
    with np.errstate(under="ignore"):
        return (rng.choice([-1.0, 1.0], count) * np.exp2(rng.uniform(low, high, count))).astype(np.float32)


def rounding_bits(seed, count):
    """Return the 24 random bits of each element of a block, computed in NumPy."""
    bits = np.uint32(seed) + np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = (bits ^ bits >> np.uint32(16)) * np.uint32(0x7FEB352D)
    bits = (bits ^ bits >> np.uint32(15)) * np.uint32(0x846CA68B)
    return (bits ^ bits >> np.uint32(16)) >> np.uint32(8)


def mixed(bits):
    mask = 2**64 - 1
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return bits ^ bits >> 31


@pytest.mark.parametrize("isa", ISAS)
def test_magnitudes_are_each_blocks_greatest_with_inf_and_nan_above_all_numbers(isa):
    for count in SIZES:
        values = log_uniform(np.random.default_rng(count), count, -140, 127)
        found = magnitudes_of(values, isa).view(np.float32)
        assert found.tolist() == [np.abs(values[b : b + BLOCK]).max() for b in range(0, count, BLOCK)]
    largest, infinite, nan = (
        magnitudes_of(np.array([1, bad], np.float32), isa)[0] for bad in (np.finfo(np.float32).max, -np.inf, -np.nan)
    )
    assert 0 < largest < 0x7F800000 == infinite < nan


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("low", "high"), [(-3, 3), (-99, 99), (-149, -140), (-120, -95), (95, 110), (120, 127.99)])
def test_every_element_is_rounded_as_documented(isa, low, high):
    """Against the hash in NumPy: the upper neighbour where the fraction is above the draw."""
    operation, worker, contributions = 12345, 6, 3
    key = mixed(((operation << 32 | worker) + 0x9E3779B97F4A7C15) % 2**64)
    for count in SIZES:
        values = log_uniform(np.random.default_rng(count), count, low, high)
        magnitudes = magnitudes_of(values)
        got = quantise(values, magnitudes, contributions, operation=operation, worker=worker, isa=isa)
        seeds = [mixed((key + b * 0x9E3779B97F4A7C15) % 2**64) >> 32 for b in range(len(magnitudes))]
        draws = np.concatenate([rounding_bits(seed, BLOCK) for seed in seeds] or [np.zeros(0)])[:count]
        leaf = np.repeat(np.abs(np.log2(magnitudes.view(np.float32).astype(np.float64))) <= 100, BLOCK)[:count]
        levels = np.float32(127 // contributions)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            scale = np.repeat(levels / magnitudes.view(np.float32), BLOCK)[:count]
            scaled = values * scale
            below = np.floor(scaled)
            in_float = below + ((scaled - below) * np.float32(2**24) > draws.astype(np.float32))
        exact = values * (1 / units_of(magnitudes, contributions, count))
        in_double = np.floor(exact) + ((exact - np.floor(exact)) * 2.0**24 > draws)
        expected = np.clip(np.where(leaf, in_float, in_double), -levels, levels)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("low", "high"), [(-6, 1), (-149, -130), (110, 127.9)])
def test_bits_are_the_same_on_every_instruction_set_and_in_place(low, high):
    for count in SIZES:
        values = log_uniform(np.random.default_rng(count), count, low, high)
        magnitudes = magnitudes_of(values, "serial")
        lost = np.zeros(count, np.float32)
        expected = quantise(values, magnitudes, 5, operation=9, worker=2, lost=lost, isa="serial")
        floats = dequantise(expected, magnitudes, 5, "serial")
        for isa in ISAS:
            lost_here, memory = np.zeros(count, np.float32), values.copy()
            front = memory.view(np.int8)[:count]
            kernels.quantise_bytes(front, memory, magnitudes, 5, 9, 2, lost_here, isa=isa)
            np.testing.assert_array_equal(front, expected)
            np.testing.assert_array_equal(lost_here.view(np.uint32), lost.view(np.uint32))
            kernels.dequantise_bytes(memory, front, magnitudes, 5, isa=isa)
            np.testing.assert_array_equal(memory.view(np.uint32), floats.view(np.uint32))


@pytest.mark.parametrize("contributions", [1, 2, 3, 8, MOST])
def test_rounding_is_unbiased_and_its_spread_is_that_of_one_unit(contributions):
    """Over K operations an element's mean error has the deviation u sqrt(f (1 - f) / K) for a fraction f. Of so many
    elements the greatest of such normal deviates stays below 5.5 (the odds against it: one in 10^5 a case); a bias of
    a fiftieth of a unit would stand out."""
    operations, count = 20_000, 256
    values = np.random.default_rng(contributions).standard_normal(count).astype(np.float32)
    magnitudes = magnitudes_of(values)
    total = np.zeros(count)
    for operation in range(operations):
        total += quantise(values, magnitudes, contributions, operation=operation)
    unit = units_of(magnitudes, contributions, count)
    exact = values / unit
    fraction = exact - np.floor(exact)
    deviation = np.sqrt(fraction * (1 - fraction) / operations)
    certain = deviation < 1e-6
    assert np.abs(total / operations - exact)[certain].max(initial=0) < 1e-3
    normal = ((total / operations - exact)[~certain]) / deviation[~certain]
    assert np.abs(normal).max() < 5.5
    assert abs(normal.mean()) < 4 / np.sqrt(count), "the elements of an operation err together"
    assert 0.8 < normal.std() < 1.2


def test_a_bias_is_detected():
    """Rounding to nearest must not pass the test above."""
    values = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    exact = values / units_of(magnitudes_of(values), 2, 256)
    fraction = exact - np.floor(exact)
    deviation = np.sqrt(np.maximum(fraction * (1 - fraction), 1e-9) / 20_000)
    assert (np.abs((np.rint(exact) - exact) / deviation) > 5.5).mean() > 0.9


def test_workers_operations_and_blocks_draw_independently():
    values = np.tile(np.linspace(-1, 1, BLOCK, dtype=np.float32) * np.float32(0.99), 64)
    values[::BLOCK] = 1
    magnitudes = magnitudes_of(values)
    exact = values / units_of(magnitudes, 4, len(values))
    errors = [
        quantise(values, magnitudes, 4, operation=operation, worker=worker) - exact
        for operation, worker in ((0, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 31))
    ]
    errors += [np.roll(errors[0], BLOCK), np.roll(errors[0], 1)]
    found = np.corrcoef(errors)
    np.fill_diagonal(found, 0)
    assert np.abs(found).max() < 5 / np.sqrt(len(values))


@pytest.mark.parametrize("contributions", range(1, MOST + 1))
def test_the_largest_contributions_cannot_overflow(contributions):
    for magnitude in (1.0, 0.1, np.finfo(np.float32).max, 2.0**-149, 3.3e-20):
        values = np.full(BLOCK, magnitude, np.float32)
        values[1::2] *= -1
        for worker in range(contributions):
            integers = quantise(values, magnitudes_of(values), contributions, worker=worker).astype(np.int64)
            assert (np.abs(integers) == 127 // contributions).all(), "the greatest magnitude is a whole multiple"
            assert np.abs(integers).max() * contributions <= 127


def test_a_sum_stays_within_the_bound_and_lost_is_its_error():
    rng = np.random.default_rng(4)
    contributions, count = 7, 5000
    parts = [log_uniform(rng, count, -20, 4) for _ in range(contributions)]
    magnitudes = np.max([magnitudes_of(part) for part in parts], 0)
    unit = units_of(magnitudes, contributions, count)
    total, missing = np.zeros(count, np.int64), np.zeros(count)
    for worker, part in enumerate(parts):
        lost = np.full(count, 77, np.float32)
        total += quantise(part, magnitudes, contributions, worker=worker, lost=lost)
        assert (np.abs(lost) < unit * (1 + 1e-6)).all()
        missing += lost
    exact = np.sum(np.array(parts, np.float64), 0)
    got = dequantise(total.astype(np.int8), magnitudes, contributions)
    assert (np.abs(got - exact) < contributions * unit).all()
    # float32 holds a unit, a product and a difference to 2^-24 each, of at most 127 units.
    assert (np.abs(got + missing - exact) < 127 * unit * 2.0**-20).all()
    assert (np.abs(missing) > unit).mean() > 0.1, "something was lost at all"


def test_blocks_of_zeros_stay_zero_and_lose_nothing():
    values, lost = np.zeros(200, np.float32), np.full(200, 7, np.float32)
    values[1] = -0.0
    magnitudes = magnitudes_of(values)
    assert not magnitudes.any()
    integers = quantise(values, magnitudes, 2, lost=lost)
    assert not integers.any()
    assert not lost.any()
    assert (dequantise(integers, magnitudes, 2).view(np.uint32) == 0).all()


def test_misuse_is_refused_with_a_reason():
    f32, i8, i32 = np.zeros(4, np.float32), np.zeros(4, np.int8), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=f"contributions is {MOST + 1}, expected 1 to {MOST}"):
        kernels.quantise_bytes(i8, f32, i32, MOST + 1, 0, 0)
    with pytest.raises(ValueError, match="magnitudes has 1 elements, expected 2"):
        kernels.dequantise_bytes(np.zeros(129, np.float32), np.zeros(129, np.int8), i32, 2)
    with pytest.raises(ValueError, match="lost has 3 elements, expected 4"):
        kernels.quantise_bytes(i8, f32, i32, 2, 0, 0, f32[:3])
