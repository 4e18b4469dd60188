"""The formats compared: netfold's wire formats, and SwitchML's two (Sapio et al., NSDI 2021).

SwitchML's are i32 tensors that a real group sums: its switch adds the same integers as SwitchML's would.

The first is 32-bit fixed point, with one factor for the whole model. Profiling finds the factor: with B the greatest
magnitude of any gradient in the profiled steps and N workers, (2^31 - N) / (N B) is the greatest without an overflow.

The second sends f16, also multiplied by a factor so that sums fit. SwitchML's switch turns f16 into fixed point and
back. Here the worker does both conversions with the same arithmetic, so the bits are those that a switch would send.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int32]]

WIRES = ("f32", "bf16", "f16", "i32", "i8")
FED_BACK = "i8, errors fed back"
FIXED, HALF = "SwitchML", "SwitchML f16"
FORMATS = (*WIRES, FED_BACK, FIXED, HALF)

_MOST_F16 = 65504.0


@dataclass(frozen=True)
class FixedPoint:
    """Converts one worker's floats to integers, and the sum of all workers' integers to floats."""

    to_integers: Callable[[Floats], Integers]
    to_floats: Callable[[Integers], Floats]


def fixed_point(largest: float, ranks: int, power: int = 0) -> FixedPoint:
    """Return SwitchML's 32-bit fixed point, with 2^power times the profiled factor; `largest`: B, as profiled."""
    factor = math.ldexp((2.0**31 - ranks) / (ranks * largest), power)
    return FixedPoint(
        to_integers=lambda values: to_i32(values.astype(np.float64) * factor),
        to_floats=lambda total: (total / factor).astype(np.float32),
    )


def half_in_switch(largest: float, ranks: int) -> FixedPoint:
    """Return SwitchML's f16. The switch's fixed point has units in which the sum of all workers' greatest f16 fits."""
    factor = _MOST_F16 / (ranks * largest)
    units = 2.0 ** (31 - 16 - math.ceil(math.log2(ranks)))

    def to_integers(values: Floats) -> Integers:
        return to_i32(_to_f16(values.astype(np.float64) * factor).astype(np.float64) * units)

    def to_floats(total: Integers) -> Floats:
        return (_to_f16(total / units).astype(np.float64) / factor).astype(np.float32)

    return FixedPoint(to_integers, to_floats)


def to_i32(values: np.ndarray[Any, np.dtype[np.float64]]) -> Integers:
    """Round to nearest, ties to even. As in x86's conversion, NaN and values out of range become -2^31."""
    rounded = np.rint(values)
    fits = (rounded >= -(2.0**31)) & (rounded < 2.0**31)
    return np.where(fits, rounded, -(2.0**31)).astype(np.int32)


def _to_f16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float16]]:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
