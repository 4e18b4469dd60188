"""Contributions of workers, and the expected result: NumPy, independent of the kernels.

The expected result is reduced in rank order, as the switch promises. f16 and bf16 are reduced in f32 and rounded once;
integers wrap; every NaN is the canonical quiet NaN. bf16 is held as uint16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire format.

    code: its number in the header.
    storage: the NumPy type that holds it.
    """

    code: int
    storage: np.dtype[Any]
    is_float: bool = False

    @property
    def element_bytes(self) -> int:
        return int(self.storage.itemsize)


# The codes of kernels/types.hpp: part of the protocol, never renumbered. Values are little-endian on the wire.
WIRES = {
    "f32": Wire(0, np.dtype("<f4"), True),
    "f64": Wire(1, np.dtype("<f8"), True),
    "f16": Wire(2, np.dtype("<f2"), True),
    "bf16": Wire(3, np.dtype("<u2"), True),
    "i8": Wire(4, np.dtype("<i1")),
    "i16": Wire(5, np.dtype("<i2")),
    "i32": Wire(6, np.dtype("<i4")),
    "i64": Wire(7, np.dtype("<i8")),
    "u8": Wire(8, np.dtype("<u1")),
    "u16": Wire(9, np.dtype("<u2")),
    "u32": Wire(10, np.dtype("<u4")),
    "u64": Wire(11, np.dtype("<u8")),
}
REDUCES = {"sum": 0, "product": 1, "min": 2, "max": 3, "band": 4, "bor": 5, "bxor": 6}
BITWISE = ("band", "bor", "bxor")

_REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def is_defined(reduce: str, wire: str) -> bool:
    return not (reduce in BITWISE and WIRES[wire].is_float)


def scramble(key: Array) -> Array:
    """A bijection of 64-bit integers that looks random (the finalizer of splitmix64; Steele et al., OOPSLA'14)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Array = key ^ (key >> np.uint64(31))
    return scrambled


def contribution(operation: int, worker: int, elements: int, wire: str) -> Array:
    """Return values that differ between elements, workers and operations.

    Magnitudes of floats are far apart, so that the order of summation shows. One in 128 each is NaN, inf and -inf.
    """
    index = np.arange(elements, dtype=np.uint64)
    key = index | np.uint64((worker + 1) << 40) | np.uint64((operation & 0xFFFF) << 48)
    bits = scramble(key)
    if not WIRES[wire].is_float:
        # Keep the low bytes of each.
        return bits.astype(f"<u{WIRES[wire].element_bytes}").view(WIRES[wire].storage)
    fraction = (bits & np.uint64(0x7FFFFF)).astype(np.float64) / 2**23
    exponent = ((bits >> np.uint64(23)) % np.uint64(17)).astype(np.int64) - 8
    sign = np.where((bits >> np.uint64(40)) & np.uint64(1), -1.0, 1.0)
    values = sign * np.ldexp(1 + fraction, exponent)
    kind = (bits >> np.uint64(41)) % np.uint64(128)
    for which, special in enumerate((np.nan, np.inf, -np.inf)):
        values[kind == np.uint64(which)] = special
    return from_f32(wire, values.astype(np.float32)) if wire != "f64" else values


def to_f32(wire: str, values: Array) -> Array:
    if wire == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def from_f32(wire: str, values: Array) -> Array:
    """Round to nearest, ties to even."""
    if wire == "bf16":
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(WIRES[wire].storage)


def reference_reduce(reduce: str, wire: str, contributions: Sequence[Array]) -> Array:
    """Return op(...op(op(c[0], c[1]), c[2])...), which every worker must get bit for bit."""
    combine = _REDUCTIONS[reduce]
    narrow = wire in ("f16", "bf16")
    terms = [to_f32(wire, values) for values in contributions] if narrow else list(contributions)
    total = terms[0]
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = combine(total, term)
    if WIRES[wire].is_float:
        total = np.where(np.isnan(total), np.asarray(np.nan, total.dtype), total)
    result = from_f32(wire, total) if narrow else total.astype(WIRES[wire].storage)
    if wire == "f16":
        result[np.isnan(total)] = np.uint16(0x7E00).view(np.float16)
    return result
