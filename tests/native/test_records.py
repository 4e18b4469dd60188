"""Records of a stream against another implementation of AES-GCM, and what an attacker may do to them."""

from __future__ import annotations

import hashlib
import hmac
import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from netfold._native import auth

pytestmark = pytest.mark.native

SECRET = bytes(range(32))


def other_record(security: str, payload: bytes, number: int, secret: bytes = SECRET) -> bytes:
    """The record as another implementation makes it."""
    key = hmac.new(secret, b"netfold record key", hashlib.sha256).digest()[:16]
    nonce, header = number.to_bytes(12, "big"), len(payload).to_bytes(4, "big")
    if security == "encrypt":
        return header + AESGCM(key).encrypt(nonce, payload, header)
    return header + payload + AESGCM(key).encrypt(nonce, b"", header + payload)


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_records_are_what_another_implementation_makes(security: str) -> None:
    sealer = auth.RecordSealer(security, SECRET)
    opener = auth.RecordOpener(security, SECRET)
    for number, length in enumerate((0, 1, 15, 16, 17, 1000, 65535, 65536)):
        payload = os.urandom(length)
        record = sealer.protect(payload)
        assert record == other_record(security, payload, number)
        if length > 8:
            assert (payload in record) == (security == "authenticate")
        assert opener.open(record) == payload


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_a_key_carries_a_bounded_number_of_records(security: str) -> None:
    sealer = auth.RecordSealer(security, SECRET, 3)
    opener = auth.RecordOpener(security, SECRET, 3)
    secret = SECRET
    for number in range(10):
        if number and number % 3 == 0:
            secret = hmac.new(secret, b"netfold next secret", hashlib.sha256).digest()
        record = sealer.protect(b"the same payload")
        assert record == other_record(security, b"the same payload", number, secret)
        assert opener.open(record) == b"the same payload"


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_every_byte_of_a_record_is_guarded(security: str) -> None:
    record = auth.RecordSealer(security, SECRET).protect(b"sixteen bytes...and some more")
    for place in range(len(record)):
        for bit in (0x01, 0x80):
            changed = record[:place] + bytes([record[place] ^ bit]) + record[place + 1 :]
            assert auth.RecordOpener(security, SECRET).open(changed) is None, (place, bit)
    assert auth.RecordOpener(security, SECRET).open(record) is not None


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_records_that_are_repeated_left_out_swapped_or_of_another_connection_are_not_opened(security: str) -> None:
    sealer = auth.RecordSealer(security, SECRET)
    first, second = sealer.protect(b"a" * 40), sealer.protect(b"a" * 40)
    assert first != second
    repeating = auth.RecordOpener(security, SECRET)
    assert repeating.open(first) is not None
    assert repeating.open(first) is None
    assert auth.RecordOpener(security, SECRET).open(second) is None
    assert auth.RecordOpener(security, os.urandom(32)).open(first) is None
    other = {"authenticate": "encrypt", "encrypt": "authenticate"}[security]
    assert auth.RecordOpener(other, SECRET).open(first) is None


def test_what_is_no_security_no_secret_and_no_record_is_refused() -> None:
    with pytest.raises(ValueError, match="none, authenticate, encrypt"):
        auth.RecordSealer("obscure", SECRET)
    with pytest.raises(ValueError, match="has no records"):
        auth.RecordSealer("none", SECRET)
    with pytest.raises(ValueError, match="32 bytes"):
        auth.RecordSealer("encrypt", SECRET[1:])
    with pytest.raises(ValueError, match="65536"):
        auth.RecordSealer("encrypt", SECRET).protect(bytes(65537))
    with pytest.raises(ValueError, match="header and a tag"):
        auth.RecordOpener("encrypt", SECRET).open(bytes(19))
