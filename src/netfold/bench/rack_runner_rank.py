"""One rank of `rack_runner.py`: `python -m netfold.bench.rack_runner_rank WORLD FOLDER DEADLINE_S`.

WORLD: `torch`, or an MPI's name. Between two commands it sleeps in a read, so that who has no turn uses no CPU.
"""

import json
import signal
import socket
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from netfold.bench.accuracy import tensors
from netfold.bench.backends import Backend
from netfold.bench.collectives import parse_collective
from netfold.bench.connection import Message
from netfold.bench.machine import congestion_control
from netfold.bench.start_line import StartLine

# The parent stops us at the deadline; should it be gone, the kernel does.
_GRACE_S = 10
# No two neighbours are alike, nor the same places of two packets; sums of all ranks stay exact in f32.
_PERIOD = 4093
# Off by so much of the greatest sum, an element is no rounded sum.
_WRONG = 0.25


class Groups(Protocol):
    """This rank's end of all groups of one kind, for all of which the same processes serve."""

    rank: int
    versions: dict[str, str]

    def group(self, workers: int, options: Any, payload_bytes: Any) -> Backend: ...

    def close(self) -> None: ...


def main(world: str, folder: str, deadline_s: str) -> None:
    signal.alarm(int(deadline_s) + _GRACE_S)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/control")
        stream = connection.makefile("rwb")
        who = world
        try:
            groups = make_groups(world)
            who = f"{world} rank {groups.rank}"
            rank = Rank(groups, Path(folder), world)
            hello = {"world": world, "rank": groups.rank, "versions": groups.versions}
            _send(stream, {**hello, "congestion_control": congestion_control()})
            for line in stream:
                command = json.loads(line)
                if command["do"] == "end":
                    break
                _send(stream, rank.obey(command))
            groups.close()
        except Exception:
            _send(stream, {"who": who, "error_text": traceback.format_exc()})
            raise


def make_groups(world: str) -> Groups:
    # What one of them imports the other need not have, and takes long: torch.
    if world == "torch":
        from netfold.bench.rack_runner_torch import TorchGroups

        return TorchGroups()
    from netfold.bench.rack_runner_mpi import MpiGroups

    return MpiGroups(world)


class Rank:
    def __init__(self, groups: Groups, folder: Path, world: str) -> None:
        self._groups = groups
        self._folder, self._world = folder, world
        self._sides: dict[str, Backend] = {}
        self._workers: dict[str, int] = {}
        self._lines: dict[int, StartLine] = {}

    def obey(self, command: Message) -> Message:
        return cast(Message, getattr(self, f"_{command.pop('do')}")(**command))

    def _open(self, label: str, workers: int, options: dict[str, str] | None, payload_bytes: int | None) -> Message:
        self._sides[label] = self._groups.group(workers, options, payload_bytes)
        self._workers[label] = workers
        if self._groups.rank < workers and workers not in self._lines:
            path = self._folder / f"{self._world}-{workers}.line"
            self._lines[workers] = StartLine(path, self._groups.rank, workers)
        return {}

    def _turn(self, label: str, size_bytes: int, number: int, calls: int, values: str) -> Message:
        backend, rank, workers = self._sides[label], self._groups.rank, self._workers[label]
        count = size_bytes // 4
        parts = normal_parts(workers, count) if values == "normal" else None
        buffer = backend.empty(count, "f32")
        array = cast(tensors.Floats, buffer.values)
        all_reduce = backend.bind(parse_collective("all_reduce"), "sum", buffer, buffer)
        answer: Message = {"took_s": [], "wrong": 0, "error": None}
        self._lines[workers].cross()
        # What every call adds up differs from the one before: an old result is a wrong one.
        for call in range(number, number + calls):
            np.copyto(array, parts[rank] if parts else whole_numbers(count) + np.float32(rank + call))
            began = time.perf_counter()
            all_reduce()
            answer["took_s"].append(time.perf_counter() - began)
            if parts:
                answer["error"] = tensors.error_of(array, parts).rms
                exact = exact_sum(workers, count)
                answer["wrong"] += int(np.count_nonzero(~(np.abs(array - exact) < _WRONG * np.abs(exact).max())))
            else:
                due = whole_numbers(count) * workers + np.float32(sum(range(workers)) + workers * call)
                answer["wrong"] += int(np.count_nonzero(array != due))
        records = backend.records()
        latest = None if records is None else records[-calls:]
        answer["again"] = 0 if latest is None else int(latest["retransmissions"].sum())
        answer["sent_bytes"] = None if latest is None else int(latest[-1]["wire_bytes"])
        return answer


@lru_cache(maxsize=4)
def whole_numbers(count: int) -> tensors.Floats:
    return (np.arange(count) % _PERIOD).astype(np.float32)


@lru_cache(maxsize=1)
def normal_parts(workers: int, count: int) -> list[tensors.Floats]:
    return [tensors.part("normal", rank, count) for rank in range(workers)]


@lru_cache(maxsize=1)
def exact_sum(workers: int, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    return cast("np.ndarray[Any, np.dtype[np.float64]]", np.sum(np.array(normal_parts(workers, count), np.float64), 0))


def _send(stream: Any, message: Message) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
