"""Tensors of several kinds, and how far a sum of them is off."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]

KINDS = ("normal", "12 decades, mixed", "12 decades, by layer", "one outlier", "tiny")
# As many elements follow each other in one magnitude, where that goes by layer.
_LAYER = 4096


def part(kind: str, rank: int, elements: int) -> Floats:
    """What a rank gives; the same in every run."""
    draw = np.random.default_rng([KINDS.index(kind), rank])
    values = draw.standard_normal(elements)
    if kind == "12 decades, mixed":
        return (values * 10 ** draw.uniform(-6, 6, elements)).astype(np.float32)
    if kind == "12 decades, by layer":
        layers = -(-elements // _LAYER)
        return (values * np.repeat(np.logspace(-6, 6, layers), _LAYER)[:elements]).astype(np.float32)
    if kind == "tiny":
        # About the least normal float, 1.2e-38: half of them are subnormal.
        return (values * 1e-38).astype(np.float32)
    if kind == "one outlier":
        values[elements // 2] = 1e9 * (rank + 1)
    return values.astype(np.float32)


@dataclass(frozen=True)
class Error:
    """greatest: the greatest error over the greatest magnitude of the exact sum; rms: the root mean square of the
    errors over that of the exact sum; gone: the part of the elements that are off by half of themselves or more."""

    greatest: float
    rms: float
    gone: float


def error_of(got: Floats, parts: Sequence[Floats]) -> Error:
    exact = np.sum(np.array(parts, np.float64), 0)
    # A finite sum that arrived as none is as wrong as can be.
    off = np.where(np.isfinite(got), np.abs(got.astype(np.float64) - exact), np.inf)
    return Error(
        greatest=float(off.max() / np.abs(exact).max()),
        rms=float(np.sqrt(np.square(off).mean() / np.square(exact).mean())),
        gone=float((off >= np.abs(exact) / 2).mean()),
    )


# What one rank or two put into a tensor of ones, each in a block of its own, and what a sum of floats makes of it.
SPECIALS: dict[str, tuple[float, ...]] = {
    "Inf": (np.inf,),
    "-Inf": (-np.inf,),
    "Inf - Inf": (np.inf, -np.inf),
    "NaN": (np.nan,),
    "3e38 + 3e38": (3e38, 3e38),
}
_BLOCK = 128


def special_part(rank: int) -> Floats:
    """A block a special value, at its start; the last block has none."""
    values = np.ones((len(SPECIALS) + 1) * _BLOCK, np.float32)
    for number, given in enumerate(SPECIALS.values()):
        if rank < len(given):
            values[number * _BLOCK] = given[rank]
    return values


def specials_in(got: Floats) -> dict[str, str]:
    """What arrived for each, and for ones beside them and in a block without any, in words."""
    found = {name: _word(float(got[number * _BLOCK])) for number, name in enumerate(SPECIALS)}
    beside = got[: len(SPECIALS) * _BLOCK].reshape(-1, _BLOCK)[:, 1:]
    found["ones beside them"] = _words(beside)
    found["ones elsewhere"] = _words(got[-_BLOCK:])
    return found


def _words(values: Floats) -> str:
    return " or ".join(sorted({_word(float(value)) for value in values.flat}))


def _word(value: float) -> str:
    if np.isnan(value):
        return "NaN"
    return ("-Inf" if value < 0 else "Inf") if np.isinf(value) else f"{value:.4g}"
