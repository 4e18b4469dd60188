"""Quantities as people write them, with their unit: `100 Gbit/s`, `80 GiB`, `1.5 us`; sizes as nccl-tests does. Pure.

May import: the standard library. Tests: `pytest plan/tests/plan/test_clusters.py
lab/tests/bench/test_bench_arithmetic.py`
"""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _prefixed(unit: str, times: float, prefixes: dict[str, float]) -> dict[str, float]:
    return {prefix + unit: scale * times for prefix, scale in prefixes.items()}


# By what is measured: units, each with what it is in the planner's own (bytes, seconds, FLOP/s, W), and an example.
_UNITS: dict[str, tuple[dict[str, float], str]] = {
    "rate": (
        _prefixed("bit/s", 1 / 8, _DECIMAL)
        | _prefixed("bit", 1 / 8, {"k": 1e3, "m": 1e6, "g": 1e9})  # as tc writes rates
        | _prefixed("B/s", 1.0, _DECIMAL)
        | _prefixed("B/s", 1.0, _BINARY),
        "100 Gbit/s",
    ),
    "bytes": (_prefixed("B", 1.0, _DECIMAL) | _prefixed("B", 1.0, _BINARY), "80 GiB"),
    "time": ({"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "1.5 us"),
    "flops": (_prefixed("FLOP/s", 1.0, _DECIMAL), "312 TFLOP/s"),
    "power": (_prefixed("W", 1.0, {"": 1.0, "k": 1e3}), "400 W"),
}
_QUANTITY = re.compile(r"^\s*(?P<number>\d+(\.\d*)?([eE][+-]?\d+)?)\s*(?P<unit>\S*)\s*$")


def parse_quantity(value: object, kind: str, where: str) -> float:
    """In bytes, bytes/s, seconds, FLOP/s or watts; kind: rate, bytes, time, flops or power.

    Raises ValueError, in a sentence that begins with `where`, where a unit is missing, unknown, or of another kind.
    """
    units, example = _UNITS[kind]
    wanted = f'write it with its unit, such as "{example}"'
    if not isinstance(value, str):
        raise ValueError(f"{where}: {value!r} has no unit; {wanted}")
    match = _QUANTITY.match(value)
    if match is None:
        raise ValueError(f"{where}: {value!r} is not a quantity; {wanted}")
    unit = match["unit"]
    if not unit:
        raise ValueError(f"{where}: {value!r} has no unit; {wanted}")
    if unit not in units:
        others = [other for other, (known, _) in _UNITS.items() if unit in known]
        meaning = f"is a quantity of {others[0]}, where one of {kind} is needed" if others else "has an unknown unit"
        raise ValueError(f"{where}: {value!r} {meaning}; {wanted}")
    quantity = float(match["number"]) * units[unit]
    if quantity == math.inf:
        raise ValueError(f"{where}: {value!r} is too large; {wanted}")
    return quantity


_SIZE = re.compile(r"^(?P<number>\d+)(?P<suffix>[KMG]?)$")
_SUFFIXES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    """Return the bytes of `4`, `64K`, `16M`, `1G`; M is 2^20. Raises ValueError."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"size {text!r} is not understood; write bytes, or with K, M or G: 4, 64K, 16M")
    return int(match["number"]) * _SUFFIXES[match["suffix"]]


def format_size(size_bytes: int) -> str:
    """Return the shortest exact form: `16M` for 2^24."""
    for suffix, unit in reversed(_SUFFIXES.items()):
        if size_bytes >= unit and size_bytes % unit == 0:
            return f"{size_bytes // unit}{suffix}"
    return str(size_bytes)
