"""The header: its bytes at their documented places, and a parser that no bytes can upset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import assert_same, make_header, make_packet, make_switch, make_worker, send_all

from netfold._native import protocol

pytestmark = pytest.mark.native

WIDTHS = {
    "flags": 4,  # known flags
    "job": 32,
    "epoch": 32,
    "incarnation": 32,
    "chunk": 64,
    "counter": 64,
    "operation": 32,
    "elements": 32,
    "worker": 16,
    "count": 16,
    "table": 16,
}
FIELDS = {name: st.integers(0, 2**bits - 1) for name, bits in WIDTHS.items()}
FIELDS |= {"wire": st.integers(0, 11), "reduce": st.integers(0, 6)}


@given(st.fixed_dictionaries(FIELDS), st.binary(max_size=40))
def test_every_header_survives_the_wire(fields, payload):
    header = make_header(**fields)
    parsed = protocol.Header.parse(header.pack() + payload)
    assert parsed == header
    assert {name: getattr(parsed, name) for name in fields} == fields


def test_the_header_is_big_endian_at_its_documented_offsets():
    header = make_header(
        flags=protocol.FLAGS["answer"] | protocol.FLAGS["non_finite"],
        job=0x01020304,
        epoch=0x05060708,
        incarnation=0x090A0B0C,
        chunk=0x1112131415161718,
        counter=0x2122232425262728,
        operation=0x31323334,
        elements=0x35363738,
        worker=0x4142,
        count=0x4344,
        wire=6,
        reduce=3,
        table=0x4748,
    )
    assert header.pack() == bytes.fromhex(
        "4e46 01 0301020304 05060708 090a0b0c1112131415161718212223242526272831323334 353637384142 4344 06 03 4748"
    )
    assert protocol.HEADER_BYTES == 48


def test_flags_are_the_documented_bits():
    assert protocol.FLAGS == {"answer": 1, "non_finite": 2, "mismatch": 4, "hello": 8, "notice": 16}


@pytest.mark.parametrize("bit", range(48 * 8))
def test_no_header_bit_is_ignored(bit):
    packet = make_packet(worker=1, chunk=5, counter=9, table=77)
    flipped = bytearray(packet)
    flipped[bit // 8] ^= 1 << bit % 8
    parsed = protocol.Header.parse(bytes(flipped))
    assert parsed is None or parsed != protocol.Header.parse(packet)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, 0x4F), (1, 0x47), (2, 0), (2, 2), (3, 0x20), (3, 0x80), (44, 14), (44, 255), (45, 9), (45, 255)],
)
def test_an_unknown_magic_version_flag_wire_or_operator_is_no_packet(offset, value):
    packet = bytearray(make_packet())
    packet[offset] = value
    assert protocol.Header.parse(bytes(packet)) is None


@pytest.mark.parametrize("length", range(48))
def test_less_than_a_header_is_no_packet(length):
    assert protocol.Header.parse(make_packet()[:length]) is None


@given(st.binary(max_size=200))
def test_arbitrary_bytes_change_no_machine(garbage):
    _change_no_machine(garbage)


@given(
    st.integers(0, 12).flatmap(lambda n: st.tuples(*[st.integers(0, 56 * 8 - 1)] * n)),
    st.integers(-56, 16),
)
def test_a_packet_with_any_bits_flipped_and_any_length_crashes_no_machine(bits, longer):
    packet = bytearray(make_packet())
    for bit in bits:
        packet[bit // 8] ^= 1 << bit % 8
    data = bytes(packet[: len(packet) + longer]) if longer < 0 else bytes(packet) + bytes(longer)
    if longer != 0:
        _change_no_machine(data)
    else:
        switch, worker = make_switch(), make_worker()
        worker.start(0, 2, 6)
        send_all(worker)
        before_switch, before_worker = switch.copy(), worker.copy()
        if switch.handle_packet(data)[0] not in ("stored", "completed"):
            assert_same(switch, before_switch)
        if worker.handle_packet(data, 5)[0] != "received":
            assert_same(worker, before_worker)


def _change_no_machine(data):
    switch, worker = make_switch(), make_worker()
    worker.start(0, 2, 6)
    send_all(worker)
    before_switch, before_worker = switch.copy(), worker.copy()
    assert switch.handle_packet(data)[:2] in (("dropped", "malformed"), ("dropped", "length"))
    assert worker.handle_packet(data, 5)[:2] in (("dropped", "malformed"), ("dropped", "length"))
    assert_same(switch, before_switch)
    assert_same(worker, before_worker)
