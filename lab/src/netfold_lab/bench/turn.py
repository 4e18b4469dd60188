"""One turn in a rack: all_reduces of f32 on one rank, one after the other, each filled, timed and checked."""

import time
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from netfold_lab.bench.accuracy import tensors
from netfold_lab.bench.backends import Backend
from netfold_lab.bench.collectives import COLLECTIVES
from netfold_lab.bench.config import Message
from netfold_lab.bench.start_line import StartLine

# No two neighbours are alike, nor the same places of two packets. The sums of all ranks stay exact in f32.
_PERIOD = 4093
# An element whose error is this part of the greatest sum is wrong, and not only rounded.
_WRONG = 0.25


def run_turn(
    backend: Backend, line: StartLine, rank: int, ranks: int, *, size_bytes: int, number: int, calls: int, values: str
) -> Message:
    """Return each call's seconds, the wrong elements, the error, and retransmissions and sent bytes by the records.

    number, values: as in RackRunner.turn.
    """
    count = size_bytes // 4
    normal = _normal_parts(ranks, count) if values == "normal" else None
    buffer = backend.empty(count, "f32")
    array = cast(tensors.Floats, buffer.values)
    all_reduce = backend.bind(COLLECTIVES["all_reduce"], "sum", buffer, buffer)
    answer: Message = {"took_s": [], "wrong": 0, "error": None}
    # Each call has values of its own, so an old result is a wrong one.
    for call in range(number, number + calls):
        np.copyto(array, normal[rank] if normal else _whole_numbers(count) + np.float32(rank + call))
        line.cross()
        began = time.perf_counter()
        all_reduce()
        answer["took_s"].append(time.perf_counter() - began)
        if normal:
            answer["error"] = tensors.error_of(array, normal).rms
            exact = _exact_sum(ranks, count)
            right = np.abs(array - exact) < _WRONG * np.abs(exact).max()
        else:
            right = array == _whole_numbers(count) * ranks + np.float32(sum(range(ranks)) + ranks * call)
        answer["wrong"] += int(np.count_nonzero(~right))
    records = backend.records()
    latest = None if records is None else records[-calls:]
    answer["again"] = 0 if latest is None else int(latest["retransmissions"].sum())
    answer["sent_bytes"] = None if latest is None else int(latest[-1]["wire_bytes"])
    return answer


@lru_cache(maxsize=4)
def _whole_numbers(count: int) -> tensors.Floats:
    return (np.arange(count) % _PERIOD).astype(np.float32)


@lru_cache(maxsize=1)
def _normal_parts(ranks: int, count: int) -> list[tensors.Floats]:
    return [tensors.part("normal", rank, count) for rank in range(ranks)]


@lru_cache(maxsize=1)
def _exact_sum(ranks: int, count: int) -> npt.NDArray[np.float64]:
    return np.sum(np.array(_normal_parts(ranks, count), np.float64), 0)  # type: ignore[no-any-return]
