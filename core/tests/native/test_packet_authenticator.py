"""MACs of packets, and their keys, against other implementations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from load import seconds

from netfold._native import auth, protocol
from netfold.switch_protocol import packet_keys

pytestmark = pytest.mark.native

SECRET = bytes(range(32))


def packet(payload: bytes, flags: int = 0, packet_number: int = 7) -> bytes:
    header = protocol.Header()
    header.flags, header.packet_number, header.job = flags, packet_number, 0xA1B2C3D4
    return bytes(header.pack()) + payload


@pytest.mark.parametrize("payload_bytes", [0, 1, 8, 15, 16, 17, 31, 200, 1408, 8880, 32768])
def test_a_mac_equals_that_of_another_implementation_of_aes_gcm(payload_bytes: int) -> None:
    key, packet_number = os.urandom(16), int.from_bytes(os.urandom(8), "big")
    whole = packet(os.urandom(payload_bytes), 0x1F, packet_number)
    nonce = bytes([0x1F]) + len(whole).to_bytes(3, "big") + packet_number.to_bytes(8, "big")
    assert auth.with_mac(key, whole) == whole + AESGCM(key).encrypt(nonce, b"", whole)


def test_the_nonce_is_flags_length_and_packet_number() -> None:
    key = os.urandom(16)
    whole = packet(bytes(16))
    tags = {
        auth.with_mac(key, each)[-16:]
        for each in (whole, packet(bytes(16), flags=8), packet(bytes(16), packet_number=8))
    }
    # GCM's tag is a sum of a function of the nonce and a function of the bytes: for equal bytes only the nonce differs.
    assert len(tags) == 3


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        auth.with_mac(bytes(15), packet(b""))


def test_no_two_epochs_workers_or_directions_share_a_key() -> None:
    keys = [packet_keys.hello_key(SECRET, job=job, worker=worker) for job in (1, 2) for worker in (0, 1)]
    keys += [packet_keys.result_key(SECRET, job=job, epoch=epoch) for job in (1, 2) for epoch in (0, 1)]
    keys += [
        packet_keys.contribution_key(SECRET, job=job, epoch=epoch, worker=worker)
        for job in (1, 2)
        for epoch in (0, 1)
        for worker in (0, 1)
    ]
    assert len(set(keys)) == len(keys) == 16


def test_a_secret_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes was expected, not of 31"):
        packet_keys.result_key(SECRET[1:], job=1, epoch=1)


PROGRAM = """
from netfold._native import auth
print(auth.unavailable_reason())
try:
    auth.with_mac(bytes(16), bytes(48))
except RuntimeError as error:
    assert str(error) == auth.unavailable_reason()
else:
    raise SystemExit("a tag was made")
"""


def test_a_host_without_libcrypto_reports_the_reason_and_makes_no_mac(tmp_path: Path) -> None:
    (tmp_path / "libcrypto.so.3").write_text("no library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    # Without numpy and ssl, which may load the library themselves.
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=seconds(60)
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("OpenSSL's libcrypto.so.3 cannot be opened (")
