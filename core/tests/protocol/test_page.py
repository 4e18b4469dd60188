"""docs/reference/protocol.md describes the code: these tests check every row of its tables against the code."""

import hmac
import re
from pathlib import Path

import pytest
from machines import (
    BAND,
    FLAGS,
    I32,
    INCARNATION,
    MS,
    SUM,
    Handled,
    answer_to,
    contribute,
    handle,
    i32,
    make_header,
    make_packet,
    make_switch,
    make_worker,
    receive,
    send_all,
)

from netfold._native import protocol
from netfold.switch_protocol import packet_keys

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "protocol.md").read_text()

pytestmark = pytest.mark.native


def table(first):
    """Return the rows of the table whose heading begins with `first`, without backquotes."""
    lines = PAGE.split(f"\n| {first} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split(" | ")] for line in lines]


# The header.


@pytest.mark.parametrize("row", table("offset"), ids=lambda row: row[2])
def test_a_header_field_lies_where_the_page_says(row):
    offset, size, field = int(row[0]), int(row[1]), row[2]
    if field in ("magic", "version"):
        assert make_header().pack()[offset : offset + size] == int(row[3], 0).to_bytes(size, "big")
        return
    zeros = dict.fromkeys([name for _, _, name, _ in table("offset")[2:]], 0)
    before = make_header(**zeros).pack()
    number = sum(FLAGS.values()) if field == "flags" else int.from_bytes(bytes(range(0xA1, 0xA1 + size)), "big")
    after = make_header(**{**zeros, field: number}).pack()
    assert after[offset : offset + size] == number.to_bytes(size, "big")
    assert after[:offset] + after[offset + size :] == before[:offset] + before[offset + size :]


def test_the_fields_of_the_header_cover_it():
    end = 0
    for offset, size, *_ in table("offset"):
        assert (int(offset), end % int(size)) == (end, 0), "no hole, and every field aligned"
        end += int(size)
    assert end == protocol.HEADER_BYTES


def test_flags_are_those_of_the_page():
    assert {name: 1 << int(bit) for name, bit, _ in table("flag")} == FLAGS


def _enum(name):
    text = (ROOT / "core/native/kernels/include/netfold/kernels/types.hpp").read_text()
    body = re.search(rf"enum class {name} .*?\{{(.*?)\}};", text, re.S)
    return {key: int(code) for key, code in re.findall(r"(\w+) = (\d+),", body[1])}


def test_wire_formats_and_operators_are_those_of_the_page():
    rows = [re.findall(r"[\w]+", line) for line in PAGE.split("\n| wire |", 1)[1].split("\n\n")[0].splitlines()[2:]]
    wires = {row[0]: int(row[1]) for row in rows}
    reduces = {row[2]: int(row[3]) for row in rows if len(row) == 4}
    types = {"bool" if name == "boolean" else name: code for name, code in _enum("DType").items()}  # a C++ keyword
    assert (wires, reduces) == (types, _enum("ReduceOp"))


def test_forms_of_calls_are_those_of_the_page():
    text = (ROOT / "core/native/collective/include/netfold/collective/call_signature.hpp").read_text()
    body = re.search(r"enum class CallForm .*?\{(.*?)\};", text, re.S)[1]
    forms = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+),", body)}
    assert {name: int(code) for name, code in table("form")} == forms
    assert len(forms) == int(re.search(r"kCallFormCount = (\d+)", text)[1]) <= 16


def test_constants_are_those_of_the_page():
    include = ROOT / "core/native/protocol/include/netfold/protocol"
    text = (include / "packet.hpp").read_text() + (include / "worker.hpp").read_text()
    text += (include / "gap_detector.hpp").read_text()
    for name, value, *_ in table("constant"):
        assert re.findall(rf"\b{name} = ([^;]+);", text) == [value], name


# The state tables: each row is played with the machines.

RESULT = i32(11, 22)


def _collecting():
    switch = make_switch(workers=3, window=1)
    contribute(switch, 0, 0, 1, 2)
    return switch


def _complete():
    switch = _collecting()
    contribute(switch, 1, 0, 4, 8)
    contribute(switch, 2, 0, 6, 12)
    assert switch.frame(0)[protocol.HEADER_BYTES :] == RESULT
    return switch


# The machine's outcome and drop reason, by the page's answer.
ANSWERS = {
    "none": ("stored", "none"),
    "none (`duplicate`)": ("dropped", "duplicate"),
    "none (`window`)": ("dropped", "window"),
    "none (`stale`)": ("dropped", "stale"),
    "the result, to every worker": ("completed", "none"),
    "the result once more, to the sender": ("resend_result", "none"),
    "a mismatch, to the sender and to the first": ("mismatch", "none"),
}


def _past():
    switch = _complete()
    contribute(switch, 0, 2, 1, 1)  # the slot's second chunk: what was before it is stale
    return switch


SWITCH_ROWS = {
    ("collecting", "c is the slot's; a new worker, not the last"): (_collecting, 1, 0, {}),
    ("collecting", "c is the slot's; the last worker"): (
        lambda: [switch := _collecting(), contribute(switch, 1, 0, 4, 8)][0],
        2,
        0,
        {},
    ),
    ("collecting", "c is the slot's; a worker that has contributed"): (_collecting, 0, 0, {}),
    ("collecting", "c is the slot's; not what the first agreed on"): (_collecting, 1, 0, {"operation": 9}),
    ("complete", "c is the slot's"): (_complete, 1, 0, {}),
    ("complete", "c is the slot's; not what was agreed on"): (_complete, 1, 0, {"table": 9}),
    ("complete", "c is the slot's + S"): (_complete, 1, 2, {}),
    ("collecting", "c is the slot's + S"): (_collecting, 1, 2, {}),
    ("any", "c is below the slot's"): (_past, 1, 0, {}),
    ("any", "c is above the slot's + S"): (_complete, 1, 4, {}),
}


def test_the_switch_has_the_rows_of_the_page():
    assert [(slot, packet) for slot, packet, _, _ in table("slot")] == list(SWITCH_ROWS)


@pytest.mark.parametrize("row", table("slot"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_switch_does_what_the_page_says(row):
    slot, packet, becomes, answer = row
    prepare, worker, chunk, changes = SWITCH_ROWS[slot, packet]
    switch = prepare()
    before = switch.copy()
    handled = contribute(switch, worker, chunk, 4, 8, **changes)
    assert (handled.outcome, handled.drop) == ANSWERS[answer]
    assert (switch == before) == (becomes == "unchanged")
    missing = switch.missing(chunk)
    if becomes.startswith("collecting"):
        assert missing and worker not in missing
    elif becomes == "complete":
        assert missing == []


# A leaf's rows: the preparation and the event.

PARENT = (17, 18, 19, 1)  # job, epoch, incarnation and worker at the parent


def _leaf():
    leaf = make_switch(workers=2, window=1, parent=PARENT, names=[4, 5])
    contribute(leaf, 0, 0, 1, 2)
    return leaf


def _summed():
    leaf = _leaf()
    contribute(leaf, 1, 0, 10, 20)
    return leaf


def _leaf_complete():
    leaf = _summed()
    from_parent(leaf)
    return leaf


def _leaf_past():
    leaf = _leaf_complete()
    contribute(leaf, 0, 2, 1, 1)
    return leaf


def from_parent(leaf, flags=0, **changes):
    job, epoch, incarnation, _ = PARENT
    header = {"job": job, "epoch": epoch, "incarnation": incarnation, "worker": 3, "packet_number": 9, **changes}
    packet = make_packet(i32(111, 222), flags=FLAGS["from_switch"] | flags, **header)
    return Handled(*leaf.handle_parent(packet))


LEAF_ROWS = {
    ("collecting", "from the last of its workers"): (_leaf, lambda leaf: contribute(leaf, 1, 0, 10, 20)),
    ("summed", "from any of its workers"): (_summed, lambda leaf: contribute(leaf, 0, 0, 1, 2)),
    ("summed", "the parent's result"): (_summed, from_parent),
    ("summed", "the parent's mismatch"): (_summed, lambda leaf: from_parent(leaf, FLAGS["mismatch"])),
    ("collecting", "the parent's mismatch"): (_leaf, lambda leaf: from_parent(leaf, FLAGS["mismatch"])),
    ("collecting", "the parent's result"): (_leaf, from_parent),
    ("complete", "the parent's result"): (_leaf_complete, from_parent),
    ("complete", "from any of its workers"): (_leaf_complete, lambda leaf: contribute(leaf, 0, 0, 1, 2)),
    ("any", "the parent's, of a chunk below the slot's"): (_leaf_past, from_parent),
}
LEAF_ANSWERS = {
    **ANSWERS,
    "the sum, to the parent": ("summed", "none"),
    "the sum once more, to the parent": ("resend_sum", "none"),
    "the mismatch, to every worker": ("mismatch", "none"),
}


def test_the_leaf_has_the_rows_of_the_page():
    assert [(slot, packet) for slot, packet, _, _ in table("at a leaf")] == list(LEAF_ROWS)


@pytest.mark.parametrize("row", table("at a leaf"), ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_leaf_does_what_the_page_says(row):
    slot, packet, becomes, answer = row
    prepare, happens = LEAF_ROWS[slot, packet]
    leaf = prepare()
    before = leaf.copy()
    handled = happens(leaf)
    assert (handled.outcome, handled.drop) == LEAF_ANSWERS[answer]
    assert (leaf == before) == (becomes == "unchanged")
    if becomes == "complete":
        header = protocol.Header.parse(leaf.frame(0))
        # The leaf's own epoch and packet number, and the parent's name of the last worker.
        assert (header.job, header.epoch, header.packet_number, header.worker) == (7, 3, 1, 3)
        assert leaf.frame(0)[protocol.HEADER_BYTES :] == i32(111, 222)


def test_a_sum_is_a_contribution_to_the_parent():
    leaf = _summed()
    packet = leaf.sum(0, 77)
    header = protocol.Header.parse(packet)
    assert (header.job, header.epoch, header.incarnation, header.worker) == PARENT
    assert (header.chunk, header.packet_number, header.flags, header.count) == (0, 77, 0, 2)
    assert packet[protocol.HEADER_BYTES :] == RESULT


def _flight(window=1, **shape):
    worker = make_worker(window=window, **shape)
    worker.start(0, 2 * 24, I32, SUM)  # 24 chunks of two
    return worker, send_all(worker)


def _result(worker, send, now_ns=0):
    got = receive(worker, answer_to(send, RESULT), now_ns)
    return got.outcome if got.outcome != "dropped" else got.drop


def _sent(worker, now_ns=0):
    return [(send.header.chunk, send.again) for send in send_all(worker, now_ns)]


def _lost():
    worker, sends = _flight()
    worker.handle_timeout(50 * MS)
    return worker, sends


def _unsent_is_sent():
    worker, sends = _flight(2)
    assert [send.header.chunk for send in sends] == [0, 1]
    _result(worker, sends[0])
    return _sent(worker) == [(2, False)]


def _flight_is_answered():
    worker, sends = _flight()
    return _result(worker, sends[0]) == "received" and worker.in_flight == 0


def _nack():
    worker, _ = _flight(4)
    named = {"flags": FLAGS["from_switch"] | FLAGS["nack"], "chunk": 3, "elements": 1, "count": 0}
    assert receive(worker, make_packet(**named)).outcome == "nack"
    return _sent(worker) == [(2, True)]  # counters begin at 1


def _numbered(worker, send, number, now_ns):
    assert receive(worker, answer_to(send, RESULT, packet_number=number), now_ns).outcome == "received"


def _skipped():
    worker, sends = _flight(12)
    _numbered(worker, sends[0], 1, 1)
    for chunk in range(2, 10):
        _numbered(worker, sends[chunk], chunk + 1, 1)  # the second answer was chunk 1's
        assert _again(worker) == ([] if chunk < 9 else [1])
    return True


def _passed_over():
    worker, sends = _flight(24)
    found = []
    # Chunk 0 waits for another worker and no number is missing. It counts as lost only when it is older than the
    # longest timeout, which bounds a repair.
    for number, when_ns in [*((number, 1 * MS) for number in range(1, 20)), (20, 5 * MS), (21, 200 * MS)]:
        _numbered(worker, sends[number], number, when_ns)
        found.append(_again(worker, when_ns))
    return found == [[]] * 20 + [[0]]


def _again(worker, now_ns=0):
    return [chunk for chunk, again in _sent(worker, now_ns) if again]


def _timer():
    worker, _ = _flight(3)
    timeout_ns = worker.poll_timeout()
    worker.handle_timeout(timeout_ns)
    doubled = worker.poll_timeout() - timeout_ns == 2 * timeout_ns
    return doubled and _sent(worker, timeout_ns) == [(0, True)]


def _probe():
    worker, sends = _flight(5)
    worker.handle_timeout(50 * MS)
    send_all(worker, 50 * MS)
    _result(worker, sends[0], 60 * MS)
    assert _again(worker, 60 * MS) == []
    worker.handle_timeout(62 * MS)
    return _again(worker, 62 * MS) == [1, 2]


def _lost_is_sent():
    worker, sends = _flight(3)
    _result(worker, sends[1])
    worker.handle_timeout(60 * MS)
    _result(worker, sends[2], 60 * MS)
    return _sent(worker, 60 * MS) == [(0, True)]


def _lost_is_answered():
    worker, sends = _lost()
    assert worker.in_flight == 0
    return _result(worker, sends[0]) == "received" and _sent(worker) == [(1, False)]


def _answered_twice():
    worker, sends = _flight(2)
    _result(worker, sends[1])
    before = worker.copy()
    return _result(worker, sends[1]) == "duplicate" and worker == before


def _window_moves():
    worker, sends = _flight(2)
    _result(worker, sends[1])
    assert worker.oldest_outstanding == 0
    _result(worker, sends[0])
    return worker.oldest_outstanding == 2 and _sent(worker) == [(2, False), (3, False)]


def _mismatch(**said):
    worker, sends = _flight()
    before = worker.copy()
    flags = {"flags": FLAGS["from_switch"] | FLAGS["mismatch"]}
    got = receive(worker, answer_to(sends[0], b"", **{**flags, **said}))
    assert worker == before
    return got


def _differs():
    return all(_mismatch(**{field: 9}).outcome == "mismatch" for field in ("operation", "elements", "count", "table"))


def _agrees():
    return _mismatch().drop == "stale"


def _forgotten():
    worker, sends = _flight()
    _result(worker, sends[0])
    before = worker.copy()
    return _result(worker, sends[0]) == "stale" and worker == before


def _unsent_is_answered():
    worker, sends = _flight()
    before = worker.copy()
    got = receive(worker, answer_to(sends[0], RESULT, chunk=1))
    return got.drop == "window" and worker == before


WORKER_ROWS = {
    ("unsent", "it is below the lowest unanswered + W, and the congestion window has room"): _unsent_is_sent,
    ("in flight", "its result"): _flight_is_answered,
    ("in flight", "a NACK of the packet that it was sent in"): _nack,
    ("in flight", "the result of one sent 8 or more later, and the number of its own was skipped"): _skipped,
    ("in flight", "the result of one sent 8 or more later, and it is overdue by a repair"): _passed_over,
    ("in flight", "the timer, and it is the one sent longest ago"): _timer,
    (
        "in flight",
        "only probes' results for 2 ms, and it is overdue and among the 2 a probe sent longest ago",
    ): _probe,
    ("lost", "there is room to send"): _lost_is_sent,
    ("lost", "its result"): _lost_is_answered,
    ("received", "its result"): _answered_twice,
    ("received", "all before it are received"): _window_moves,
    ("in flight", "a mismatch, which says something else than this worker did"): _differs,
    ("in flight", "a mismatch, which says what this worker did"): _agrees,
    ("forgotten", "its result"): _forgotten,
    ("unsent", "its result"): _unsent_is_answered,
}


def test_the_worker_has_the_rows_of_the_page():
    assert [(chunk, event) for chunk, event, _, _ in table("chunk")] == list(WORKER_ROWS)


@pytest.mark.parametrize("row", WORKER_ROWS, ids=lambda row: "-".join(row))
def test_a_worker_does_what_the_page_says(row):
    assert WORKER_ROWS[row]()


# Keys.


def test_keys_are_derived_as_the_page_says():
    secret = bytes(range(packet_keys.SECRET_BYTES))
    job, epoch, worker = 0xA1B2C3D4, 9, 0x0102
    made = {
        "hellos": packet_keys.hello_key(secret, job=job, worker=worker),
        "contributions": packet_keys.contribution_key(secret, job=job, epoch=epoch, worker=worker),
        "answers": packet_keys.result_key(secret, job=job, epoch=epoch),
    }
    numbers = {"0": 0, "the job's": epoch, "its number": worker}
    (text,) = re.findall(r"`(netfold packets \d )`", PAGE)
    for kind, _, of_epoch, of_worker in table("kind"):
        behind = b"".join([job.to_bytes(4, "big"), numbers[of_epoch].to_bytes(4, "big")])
        info = text.encode() + kind.encode() + behind + numbers.get(of_worker, 0).to_bytes(2, "big")
        extracted = hmac.digest(bytes(32), secret, "sha256")  # RFC 5869, without salt
        assert made.pop(kind) == hmac.digest(extracted, info + b"\x01", "sha256")[:16]
    assert made == {}


# Drops.


def test_reasons_for_a_drop_are_those_of_the_page():
    assert ["none", *(reason for reason, _, _ in table("reason"))] == list(protocol.DROPS)


# A change for each reason that the machines check before a chunk's state; alone it makes them drop a packet.
WRONG = {
    "foreign": {"job": 99},
    "incarnation": {"incarnation": INCARNATION + 1},
    "epoch": {"epoch": 99},
    "worker": {"worker": 99},
    "malformed": {"wire": 0, "reduce": BAND},
}


@pytest.mark.parametrize("at", ["switch", "worker"])
def test_reasons_are_checked_in_the_order_of_the_page(at):
    switch = make_switch()
    worker, _ = _flight()
    right = FLAGS["from_switch"] if at == "worker" else 0
    order = re.search(r"looks at\n?(.*?)\.", PAGE, re.S)[1].replace("\n", " ").replace("`", "")
    order = [reason.strip().removeprefix("then ") for reason in order.split(",")]
    assert order[:2] == ["malformed (the header alone)", "length"]
    assert order[-3:] == ["stale", "window", "duplicate"]
    # From the last reason to the first: each packet also has all later faults.
    wrong, longer = {"flags": right, "chunk": 1 << 40}, b""
    for reason in reversed(order[:-3]):
        if reason == "direction":
            wrong["flags"] ^= FLAGS["from_switch"]
        elif reason == "malformed (the header alone)":
            wrong["wire"] = 99
        elif reason == "length":
            longer = b"\0"
        else:
            wrong |= WRONG[reason.split()[0]]
        packet = make_packet(i32(1, 2), **wrong) + longer
        got = handle(switch, packet).drop if at == "switch" else receive(worker, packet).drop
        assert got == reason.split()[0]
