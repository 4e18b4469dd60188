"""One rank of `turns.py`: `python -m netfold.bench.turns_rank FOLDER DEADLINE_S`.

Between two commands it sleeps in a read, so that a host whose turn it is not uses no CPU.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

import netfold.torch
from netfold import Options, control
from netfold.bench.accuracy import tensors
from netfold.bench.connection import Message
from netfold.bench.machine import congestion_control
from netfold.bench.start_line import StartLine

# The parent stops us at the deadline; should it be gone, the kernel does.
_GRACE_S = 10
# No two neighbours are alike, nor the same places of two packets; sums of all ranks stay exact in f32.
_PERIOD = 4093
# Off by so much of the greatest sum, an element is no rounded sum.
_WRONG = 0.25


def main(folder: str, deadline_s: str) -> None:
    signal.alarm(int(deadline_s) + _GRACE_S)
    number = int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{folder}/control")
        stream = connection.makefile("rwb")
        try:
            rank = Rank(Path(folder), number)
            versions = {"torch": str(torch.__version__), "numpy": str(np.__version__)}
            _send(stream, {"rank": number, "versions": versions, "congestion_control": congestion_control()})
            for line in stream:
                command = json.loads(line)
                if command["do"] == "end":
                    break
                _send(stream, rank.obey(command))
            dist.destroy_process_group()
        except Exception:
            _send(stream, {"rank": number, "error_text": traceback.format_exc()})
            raise


class Rank:
    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._number = folder, number
        # Which groups have a switch, the ways say.
        self._switch = os.environ.pop("NETFOLD_SWITCH", None)
        dist.init_process_group("gloo")
        self._groups: dict[str, Any] = {}
        self._workers: dict[str, int] = {}
        self._lines: dict[int, StartLine] = {}

    def obey(self, command: Message) -> Message:
        return cast(Message, getattr(self, f"_{command.pop('do')}")(**command))

    def _open(self, label: str, workers: int, options: dict[str, str] | None, payload_bytes: int | None) -> Message:
        ranks = list(range(workers))
        if options is None:
            group: Any = dist.new_group(ranks, backend="gloo")
        else:
            if options.get("switch") == "nearest":
                options["switch"] = str(self._switch)
            tried = control.PAYLOAD_CANDIDATES
            if payload_bytes is not None:
                # A job's packets are as long as its worker with the shortest says.
                control.PAYLOAD_CANDIDATES = (payload_bytes,)  # type: ignore[assignment]
            group = dist.new_group(ranks, backend="netfold", pg_options=Options(**cast(Any, options)))
            if self._number < workers:
                dist.barrier(group=group)
            control.PAYLOAD_CANDIDATES = tried
        self._groups[label], self._workers[label] = group, workers
        if self._number < workers and workers not in self._lines:
            self._lines[workers] = StartLine(self._folder / f"{workers}.line", self._number, workers)
        return {}

    def _turn(self, label: str, size_bytes: int, number: int, calls: int, values: str) -> Message:
        group, workers = self._groups[label], self._workers[label]
        count = size_bytes // 4
        parts = normal_parts(workers, count) if values == "normal" else None
        tensor = torch.empty(count)
        array = tensor.numpy()
        answer: Message = {"took_s": [], "wrong": 0, "error": None}
        self._lines[workers].cross()
        # What every call adds up differs from the one before: an old result is a wrong one.
        for call in range(number, number + calls):
            np.copyto(array, parts[self._number] if parts else whole_numbers(count) + np.float32(self._number + call))
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            answer["took_s"].append(time.perf_counter() - began)
            if parts:
                answer["error"] = tensors.error_of(array, parts).rms
                exact = exact_sum(workers, count)
                answer["wrong"] += int(np.count_nonzero(~(np.abs(array - exact) < _WRONG * np.abs(exact).max())))
            else:
                due = whole_numbers(count) * workers + np.float32(sum(range(workers)) + workers * call)
                answer["wrong"] += int(np.count_nonzero(array != due))
        records = None if self._is_gloo(label) else netfold.torch.events(group)[-calls:]
        answer["again"] = 0 if records is None else int(records["retransmissions"].sum())
        answer["sent_bytes"] = None if records is None else int(records[-1]["wire_bytes"])
        return answer

    def _is_gloo(self, label: str) -> bool:
        return bool(dist.get_backend(self._groups[label]) == "gloo")


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
