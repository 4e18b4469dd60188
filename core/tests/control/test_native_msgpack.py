"""The native msgpack beside the library that the switch uses: the same bytes, the same values, and no other input."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netfold._native_dev import control

pytestmark = pytest.mark.native

MAX_DEPTH = 16  # netfold::control::kMaxDepth

numbers = st.integers(-(1 << 63), (1 << 64) - 1)
edges = st.sampled_from([sign * (1 << bits) + by for bits in range(64) for sign in (1, -1) for by in (-1, 0, 1)])
texts = st.text(max_size=40) | st.integers(250, 70_000).map("ä".__mul__)
leaves = st.none() | st.booleans() | numbers | edges.filter(lambda n: -(1 << 63) <= n < 1 << 64) | texts
leaves |= st.floats(allow_nan=False) | st.binary(max_size=300)
maps = st.dictionaries(st.text(max_size=10), st.none() | numbers, max_size=40)
trees = st.recursive(
    leaves, lambda each: st.lists(each, max_size=20) | st.dictionaries(st.text(max_size=10), each, max_size=20)
)
SETTINGS = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def depth_of(value: Any) -> int:
    parts = value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return 1 + max(map(depth_of, parts), default=0) if isinstance(value, list | dict) else 0


def is_ours(value: Any) -> bool:
    """Whether control messages may hold this value: text as keys, no extension types."""
    if isinstance(value, list):
        return all(map(is_ours, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_ours(each) for key, each in value.items())
    return isinstance(value, type(None) | bool | int | float | str | bytes)


def same(a: Any, b: Any) -> bool:
    """Equal in value and type; a NaN equals a NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@SETTINGS
@given(trees)
def test_values_have_the_bytes_of_the_library(value: Any) -> None:
    packed = msgpack.packb(value)
    if depth_of(value) > MAX_DEPTH:
        with pytest.raises(RuntimeError, match="nested too deep"):
            control.recode(packed)
        return
    found, again = control.recode(packed)
    assert same(found, value)
    assert again == packed


def check_against_the_library(data: bytes) -> bool:
    """Decode by both; returns whether both took the bytes."""
    try:
        wanted = msgpack.unpackb(data)
    except Exception:
        with pytest.raises(RuntimeError, match="not msgpack"):
            control.recode(data)
        return False
    if not is_ours(wanted) or depth_of(wanted) > MAX_DEPTH:
        with pytest.raises(RuntimeError, match="not msgpack"):
            control.recode(data)
        return False
    found, again = control.recode(data)
    # A key that occurs twice counts once, and its last value counts.
    assert same(found, wanted), data.hex()
    assert same(msgpack.unpackb(again), wanted), data.hex()
    return True


@SETTINGS
@given(st.binary(max_size=60))
def test_any_bytes_mean_the_same_to_both(data: bytes) -> None:
    check_against_the_library(data)


JOIN = {"type": "join", "version": 9, "job": "ab" * 16, "ranks": [0, 1, 2], "port": 40_000, "timeout_s": 60.0,
        "secret": bytes(range(32)), "nonce": (1 << 64) - 5, "fault": -1, "unknown": None, "encrypt": True}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_a_message_with_changed_bytes_means_the_same_to_both(seed: int) -> None:
    draw, packed, taken = random.Random(seed), msgpack.packb(JOIN), 0
    for _ in range(200):
        data = bytearray(packed)
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] = draw.choice([draw.randrange(256), 0xC0, 0xC1, 0xDF, 0xDD, 0xDB, 0xC6])
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        taken += check_against_the_library(bytes(data))
    assert taken


def test_a_message_that_ends_early_is_refused_at_every_length() -> None:
    packed = msgpack.packb(JOIN)
    for length in range(len(packed)):
        with pytest.raises(RuntimeError, match="it ends within a value"):
            control.recode(packed[:length])
    with pytest.raises(RuntimeError, match="bytes follow"):
        control.recode(packed + b"\0")


@pytest.mark.parametrize("tag", [0xC6, 0xDB, 0xDD, 0xDF])
def test_a_length_beyond_the_end_takes_no_memory(tag: int) -> None:
    with pytest.raises(RuntimeError, match="it ends within a value"):
        control.recode(bytes([tag]) + b"\xff\xff\xff\xff" + b"\xa1a" * 8)


def test_nesting_is_bounded() -> None:
    assert control.recode(b"\x91" * MAX_DEPTH + b"\x01")[0] is not None
    for opening in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(RuntimeError, match="nested too deep"):
            control.recode(opening * 60_000)


def test_text_is_utf_8() -> None:
    for text in (b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80", b"\x80", b"\xc3", b"\xf8\x88"):
        with pytest.raises(RuntimeError, match="not UTF-8"):
            control.recode(bytes([0xA0 + len(text)]) + text)
        with pytest.raises(UnicodeDecodeError):
            text.decode()
    for good in ("\u07ff", "\ud7ff", "\ue000", "\uffff", "\U0010ffff", "\0"):
        assert control.recode(msgpack.packb(good))[0] == good


def test_a_float_of_32_bits_is_read() -> None:
    assert control.recode(struct.pack(">Bf", 0xCA, 0.5))[0] == 0.5
