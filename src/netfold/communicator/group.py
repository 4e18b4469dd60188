"""A group of ranks: mesh, switch membership, choice table, and the native queue behind them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from netfold._native import engine, protocol
from netfold.communicator import peer_memory, probe, rendezvous
from netfold.communicator.errors import NetfoldError, RendezvousError, error_of
from netfold.communicator.membership import Membership
from netfold.communicator.nodes import Node, find_nodes
from netfold.communicator.options import Options
from netfold.communicator.store import Store
from netfold.plan import (
    DEFAULT_LINKS,
    Candidate,
    ChoiceTable,
    Links,
    Topology,
    build_table,
    candidates,
    format_seconds,
)
from netfold.profile import Records, records_of

log = logging.getLogger("netfold")
_LOG_FORMAT = "%(asctime)s %(name)s %(levelname)-7s %(message)s"

KINDS: dict[str, int] = engine.KINDS
DTYPES: dict[str, int] = engine.DTYPES
REDUCE_OPS: dict[str, int] = engine.REDUCE_OPS
# The `root` of a receive from whoever sends first.
ANY_SOURCE: int = engine.ANY_SOURCE

# (address, bytes). The caller keeps the memory alive until the operation is done.
Region = tuple[int, int]

# Connections between two ranks: one for collectives, one for messages, so that neither waits for the other.
_LANES = 2
# What comes through memory comes in microseconds, if its sender runs; who yields meanwhile takes nothing from anybody.
_SPIN_US, _CROWDED_SPIN_US = 200, 1000

# What only moves values: where ranks share memory, in one copy if the kernel lets them.
_COPIES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")

_ids = itertools.count(1)


class Group:
    """One rank's end of a group. Thread-safe; calls must come in the same order on every rank."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
    ) -> None:
        """Meet the other ranks through `store`, then join the switch, if one is named.

        `timeout_s` is the deadline of each operation that names none; `join_timeout_s` that of coming together.
        Raises ValueError for options that make no sense, RendezvousError, SwitchError.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        options = (options or Options()).resolved()
        _log_to_stderr()
        deadline = time.monotonic() + join_timeout_s
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self.membership: Membership | None = None

        # The part of the store that this life of the group has to itself.
        self.store = store = rendezvous.claim(store, rank, size, deadline)
        job = rendezvous.agree(store, rank, size, options, deadline)
        host = rendezvous.local_host(options, store_host)
        ports = options.port_range()
        sockets = rendezvous.connect_mesh(store, rank, size, host, job.secret, deadline, _LANES, ports)
        node: Node | None = None
        try:
            enabled = options.transport != "tcp"
            self.nodes, node = find_nodes(rank, size, sockets[0], enabled=enabled, deadline=deadline)
            self.peer_memory: Any = None
            self._single_copy = ""
            if node is not None:
                enabled = options.single_copy != "off"
                self.peer_memory, self._single_copy = peer_memory.meet(node, enabled=enabled, deadline=deadline)
            shared = node is not None and len(node.ranks) == size
            self.shares_buckets = shared and options.share_buckets != "off"
            topology = Topology(self.nodes)

            def build(links: Links) -> ChoiceTable:
                return build_table(
                    ranks=size,
                    switch=job.switch,
                    algorithm=job.algorithm,
                    wire=job.wire,
                    topology=topology,
                    links=links,
                )

            if job.probe and not shared and size > 1:
                choice = probe.agree(sockets[0], rank, topology, build, deadline)
            else:
                choice = probe.Choice(build(DEFAULT_LINKS), DEFAULT_LINKS, topology)
            self.table: ChoiceTable = choice.table
            self.links = choice.links
            self.topology = choice.topology
            if job.switch is not None and any(row.algorithm == "in_network" for row in self.table.rows):
                if size > protocol.MAX_WORKERS:
                    raise ValueError(f"a switch adds for at most {protocol.MAX_WORKERS} workers, not {size}")
                assert job.switch is not None
                # The name is a digest: the switch learns which ranks belong together, not the secret behind it.
                self.membership = Membership.join(
                    job.switch,
                    job=hashlib.sha256(job.name.encode() + job.secret).hexdigest()[:32],
                    rank=rank,
                    size=size,
                    host=host,
                    window_bytes=job.window_bytes,
                    timeout_s=max(0.1, deadline - time.monotonic()),
                )
        except BaseException:
            rendezvous.close_all(sockets)
            if node is not None:
                node.close()
            raise
        self._switch = job.switch
        fds, lane_fds = ([-1 if stream is None else _detached(stream) for stream in lane] for lane in sockets)
        crowded = node is not None and len(node.ranks) > len(os.sched_getaffinity(0))
        self._native = engine.add_group(
            rank=rank,
            fds=fds,
            lane_fds=lane_fds,
            id=next(_ids),
            job=hashlib.sha256(b"status" + job.name.encode() + job.secret).hexdigest()[:32],
            spin_us=(_CROWDED_SPIN_US if crowded else _SPIN_US) if options.spin_us is None else options.spin_us,
            spins_for_sockets=options.spin_us is not None,
            yields=crowded,
            table=[
                (
                    KINDS[row.operation],
                    row.min_bytes,
                    engine.ALGORITHMS[row.algorithm],
                    DTYPES.get(row.wire, -1),
                    engine.ALGORITHMS[row.between],
                )
                for row in self.table.rows
            ],
            table_hash=self.table.hash16,
            nodes=list(self.nodes),
        )
        if node is not None:
            self._native.share(node.position, list(node.ranks), node.segments, node.bells, node.links, self.peer_memory)
            log.info("rank %d of %d: %s", rank, size, self._single_copy)
        if self.membership is not None:
            self.membership.attach(self._native, self._fail)
            log.info(
                "rank %d of %d joined the switch at %s: window %d x %d bytes",
                rank,
                size,
                job.switch,
                self.membership.window,
                self.membership.payload_bytes,
            )
        log.info("rank %d of %d listens on %s; all_reduce: %s", rank, size, host, self.why("all_reduce", 1 << 24))

    def submit(
        self,
        kind: str,
        *,
        dtype: str = "u8",
        reduce: str = "sum",
        average: bool = False,
        root: int = 0,
        tag: int = 0,
        inputs: Sequence[Region] = (),
        outputs: Sequence[Region] = (),
        timeout_s: float | None = None,
        wait_here: bool,
    ) -> Any:
        """Enqueue a call; the native Operation. With `wait_here` it may run on this thread and be done on return.

        send and receive name the other rank by `root` (receive: ANY_SOURCE for whoever comes first; the operation's
        `peer` then says who it was) and are matched by `tag`. They are no part of the group's order of calls.
        """
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return self._native.submit(
            KINDS[kind],
            DTYPES[dtype],
            REDUCE_OPS[reduce],
            average,
            root,
            inputs,
            outputs,
            int(seconds * 1e9),
            wait_here,
            tag,
        )

    def run_in_place(
        self, kind: int, dtype: int, reduce: int, average: bool, region: Region, timeout_s: float | None = None
    ) -> None:
        """`submit` and `wait` at once for one region, by native codes: nothing on the way that a small call would feel.
        Raises what befell the operation."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        operation = self._native.submit(kind, dtype, reduce, average, 0, (), (region,), int(seconds * 1e9), True)
        if not operation.done:
            self._native.wait(operation, -1)
        if operation.failure is not None:
            raise self.error(operation)

    def all_reduce_here(self, array: Any, reduce: int, average: bool, timeout_s: float | None) -> bool:
        """A blocking all_reduce in place by the short way, for small arrays: what `array` is, is found natively.

        False where it is nothing for this way (no writable contiguous buffer of plain numbers): nothing was done then.
        """
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        operation = self._native.all_reduce_here(array, reduce, average, int(seconds * 1e9))
        if operation is None:
            return True
        if operation is NotImplemented:
            return False
        raise self.error(operation)

    def _refuse(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError("this group was made before a fork; make a new one in the child")
        raise ValueError("this group was closed")

    def wait(self, operation: Any, timeout_s: float | None = None) -> None:
        """Wait for a submitted operation; raises what befell it. TimeoutError when only the waiting ended."""
        if not operation.done and not self._native.wait(operation, -1 if timeout_s is None else int(timeout_s * 1e9)):
            raise TimeoutError(f"rank {self.rank}: the operation is not done after {timeout_s} s of waiting")
        if operation.failure is not None:
            raise self.error(operation)

    def error(self, operation: Any) -> NetfoldError:
        """What befell a failed operation, with the missing ranks where the switch knows them."""
        kind, rank, text = operation.failure
        name = engine.FAILURES[kind]
        record = records_of(operation.record())[0]
        in_network = record["algorithm"] == engine.ALGORITHMS["in_network"]
        if name == "timeout" and in_network and self.membership is not None:
            traffic = self._native.traffic()
            missing = self.membership.missing(traffic["oldest_unanswered"])
            if missing:
                rank = missing[0]
                text += f"; the switch still waits for rank {', '.join(map(str, missing))}"
            else:
                text += "; the switch has every rank's part, or cannot be reached: packets to it may be lost"
            text += ". Did every rank make this call?"
        return error_of(name, rank, text)

    def candidates(self, operation: str, size_bytes: int) -> list[Candidate]:
        """All algorithms for it and what this group's cost model expects of them, the quickest first.

        size_bytes: of the whole tensor: what is reduced or broadcast, what all gather together, what a rank gives to
        reduce_scatter and all_to_all.
        """
        wire = self.table.choose(operation, size_bytes).wire
        return candidates(operation, size_bytes, self.topology, self.links, switch=self._switch, wire=wire)

    def why(self, operation: str, size_bytes: int) -> str:
        """The algorithm that would run, the reason, and the predicted times of all; sizes as in `candidates`."""
        row = self.table.choose(operation, size_bytes)
        if row.algorithm == "local":
            return f"{row.algorithm} ({row.reason})"
        times = [
            f"{each.algorithm} {format_seconds(each.seconds)}"
            for each in self.candidates(operation, size_bytes)
            if each.seconds is not None
        ]
        reason = row.reason
        if row.algorithm == "shared_memory" and operation in _COPIES:
            reason += f"; {self._single_copy}"
        return f"{row.algorithm} ({reason}); for {size_bytes} bytes the model says {', '.join(times)}"

    def events(self) -> Records:
        """The newest records of this group's operations (`netfold.profile.RECORD`), oldest first."""
        _, raw = self._native.events()
        return records_of(raw)

    def traffic(self) -> dict[str, Any] | None:
        """Counters of the path to the switch, None without one."""
        traffic: dict[str, Any] | None = self._native.traffic()
        return traffic

    def abort(self, reason: str) -> None:
        """Fail everything under way and to come. Other ranks hear the reason."""
        self._fail("aborted", self.rank, f"rank {self.rank} aborted the group: {reason}")

    def close(self) -> None:
        """End the group: waits for no other rank. Idempotent. Operations under way fail."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        failure = self._native.failure
        if self.membership is not None:
            self.membership.leave(failure[2] if failure is not None else "it closed the group")
        engine.remove_group(self._native)

    def _fail(self, kind: str, rank: int, text: str) -> None:
        self._native.fail(engine.FAILURES.index(kind), rank, text)


def _log_to_stderr() -> None:
    """NETFOLD_LOG=info: for people who have not set up logging themselves."""
    level = os.environ.get("NETFOLD_LOG", "").upper()
    if not level or log.handlers:
        return
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"NETFOLD_LOG={level.lower()!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    log.addHandler(handler)
    log.setLevel(level)


def region(array: np.ndarray[Any, Any]) -> Region:
    return array.ctypes.data, array.nbytes


def _detached(stream: socket.socket) -> int:
    stream.settimeout(None)
    return stream.detach()


__all__ = ["Group", "Region", "RendezvousError", "region"]
