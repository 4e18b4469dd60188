"""Machines and packets for tests that look at one step: bytes in, outcome out."""

from typing import Any, NamedTuple

from netfold._native import protocol

JOB, EPOCH, INCARNATION = 7, 3, 0x5EED
IDENTITY = {"job": JOB, "epoch": EPOCH, "incarnation": INCARNATION}
FLAGS = protocol.FLAGS
F32, F64, F16, BF16, I8, I32, I64 = 0, 1, 2, 3, 4, 6, 7
SUM, PRODUCT, MIN, MAX, BAND, MIN_LOC = 0, 1, 2, 3, 4, 7
MS = 1_000_000


class Handled(NamedTuple):
    outcome: str
    drop: str
    slot: int
    chunk: int
    worker: int
    other: int


class Received(NamedTuple):
    outcome: str
    drop: str
    header: Any
    first: int
    finished: bool
    values: bytes


def make_switch(workers=2, window=1, payload_bytes=8, **changes):
    shape = {**IDENTITY, "workers": workers, "window": window, "payload_bytes": payload_bytes}
    return protocol.SwitchJob(**{**shape, **changes})


def make_worker(worker=0, workers=2, window=1, payload_bytes=8, **changes):
    shape = {**IDENTITY, "worker": worker, "workers": workers, "window": window, "payload_bytes": payload_bytes}
    return protocol.Worker(**{**shape, **changes})


def make_header(**changes):
    """Return the header of a contribution of two i32 to chunk 0, with `changes`."""
    header = protocol.Header()
    for name, value in {**IDENTITY, "elements": 2, "count": 2, "wire": I32, **changes}.items():
        setattr(header, name, value)
    return header


def make_packet(payload=b"", payload_bytes=8, **changes):
    return make_header(**changes).pack() + payload.ljust(payload_bytes, b"\0")


def i32(*values):
    return b"".join(value.to_bytes(4, "little", signed=True) for value in values)


def contribute(switch, worker, chunk, *values, **changes):
    """Give the switch the worker's contribution of two i32 to `chunk`."""
    packet = make_packet(i32(*values), worker=worker, chunk=chunk, **changes)
    return handle(switch, packet)


def handle(switch, packet):
    return Handled(*switch.handle_packet(packet))


def receive(worker, packet, now_ns=0):
    return Received(*worker.handle_packet(packet, now_ns))


def result_of(switch, slot):
    return switch.frame(slot)[protocol.HEADER_BYTES :]


def answer_to(send, payload=b"", payload_bytes=8, **changes):
    """Return the answer of a switch to a worker's send."""
    header = protocol.Header.parse(send.header.pack())
    header.flags |= FLAGS["from_switch"]
    for name, value in changes.items():
        setattr(header, name, value)
    return header.pack() + payload.ljust(payload_bytes, b"\0")


def send_all(worker, now_ns=0):
    """Return all that the worker sends now."""
    sends = []
    while (send := worker.poll_send(now_ns)) is not None:
        sends.append(send)
        # Without a bound a worker that offers the same chunk for ever would hang the test.
        assert len(sends) <= 1000, "no window of these tests is that wide"
    return sends


def assert_same(machine, before):
    assert machine == before
    assert machine.canonical() == before.canonical()
