"""Arithmetic at the switch: sums are in rank order for any order of arrival, and no NaN or Inf is lost."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import handle, make_packet, make_switch, result_of

from netfold._native import protocol
from netfold_plan.sim import values

pytestmark = pytest.mark.native


def through_switch(contributions, wire="f32", reduce="sum", order=None, payload_bytes=64):
    """Return the header and the values of the result of one chunk whose contributions arrive in `order`."""
    workers = len(contributions)
    switch = make_switch(workers=workers, payload_bytes=payload_bytes)
    for worker in order or range(workers):
        packet = make_packet(
            contributions[worker].tobytes(),
            payload_bytes,
            worker=worker,
            count=len(contributions[0]),
            elements=len(contributions[0]),
            wire=values.WIRES[wire].code,
            reduce=values.REDUCES[reduce],
        )
        handled = handle(switch, packet)
    assert handled.outcome == "completed"
    frame = switch.frame(handled.slot)
    result = np.frombuffer(result_of(switch, handled.slot), values.WIRES[wire].storage)
    return protocol.Header.parse(frame), result[: len(contributions[0])]


def f32(*numbers):
    return np.array(numbers, np.float32)


def same_bits(one, two):
    return one.tobytes() == two.tobytes()


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_floats_are_summed_in_rank_order_for_any_order_of_arrival(order):
    # Ranks 0 and 2 cancel: rank 1's value, added before, is rounded away; rank 3's, added after, is kept.
    contributions = [f32(1e8, 1), f32(1, 1e8), f32(-1e8, 1), f32(1, -1e8)]
    _, result = through_switch(contributions, order=order)
    assert same_bits(result, f32(1, 0))
    assert same_bits(result, values.reference_reduce("sum", "f32", contributions))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_narrow_floats_are_summed_in_f32_and_rounded_once(order):
    # 1 + 2^-11 + 2^-11 is 1 + 2^-10 if rounded once to f16; rounding after each step would give 1.
    contributions = [np.array([number], np.float16) for number in (1, 2**-11, 2**-11)]
    _, result = through_switch(contributions, "f16", order=order)
    assert result[0] == np.float16(1 + 2**-10)


@pytest.mark.parametrize("wire", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("place", range(3))
def test_nan_and_infinities_reach_every_worker_as_in_a_float_sum(wire, place):
    plain = np.array([1, 2, 3, 4], np.float64)
    contributions = [plain + worker for worker in range(3)]
    contributions[place] = np.array([np.nan, np.inf, -np.inf, np.inf])
    contributions[(place + 1) % 3][3] = -np.inf
    encoded = [c if wire == "f64" else values.from_f32(wire, c.astype(np.float32)) for c in contributions]
    _, result = through_switch(encoded, wire)
    got = result if wire == "f64" else values.to_f32(wire, result)
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, np.nan])
    assert same_bits(result, values.reference_reduce("sum", wire, encoded)), "every NaN is the one canonical NaN"


@pytest.mark.parametrize("reduce", ["min", "max"])
def test_min_and_max_keep_nan(reduce):
    _, result = through_switch([f32(1, np.nan), f32(np.nan, 2), f32(3, 4)], reduce=reduce)
    assert np.isnan(result).all()


PAIRS = [(wire, reduce) for wire, reduce in product(values.WIRES, values.REDUCES)]


@pytest.mark.parametrize(("wire", "reduce"), PAIRS)
def test_every_wire_format_and_operator_gives_the_reduction_of_numpy(wire, reduce):
    if not values.is_defined(reduce, wire):
        packet = make_packet(count=1, elements=1, wire=values.WIRES[wire].code, reduce=values.REDUCES[reduce])
        assert handle(make_switch(), packet).drop == "malformed"
        return
    for workers in (1, 2, 5):
        for count in (1, 7, 32 // values.WIRES[wire].element_bytes):
            contributions = [values.contribution(3, worker, count, wire) for worker in range(workers)]
            order = sorted(range(workers), key=lambda worker: -worker)
            _, result = through_switch(contributions, wire, reduce, order)
            assert same_bits(result, values.reference_reduce(reduce, wire, contributions))


@given(st.data(), st.integers(1, 5), st.integers(1, 8))
def test_any_floats_in_any_order_give_the_bits_of_the_sum_in_rank_order(data, workers, count):
    number = st.floats(width=32)
    contributions = [
        np.array(data.draw(st.lists(number, min_size=count, max_size=count)), np.float32) for _ in range(workers)
    ]
    order = data.draw(st.permutations(range(workers)))
    _, result = through_switch(contributions, order=order)
    assert same_bits(result, values.reference_reduce("sum", "f32", contributions))


def test_contributions_differ_in_every_element_worker_and_operation():
    seen = np.concatenate([values.contribution(op, worker, 500, "i32") for op in range(3) for worker in range(5)])
    assert len(np.unique(seen)) == len(seen)
