"""A switch in the test's process: the test decides which workers get results, and when the switch dies.

The sums are those of production's machine (SwitchJob); the sockets and control connections are the test's. Chunks are
small, so that few bytes meet many events, and the switch ends as suddenly as by SIGKILL.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

from netfold._native import protocol
from netfold.switch_protocol import control_messages

HELLO = protocol.FLAGS["hello"]
# A worker counts as stalled after this many requests for a result that is held back. By then it has read all earlier
# results.
ASKS = 2


class MortalSwitch:
    """Serve one job at a time.

    lives_for: die as soon as this many chunks are complete; None: no such number.
    answers(worker, chunk): whether the worker ever gets that chunk's result.
    stalls_at: where `answers` keeps results back, it also dies when so many chunks are complete and each worker that
    lacks a result has asked for it in vain ASKS times since the last chunk came to be complete; None: it lives on.
    hardware: it names the hardware profile.
    """

    def __init__(
        self,
        *,
        window: int = 16,
        payload_bytes: int = 64,
        lives_for: int | None = None,
        answers: Callable[[int, int], bool] = lambda worker, chunk: True,
        stalls_at: int | None = None,
        port: int = 0,
        hardware: bool = False,
    ) -> None:
        self.stalls_at = stalls_at
        self.window, self.payload_bytes = window, payload_bytes
        self.lives_for, self.answers = lives_for, answers
        self.hardware = hardware
        self.reductions: set[tuple[int, int]] = set()  # wire and operator of all contributions
        self.joins = 0
        self.complete = 0
        self.dead = threading.Event()
        self.incarnation = random.getrandbits(32)
        self._lock = threading.Lock()
        self._epochs = itertools.count(1)
        self._jobs: dict[str, _Job] = {}
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        self._start(self._accept)

    def __enter__(self) -> MortalSwitch:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """End at once, and drop everything in flight."""
        self.dead.set()
        with self._lock:
            sockets, self._sockets = [self._listener, *self._sockets], []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self, rank: int) -> None:
        """End the control connection of one rank."""
        for job in self._jobs.values():
            with contextlib.suppress(OSError):
                job.streams[rank].shutdown(socket.SHUT_RDWR)

    def keep(self, each: socket.socket) -> bool:
        with self._lock:
            if self.dead.is_set():
                each.close()
                return False
            self._sockets.append(each)
            return True

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            if self.keep(stream):
                self._start(self._serve, stream)

    def _serve(self, stream: socket.socket) -> None:
        job, rank = None, -1
        try:
            message = control_messages.receive(stream)
            if message["type"] == "path":
                path = {"version": control_messages.VERSION, "switches": [[self.incarnation, ""]], "error": ""}
                control_messages.send(stream, {"type": "path", **path})
                return
            rank = message["rank"]
            with self._lock:
                job = self._jobs.setdefault(message["job"], _Job(message["ranks"]))
                job.streams[rank] = stream
                if job.port is None:
                    job.port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    job.port.bind(("127.0.0.1", 0))
                    self._sockets.append(job.port)
                    self._start(self._add, job)
            admitted = {"job_id": job.id, "incarnation": self.incarnation, "worker": job.ranks.index(rank), "nonce": 1}
            admitted |= {"version": control_messages.VERSION, "port": job.port.getsockname()[1]}
            if self.hardware:
                admitted |= {"profile": "hardware", "payload_bytes": self.payload_bytes}
            self.joins += 1
            control_messages.send(stream, {"type": "admitted", **admitted})
            while True:
                message = control_messages.receive(stream)
                if message["type"] == "ready":
                    with self._lock:
                        job.ready.add(rank)
                        if len(job.ready) == len(job.ranks):
                            job.begin(next(self._epochs), self)
                elif message["type"] == "stragglers":
                    ranks = [job.ranks[worker] for worker in job.machine.missing(message["chunk"])]
                    control_messages.send(stream, {"type": "stragglers", "ranks": ranks, "serial": message["serial"]})
        except (OSError, EOFError, ValueError):
            if job is not None and not self.dead.is_set():
                job.lose(rank)

    def _add(self, job: _Job) -> None:
        addresses: dict[int, Any] = {}
        lacking: set[int] = set()  # workers without the result of a complete chunk
        in_vain: collections.Counter[int] = collections.Counter()  # by worker, since the last chunk was complete
        while not self.dead.is_set():
            try:
                packet, source = job.port.recvfrom(65536)
            except OSError:
                return
            header = protocol.Header.parse(packet)
            if header is None:  # the socket was shut down
                continue
            if header.flags & HELLO:
                addresses[header.worker] = source
                job.port.sendto(packet, source)
                continue
            self.reductions.add((header.wire, header.reduce))
            outcome, _, slot, chunk, worker, _ = job.machine.handle_packet(packet)
            if outcome == "completed":
                self.complete += 1
                in_vain.clear()
                lacking |= {each for each in addresses if not self.answers(each, chunk)}
                to = list(addresses)
                # Only some workers may get the last result.
                if self.lives_for is not None and self.complete >= self.lives_for:
                    to = random.Random(self.complete).sample(to, random.randrange(len(to) + 1))
            else:
                to = [worker] if outcome == "resend_result" else []
                in_vain.update(each for each in to if not self.answers(each, chunk))
            with contextlib.suppress(OSError):
                for each in to:
                    if self.answers(each, chunk):
                        job.port.sendto(job.machine.frame(slot), addresses[each])
            stalled = bool(lacking) and all(in_vain[each] >= ASKS for each in lacking)
            enough = self.stalls_at is not None and self.complete >= max(1, self.stalls_at)
            if (self.lives_for is not None and self.complete >= self.lives_for) or (stalled and enough):
                self.die()


class _Job:
    def __init__(self, ranks: list[int]) -> None:
        self.id = random.getrandbits(32)
        self.ranks = ranks
        self.streams: dict[int, socket.socket] = {}
        self.ready: set[int] = set()
        self.port: socket.socket | None = None
        self.machine: Any = None

    def begin(self, epoch: int, switch: MortalSwitch) -> None:
        shape = {"window": switch.window, "payload_bytes": switch.payload_bytes}
        self.machine = protocol.SwitchJob(
            job=self.id, epoch=epoch, incarnation=switch.incarnation, workers=len(self.ranks), **shape
        )
        for stream in self.streams.values():
            control_messages.send(stream, {"type": "start", "epoch": epoch, **shape})

    def lose(self, rank: int) -> None:
        self.streams.pop(rank, None)
        for stream in list(self.streams.values()):
            with contextlib.suppress(OSError):
                control_messages.send(
                    stream, {"type": "left", "ranks": [rank], "reason": "its connection was lost", "fault": None}
                )
