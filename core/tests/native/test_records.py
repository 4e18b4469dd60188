"""Records of a stream against another implementation of AES-GCM, and against changes by an attacker."""

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
    """Return the record as another implementation makes it."""
    key = hmac.new(secret, b"netfold record key", hashlib.sha256).digest()[:16]
    nonce, header = number.to_bytes(12, "big"), len(payload).to_bytes(4, "big")
    if security == "encrypt":
        return header + AESGCM(key).encrypt(nonce, payload, header)
    return header + payload + AESGCM(key).encrypt(nonce, b"", header + payload)


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_records_equal_those_of_another_implementation(security: str) -> None:
    protector = auth.RecordProtector(security, SECRET)
    unprotector = auth.RecordUnprotector(security, SECRET)
    for number, length in enumerate((0, 1, 15, 16, 17, 1000, 65535, 65536)):
        payload = os.urandom(length)
        record = protector.protect(payload)
        assert record == other_record(security, payload, number)
        if length > 8:
            assert (payload in record) == (security == "authenticate")
        assert unprotector.unprotect(record) == payload


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_a_key_is_used_for_a_bounded_number_of_records(security: str) -> None:
    protector = auth.RecordProtector(security, SECRET, 3)
    unprotector = auth.RecordUnprotector(security, SECRET, 3)
    secret = SECRET
    for number in range(10):
        if number and number % 3 == 0:
            secret = hmac.new(secret, b"netfold next secret", hashlib.sha256).digest()
        record = protector.protect(b"the same payload")
        assert record == other_record(security, b"the same payload", number, secret)
        assert unprotector.unprotect(record) == b"the same payload"


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_every_byte_of_a_record_is_authenticated(security: str) -> None:
    record = auth.RecordProtector(security, SECRET).protect(b"sixteen bytes...and some more")
    for place in range(len(record)):
        for bit in (0x01, 0x80):
            changed = record[:place] + bytes([record[place] ^ bit]) + record[place + 1 :]
            assert auth.RecordUnprotector(security, SECRET).unprotect(changed) is None, (place, bit)
    assert auth.RecordUnprotector(security, SECRET).unprotect(record) is not None


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_records_that_are_repeated_omitted_swapped_or_of_another_connection_are_rejected(security: str) -> None:
    protector = auth.RecordProtector(security, SECRET)
    first, second = protector.protect(b"a" * 40), protector.protect(b"a" * 40)
    assert first != second
    repeating = auth.RecordUnprotector(security, SECRET)
    assert repeating.unprotect(first) is not None
    assert repeating.unprotect(first) is None
    assert auth.RecordUnprotector(security, SECRET).unprotect(second) is None
    assert auth.RecordUnprotector(security, os.urandom(32)).unprotect(first) is None
    other = {"authenticate": "encrypt", "encrypt": "authenticate"}[security]
    assert auth.RecordUnprotector(other, SECRET).unprotect(first) is None


def test_an_invalid_security_secret_or_record_is_refused() -> None:
    with pytest.raises(ValueError, match="none, authenticate, encrypt"):
        auth.RecordProtector("obscure", SECRET)
    with pytest.raises(ValueError, match="has no records"):
        auth.RecordProtector("none", SECRET)
    with pytest.raises(ValueError, match="32 bytes"):
        auth.RecordProtector("encrypt", SECRET[1:])
    with pytest.raises(ValueError, match="65536"):
        auth.RecordProtector("encrypt", SECRET).protect(bytes(65537))
    with pytest.raises(ValueError, match="header and a MAC"):
        auth.RecordUnprotector("encrypt", SECRET).unprotect(bytes(19))
