"""The header: fields at their documented offsets, and a parser that accepts any bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import (
    FLAGS,
    I32,
    IDENTITY,
    SUM,
    answer_to,
    assert_same,
    i32,
    make_header,
    make_packet,
    make_switch,
    make_worker,
    result_of,
    send_all,
)

from netfold._native import protocol

pytestmark = pytest.mark.native

WIDTHS = {
    "job": 32,
    "epoch": 32,
    "incarnation": 32,
    "chunk": 64,
    "packet_number": 64,
    "operation": 32,
    "elements": 32,
    "worker": 16,
    "count": 16,
    "table": 16,
}
FIELDS = {name: st.integers(0, 2**bits - 1) for name, bits in WIDTHS.items()}
FIELDS |= {"flags": st.sets(st.sampled_from(list(protocol.FLAGS.values()))).map(sum)}
FIELDS |= {"wire": st.integers(0, 11), "reduce": st.integers(0, 6)}


@given(st.fixed_dictionaries(FIELDS), st.binary(max_size=40))
def test_every_header_survives_the_wire(fields, payload):
    header = make_header(**fields)
    parsed = protocol.Header.parse(header.pack() + payload)
    assert parsed == header
    assert {name: getattr(parsed, name) for name in fields} == fields


def test_the_header_is_big_endian_at_its_documented_offsets():
    header = make_header(
        flags=protocol.FLAGS["from_switch"] | protocol.FLAGS["mismatch"],
        job=0x01020304,
        epoch=0x05060708,
        incarnation=0x090A0B0C,
        chunk=0x1112131415161718,
        packet_number=0x2122232425262728,
        operation=0x31323334,
        elements=0x35363738,
        worker=0x4142,
        count=0x4344,
        wire=6,
        reduce=3,
        table=0x4748,
    )
    assert header.pack() == bytes.fromhex(
        "4e46 01 0501020304 05060708 090a0b0c1112131415161718212223242526272831323334 353637384142 4344 06 03 4748"
    )
    assert protocol.HEADER_BYTES == 48


def test_flags_are_the_documented_bits():
    assert protocol.FLAGS == {"from_switch": 1, "mismatch": 4, "hello": 8, "nack": 16}


def test_no_header_bit_is_ignored():
    packet = make_packet(worker=1, chunk=5, packet_number=9, table=77)
    for bit in range(HEADER_BITS):
        parsed = protocol.Header.parse(flip(packet, [bit]))
        assert parsed is None or parsed != protocol.Header.parse(packet), f"bit {bit}"


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (0, 0x4F),
        (1, 0x47),
        (2, 0),
        (2, 2),
        (3, 0x02),
        (3, 0x03),
        (3, 0x20),
        (3, 0x80),
        (44, 15),
        (44, 255),
        (45, 9),
        (45, 255),
    ],
)
def test_an_unknown_magic_version_flag_wire_or_operator_is_no_packet(offset, value):
    packet = bytearray(make_packet())
    packet[offset] = value
    assert protocol.Header.parse(bytes(packet)) is None


def test_less_than_a_header_is_no_packet():
    assert protocol.Header.parse(make_packet()[:48]) is not None
    for length in range(48):
        assert protocol.Header.parse(make_packet()[:length]) is None, f"{length} bytes"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_change_no_machine(garbage):
    _change_no_machine(garbage)


@pytest.mark.parametrize("version", [0, 2], ids=["earlier", "later"])
def test_a_packet_of_another_version_changes_no_machine(version):
    packet = bytearray(make_packet())
    assert packet[2] == 1
    packet[2] = version
    _change_no_machine(bytes(packet))


@given(st.integers(-56, 16).filter(bool), st.binary(min_size=16, max_size=16))
def test_a_packet_of_another_length_changes_no_machine(longer, more):
    packet = make_packet()
    _change_no_machine(packet[:longer] if longer < 0 else packet + more[:longer])


# Bits of a packet of two i32. The machines cannot detect a flip in the packet number or in the values; packet
# authentication can, where it is on.
HEADER_BITS, PACKET_BITS = 8 * protocol.HEADER_BYTES, 8 * (protocol.HEADER_BYTES + 8)
UNDETECTED = [*range(8 * 24, 8 * 32), *range(HEADER_BITS, PACKET_BITS)]
flips = st.one_of(
    st.sets(st.sampled_from(UNDETECTED), max_size=8),
    st.sets(st.integers(0, PACKET_BITS - 1), max_size=4),
)


def flip(packet, bits):
    flipped = bytearray(packet)
    for bit in bits:
        flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def test_the_packet_number_is_at_the_bits_that_these_tests_flip():
    for bit in UNDETECTED[:64]:
        flipped = protocol.Header.parse(flip(make_packet(packet_number=9), [bit]))
        assert flipped.packet_number != 9
        flipped.packet_number = 9
        assert flipped == make_header(packet_number=9)


def is_of_this_job(header):
    return (header.job, header.epoch, header.incarnation) == tuple(IDENTITY.values())


@given(flips, st.integers(-(2**30), 2**30 - 1), st.integers(-(2**30), 2**30 - 1))
def test_a_contribution_with_flipped_bits_is_added_unchanged_or_changes_nothing(bits, one, two):
    switch = make_switch()
    before = switch.copy()
    data = flip(make_packet(i32(one, two)), bits)
    header = protocol.Header.parse(data)
    outcome, drop, slot, chunk, worker, _ = switch.handle_packet(data)
    if bits <= set(UNDETECTED):
        assert outcome == "stored", drop
    if outcome != "stored":
        assert (outcome, drop != "none") == ("dropped", True)
        assert_same(switch, before)
        return
    assert is_of_this_job(header) and header.flags == 0
    assert (worker, chunk) == (header.worker, header.chunk) and worker < 2 and chunk < 2
    if (header.wire, header.reduce, header.count) != (I32, SUM, 2):
        return  # the other worker's call differs, which is a mismatch later
    # The other worker's contribution completes the chunk, and the sum shows the stored values.
    other = protocol.Header.parse(data[: protocol.HEADER_BYTES])
    other.worker, other.packet_number = 1 - worker, 77
    assert switch.handle_packet(other.pack() + i32(5, -7))[0] == "completed"
    stored = [int.from_bytes(data[at : at + 4], "little", signed=True) for at in (48, 52)]
    assert result_of(switch, slot) == i32(wrapped(stored[0] + 5), wrapped(stored[1] - 7))


def wrapped(value):
    return (value + 2**31) % 2**32 - 2**31


@given(flips, st.binary(min_size=8, max_size=8))
def test_an_answer_with_flipped_bits_is_received_unchanged_or_changes_nothing(bits, payload):
    worker = make_worker()
    worker.start(0, 2, I32)
    (send,) = send_all(worker)
    before = worker.copy()
    answer = answer_to(send, payload)
    data = flip(answer, bits)
    sent, header = protocol.Header.parse(answer), protocol.Header.parse(data)
    outcome, drop, got, first, finished, received = worker.handle_packet(data, 5)
    if bits <= set(UNDETECTED):
        assert outcome == "received", drop
    if outcome == "dropped":
        assert drop != "none"
        assert_same(worker, before)
        return
    assert is_of_this_job(header) and header.flags & FLAGS["from_switch"] and not header.flags & FLAGS["hello"]
    if outcome == "received":
        assert got == header and (first, finished, received) == (0, True, data[protocol.HEADER_BYTES :])
        for name in ("chunk", "operation", "count", "wire", "reduce"):
            assert getattr(header, name) == getattr(sent, name), name
    elif outcome == "mismatch":
        assert header.flags & FLAGS["mismatch"] and header.chunk == 0
        assert_same(worker, before)
    else:
        assert outcome == "nack" and header.flags & FLAGS["nack"]


def _change_no_machine(data):
    switch, worker = make_switch(), make_worker()
    worker.start(0, 2, 6)
    send_all(worker)
    before_switch, before_worker = switch.copy(), worker.copy()
    assert switch.handle_packet(data)[:2] in (("dropped", "malformed"), ("dropped", "length"))
    assert worker.handle_packet(data, 5)[:2] in (("dropped", "malformed"), ("dropped", "length"))
    assert_same(switch, before_switch)
    assert_same(worker, before_worker)
