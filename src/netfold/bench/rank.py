"""One rank of one world: `python -m netfold.bench.rank WORLD CONTROL_SOCKET FOLDER DEADLINE_S`.

It connects to the runner and does what it is told, one command at a time; between commands it sleeps in recv(),
so that the backends whose turn it is not use no CPU.
"""

import json
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, cast

from netfold.bench.backends import Backend, BackendName, RefusedError, World, how_it_ran
from netfold.bench.config import SMALL_BYTES
from netfold.bench.program import build_program
from netfold.bench.replay import StepTrial
from netfold.bench.start_line import StartLine
from netfold.bench.trial import Task, Trial
from netfold.plan.model.catalogue import find_model
from netfold.rack.names import HOST_INTERFACE

# Wire bytes are counted in rounds of their own, outside the timed ones: reading counters takes longer than
# a small message, and the last acknowledgements need a moment to arrive. A veth counts a GSO packet's headers
# once, so the true bytes are up to 5% more, for TCP and UDP alike; with loss asked for they are exact, because
# packets are then cut before the veth.
WIRE_ROUNDS = 3
WIRE_SETTLE_S = 0.05
# The launcher comes first.
_GRACE_S = 10

Message = dict[str, Any]


def main(world_name: str, control: str, folder: str, deadline_s: str) -> None:
    # The launcher stops us at the deadline; should it be gone, the kernel does.
    signal.alarm(int(deadline_s) + _GRACE_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(control)
        stream = connection.makefile("rwb")
        who = world_name
        try:
            world = _make_world(world_name, folder)
            who = f"{world_name} rank {world.rank}"
            rank = Rank(world, StartLine(Path(folder, f"{world_name}.line"), world.rank, world.size))
            _send(stream, {"world": world_name, "rank": world.rank, "versions": world.versions})
            for line in stream:
                command = json.loads(line)
                if command["do"] == "end":
                    break
                _send(stream, rank.obey(command))
            world.close()
        except Exception:
            _send(stream, {"who": who, "error": traceback.format_exc()})
            raise


class Rank:
    """The commands. Each answers with plain values; that a backend refuses a call is an answer, all else is an
    error.
    """

    def __init__(self, world: World, line: StartLine) -> None:
        self._world = world
        self._line = line
        self._sides: dict[str, Backend] = {}
        self._names: dict[str, BackendName] = {}
        self._trials: dict[str, Any] = {}

    def obey(self, command: Message) -> Message:
        return cast(Message, getattr(self, f"_{command.pop('do')}")(**command))

    def _open(self, **fields: str) -> Message:
        name = BackendName(**fields)
        try:
            self._sides[name.label] = self._world.backend(name)
        except RefusedError as refusal:
            return {"refused": str(refusal)}
        self._names[name.label] = name
        return {}

    def _prepare(self, label: str, collective: str, size_bytes: int, dtype: str, redop: str, calls: int) -> Message:
        self._trials.pop(label, None)
        name, backend = self._names[label], self._sides[label]
        task = Task(collective, size_bytes, dtype, calls, redop, _wire_of(name))
        try:
            trial = Trial(backend, self._line, self._world.rank, self._world.size, task)
            trial.run_once()
            ran = how_it_ran(backend.records())
            _insist(name, ran)
        except (RuntimeError, ValueError) as refusal:
            return {"refused": str(refusal)}
        self._trials[label] = trial
        return {"count": trial.count, "ran": ran, "tolerance": trial.tolerance}

    def _prepare_ddp(self, label: str, steps: int, width: int) -> Message:
        from netfold.bench.ddp import DdpTrial

        group = cast(Any, self._sides[label]).group
        self._trials[label] = DdpTrial(group, self._line, self._world.rank, steps, width)
        return {}

    def _prepare_step(self, label: str, model: str, bucket_bytes: int, shrink: int, compute_scale: float) -> Message:
        self._trials.pop(label, None)
        program = build_program(
            find_model(model), bucket_bytes=bucket_bytes, shrink=shrink, compute_scale=compute_scale
        )
        try:
            line, rank, size, wire = self._line, self._world.rank, self._world.size, _wire_of(self._names[label])
            trial = StepTrial(self._sides[label], line, rank, size, program, wire)
            trial.run_once()
        except (RuntimeError, ValueError) as refusal:
            return {"refused": str(refusal)}
        self._trials[label] = trial
        return {"alone_ns": trial.alone()}

    def _timer(self, label: str) -> Message:
        """How late the timer made each start, over all steps, warm-ups too."""
        return {"late_ns": self._trials[label].late_ns}

    def _burst(self, label: str, round_index: int, check: bool, breakdown: bool) -> Message:
        trial = self._trials[label]
        durations = trial.burst(round_index)
        answer: Message = {"mean_ns": sum(durations) // len(durations)}
        answer["wrong"] = trial.wrong_elements(round_index) if check else 0
        if breakdown:
            answer["call_ns"] = durations
            records = self._sides[label].records()
            answer["parts_ns"] = None if records is None else split_calls(records, durations)
        return answer

    def _wire(self, label: str, in_rack: bool) -> Message:
        trial, backend = self._trials[label], self._sides[label]
        if in_rack:
            return {"wire": self._count_interface(trial)}
        records = backend.records()
        if records is None or len(records) == 0:
            return {"wire": None}
        return {"wire": [int(records[-1]["wire_bytes"]), 0]}

    def _count_interface(self, trial: Trial) -> list[int]:
        """[sent, received] by one call on this rank, as the interface counts: medians of a few rounds."""
        rounds = []
        for _ in range(WIRE_ROUNDS):
            trial.fill(0)
            self._line.cross()
            time.sleep(WIRE_SETTLE_S)
            before = interface_bytes(HOST_INTERFACE)
            # Nobody starts before everyone has read.
            time.sleep(WIRE_SETTLE_S)
            calls = trial.call_all()
            time.sleep(WIRE_SETTLE_S)
            after = interface_bytes(HOST_INTERFACE)
            rounds.append([(b - a) // calls for a, b in zip(before, after, strict=True)])
        return [int(statistics.median(column)) for column in zip(*rounds, strict=True)]

    def _waiting(self, label: str, sleep_s: float) -> Message:
        """CPU seconds that this rank used while the last rank slept `sleep_s` before it joined the call."""
        trial = self._trials[label]
        trial.fill(0)
        self._line.cross()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        if self._world.rank == self._world.size - 1:
            time.sleep(sleep_s)
        trial.call_all()
        return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s}

    def _release(self, label: str) -> Message:
        self._trials.pop(label, None)
        return {}


def _wire_of(name: BackendName) -> str:
    """How a backend sends f32. Without a word of its own it follows the environment, and is checked as that travels."""
    return name.wire or (os.environ.get("NETFOLD_WIRE_DTYPE", "") if name.is_netfold else "")


def _insist(name: BackendName, ran: tuple[str, str] | None) -> None:
    """A backend with an algorithm or a wire format in its name is measured in that or not at all."""
    if ran is None:
        return
    for asked, took in zip((name.algorithm, name.wire), ran, strict=True):
        if asked and took != asked:
            raise RefusedError(f"it ran by {ran[0]} in {ran[1]}, not by {asked}: netfold does not do this so")


def interface_bytes(interface: str) -> list[int]:
    folder = Path("/sys/class/net") / interface / "statistics"
    return [int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def split_calls(records: Any, durations_ns: list[int]) -> list[list[int]]:
    """[Python, queue, wire] nanoseconds of the latest calls, from the backend's own event records."""
    latest = records[-len(durations_ns) :]
    if len(latest) != len(durations_ns) or any(int(record["bytes"]) > SMALL_BYTES for record in latest):
        raise RuntimeError(
            f"the last {len(durations_ns)} calls were small, but netfold's latest event records say "
            f"{[int(record['bytes']) for record in latest]} bytes"
        )
    parts = []
    for duration_ns, record in zip(durations_ns, latest, strict=True):
        queue_ns = int(record["started_ns"]) - int(record["queued_ns"])
        wire_ns = int(record["finished_ns"]) - int(record["started_ns"])
        parts.append([duration_ns - queue_ns - wire_ns, queue_ns, wire_ns])
    return parts


def _make_world(name: str, folder: str) -> World:
    if name == "torch":
        from netfold.bench.backends.torch_backend import TorchWorld

        return TorchWorld()
    if name == "communicator":
        from netfold.bench.backends.communicator_backend import CommunicatorWorld

        return CommunicatorWorld(folder)
    from netfold.bench.backends.mpi_backend import MpiWorld

    return MpiWorld(name)


def _send(stream: Any, message: Message) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
