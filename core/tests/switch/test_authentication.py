"""Authenticated packets: forged, changed and replayed packets change nothing and are counted."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import RunningSwitch, private, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import auth, protocol
from netfold._native.dataplane import DataPlane
from netfold.switch import Switch, Tokens, daemon
from netfold.switch_protocol import control_client, packet_keys

TOKEN = "a" * 31 + "1"
JOB, INCARNATION, EPOCH, WORKERS = 0x0A0B0C0D, 77, 5, 2
FLAGS = protocol.FLAGS


class Job:
    """A job on a DataPlane whose workers are sockets of the test."""

    def __init__(self, *, window: int = 16, payload_bytes: int = 8, workers: int = WORKERS) -> None:
        self.plane = DataPlane()
        self.payload_bytes, self.window = payload_bytes, window
        self.secrets = [packet_keys.draw_secret() for _ in range(workers)]
        self.result_secret = packet_keys.draw_secret()
        self.nonces = [secrets.randbits(64) for _ in range(workers)]
        self.sockets = [open_socket() for _ in range(workers)]
        self.counters = [0] * workers
        keys = [self.hello_key(worker) for worker in range(workers)]
        self.address = ("127.0.0.1", self.plane.open(JOB, INCARNATION, "127.0.0.1", self.nonces, keys, 1 << 20))
        for worker, each in enumerate(self.sockets):
            self.plane.set_worker_address(JOB, worker, *each.getsockname())

    def hello_key(self, worker: int) -> bytes:
        return packet_keys.hello_key(self.secrets[worker], job=JOB, worker=worker)

    def key(self, worker: int, epoch: int = EPOCH) -> bytes:
        return packet_keys.contribution_key(self.secrets[worker], job=JOB, epoch=epoch, worker=worker)

    @property
    def result_key(self) -> bytes:
        return packet_keys.result_key(self.result_secret, job=JOB, epoch=EPOCH)

    def hello(self, worker: int) -> bytes:
        header = self.header(worker, flags=FLAGS["hello"], epoch=0, packet_number=self.nonces[worker])
        return auth.with_mac(self.hello_key(worker), header + bytes(self.payload_bytes))

    def greet(self) -> None:
        for worker, each in enumerate(self.sockets):
            each.sendto(self.hello(worker), self.address)
            assert each.recv(65536) == self.hello(worker)

    def begin(self) -> None:
        self.plane.begin(
            job=JOB,
            epoch=EPOCH,
            incarnation=INCARNATION,
            workers=len(self.sockets),
            window=self.window,
            payload_bytes=self.payload_bytes,
            keys=([self.key(worker) for worker in range(len(self.sockets))], self.result_key),
        )

    def header(self, worker: int, **fields: int) -> bytes:
        header = protocol.Header()
        words = {"job": JOB, "epoch": EPOCH, "incarnation": INCARNATION, "worker": worker, "count": 1, **fields}
        for name, value in words.items():
            setattr(header, name, value)
        return bytes(header.pack())

    def contribution(self, worker: int, chunk: int, value: float, **fields: int) -> bytes:
        """Return the packet without its MAC."""
        self.counters[worker] += 1
        header = self.header(
            worker, **{"chunk": chunk, "packet_number": self.counters[worker], "elements": 1, **fields}
        )
        return header + struct.pack("<f", value).ljust(self.payload_bytes, b"\0")

    def send(self, worker: int, packet: bytes) -> None:
        self.sockets[worker].sendto(packet, self.address)

    def counted(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.plane.counters(JOB)
        return counters

    def drops(self, total: int) -> dict[str, int]:
        """Wait for `total` drops; return the drops by reason."""
        deadline = time.monotonic() + seconds(10)
        while sum((counters := self.counted())["drops"].values()) < total:
            assert time.monotonic() < deadline, counters
            time.sleep(0.001)
        found = {reason: count for reason, count in counters["drops"].items() if count}
        assert sum(found.values()) == total
        return found

    def answer(self, worker: int) -> bytes:
        """Receive a packet, check its MAC, and return it without the MAC."""
        packet = self.sockets[worker].recv(65536)
        assert auth.with_mac(self.result_key, packet[:-16]) == packet
        return packet[:-16]

    def adds(self, chunk: int) -> None:
        """Send the workers' own contributions to `chunk`, and check their sum."""
        for worker in range(len(self.sockets)):
            self.send(worker, auth.with_mac(self.key(worker), self.contribution(worker, chunk, 1.5 + worker)))
        for worker in range(len(self.sockets)):
            packet = self.answer(worker)
            while protocol.Header.parse(packet).count == 0:  # a NACK
                packet = self.answer(worker)
            assert protocol.Header.parse(packet).chunk == chunk
            (value,) = struct.unpack_from("<f", packet, protocol.HEADER_BYTES)
            assert value == sum(1.5 + each for each in range(len(self.sockets)))


def open_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    made.settimeout(seconds(5))
    return made


@contextlib.contextmanager
def job(**shape: int) -> Iterator[Job]:
    made = Job(**shape)
    try:
        yield made
    finally:
        for each in made.sockets:
            each.close()


pytestmark = pytest.mark.native


def test_a_bit_that_is_flipped_anywhere_changes_nothing() -> None:
    with job() as made:
        made.greet()
        made.begin()
        whole = auth.with_mac(made.key(0), made.contribution(0, 0, 99.0))
        bits = 8 * len(whole)
        for bit in range(bits):
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            made.send(0, bytes(changed))
        drops = made.drops(bits)
        # Fields that are checked before the MAC: magic, version, unknown flags, wire, reduce, and the sender.
        assert set(drops) <= {"malformed", "worker", "source", "unauthenticated", "foreign"}
        assert drops["unauthenticated"] > bits - 60
        assert made.counted()["contributions"] == 0
        made.counters[0] = 0  # no switch has received that packet
        made.adds(0)


def test_a_truncated_or_extended_packet_changes_nothing() -> None:
    with job() as made:
        made.greet()
        made.begin()
        whole = auth.with_mac(made.key(0), made.contribution(0, 0, 99.0))
        others = [whole[:length] for length in range(len(whole))] + [whole + bytes(1), whole + whole]
        for packet in others:
            made.send(0, packet)
        cut = len(whole) - protocol.HEADER_BYTES
        assert made.drops(len(others)) == {"malformed": protocol.HEADER_BYTES, "unauthenticated": cut + 2}
        made.counters[0] = 0
        made.adds(0)


def test_a_packet_without_a_mac_is_dropped() -> None:
    with job() as made:
        made.greet()
        made.begin()
        made.send(0, made.contribution(0, 0, 99.0))
        made.send(0, made.contribution(0, 0, 99.0) + bytes(16))
        assert made.drops(2) == {"unauthenticated": 2}
        made.adds(0)


def test_a_workers_key_authenticates_only_its_own_packets() -> None:
    with job() as made:
        made.greet()
        made.begin()
        # Worker 1 has its own key and the results' key, and can send from its own address.
        forged = made.contribution(0, 0, 99.0)
        for key in (made.key(1), made.result_key, made.hello_key(0)):
            made.send(0, auth.with_mac(key, forged))  # from worker 0's address, as a spoofed packet
        made.send(1, auth.with_mac(made.key(1), forged))
        assert made.drops(4) == {"unauthenticated": 3, "source": 1}
        made.adds(0)


def test_a_packet_of_an_earlier_epoch_is_dropped() -> None:
    with job() as made:
        made.greet()
        made.begin()
        before = made.key(0, EPOCH - 1)
        # As it was captured, and with this epoch's number written into it.
        made.send(0, auth.with_mac(before, made.contribution(0, 0, 99.0, epoch=EPOCH - 1)))
        captured = auth.with_mac(before, made.contribution(0, 0, 99.0, epoch=EPOCH - 1))
        made.send(0, captured[:8] + EPOCH.to_bytes(4, "big") + captured[12:])
        assert made.drops(2) == {"unauthenticated": 2}
        made.adds(0)


def test_a_replayed_packet_counts_once() -> None:
    with job() as made, open_socket() as other:
        made.greet()
        made.begin()
        captured = auth.with_mac(made.key(0), made.contribution(0, 0, 1.5))
        made.send(0, captured)
        other.sendto(captured, made.address)
        made.send(0, captured)
        assert made.drops(2) == {"source": 1, "duplicate": 1}
        made.send(1, auth.with_mac(made.key(1), made.contribution(1, 0, 2.5)))
        answers = [made.answer(worker) for worker in range(2)]
        assert answers[0] == answers[1]
        assert struct.unpack_from("<f", answers[0], protocol.HEADER_BYTES) == (4.0,)
        made.send(0, captured)
        assert made.answer(0) == answers[0], "the kept answer, with the same counter and so the same tag"
        assert made.counted()["results"] == 1


def test_a_replayed_hello_does_not_take_its_workers_address() -> None:
    with job() as made, open_socket() as other:
        for worker in range(2):
            other.sendto(made.hello(worker), made.address)
        assert made.drops(2) == {"source": 2}
        with pytest.raises(ValueError, match="no hello came from worker 0 1"):
            made.begin()
        made.greet()
        made.begin()
        other.sendto(made.hello(0), made.address)
        assert made.drops(3) == {"source": 3}
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.recv(65536)
        made.adds(0)


def test_a_hello_with_a_wrong_mac_is_not_answered() -> None:
    with job() as made:
        whole = made.hello(0)
        for packet in (whole[:-16], whole[:-1] + bytes([whole[-1] ^ 1]), auth.with_mac(made.key(0), whole[:-16])):
            made.send(0, packet)
        assert made.drops(3) == {"unauthenticated": 3}
        assert made.counted()["hellos"] == 0
        made.greet()
        made.begin()
        made.adds(0)


def test_every_packet_of_the_switch_has_a_mac_and_its_own_nonce() -> None:
    with job(workers=3) as made:
        made.greet()
        made.begin()
        by_nonce: dict[bytes, set[bytes]] = {}
        made.counters = [
            30,
            30,
            30,
        ]  # thirty missing packets: a NACK for each worker at the first packet beyond the reorder threshold
        for chunk in range(3):
            for worker in range(3):
                made.send(worker, auth.with_mac(made.key(worker), made.contribution(worker, chunk, 1.0)))
        made.counters = [60, 60, 60]
        for worker in range(3):
            made.send(worker, auth.with_mac(made.key(worker), made.contribution(worker, 3, 1.0, operation=worker)))
        kinds = set()
        deadline = time.monotonic() + seconds(10)
        for each in made.sockets:
            each.settimeout(0.1)
        while time.monotonic() < deadline and len(kinds) < 3:
            for worker in range(3):
                with contextlib.suppress(TimeoutError):
                    while True:
                        packet = made.answer(worker)
                        kinds.add(packet[3])
                        nonce = packet[3:4] + packet[24:32]
                        by_nonce.setdefault(nonce, set()).add(packet)
        answer = FLAGS["from_switch"]
        assert kinds == {answer, answer | FLAGS["nack"], answer | FLAGS["mismatch"]}
        assert [packets for packets in by_nonce.values() if len(packets) > 1] == []


def test_a_disagreeing_worker_makes_the_switch_send_about_as_much_as_the_worker_sends() -> None:
    workers, copies = 16, 400
    with job(workers=workers) as made:
        made.greet()
        made.begin()
        made.send(0, auth.with_mac(made.key(0), made.contribution(0, 0, 1.0)))
        began = time.monotonic()
        for _ in range(copies):
            # Two elements, where worker 0 sent one.
            made.send(1, auth.with_mac(made.key(1), made.contribution(1, 0, 1.0, elements=2)))
        deadline = time.monotonic() + seconds(10)
        while made.counted()["mismatches"] < copies and time.monotonic() < deadline:
            time.sleep(0.01)
        took_s = time.monotonic() - began
        assert made.counted()["mismatches"] > copies / 2, "the kernel may drop some of a burst, and no more"
        counts = []
        for each in made.sockets[2:]:
            each.setblocking(False)
            count = 0
            with contextlib.suppress(BlockingIOError):
                while each.recv(65536):
                    count += 1
            counts.append(count)
        assert all(1 <= count <= 2 + took_s / 0.01 for count in counts), (counts, took_s)
        assert made.answer(1)  # and the disagreeing worker gets a reply


def test_a_job_starts_with_keys_if_and_only_if_it_has_keys() -> None:
    with job() as made:
        made.greet()
        shape = {"epoch": EPOCH, "incarnation": INCARNATION, "workers": 2, "window": 8, "payload_bytes": 8}
        with pytest.raises(ValueError, match="keys are for a job that has them"):
            made.plane.begin(job=JOB, **shape, keys=None)
        made.plane.open(JOB + 1, INCARNATION, "127.0.0.1", [1, 2], [], 1 << 16)
        with pytest.raises(ValueError, match="keys are for a job that has them"):
            made.plane.begin(job=JOB + 1, **shape, keys=([bytes(16)] * 2, bytes(16)))


def test_a_second_begin_of_a_job_is_refused_and_the_job_keeps_its_results() -> None:
    with job() as made:
        made.greet()
        made.begin()
        made.adds(0)
        with pytest.raises(ValueError, match="begin: the job has begun; another epoch needs a new job"):
            made.begin()
        made.send(0, auth.with_mac(made.key(0), made.contribution(0, 0, 1.0)))
        assert made.answer(0), "a late duplicate is answered from the kept result"


# Whole jobs.


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[RunningSwitch]:
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as running:
        yield running


def options(switch: RunningSwitch, tmp_path: Path) -> Options:
    return Options(switch=switch.endpoint, token_file=private(tmp_path / "token", TOKEN))


LENGTHS = (1, 2, 3, 351, 352, 353, 2219, 2220, 2221, 100_003)


@pytest.mark.parametrize(
    ("dtype", "wire"), [(np.float32, "f32"), (np.float32, "bf16"), (np.float32, "i32"), (np.int8, "auto")]
)
def test_tensors_of_every_length_pass_with_macs(switch: RunningSwitch, tmp_path: Path, dtype: type, wire: str) -> None:
    """Values begin and end at any address: the MAC covers the parts of a packet in place."""
    chosen = Options(**{**options(switch, tmp_path).__dict__, "wire_dtype": wire})

    def add(rank: int, size: int, folder: str) -> dict[str, Any]:
        with Communicator(FileStore(folder), rank, size, options=chosen, timeout_s=20) as group:
            for length in LENGTHS:
                for offset in range(3):
                    whole = np.zeros(length + offset, dtype)
                    buffer = whole[offset:]
                    buffer[:] = np.arange(length) % 16 + rank
                    group.all_reduce(buffer)
                    assert (buffer == (np.arange(length) % 16) * size + 3).all(), (length, offset)
            return dict(group.group.traffic() or {})

    for traffic in values(run_threads(add, 3, timeout_s=60)):
        assert traffic["drops"]["unauthenticated"] == 0
        assert traffic["packets_sent"] > 0


def works_until(rank: int, size: int, folder: str, chosen: Options, over: threading.Event) -> dict[str, Any]:
    """all_reduce until `over`, which rank 0 announces in the sum itself."""
    turns = 0
    with Communicator(FileStore(folder), rank, size, options=chosen, timeout_s=30) as group:
        while True:
            flag = np.array([rank == 0 and over.is_set()], np.int32)
            group.all_reduce(flag)
            if flag[0]:
                return {"turns": turns, "traffic": group.group.traffic()}
            buffer = np.arange(100_000, dtype=np.int64) * (rank + 1) + turns
            group.all_reduce(buffer)
            assert (buffer == np.arange(100_000) * (size * (size + 1) // 2) + size * turns).all()
            turns += 1


def forgeries(packet: bytes, generator: np.random.Generator) -> Iterator[bytes]:
    """Forgeries of a captured packet: a replay, one bit changed, other values, a future packet number, truncated."""
    yield packet
    changed = bytearray(packet)
    changed[int(generator.integers(len(packet)))] ^= 1 << int(generator.integers(8))
    yield bytes(changed)
    yield packet[:48] + bytes(8) + packet[56:]
    yield packet[:24] + (int.from_bytes(packet[24:32], "big") + 1000).to_bytes(8, "big") + packet[32:]
    yield packet[:-3]


def datagram(source: int, to: int, packet: bytes) -> bytes:
    """Return an IP packet between two ports of this host. The kernel fills in the IP checksum; UDP's may be 0."""
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + len(packet), 0, 0, 64, 17, 0, *[socket.inet_aton("127.0.0.1")] * 2)
    return ip + struct.pack(">HHHH", source, to, 8 + len(packet), 0) + packet


@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs CAP_NET_RAW to hear a job's packets and to send from its addresses"
)
def test_a_flood_of_forged_packets_from_the_jobs_addresses_changes_no_sum(
    switch: RunningSwitch, tmp_path: Path
) -> None:
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    over = threading.Event()
    chosen = options(switch, tmp_path)
    forged = {"to the switch": 0, "to a worker": 0}

    def flood() -> None:
        generator = np.random.default_rng(seed)
        ((bytes_each, port),) = switch.wait_for(r"payload_bytes=(\d+) .* port=(\d+)")
        packet_bytes, port = int(bytes_each) + 64, int(port)
        deadline = time.monotonic() + 3.0
        with (
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as tap,
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as mouth,
        ):
            tap.settimeout(0.2)
            while time.monotonic() < deadline:
                try:
                    captured = tap.recv(65536)
                except TimeoutError:
                    continue
                start = (captured[0] & 15) * 4
                source, to = struct.unpack_from(">HH", captured, start)
                # Use the first packet: loopback carries a GSO run as one datagram.
                packet = captured[start + 8 :][:packet_bytes]
                if port not in (source, to) or len(packet) < packet_bytes:
                    continue
                for forgery in forgeries(packet, generator):
                    mouth.sendto(datagram(source, to, forgery), ("127.0.0.1", 0))
                    forged["to the switch" if to == port else "to a worker"] += 1

    def everybody(rank: int, size: int, folder: str) -> dict[str, Any] | None:
        if rank < 2:
            return works_until(rank, 2, folder, chosen, over)
        try:
            flood()
        finally:
            over.set()
        return None

    found = values(run_threads(everybody, 3, timeout_s=60))[:2]
    assert all(count > 100 for count in forged.values()), f"nothing was forged: {forged}"
    assert all(each is not None and each["turns"] > 5 for each in found)
    (line,) = switch.wait_for(r"closed after .*")
    counted = re.search(r"(\d+) unauthenticated", line)
    assert counted is not None and int(counted[1]) > 0, line
    assert sum(each["traffic"]["drops"]["unauthenticated"] for each in found) > 0, found


def test_log_status_and_metrics_say_whether_packets_are_authenticated(switch: RunningSwitch, tmp_path: Path) -> None:
    def add(rank: int, size: int, folder: str, chosen: Options) -> bool:
        with Communicator(FileStore(folder), rank, size, options=chosen, timeout_s=20) as group:
            group.all_reduce(np.ones(4))
            assert group.group.membership is not None
            return bool(group.group.membership.authenticated)

    assert values(run_threads(add, 2, options(switch, tmp_path))) == [True, True]
    switch.wait_for("event=started .*authenticated=yes")
    with running_switch() as bare:
        assert values(run_threads(add, 2, Options(switch=bare.endpoint))) == [False, False]
        bare.wait_for("event=started .*authenticated=no")
        bare.wait_for("event=open .*packets are not authenticated")


def test_a_host_without_libcrypto_runs_only_an_open_switch(
    switch: RunningSwitch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = SimpleNamespace(unavailable_reason=lambda: "OpenSSL's libcrypto.so.3 cannot be opened (it is not there)")
    monkeypatch.setattr(daemon, "auth", absent)
    with pytest.raises(ValueError, match=r"cannot be authenticated here: OpenSSL's .*\. Without it only --open"):
        Switch("127.0.0.1", 0, tokens=Tokens.read(tmp_path / "tokens"))
    Switch("127.0.0.1", 0)
    monkeypatch.setattr(control_client, "auth", absent)

    def join(rank: int, size: int, folder: str, chosen: Options) -> None:
        Communicator(FileStore(folder), rank, size, options=chosen, timeout_s=20, join_timeout_s=5).close()

    for outcome in run_threads(join, 2, options(switch, tmp_path)):
        assert outcome.error == "SwitchError", outcome.text
        assert "this host cannot: OpenSSL's libcrypto.so.3 cannot be opened" in outcome.text
