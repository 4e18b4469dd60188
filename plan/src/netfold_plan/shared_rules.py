"""Rules that `netfold plan` and `netfold train` share: ZeRO's bytes, waiting passes, DDP's buckets. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ParameterBytes(NamedTuple):
    """Bytes a parameter on one rank."""

    weights: float
    gradients: float
    state: float


def zero_bytes(weights: float, gradients: float, state: float, *, zero: int, data: int) -> ParameterBytes:
    """Bytes a parameter on one of `data` ranks: ZeRO 1 splits the optimizer's state, 2 gradients too, 3 weights too.

    Source: Rajbhandari et al. 2020, section 3.1 and figure 1.
    """
    return ParameterBytes(
        *(
            size / (data if zero >= level else 1)
            for size, level in zip((weights, gradients, state), (3, 2, 1), strict=True)
        )
    )


def waiting_passes(schedule: str, index: int, *, pipeline: int, interleave: int, microbatches: int) -> int:
    """The largest number of forward passes through one stage of a rank whose backward passes are still to come.

    schedule: "gpipe", "1f1b", "interleaved", or "zero-bubble". index: the rank's place on the pipeline axis.
    interleave: stages per rank. gpipe keeps all microbatches. 1f1b keeps as many as there are stages from here on
    (Narayanan et al. 2021, section 2.2). An interleaved schedule keeps its warm-up: interleave - 1 groups of
    microbatches, two for each later rank, and one more (Korthikanti et al. 2022, section 4.2.3). zero-bubble keeps as
    many microbatches as there are ranks (Qi et al. 2023); passes that wait for gradients of weights are not counted.
    """
    every, after = microbatches * interleave, pipeline - index
    if schedule == "gpipe":
        return every
    if schedule == "zero-bubble":
        return interleave * min(microbatches, pipeline)
    group = microbatches // max(1, microbatches // pipeline)
    return min(every, after if interleave == 1 else (interleave - 1) * group + 2 * (after - 1) + 1)


def bucket_ends(sizes: Iterable[float], limit: float, first_limit: float | None = None) -> list[int]:
    """Return where DDP closes its buckets: for each bucket the index behind its last gradient.

    sizes: bytes of each gradient, in the order in which the backward pass completes them. limit: bytes; the gradient
    that reaches the limit closes the bucket. first_limit: the first bucket's limit, where it differs.
    """
    ends: list[int] = []
    filled, number = 0.0, 0
    most = limit if first_limit is None else first_limit
    for number, size in enumerate(sizes, 1):
        filled += size
        if filled >= most:
            ends.append(number)
            filled, most = 0.0, limit
    return ends if not filled else [*ends, number]
