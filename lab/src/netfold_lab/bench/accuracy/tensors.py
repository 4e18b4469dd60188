"""Tensors of several kinds, and the errors of their sums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

KINDS = ("normal", "12 decades, mixed", "12 decades, by layer", "one outlier", "tiny")
# Consecutive elements of one magnitude in the kind "by layer".
_LAYER = 4096


def part(kind: str, rank: int, elements: int) -> Floats:
    """Return a rank's contribution, [elements] f32; the same in every run."""
    draw = np.random.default_rng([KINDS.index(kind), rank])
    values = draw.standard_normal(elements)
    if kind == "12 decades, mixed":
        return (values * 10 ** draw.uniform(-6, 6, elements)).astype(np.float32)
    if kind == "12 decades, by layer":
        layers = -(-elements // _LAYER)
        return (values * np.repeat(np.logspace(-6, 6, layers), _LAYER)[:elements]).astype(np.float32)
    if kind == "tiny":
        # Around the least normal float, 1.2e-38: half of the values are subnormal.
        return (values * 1e-38).astype(np.float32)
    if kind == "one outlier":
        values[elements // 2] = 1e9 * (rank + 1)
    return values.astype(np.float32)


@dataclass(frozen=True)
class Error:
    greatest: float  # the greatest error over the greatest magnitude of the exact sum
    rms: float  # the root mean square of the errors over that of the exact sum
    gone: float  # the part of the elements whose error is half of their value or more


def error_of(got: Floats, parts: Sequence[Floats]) -> Error:
    exact = np.sum(np.array(parts, np.float64), 0)
    # The exact sum is finite, so the error of a sum that is not is infinite.
    off = np.where(np.isfinite(got), np.abs(got.astype(np.float64) - exact), np.inf)
    return Error(
        greatest=float(off.max() / np.abs(exact).max()),
        rms=float(np.sqrt(np.square(off).mean() / np.square(exact).mean())),
        gone=float((off >= np.abs(exact) / 2).mean()),
    )


# The values that one rank or two put into a tensor of ones, each in a block of its own.
SPECIALS: dict[str, tuple[float, ...]] = {
    "Inf": (np.inf,),
    "-Inf": (-np.inf,),
    "Inf - Inf": (np.inf, -np.inf),
    "NaN": (np.nan,),
    "3e38 + 3e38": (3e38, 3e38),
}
_BLOCK = 128


def special_part(rank: int) -> Floats:
    """Return a rank's contribution: one block for each special value, at the block's start, and one without."""
    values = np.ones((len(SPECIALS) + 1) * _BLOCK, np.float32)
    for number, given in enumerate(SPECIALS.values()):
        if rank < len(given):
            values[number * _BLOCK] = given[rank]
    return values


def specials_in(got: Floats) -> dict[str, str]:
    """Return what arrived for each special value, for ones in the same blocks, and for ones in the last block."""
    found = {name: _text(float(got[number * _BLOCK])) for number, name in enumerate(SPECIALS)}
    beside = got[: len(SPECIALS) * _BLOCK].reshape(-1, _BLOCK)[:, 1:]
    found["ones beside them"] = _texts(beside)
    found["ones elsewhere"] = _texts(got[-_BLOCK:])
    return found


def _texts(values: Floats) -> str:
    return " or ".join(sorted({_text(float(value)) for value in values.flat}))


def _text(value: float) -> str:
    if np.isnan(value):
        return "NaN"
    return ("-Inf" if value < 0 else "Inf") if np.isinf(value) else f"{value:.4g}"
