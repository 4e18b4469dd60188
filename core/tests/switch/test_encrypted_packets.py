"""Packets between workers and a switch that are encrypted, made and read by another implementation of AES-GCM."""

from __future__ import annotations

import secrets
import socket
import struct
import time

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from load import seconds

from netfold._native import auth, protocol
from netfold._native.dataplane import DataPlane
from netfold.switch_protocol import packet_keys

pytestmark = pytest.mark.native

JOB, INCARNATION, EPOCH, WORKERS = 0x0A0B0C0D, 77, 5, 2
# A payload for an MTU of 1500, one batch of AES blocks and one more, and a partial block.
PAYLOADS = (8, 1408, 1536 + 24, 8880)


def nonce_of(packet: bytes, mac_bytes: int) -> bytes:
    header = protocol.Header.parse(packet)
    return (
        bytes([header.flags])
        + (len(packet) - mac_bytes).to_bytes(3, "big")
        + int(header.packet_number).to_bytes(8, "big")
    )


def encrypted(key: bytes, packet: bytes) -> bytes:
    header, values = packet[: protocol.HEADER_BYTES], packet[protocol.HEADER_BYTES :]
    return header + AESGCM(key).encrypt(nonce_of(packet, 0), values, header)


def decrypted(key: bytes, packet: bytes) -> bytes:
    header, values = packet[: protocol.HEADER_BYTES], packet[protocol.HEADER_BYTES :]
    return header + AESGCM(key).decrypt(nonce_of(packet, auth.MAC_BYTES), values, header)


class EncryptedJob:
    """A job on a DataPlane whose workers are sockets of the test."""

    def __init__(self, payload_bytes: int) -> None:
        self.plane = DataPlane()
        self.payload_bytes = payload_bytes
        own, answers = [packet_keys.draw_secret() for _ in range(WORKERS)], packet_keys.draw_secret()
        nonces = [secrets.randbits(64) for _ in range(WORKERS)]
        hellos = [packet_keys.hello_key(each, job=JOB, worker=worker) for worker, each in enumerate(own)]
        self.keys = [
            packet_keys.contribution_key(each, job=JOB, epoch=EPOCH, worker=worker) for worker, each in enumerate(own)
        ]
        self.result_key = packet_keys.result_key(answers, job=JOB, epoch=EPOCH)
        self.sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(WORKERS)]
        port = self.plane.open(JOB, INCARNATION, "127.0.0.1", nonces, hellos, 1 << 20)
        for worker, each in enumerate(self.sockets):
            each.bind(("127.0.0.1", 0))
            each.settimeout(seconds(10))
            each.connect(("127.0.0.1", port))
            self.plane.set_worker_address(JOB, worker, *each.getsockname())
            # A hello has no values, so it is authenticated and not encrypted.
            hello = auth.with_mac(
                hellos[worker],
                self.header(worker, flags=protocol.FLAGS["hello"], epoch=0, packet_number=nonces[worker]),
            )
            each.send(hello)
            assert each.recv(65536) == hello
        self.plane.begin(
            job=JOB,
            epoch=EPOCH,
            incarnation=INCARNATION,
            workers=WORKERS,
            window=16,
            payload_bytes=payload_bytes,
            keys=(self.keys, self.result_key),
            encrypts=True,
        )

    def header(self, worker: int, **fields: int) -> bytes:
        header = protocol.Header()
        words = {"job": JOB, "epoch": EPOCH, "incarnation": INCARNATION, "worker": worker, "count": 1, **fields}
        for name, value in words.items():
            setattr(header, name, value)
        return bytes(header.pack())

    def contribution(self, worker: int, chunk: int, value: float) -> bytes:
        count = self.payload_bytes // 4
        header = self.header(worker, chunk=chunk, packet_number=chunk + 1, count=count, elements=count)
        return header + struct.pack(f"<{count}f", *(value + place for place in range(count)))

    def unauthenticated(self, count: int) -> None:
        """Wait for that many packets with a wrong MAC, and check that no packet was dropped for another reason."""
        deadline = time.monotonic() + seconds(10)
        while sum((drops := self.plane.counters(JOB)["drops"]).values()) < count:
            assert time.monotonic() < deadline, drops
            time.sleep(0.001)
        assert drops["unauthenticated"] == count == sum(drops.values())


@pytest.mark.parametrize("payload_bytes", PAYLOADS)
def test_another_implementation_exchanges_encrypted_packets_with_the_switch(
    payload_bytes: int,
) -> None:
    job = EncryptedJob(payload_bytes)
    packets = [job.contribution(worker, 0, 1.5 + 10 * worker) for worker in range(WORKERS)]
    for worker, packet in enumerate(packets):
        job.sockets[worker].send(encrypted(job.keys[worker], packet))
    count = payload_bytes // 4
    expected = struct.pack(f"<{count}f", *(13.0 + 2 * place for place in range(count)))
    results = [each.recv(65536) for each in job.sockets]
    assert results[0] == results[1]
    assert decrypted(job.result_key, results[0])[protocol.HEADER_BYTES :] == expected
    assert expected[:8] not in results[0]
    with pytest.raises(InvalidTag):
        decrypted(job.keys[0], results[0])
    # On a second request the switch sends the same bytes: a nonce belongs to one packet.
    again = job.header(0, chunk=0, packet_number=9, count=count, elements=count) + packets[0][protocol.HEADER_BYTES :]
    job.sockets[0].send(encrypted(job.keys[0], again))
    assert job.sockets[0].recv(65536) == results[0]


def test_changed_plaintext_or_resized_packets_change_nothing() -> None:
    job = EncryptedJob(1408)
    right = encrypted(job.keys[0], job.contribution(0, 0, 1.0))
    wrong = [right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :] for place in (31, 48, 100, len(right) - 1)]
    # Authenticated and not encrypted; under another worker's key; cut, and made longer.
    wrong.append(auth.with_mac(job.keys[0], job.contribution(0, 0, 1.0)))
    wrong.append(encrypted(job.keys[1], job.contribution(0, 0, 1.0)))
    wrong += [right[:-8], right + bytes(8), right[: protocol.HEADER_BYTES]]
    for packet in wrong:
        job.sockets[0].send(packet)
    job.unauthenticated(len(wrong))
    job.sockets[0].send(right)
    job.sockets[1].send(encrypted(job.keys[1], job.contribution(1, 0, 2.0)))
    values = decrypted(job.result_key, job.sockets[0].recv(65536))[protocol.HEADER_BYTES :]
    assert struct.unpack_from("<2f", values) == (3.0, 5.0)
