"""The hardware profile's pipeline, packet by packet, in bmv2's simple_switch. Needs root, simple_switch and p4c-bm2-ss.

Each packet goes to the pipeline and to the software switch's machine, and both must answer with the same bytes.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from load import seconds
from p4_rig import (
    DATA_PORT,
    INCARNATION,
    NEEDS_PIPELINE,
    ROOT,
    SWITCH_IP,
    SWITCH_MAC,
    Answer,
    Rig,
    compile_program,
    connect,
    ip_of,
    mac_of,
    port_of,
    rig,
    udp_frame,
)

from netfold._native import protocol
from netfold.switch.bmv2 import Bmv2, Host, PipelineError, PipelineJob, PipelineMember, PipelineParent

pytestmark = NEEDS_PIPELINE

WORKERS, VALUES, SLOTS, WINDOW = 3, 32, 64, 2
JOB, EPOCH = 0x80000007, 3
# The host of a job's parent, and the port of this switch for the parent's packets.
PARENT, OWN_PORT = WORKERS, 7300
FLAGS = protocol.FLAGS
F32, I8, I32, U8, U16, U32, U64 = 0, 4, 6, 8, 9, 10, 11
SUM, MIN, MAX, BOR = 0, 2, 3, 5
OPERATORS = [(I32, SUM), (U32, SUM), (I32, MAX), (U8, BOR), (U16, BOR), (U32, BOR), (U64, BOR)]
ELEMENT_BYTES = {F32: 4, I8: 1, I32: 4, U8: 1, U16: 2, U32: 4, U64: 8}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("p4"), VALUES, SLOTS)


@pytest.fixture(scope="module")
def switch(program: Path) -> Iterator[Rig]:
    with rig(program, WORKERS + 1, "a") as started:
        yield started


def members(*hosts: int) -> list[PipelineMember]:
    return [PipelineMember(ip_of(host), port_of(host), name) for name, host in enumerate(hosts)]


def make_job(**changes: object) -> PipelineJob:
    fields = {
        "id": JOB,
        "epoch": EPOCH,
        "ip": SWITCH_IP,
        "port": DATA_PORT,
        "window": WINDOW,
        "members": members(*range(WORKERS)),
    }
    return PipelineJob(**{**fields, **changes})  # type: ignore[arg-type]


SHAPE = {"workers": WORKERS, "window": WINDOW, "payload_bytes": 4 * VALUES}


def identity_at(parent: PipelineParent) -> tuple[int, int, int, int]:
    return parent.job, parent.epoch, parent.incarnation, parent.worker


class Both:
    """One job, in the pipeline and in the software switch's machine."""

    def __init__(self, switch: Rig, **changes: object) -> None:
        self.rig, self.job = switch, make_job(**changes)
        self.size = len(self.job.members)
        self.machine = protocol.SwitchJob(
            job=self.job.id,
            epoch=self.job.epoch,
            incarnation=switch.pipeline.incarnation,
            workers=self.size,
            window=self.job.window,
            payload_bytes=4 * VALUES,
            names=[member.name for member in self.job.members],
            parent=None if self.job.parent is None else identity_at(self.job.parent),
        )
        self.outcomes: Counter[str] = Counter()  # of workers' packets
        self.parent_outcomes: Counter[str] = Counter()
        self.sums = 0
        self.first: dict[int, tuple[bytes, int]] = {}  # by chunk: the contribution that came first, and whose
        self.mismatches = 0
        switch.pipeline.install(self.job)

    def packet(self, worker: int, chunk: int, values: np.ndarray, **changes: int) -> bytes:
        header = protocol.Header()
        wire = changes.get("wire", I32)
        fields = {
            "job": self.job.id,
            "epoch": self.job.epoch,
            "incarnation": self.rig.pipeline.incarnation,
            "worker": worker,
            "chunk": chunk,
            "packet_number": 1,
            "operation": chunk // 3 & 0xFFFFFFFF,
            "elements": len(values),
            "count": values.nbytes // ELEMENT_BYTES[wire],
            "wire": wire,
        }
        for name, value in {**fields, **changes}.items():
            setattr(header, name, value)
        return bytes(header.pack()) + values.tobytes().ljust(4 * VALUES, b"\0")

    def send(self, host: int, packet: bytes) -> str:
        """Give the packet, which comes from the host's own address, to both; return what became of it."""
        outcome, reason, slot, chunk, worker, _ = self.machine.handle_packet(packet)
        answers = self.answers(host, udp_frame(packet, host, to=(SWITCH_MAC, SWITCH_IP, self.job.port)))
        if outcome in ("summed", "resend_sum"):
            self.sums += 1
            self.check_sum(answers, slot)
        elif outcome == "mismatch":
            self.mismatches += 1
            # The sender learns what the first worker asked for, and the others what the sender did.
            calls = dict.fromkeys(range(self.size), (packet, self.job.members[worker].name)) | {host: self.first[chunk]}
            expected = {to: self.machine.mismatch_packet(chunk, *calls[to], self.mismatches) for to in calls}
            self.check_answers(answers, expected)
        else:
            to = {"completed": range(self.size), "resend_result": [host]}.get(outcome, ())
            self.check_answers(answers, {each: self.machine.frame(slot) for each in to})
        if outcome in ("stored", "completed", "summed"):
            self.first.setdefault(chunk, (packet, self.job.members[worker].name))
        became = reason if outcome == "dropped" else outcome
        self.outcomes[became] += 1
        return became

    def send_from_parent(self, packet: bytes) -> str:
        """Give the parent's packet to both; return what became of it."""
        outcome, reason, slot, chunk, worker, _ = self.machine.handle_parent(packet)
        answers = self.answers(PARENT, udp_frame(packet, PARENT, to=(SWITCH_MAC, SWITCH_IP, OWN_PORT)))
        expected = {}
        if outcome == "completed":
            expected = {to: self.machine.frame(slot) for to in range(self.size)}
        elif outcome == "mismatch":
            self.mismatches += 1
            passed_on = self.machine.mismatch_packet(chunk, packet, worker, self.mismatches)
            expected = dict.fromkeys(range(self.size), passed_on)
        self.check_answers(answers, expected)
        became = reason if outcome == "dropped" else outcome
        self.parent_outcomes[became] += 1
        return became

    def answers(self, host: int, frame: bytes) -> dict[int, list[Answer]]:
        return {to: [Answer(each) for each in came] for to, came in self.rig.send(host, frame).items() if came}

    def check_answers(self, answers: dict[int, list[Answer]], expected: dict[int, bytes]) -> None:
        assert sorted(answers) == sorted(expected)
        for to, (answer,) in answers.items():
            assert (answer.to_mac, answer.to_ip, answer.to_port) == (mac_of(to), ip_of(to), port_of(to))
            assert (answer.from_mac, answer.from_ip, answer.from_port) == (SWITCH_MAC, SWITCH_IP, self.job.port)
            assert answer.packet == expected[to]

    def check_sum(self, answers: dict[int, list[Answer]], slot: int) -> None:
        assert list(answers) == [PARENT]
        (answer,) = answers[PARENT]
        assert (answer.to_mac, answer.to_ip, answer.to_port) == (mac_of(PARENT), ip_of(PARENT), port_of(PARENT))
        assert (answer.from_mac, answer.from_ip, answer.from_port) == (SWITCH_MAC, SWITCH_IP, OWN_PORT)
        assert answer.packet == self.machine.sum(slot, self.sums)

    def check_counters(self) -> None:
        counted = self.rig.pipeline.counters(self.job.id)
        came, answered = self.outcomes, self.parent_outcomes
        named = {
            "contributions": came["stored"] + came["completed"] + came["summed"],
            "results": came["completed"] + answered["completed"],
            "results_resent": came["resend_result"],
            "mismatches": came["mismatch"] + answered["mismatch"],
            "sums_sent": came["summed"] + came["resend_sum"],
            "sums_resent": came["resend_sum"],
            "parent_nacks": answered["nack"],
        }
        # A sum that goes once more is a duplicate too, as far as this switch is concerned.
        for kind, outcomes in (("drops", came + Counter(duplicate=came["resend_sum"])), ("parent_drops", answered)):
            assert +Counter(counted.pop(kind)) == +Counter({each: outcomes[each] for each in protocol.DROPS})
        assert counted == named

    def remove(self) -> None:
        self.rig.pipeline.remove(self.job.id)


@pytest.fixture
def both(switch: Rig) -> Iterator[Both]:
    made = Both(switch)
    yield made
    made.remove()


# Its worker 5 is this switch.
ABOVE = PipelineParent(0xC0000001, 9, 0x12345678, 5, ip_of(PARENT), port_of(PARENT), SWITCH_IP, OWN_PORT)
# Names count over the whole tree.
LEAF_MEMBERS = [PipelineMember(ip_of(host), port_of(host), 5 + host) for host in range(WORKERS)]


@pytest.fixture
def leaf(switch: Rig) -> Iterator[Both]:
    made = Both(switch, parent=ABOVE, members=LEAF_MEMBERS)
    yield made
    made.remove()


def from_parent(chunk: int, values: np.ndarray, **changes: int) -> bytes:
    """A result of the parent; its last contribution came from worker 1 of the tree."""
    header = protocol.Header()
    wire = changes.get("wire", I32)
    fields = {
        "flags": FLAGS["from_switch"],
        "job": ABOVE.job,
        "epoch": ABOVE.epoch,
        "incarnation": ABOVE.incarnation,
        "worker": 1,
        "chunk": chunk,
        "packet_number": 77,
        "operation": chunk // 3 & 0xFFFFFFFF,
        "elements": len(values),
        "count": values.nbytes // ELEMENT_BYTES[wire],
        "wire": wire,
    }
    for name, value in {**fields, **changes}.items():
        setattr(header, name, value)
    return bytes(header.pack()) + values.tobytes().ljust(4 * VALUES, b"\0")


@pytest.mark.parametrize("seed", range(6))
def test_a_leaf_answers_any_sequence_of_workers_and_parents_packets_as_the_software_switch(
    leaf: Both, seed: int
) -> None:
    source = random.Random(seed)
    lowest = 0  # chunk that may not be complete
    calls: dict[int, tuple[tuple[int, int], int]] = {}
    for _ in range(500):
        chunk = max(0, lowest + source.choice([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, -1, -2, -4, 4, 5, 8]))
        (wire, operator), count = calls.setdefault(chunk, (source.choice(OPERATORS), source.choice([VALUES, 2, 18])))
        worker = source.choice([*range(WORKERS), None, None])  # None: the parent
        if source.random() < (0.04 if worker is not None else 0.2):
            wire, operator = source.choice(OPERATORS)
        values, call = draw(source)[:count], {"wire": wire, "reduce": operator}
        if worker is not None:
            leaf.send(worker, leaf.packet(worker, chunk, values, **call))
            continue
        if source.random() < 0.15:
            flags = source.choice(["mismatch", "nack", "hello"])
            call |= {"flags": FLAGS["from_switch"] | FLAGS[flags]}
            if flags == "nack":
                call |= {"count": 0, "worker": source.choice([5, 4])}
        if leaf.send_from_parent(from_parent(chunk, values, **call)) == "completed":
            lowest = max(lowest, chunk)
    leaf.check_counters()
    expected = {"stored", "summed", "resend_sum", "resend_result", "mismatch", "duplicate", "stale", "window"}
    assert set(leaf.outcomes) >= expected, f"seed {seed}: {leaf.outcomes}"
    expected = {"completed", "mismatch", "nack", "worker", "direction", "duplicate", "stale", "window", "malformed"}
    assert set(leaf.parent_outcomes) >= expected, f"seed {seed}: {leaf.parent_outcomes}"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"job": JOB}, "foreign"),
        ({"incarnation": INCARNATION}, "incarnation"),
        ({"epoch": EPOCH}, "epoch"),
        ({"flags": 0}, "direction"),
        ({"flags": FLAGS["mismatch"]}, "direction"),
        ({"flags": FLAGS["from_switch"] | FLAGS["hello"]}, "direction"),
        ({"flags": FLAGS["from_switch"] | 2}, "malformed"),
        ({"flags": FLAGS["from_switch"] | 128}, "malformed"),
        ({"flags": FLAGS["from_switch"] | FLAGS["nack"]}, "worker"),
        ({"flags": FLAGS["from_switch"] | FLAGS["nack"], "worker": 5}, "malformed"),
        ({"flags": FLAGS["from_switch"] | FLAGS["nack"], "worker": 5, "count": 0, "elements": 0}, "malformed"),
        ({"flags": FLAGS["from_switch"] | FLAGS["nack"], "worker": 5, "count": 0}, "nack"),
        ({"operation": 3}, "malformed"),
        ({"elements": 5}, "malformed"),
        ({"count": 3}, "malformed"),
        ({"reduce": MAX}, "malformed"),
        ({"table": 1}, "malformed"),
        ({"chunk": 1}, "window"),
        ({"chunk": 2 * WINDOW}, "window"),
        ({"chunk": 1 << 63}, "window"),
        ({}, "completed"),
    ],
)
def test_an_answer_of_the_parent_that_cannot_count_is_dropped_with_the_software_switchs_reason(
    leaf: Both, changes: dict[str, int], reason: str
) -> None:
    values = np.arange(4, dtype="<u4")
    for worker in range(WORKERS):
        leaf.send(worker, leaf.packet(worker, 0, values))
    changes = dict(changes)
    assert leaf.send_from_parent(from_parent(changes.pop("chunk", 0), values, **changes)) == reason
    leaf.check_counters()


def test_the_parents_answers_count_only_from_its_address_and_port_of_the_switch(leaf: Both) -> None:
    values = np.arange(4, dtype="<u4")
    for worker in range(WORKERS):
        leaf.send(worker, leaf.packet(worker, 0, values))
    result, own = from_parent(0, values), (SWITCH_MAC, SWITCH_IP, OWN_PORT)
    for host, frame in [
        (0, udp_frame(result, 0, to=own)),  # a worker's address
        (0, udp_frame(result, PARENT, to=own)),  # the parent's address, by another port of the switch
        (PARENT, udp_frame(result, PARENT, port=port_of(PARENT) + 1, to=own)),
    ]:
        assert not any(leaf.rig.send(host, frame).values())
    assert leaf.rig.pipeline.counters(JOB)["parent_drops"]["source"] == 3
    assert leaf.send(0, leaf.packet(0, 0, values)) == "resend_sum"
    # A result that comes where workers send to is no contribution; the control plane's host gets it.
    frame = udp_frame(result, PARENT)
    assert leaf.rig.send(PARENT, frame)[leaf.rig.control_host] == [frame]


def test_a_leaf_that_waits_for_its_parent_lacks_no_worker(leaf: Both) -> None:
    values = np.arange(4, dtype="<u4")
    assert leaf.rig.pipeline.missing(JOB, 0) == [0, 1, 2]
    leaf.send(1, leaf.packet(1, 0, values))
    assert leaf.rig.pipeline.missing(JOB, 0) == [0, 2] == leaf.machine.missing(0)
    for worker in (0, 2):
        leaf.send(worker, leaf.packet(worker, 0, values))
    assert leaf.rig.pipeline.missing(JOB, 0) == [] == leaf.machine.missing(0)


def test_a_job_of_a_control_plane_that_lost_the_pipeline_counts_no_more(switch: Rig) -> None:
    both = Both(switch)
    packet = both.packet(1, 0, np.arange(4, dtype="<u4"))
    both.send(0, both.packet(0, 0, np.arange(4, dtype="<u4")))
    try:
        switch.pipeline._write("lease", 0, INCARNATION + 1)
        frame = udp_frame(packet, 1)
        assert switch.send(1, frame)[switch.control_host] == [frame]
        assert switch.pipeline.missing(JOB, 0) == [1, 2]
        switch.pipeline._write("lease", 0, INCARNATION)
        assert both.send(1, packet) == "stored"
    finally:
        switch.pipeline._write("lease", 0, INCARNATION)
        both.remove()


def test_an_owner_that_was_stopped_while_it_installed_a_job_makes_no_part_of_a_sum_a_result(
    switch: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has the first slots too, and goes on call by call between the packets of the present owner's job.
    stopped = object.__new__(Bmv2)
    stopped.__dict__.update(switch.pipeline.__dict__, incarnation=INCARNATION - 1, _installed={})
    monkeypatch.setattr(stopped, "_check_lease", lambda: None)
    both = Both(switch)
    values = [draw(random.Random(worker)) for worker in range(WORKERS)]
    whole = [protocol.SwitchJob(job=JOB, epoch=EPOCH, incarnation=INCARNATION, **SHAPE) for _ in range(2 * WINDOW)]
    packets = [[both.packet(worker, chunk, values[worker]) for worker in range(WORKERS)] for chunk in range(2 * WINDOW)]
    for machine, contributions in zip(whole, packets, strict=True):
        for packet in contributions:
            machine.handle_packet(packet)
    results = [machine.frame(chunk)[protocol.HEADER_BYTES :] for chunk, machine in enumerate(whole)]
    for chunk in range(WINDOW):
        for worker in range(WORKERS):
            both.send(worker, packets[chunk][worker])
    source, calls, came = random.Random(1), 0, Counter[int]()
    call = stopped._call

    def then_packets(service: str, method: str, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        result = call(service, method, *arguments)  # type: ignore[arg-type]
        for _ in range(2):
            chunk, worker = source.randrange(2 * WINDOW), source.randrange(WORKERS)
            for frames in switch.send(worker, udp_frame(packets[chunk][worker], worker)).values():
                for frame in frames:
                    answer = Answer(frame)
                    assert answer.packet[protocol.HEADER_BYTES :] == results[answer.header.chunk]
                    came[answer.header.chunk] += 1
        return result

    monkeypatch.setattr(stopped, "_call", then_packets)
    try:
        for _ in range(3):
            with contextlib.suppress(PipelineError):
                stopped.install(make_job(port=DATA_PORT + 1))
            stopped.remove(JOB)
        assert calls > 60
        assert came[0] and came[2 * WINDOW - 1]
    finally:
        with contextlib.suppress(PipelineError):  # the other owner removed the multicast group
            both.remove()


def nothing_counted(switch: Rig) -> bool:
    counted = switch.pipeline.counters(JOB)
    drops = [*counted.pop("drops").values(), *counted.pop("parent_drops").values()]
    return not any([*counted.values(), *drops])


def draw(source: random.Random) -> np.ndarray:
    """Values over the whole range of 32 bits."""
    extremes = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    values = [source.choice(extremes) if source.random() < 0.2 else source.getrandbits(32) for _ in range(VALUES)]
    return np.array(values, dtype="<u4")


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_packets_gets_the_answers_of_the_software_switch(both: Both, seed: int) -> None:
    # Chunks far ahead, long past and twice over, in any order, with calls that differ at times: more than a network of
    # honest workers would bring.
    source = random.Random(seed)
    lowest = 0
    calls: dict[int, tuple[tuple[int, int], int]] = {}
    for _ in range(300):
        chunk = max(0, lowest + source.choice([0, 0, 0, 1, 1, 1, 2, 2, 3, 3, -1, -2, 4, 5, 8]))
        (wire, operator), count = calls.setdefault(chunk, (source.choice(OPERATORS), source.choice([VALUES, 2, 18])))
        if source.random() < 0.04:
            wire, operator = source.choice(OPERATORS)
        worker = source.randrange(WORKERS)
        packet = both.packet(worker, chunk, draw(source)[:count], wire=wire, reduce=operator)
        if both.send(worker, packet) == "completed":
            lowest = max(lowest, chunk)
    both.check_counters()
    expected = {"stored", "completed", "resend_result", "mismatch", "duplicate", "stale", "window"}
    assert set(both.outcomes) >= expected, f"seed {seed}: {both.outcomes}"


@pytest.mark.parametrize("wire, operator", OPERATORS)
def test_every_operator_of_the_profile_has_the_software_switchs_bits(both: Both, wire: int, operator: int) -> None:
    source = random.Random(wire * 16 + operator)
    for worker in (2, 0, 1):
        outcome = both.send(worker, both.packet(worker, 0, draw(source), wire=wire, reduce=operator))
    assert outcome == "completed"


def test_the_sum_of_i32_wraps(both: Both) -> None:
    for worker in range(WORKERS):
        both.send(worker, both.packet(worker, 0, np.array([0x7FFFFFFF, 0x80000000], dtype="<u4")))
    result = np.frombuffer(both.machine.frame(0)[protocol.HEADER_BYTES :][:8], dtype="<i4")
    assert result.tolist() == [3 * 0x7FFFFFFF - (1 << 32), 3 * -0x80000000 + (1 << 32)]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"job": JOB + 1}, "foreign"),
        ({"incarnation": INCARNATION + 1}, "incarnation"),
        ({"epoch": EPOCH - 1}, "epoch"),
        ({"wire": I8, "reduce": 7}, "malformed"),
        ({"count": 0}, "malformed"),
        ({"count": VALUES + 1}, "malformed"),
        ({"wire": U8, "reduce": BOR, "count": 4 * VALUES + 1}, "malformed"),
        ({"chunk": 1 << 63}, "window"),
        ({"chunk": (1 << 32)}, "window"),
        ({"chunk": 2 * WINDOW}, "window"),
    ],
)
def test_a_packet_that_cannot_count_is_dropped_with_the_software_switchs_reason(
    both: Both, changes: dict[str, int], reason: str
) -> None:
    changes = dict(changes)
    packet = both.packet(1, changes.pop("chunk", 0), np.arange(4, dtype="<u4"), **changes)
    assert both.send(1, packet) == reason
    both.check_counters()


@pytest.mark.parametrize("wire, operator", [(F32, SUM), (I32, MIN)])
def test_an_operator_beyond_the_profile_is_dropped_as_malformed(both: Both, wire: int, operator: int) -> None:
    packet = both.packet(1, 0, np.arange(4, dtype="<u4"), wire=wire, reduce=operator)
    assert not any(both.rig.send(1, udp_frame(packet, 1)).values())
    assert both.rig.pipeline.counters(JOB)["drops"]["malformed"] == 1


def test_a_contribution_counts_only_from_its_workers_address_and_port_of_the_switch(both: Both) -> None:
    packet = both.packet(1, 0, np.arange(4, dtype="<u4"))
    outsider = WORKERS
    forged = udp_frame(packet, 1)
    for host, frame in [
        (outsider, udp_frame(packet, outsider)),  # an address of no worker
        (outsider, forged),  # the worker's address, by another port of the switch
        (0, udp_frame(packet, 0)),  # another worker's address
        (1, udp_frame(packet, 1, port=port_of(1) + 1)),
    ]:
        assert not any(both.rig.send(host, frame).values())
    assert both.rig.pipeline.counters(JOB)["drops"]["source"] == 4
    absent = both.packet(WORKERS, 0, np.arange(4, dtype="<u4"))
    assert not any(both.rig.send(1, udp_frame(absent, 1)).values())
    assert both.rig.pipeline.counters(JOB)["drops"]["worker"] == 1
    assert both.rig.pipeline.missing(JOB, 0) == [0, 1, 2]


def test_packets_that_are_no_contributions_reach_the_control_plane_unchanged(both: Both) -> None:
    contribution = both.packet(1, 0, np.arange(4, dtype="<u4"))
    frames = [udp_frame(both.packet(1, 0, np.arange(4, dtype="<u4"), flags=flag), 1) for flag in FLAGS.values()]
    frames += [
        udp_frame(contribution + b"\0" * 8, 1),
        udp_frame(contribution[:-8], 1),
        udp_frame(contribution[: protocol.HEADER_BYTES], 1),
        udp_frame(b"", 1),
        udp_frame(b"\0" + contribution[1:], 1),  # another magic
        udp_frame(contribution, 1, fragment=0x2000),
        udp_frame(contribution, 1, to=(SWITCH_MAC, SWITCH_IP, DATA_PORT + 1)),  # of no job
        SWITCH_MAC + mac_of(1) + bytes.fromhex("0806") + bytes(46),
    ]
    for frame in frames:
        came = both.rig.send(1, frame)
        assert came.pop(both.rig.control_host) == [frame]
        assert not any(came.values())
    assert nothing_counted(both.rig)


def test_a_damaged_header_of_ip_is_dropped(both: Both) -> None:
    frame = bytearray(udp_frame(both.packet(1, 0, np.arange(4, dtype="<u4")), 1))
    frame[14 + 8] ^= 1
    assert not any(both.rig.send(1, bytes(frame)).values())
    assert nothing_counted(both.rig)


def test_frames_between_hosts_are_forwarded_and_those_to_nobody_known_flooded(switch: Rig) -> None:
    to_two = udp_frame(b"hello", 0, to=(mac_of(2), ip_of(2), 5000))
    assert switch.send(0, to_two) == {0: [], 1: [], 2: [to_two], 3: [], 4: []}
    broadcast = b"\xff" * 6 + to_two[6:]
    assert switch.send(0, broadcast) == {0: [], 1: [broadcast], 2: [broadcast], 3: [broadcast], 4: [broadcast]}


def test_names_of_workers_in_a_tree_stand_in_answers(switch: Rig) -> None:
    named = [PipelineMember(ip_of(host), port_of(host), 10 * host + 5) for host in range(WORKERS)]
    both = Both(switch, members=named)
    try:
        for worker in (1, 2):
            both.send(worker, both.packet(worker, 0, np.arange(4, dtype="<u4")))
        both.send(0, both.packet(0, 0, np.arange(4, dtype="<u4"), table=9))
        both.send(0, both.packet(0, 0, np.arange(4, dtype="<u4")))
        both.send(2, both.packet(2, 0, np.arange(4, dtype="<u4")))
        assert [both.outcomes[each] for each in ("mismatch", "completed", "resend_result")] == [1, 1, 1]
    finally:
        both.remove()


def test_a_job_of_one_worker_gets_its_own_values(switch: Rig) -> None:
    both = Both(switch, members=members(0))
    try:
        for chunk in range(9):
            values = np.arange(chunk, chunk + VALUES, dtype="<u4")
            assert both.send(0, both.packet(0, chunk, values)) == "completed"
            assert both.send(0, both.packet(0, chunk, values)) == "resend_result"
    finally:
        both.remove()


def test_jobs_side_by_side_have_slots_of_their_own(switch: Rig) -> None:
    one = Both(switch)
    other = Both(switch, id=9, port=DATA_PORT + 1, window=4, members=members(2, 0))
    try:
        source = random.Random(5)
        for chunk in range(12):
            for worker in range(WORKERS):
                one.send(worker, one.packet(worker, chunk, draw(source)))
            for worker, host in ((1, 0), (0, 2)):
                packet = other.packet(worker, chunk, draw(source), reduce=MAX)
                came = switch.send(host, udp_frame(packet, host, to=(SWITCH_MAC, SWITCH_IP, DATA_PORT + 1)))
                other.machine.handle_packet(packet)
            for to in (0, 2):
                (answer,) = map(Answer, came[to])
                assert answer.packet == other.machine.frame(chunk % 8)
        assert one.outcomes["completed"] == 12
        one.check_counters()
    finally:
        one.remove()
        other.remove()


def test_a_job_that_takes_the_slots_of_another_sees_nothing_of_it(switch: Rig) -> None:
    source = random.Random(6)
    old = Both(switch)
    for chunk in range(6):
        for worker in range(WORKERS):
            old.send(worker, old.packet(worker, chunk, draw(source)))
    old.send(0, old.packet(0, 6, draw(source)))
    late = old.packet(1, 6, draw(source))
    old.remove()
    new = Both(switch, epoch=EPOCH + 1)
    try:
        assert new.rig.pipeline.missing(JOB, 0) == [0, 1, 2]
        assert new.send(1, late) == "epoch"
        for chunk in range(6):
            for worker in range(WORKERS):
                new.send(worker, new.packet(worker, chunk, draw(source)))
        assert new.outcomes["completed"] == 6
        new.check_counters()
    finally:
        new.remove()


def test_a_full_pipeline_refuses_a_job_and_keeps_nothing_of_it(switch: Rig) -> None:
    # 64 slots: 2 * 16 and 2 * 8 leave 16.
    switch.pipeline.install(make_job(id=1, port=1, window=16))
    switch.pipeline.install(make_job(id=2, port=2, window=8))
    try:
        with pytest.raises(PipelineError, match="the pipeline has 64 slots, and no 32 of them in succession are free"):
            switch.pipeline.install(make_job(id=3, port=3, window=16))
        switch.pipeline.remove(1)
        switch.pipeline.install(make_job(id=3, port=3, window=16))
        nowhere = [PipelineMember("10.9.0.77", 9000, 0)]
        with pytest.raises(PipelineError, match=r"no port of the switch leads to 10\.9\.0\.77"):
            switch.pipeline.install(make_job(id=4, port=4, window=8, members=nowhere))
        switch.pipeline.install(make_job(id=5, port=5, window=8))
    finally:
        for job in (1, 2, 3, 4, 5):
            switch.pipeline.remove(job)


def test_a_contribution_of_a_removed_job_reaches_the_control_plane(switch: Rig) -> None:
    both = Both(switch)
    packet = both.packet(1, 0, np.arange(4, dtype="<u4"))
    both.remove()
    frame = udp_frame(packet, 1)
    assert switch.send(1, frame)[switch.control_host] == [frame]


def test_a_control_plane_that_starts_again_ends_the_jobs_of_the_one_before(program: Path) -> None:
    with rig(program, WORKERS, "r") as switch:
        both = Both(switch)
        packet = both.packet(1, 0, np.arange(4, dtype="<u4"))
        both.send(1, packet)
        switch.pipeline.close()
        places = {ip_of(host): Host(mac_of(host), host) for host in range(WORKERS)}
        everyone = {**places, SWITCH_IP: Host(SWITCH_MAC, WORKERS)}
        switch.pipeline = connect(switch.namespace, everyone, INCARNATION + 1)
        frame = udp_frame(packet, 1)
        assert switch.send(1, frame)[switch.control_host] == [frame]
        again = Both(switch)
        assert again.send(1, packet) == "incarnation"
        for worker in range(WORKERS):
            again.send(worker, again.packet(worker, 0, np.arange(4, dtype="<u4")))
        assert again.outcomes["completed"] == 1


class Link:
    """Frames under way to and from the pipeline: some are lost, doubled, or overtaken."""

    def __init__(self, source: random.Random, loss: float, copies: float) -> None:
        self._source, self._loss, self._copies = source, loss, copies
        self.frames: list[tuple[int, bytes]] = []

    def put(self, host: int, frame: bytes) -> None:
        if self._source.random() >= self._loss:
            self.frames.append((host, frame))
        if self._source.random() < self._copies:
            self.frames.append((host, frame))

    def take(self) -> tuple[int, bytes]:
        return self.frames.pop(self._source.randrange(len(self.frames)))


@pytest.mark.parametrize("seed", range(3))
def test_worker_machines_sum_right_over_a_network_that_loses_copies_and_reorders(switch: Rig, seed: int) -> None:
    source = random.Random(seed)
    job = make_job(window=8)
    identity = {"job": JOB, "epoch": EPOCH, "incarnation": INCARNATION, "window": 8, "payload_bytes": 4 * VALUES}
    workers = [protocol.Worker(worker=each, workers=WORKERS, **identity) for each in range(WORKERS)]
    tensors = [np.array(source.choices(range(1 << 32), k=VALUES * 25 + 7), dtype="<u4") for _ in workers]
    results = [np.zeros_like(tensor) for tensor in tensors]
    with np.errstate(over="ignore"):
        expected = tensors[0] + tensors[1] + tensors[2]
    up, down = Link(source, 0.1, 0.1), Link(source, 0.1, 0.1)
    now_ns = 0
    switch.pipeline.install(job)
    try:
        for worker in workers:
            worker.start(operation=1, elements=len(expected), wire=I32, reduce=SUM)
        while not all(worker.idle for worker in workers):
            assert now_ns < 60e9, "no end within a minute of virtual time"
            now_ns += 1_000_000
            for host, worker in enumerate(workers):
                timeout_ns = worker.poll_timeout()
                if timeout_ns is not None and timeout_ns <= now_ns:
                    worker.handle_timeout(now_ns)
                while (send := worker.poll_send(now_ns)) is not None:
                    values = tensors[host][send.first : send.first + send.count].tobytes().ljust(4 * VALUES, b"\0")
                    up.put(host, udp_frame(send.header.pack() + values, host))
            for _ in range(source.randrange(len(up.frames) + 1)):
                host, frame = up.take()
                for to, came in switch.send(host, frame).items():
                    for answer in came:
                        down.put(to, answer)
            for _ in range(source.randrange(len(down.frames) + 1)):
                host, frame = down.take()
                outcome, _, _, first, _, values = workers[host].handle_packet(Answer(frame).packet, now_ns)
                assert outcome in ("received", "dropped")
                if outcome == "received":
                    chunk = np.frombuffer(values, dtype="<u4")
                    results[host][first : first + len(chunk)] = chunk[: len(expected) - first]
        for result in results:
            np.testing.assert_array_equal(result, expected)
        counted = switch.pipeline.counters(JOB)
        assert counted["results"] == 26
        assert counted["results_resent"] > 0
        assert counted["drops"]["window"] == 0
    finally:
        switch.pipeline.remove(JOB)


@pytest.mark.parametrize("values", [64, 128, 256])
def test_the_program_compiles_for_every_number_of_values(tmp_path: Path, values: int) -> None:
    compile_program(tmp_path, values, 4096)


def test_the_program_refuses_another_number_of_values(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="NETFOLD_VALUES is 8, 16, 32, 64, 128 or 256"):
        compile_program(tmp_path, 48, 64)


@pytest.mark.parametrize("target", [1, 2])
def test_the_program_for_tofino_is_well_typed(target: int) -> None:
    if shutil.which("p4test") is None:
        pytest.skip("the Tofino program cannot be type-checked: p4test, of p4lang/p4c, is not on the PATH")
    argv = ["p4test", f"-D__TARGET_TOFINO__={target}", str(ROOT / "core" / "native" / "p4" / "netfold_tna.p4")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds(60))
    if re.search(r"no include path in which to search for t2?na\.p4|t2?na\.p4: No such file", done.stderr):
        pytest.skip(
            "the Tofino program cannot be type-checked: p4test lacks the headers of p4lang/p4c's backends/tofino"
        )
    assert done.returncode == 0 and "error" not in done.stderr, done.stderr


def test_an_absent_switch_is_an_error() -> None:
    with pytest.raises(PipelineError, match=r"no simple_switch answers at 127\.0\.0\.1:1: "):
        Bmv2("127.0.0.1", 1, {}, incarnation=1)
