"""The runner: gives every backend its turn, round by round, and pairs what they took.

Sides A, B, C run A B C, B C A, C A B, ...: whatever else the machine does meets them alike, and each is first as often
as any other (the first one meets colder caches). While one has its turn the others sleep in a read.
"""

import contextlib
import os
import selectors
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from netfold.bench.backends import BackendName
from netfold.bench.config import (
    SMALL_BYTES,
    BenchEnvironment,
    Measured,
    Replay,
    Replayed,
    Result,
    SizeResult,
    Trials,
    calls_a_round,
)
from netfold.bench.connection import Connection, Message
from netfold.bench.launch import KEPT_LINES, Lines, Running, start_worlds
from netfold.bench.machine import congestion_control, describe_machine, describe_versions
from netfold.bench.start_line import StartLine
from netfold.rack.processes import DRAIN_S, FAILURE_GRACE_S, follow, stop, uninterrupted

_POLL_S = 0.2


class BenchError(RuntimeError):
    """The ranks did not come to a result; the message holds what the first to fail said."""


def measure(place: BenchEnvironment, *trials: Trials) -> list[Result]:
    """Benchmarks of the same backends from start to end, one after the other. Raises BenchError, ValueError,
    RackError.
    """
    names = trials[0].backend_names()
    if not any(name.is_netfold for name in names):
        place = replace(place, switch=False)
    with start_runner(place, [name.world for name in names]) as runner:
        return [runner.measure(each) for each in trials]


@contextlib.contextmanager
def start_runner(place: BenchEnvironment, worlds: list[str]) -> Iterator["Runner"]:
    """A stage on which any number of trials can follow each other; its processes end with the block."""
    worlds = list(dict.fromkeys(worlds))
    with tempfile.TemporaryDirectory(prefix="netfold-bench-") as name, socket.socket(socket.AF_UNIX) as server:
        folder = Path(name)
        control = folder / "control"
        server.bind(str(control))
        server.listen(len(worlds) * place.workers)
        for world in worlds:
            StartLine.draw(folder / f"{world}.line", place.workers)
        deadline = time.monotonic() + place.deadline_s
        with start_worlds(place, worlds, control, folder) as running:
            runner = Runner(place, running, deadline)
            try:
                runner.meet(server, worlds)
                yield runner
                runner.end()
            finally:
                with uninterrupted():
                    runner.close()


class Runner:
    def __init__(self, place: BenchEnvironment, running: Running, deadline: float) -> None:
        self.place = place
        self.versions: dict[str, str] = {}
        self._running = running
        self._deadline = deadline
        self._outputs: dict[str, Lines] = {}
        self._readers = []
        for name, process in running.processes.items():
            self._outputs[name] = deque(maxlen=KEPT_LINES)
            self._readers.append(follow(process, self._outputs[name].append))
        self._connections: dict[str, list[Connection]] = {}
        self._open: dict[str, str | None] = {}  # by label: why there is no such backend, or None
        self._load_before = os.getloadavg()[0]

    def meet(self, server: socket.socket, worlds: list[str]) -> None:
        """Wait until every rank of every world has come."""
        here: dict[str, dict[int, Connection]] = {world: {} for world in worlds}
        server.settimeout(_POLL_S)
        new: list[Connection] = []
        while any(len(ranks) < self.place.workers for ranks in here.values()):
            self._watch()
            with contextlib.suppress(TimeoutError):
                new.append(Connection(server.accept()[0]))
            for connection in list(new):
                hello = connection.poll()
                if hello is None:
                    continue
                self._raise_error(hello)
                new.remove(connection)
                here[hello["world"]][hello["rank"]] = connection
                self.versions |= hello["versions"]
        self._connections = {world: [ranks[rank] for rank in sorted(ranks)] for world, ranks in here.items()}

    def measure(self, trials: Trials) -> Result:
        """Every size, every backend, interleaved round by round."""
        sizes = [self._measure_size(trials, size_bytes) for size_bytes in trials.sizes]
        return Result(dict(self.versions), congestion_control(), (self._load_before, os.getloadavg()[0]), sizes)

    def describe(self) -> Message:
        """What it was measured on, as report.describe_run says it."""
        load = (self._load_before, os.getloadavg()[0])
        machine = {**describe_machine(), "tcp_congestion_control": congestion_control(), "load": load}
        return {"machine": machine, "versions": describe_versions(self.versions), "place": asdict(self.place)}

    def measure_ddp(self, backends: list[BackendName], rounds: int, steps: int, width: int) -> list[Measured]:
        """Training steps, of a model with layers so wide, in place of calls."""
        for name in backends:
            self._ensure_open(name)
            self._tell(name, "prepare_ddp", steps=steps, width=width)
        takes = {name.label: _Takes() for name in backends}
        self._play(backends, takes, rounds, warmups=1, check=True, breakdown=False)
        self._release(backends)
        return [takes[name.label].measured(None, True, False) for name in backends]

    def measure_step(self, replay: Replay, model: str) -> list[Replayed]:
        """Training steps of one model in place of calls: an entry a backend."""
        takes = {label: _Takes() for label in replay.labels()}
        alone_ns: dict[str, int] = {}
        for name in replay.backend_names():
            answers = self._prepared(
                name,
                "prepare_step",
                model=model,
                bucket_bytes=replay.bucket_bytes,
                shrink=replay.shrink,
                compute_scale=replay.compute_scale,
            )
            takes[name.label].refused = next((a["refused"] for a in answers if "refused" in a), None)
            if takes[name.label].refused is None:
                alone_ns[name.label] = max(answer["alone_ns"] for answer in answers)
        playing = [name for name in replay.backend_names() if name.label in alone_ns]
        self._play(playing, takes, replay.rounds, replay.warmups, replay.check, breakdown=False)
        replayed = []
        for name in replay.backend_names():
            late_ns: list[int] = []
            if name in playing:
                late_ns = [late for answer in self._tell(name, "timer") for late in answer["late_ns"]]
            steps = takes[name.label].measured(None, replay.check, False)
            replayed.append(Replayed(steps, alone_ns.get(name.label), late_ns))
        self._release(playing)
        return replayed

    def measure_waiting(self, name: BackendName, size_bytes: int, sleep_s: float) -> list[Message]:
        """A rank each: CPU and wall seconds of an all_reduce that the last rank joins `sleep_s` late."""
        self._prepare(name, Trials("all_reduce", [name.label], [size_bytes]), size_bytes, calls=1)
        answers = self._tell(name, "waiting", sleep_s=sleep_s)
        self._release([name])
        return answers

    def end(self) -> None:
        for connection in self._all():
            connection.send({"do": "end"})
        while any(process.poll() is None for process in self._running.processes.values()):
            self._watch(ended_is_well=True)
            time.sleep(0.02)

    def close(self) -> None:
        """Also half way: ranks that hear the line go dead end in order, and an MPI then removes its shared memory."""
        for connection in self._all():
            connection.close()
        until = time.monotonic() + FAILURE_GRACE_S
        while time.monotonic() < until and any(p.poll() is None for p in self._running.processes.values()):
            time.sleep(0.02)

    def _measure_size(self, trials: Trials, size_bytes: int) -> SizeResult:
        breakdown = trials.breakdown and size_bytes <= SMALL_BYTES
        takes = {label: _Takes() for label in trials.labels()}
        count = 0
        for name in trials.backend_names():
            answers = self._prepare(name, trials, size_bytes, calls_a_round(size_bytes))
            takes[name.label].prepared(answers)
            count = max(count, answers[0].get("count", 0))
        playing = [name for name in trials.backend_names() if takes[name.label].refused is None]
        self._play(playing, takes, trials.rounds, trials.warmups, trials.check, breakdown)
        measured = []
        for name in trials.backend_names():
            take = takes[name.label]
            wire = None
            if take.refused is None:
                wires = [a["wire"] for a in self._tell(name, "wire", in_rack=self.place.rack_rate is not None)]
                wire = wires if all(one is not None for one in wires) else None
            measured.append(take.measured(wire, trials.check, breakdown))
        self._release(playing)
        return SizeResult(size_bytes, count, measured)

    def _prepare(self, name: BackendName, trials: Trials, size_bytes: int, calls: int) -> list[Message]:
        return self._prepared(
            name,
            "prepare",
            collective=trials.collective,
            size_bytes=size_bytes,
            dtype=trials.dtype,
            redop=trials.redop,
            calls=calls,
        )

    def _prepared(self, name: BackendName, what: str, **more: Any) -> list[Message]:
        """The ranks' answers, each of which may be a refusal; one alone where there is no such backend at all."""
        self._ensure_open(name)
        refused = self._open[name.label]
        return self._tell(name, what, **more) if refused is None else [{"refused": refused}]

    def _play(
        self,
        backends: list[BackendName],
        takes: "dict[str, _Takes]",
        rounds: int,
        warmups: int,
        check: bool,
        breakdown: bool,
    ) -> None:
        for round_index in range(warmups + rounds):
            for turn in range(len(backends)):
                name = backends[(round_index + turn) % len(backends)]
                answers = self._tell(name, "burst", round_index=round_index, check=check, breakdown=breakdown)
                takes[name.label].add(answers, timed=round_index >= warmups)

    def _ensure_open(self, name: BackendName) -> None:
        if name.label not in self._open:
            answers = self._tell(name, "open", **{key: value for key, value in asdict(name).items() if key != "label"})
            self._open[name.label] = next((a["refused"] for a in answers if "refused" in a), None)

    def _release(self, backends: list[BackendName]) -> None:
        for name in backends:
            self._tell(name, "release")

    def _tell(self, name: BackendName, what: str, **more: Any) -> list[Message]:
        """One command to every rank of the backend's world; their answers in the order of ranks."""
        ranks = self._connections[name.world]
        for connection in ranks:
            connection.send({"do": what, "label": name.label, **more})
        answers: list[Message | None] = [None] * len(ranks)
        with selectors.DefaultSelector() as selector:
            for connection in ranks:
                selector.register(connection.socket, selectors.EVENT_READ)
            while any(answer is None for answer in answers):
                for rank, connection in enumerate(ranks):
                    if answers[rank] is None and (answer := connection.poll()) is not None:
                        self._raise_error(answer)
                        answers[rank] = answer
                        selector.unregister(connection.socket)
                if any(answer is None for answer in answers):
                    self._watch()
                    selector.select(_POLL_S)
        return [answer for answer in answers if answer is not None]

    def _watch(self, *, ended_is_well: bool = False) -> None:
        """Raise BenchError where a process ended, or the deadline is past."""
        for name, process in self._running.processes.items():
            code = process.poll()
            if code is not None and not (ended_is_well and code == 0):
                self._fail(f"{name} failed with exit code {code}" if code else f"{name} ended too early", [name])
        if time.monotonic() > self._deadline:
            self._fail(
                f"the workers had not ended after {self.place.deadline_s} s; fewer sizes (-e), rounds (-n) or more "
                "--timeout",
                list(self._outputs),
            )

    def _raise_error(self, answer: Message) -> None:
        if "error" in answer:
            self._fail(f"{answer['who']} failed: {answer['error'].rstrip()}", list(self._outputs))

    def _fail(self, what: str, whose: list[str]) -> None:
        stop(list(self._running.processes.values()))
        for reader in self._readers:
            reader.join(DRAIN_S)
        said = [f"{name}| {line}" for name in whose for line in self._outputs[name]]
        raise BenchError("\n".join([what, *said, *(f"switch| {line}" for line in self._running.switch_lines)]))

    def _all(self) -> list[Connection]:
        return [connection for ranks in self._connections.values() for connection in ranks]


class _Takes:
    """What one backend's rounds took."""

    def __init__(self) -> None:
        self.refused: str | None = None
        self._ran: list[str] | None = None
        self._tolerance = 0.0
        self._times_ns: list[int] = []
        self._wrong = 0
        self._call_ns: list[int] = []
        self._parts_ns: list[list[int]] = []

    def prepared(self, answers: list[Message]) -> None:
        self.refused = next((a["refused"] for a in answers if "refused" in a), None)
        self._ran = next((a["ran"] for a in answers if a.get("ran")), None)
        self._tolerance = max(a.get("tolerance", 0.0) for a in answers)

    def add(self, answers: list[Message], *, timed: bool) -> None:
        self._wrong += sum(answer["wrong"] for answer in answers)
        if not timed:
            return
        self._times_ns.append(max(answer["mean_ns"] for answer in answers))
        for answer in answers:
            self._call_ns += answer.get("call_ns") or []
            self._parts_ns += answer.get("parts_ns") or []

    def measured(self, wire: list[list[int]] | None, check: bool, breakdown: bool) -> Measured:
        return Measured(
            times_ns=self._times_ns,
            wrong=self._wrong if check and self.refused is None else None,
            wire_bytes=wire,
            call_ns=(self._call_ns or None) if breakdown else None,
            parts_ns=(self._parts_ns or None) if breakdown else None,
            refused=self.refused,
            algorithm=None if self._ran is None else self._ran[0],
            wire=None if self._ran is None else self._ran[1],
            tolerance=self._tolerance,
        )
