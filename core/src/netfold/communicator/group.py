"""A group of ranks: submit operations to the native group, wait for them, explain choices and failures."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import netfold
from netfold import units
from netfold._native import engine
from netfold.bootstrap import capacity
from netfold.bootstrap.listener import Listener
from netfold.bootstrap.store import Store
from netfold.communicator import connection_manager, startup
from netfold.communicator.capacity_watch import CapacityWatch
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.failure_report import FailureReport
from netfold.communicator.meeting import Meeting, StoreMeeting
from netfold.communicator.membership import Membership
from netfold.communicator.message_links import ParentLost
from netfold.communicator.parent_meeting import Parent, ParentMeeting
from netfold.communicator.recovery import Recovery
from netfold.communicator.startup import Connections
from netfold.errors import NetfoldError, WaitTimeout, error_of
from netfold.options import SECURITIES, Options, timeout_seconds
from netfold.profile import Records, recording, records_of
from netfold.profile.run import GroupName
from netfold.tuning import Candidate, candidates, table_without_switch

log = logging.getLogger("netfold")
_LOG_FORMAT = "%(asctime)s %(name)s %(levelname)-7s %(message)s"

KINDS: dict[str, int] = engine.KINDS
# The types of elements: dtypes, and types that travel as one of them. Ranks compare it.
ELEMENTS: dict[str, int] = engine.ELEMENTS
REDUCE_OPS: dict[str, int] = engine.REDUCE_OPS
_SEND = KINDS["send"]
_TRANSFERS = ("send", "receive")
# The most of a refused call's error that other ranks get.
_REASON_CHARACTERS = 400
# The `root` of a receive from whichever rank sends first.
ANY_SOURCE: int = engine.ANY_SOURCE

# (address, bytes). The caller keeps the memory alive until the operation is done.
Region = tuple[int, int]

# Operations that only move values: ranks that share memory do them with one copy if the kernel lets them.
_COPIES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")

# Call sites begin at the first frame outside of this package.
engine.hide_from_call_sites(os.path.dirname(netfold.__file__) + os.sep)

_ids = itertools.count(1)
# Groups of this process that could have logged how they communicate at level info. The first one did.
_announced = itertools.count()


class Group:
    """One rank's end of a group. Thread-safe; calls must come in the same order on every rank."""

    def __init__(
        self,
        store: Store | Meeting,
        rank: int,
        size: int,
        *,
        options: Options | None = None,
        timeout_s: float = 1800.0,
        join_timeout_s: float = 60.0,
        store_host: str | None = None,
        job_ranks: Sequence[int] = (),
    ) -> None:
        """Connect to the other ranks through `store`, then join the switches that are named, if any.

        store: a store, or the ranks' meeting over handles or by a parent (meeting.py).
        timeout_s: deadline of each operation that names none.
        join_timeout_s: deadline of this start-up.
        store_host: the rendezvous host, which the first interface should reach.
        job_ranks: the ranks of this group in the job, for profiles; empty where that is not known.
        Raises ValueError for contradictory options, RendezvousError, SwitchError.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        options = (options or Options()).resolved()
        _log_to_stderr()
        deadline = time.monotonic() + timeout_seconds(join_timeout_s)
        self.rank = rank
        self.job_ranks = job_ranks
        self.size = size
        self.timeout_s = timeout_s
        self.options = options  # for groups that are made like this one
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.RLock()  # a signal handler may close the group
        self._id = next(_ids)
        # By switch; none on a rank that did not join any.
        self.recoveries: list[Recovery] = []
        with contextlib.ExitStack() as undo:
            meeting = store if isinstance(store, Meeting) else StoreMeeting(store, rank, size, store_host)
            connections = startup.connect_group(meeting, options, deadline, undo)
            listener, job = connections.agreement.listener, connections.job
            self.name = job.name
            # all_handles: of all ranks (bootstrap/handle.py). Over handles some of them, and others, can form a group.
            self.endpoint, self.all_handles = connections.regrouping
            self.nodes = connections.memory.nodes
            self.peer_memory: Any = connections.memory.peer_memory
            self.shares_buckets = startup.is_shared(connections.memory) and options.share_buckets != "off"
            self.fabric = connections.fabric.description  # what replaces TCP, and why; empty for TCP
            self.table, self.links, self.topology, *_ = connections.choice
            self._peer_addresses = connections.mesh.peer_addresses
            self._copies = connections.memory.copies
            self._port = connections.fabric.port
            self._switch = job.switch
            self._no_switch = job.no_switch
            self._secret = job.secret
            self._new_groups: collections.Counter[Any] = collections.Counter()
            self._native = startup.start_native(connections, self._id, undo)
            self._monitor = GroupMonitor(
                self._native,
                connections.registered_group,
                connections.mesh.peer_addresses,
                float(options.reconnect_s or 0),
            )
            self._failures = FailureReport(self._monitor, self.recoveries)
            undo.callback(_announce_end, self._id, self._monitor, self.recoveries, listener)
            self._start_switches(connections, deadline)
            # Until the group ends. Nothing in it refers to this object, which would keep itself alive.
            self._resources = undo.pop_all()
        name = GroupName(f"netfold {job.name[:8]}", "netfold", list(job_ranks))
        self._member = recording.Member(
            self._id, name, rank, size, self._native.events, functools.partial(_registrations, self._port)
        )
        recording.joined(self._member)
        self._log_start(connections)

    def _start_switches(self, connections: Connections, deadline: float) -> None:
        """Attach memberships, then watch the group; measure the switches where a choice depends on it."""
        job, hosts = connections.job, connections.mesh.hosts
        native = self._native
        watch = CapacityWatch(lambda: native.shares, rank=self.rank, hosts=hosts, switch=job.switch or "")
        for number in range(len(connections.memberships)):
            self.recoveries.append(self._attach_switch(number, connections, watch))
        connection_manager.manager.add(self._id, self._monitor)
        if job.switch is None or not connections.workers:
            return
        choice = connections.choice
        if choice.measures_switches and not self.links.switches:
            run = functools.partial(self._run_once, deadline)
            self.table, self.links = capacity.agree(
                run, self.rank, self.links, choice.build, hosts, job.switch, self.lost_switches
            )
            native.set_table(startup.native_rows(self.table), self.table.hash16)
        if self.recoveries:
            native.set_shares(
                capacity.shares_of(
                    self.links, len(connections.workers), len(connections.memberships), fixed=not job.probe
                )
            )
            if job.probe:
                watch.begin(measured=bool(self.links.switches))

    def _attach_switch(self, number: int, connections: Connections, watch: CapacityWatch) -> Recovery:
        """Give the membership of a switch to the native group, and recover from the switch's loss."""
        membership, access, job = connections.memberships[number], connections.accesses[number], connections.job
        log.debug(
            "rank %d joined the switch at %s as one of %d workers: window %d x %d bytes over %s, packets %s",
            self.rank,
            membership.endpoint,
            len(membership.workers),
            membership.window,
            membership.payload_bytes,
            self.options.fabric or "UDP",
            membership.protection,
        )
        if membership.window_shortfall and self.rank == membership.workers[0]:
            log.warning("the switch at %s: %s", membership.endpoint, membership.window_shortfall)
        if membership.hardware and self.rank == membership.workers[0]:
            log.info(
                "the switch at %s has the hardware profile: it sums integers of 32 bits (of f32 tensors with "
                "NETFOLD_WIRE_DTYPE=i32), finds their maximum, and moves tensors; what else a group reduces goes by "
                "host algorithms",
                membership.endpoint,
            )
        table = table_without_switch(len(membership.workers), wire=job.wire, links=self.links)
        membership.attach(self._native, startup.native_rows(table), table.hash16)
        return Recovery(
            self._monitor,
            membership,
            access,
            number=number,
            job=startup.switch_secret(number, job),
            rejoin_s=float(self.options.rejoin_s or 0),
            table=table,
            capacity=functools.partial(watch.look, number),
        )

    def _log_start(self, connections: Connections) -> None:
        agreement, failed = connections.agreement, list(connections.mesh.peer_addresses.failed)
        if self._no_switch and self.rank == 0:
            log.warning("rank 0 of %d: %s", self.size, self._no_switch)
        if self._copies:
            log.debug("rank %d of %d: %s", self.rank, self.size, self._copies)
        # Frameworks that configure logging (Ray) show info of every rank, so one group of one rank logs at info.
        is_first = self.rank == 0 and (not self.job_ranks or self.job_ranks[0] == 0) and next(_announced) == 0
        security = agreement.job.security
        secured = [] if security == SECURITIES[0] else [f"streams between ranks: NETFOLD_SECURITY={security}"]
        level = logging.INFO if is_first else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        log.log(
            level,
            "rank %d of %d listens on %s, port %d; %s; all_reduce: %s",
            self.rank,
            self.size,
            ", ".join(agreement.listener.hosts),
            agreement.listener.port,
            "; ".join([*self.interfaces, *secured, *(f"not used: {each}" for each in failed)]),
            self.why("all_reduce", 1 << 24),
        )

    def _run_once(self, deadline: float, kind: str, dtype: str, reduce: str, array: np.ndarray[Any, Any]) -> None:
        """One operation in place, from rank 0 where there is a root, during start-up."""
        left_s = max(0.1, deadline - time.monotonic())
        output = (region(array),)
        self.wait(
            self.submit(kind, dtype=dtype, reduce=reduce, outputs=output, owner=array, timeout_s=left_s, wait_here=True)
        )

    @property
    def timeout_s(self) -> float:
        """The deadline of each operation that names none, in seconds from its call."""
        return self._timeout_ns / 1e9

    @timeout_s.setter
    def timeout_s(self, timeout_s: float | None) -> None:
        self._timeout_ns = _nanoseconds(timeout_s)

    def lost_switches(self) -> str:
        """Say which switches are lost and what runs instead; empty where none is."""
        return "; ".join(recovery.state for recovery in self.recoveries if recovery.state)

    @functools.cached_property
    def interfaces(self) -> tuple[str, ...]:
        """In words, which ranks are reached over which interface. Cost: a system call for each rank."""
        return startup.describe_interfaces(self._peer_addresses)

    @property
    def shares(self) -> Any:
        """The parts of a split all_reduce over each path now (native Shares); None in a group that joined no switch."""
        return self._native.shares

    @property
    def membership(self) -> Membership | None:
        """Of the first switch; None on a rank that did not join one, and while the switch is lost."""
        return self.recoveries[0].membership() if self.recoveries else None

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
        owner: object = None,
        timeout_s: float | None = None,
        wait_here: bool,
        coalesced: int = 0,
    ) -> Any:
        """Enqueue a call; returns the native Operation.

        owner: keeps the memory of inputs and outputs allocated. The operation refers to it until it is done, also where
        an exception, as of a signal handler, takes the operation from the caller.
        wait_here: the caller will wait at once, so the operation may run on this thread and be done on return.
        coalesced: of several calls that became one, a digest of their sizes. Ranks whose digests differ get an error.

        send and receive take the other rank as `root`, and match by `tag`. A receive from ANY_SOURCE takes the first
        message of any rank; the operation's `peer` then names the sender. Both are outside of the group's order of
        calls.
        An all_reduce with the wire format i8 takes an input: the residual, as long as the output. The residual is added
        to this rank's contribution, and then holds the rounding error of the sum of both.
        """
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        try:
            return self._native.submit(
                KINDS[kind],
                ELEMENTS[dtype],
                REDUCE_OPS[reduce],
                average,
                root,
                inputs,
                outputs,
                owner,
                self._timeout_ns if timeout_s is None else _nanoseconds(timeout_s),
                wait_here,
                tag,
                coalesced,
            )
        except (ValueError, TypeError) as error:
            if kind not in _TRANSFERS:
                self.note_refusal(error)
            raise

    def note_refusal(self, error: Exception) -> None:
        """Note why this rank refused its next collective. Ranks that wait in it ask after a second, and fail with it.

        The group goes on where all ranks refuse alike, or this rank makes the call after all.
        """
        reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
        self._monitor.refused = (self.collectives_submitted + 1, reason)

    @property
    def native(self) -> Any:
        """The native group, for native code that submits calls by itself. Raises as `submit` does."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        return self._native

    def start_in_place(
        self,
        kind: int,
        element: int,
        reduce: int,
        average: bool,
        region: Region,
        owner: object,
        timeout_s: float | None,
        *,
        wait_here: bool,
    ) -> Any:
        """`submit` for one region, by native codes, with as little Python as a small call needs."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        try:
            timeout_ns = self._timeout_ns if timeout_s is None else _nanoseconds(timeout_s)
            return self._native.submit(kind, element, reduce, average, 0, (), (region,), owner, timeout_ns, wait_here)
        except (ValueError, TypeError) as error:
            self.note_refusal(error)
            raise

    def run_in_place(
        self,
        kind: int,
        element: int,
        reduce: int,
        average: bool,
        region: Region,
        owner: object,
        timeout_s: float | None = None,
    ) -> None:
        """`start_in_place` and `wait` in one call. Raises the operation's error."""
        operation = self.start_in_place(kind, element, reduce, average, region, owner, timeout_s, wait_here=True)
        if not operation.done:
            self._native.wait(operation, -1)
        if operation.failure is not None:
            raise self.error(operation)

    def start_transfer(self, kind: int, element: int, peer: int, tag: int, region: Region, owner: object) -> Any:
        """`submit` for a send or receive, by native codes."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        inputs, outputs = ((region,), ()) if kind == _SEND else ((), (region,))
        return self._native.submit(kind, element, 0, False, peer, inputs, outputs, owner, self._timeout_ns, False, tag)

    def all_reduce_here(self, array: Any, reduce: int, average: bool, timeout_s: float | None) -> bool:
        """A blocking all_reduce in place for small arrays: native code finds the address, size and dtype of `array`.

        False, and nothing done, where `array` is not a writable contiguous buffer of plain numbers.
        """
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        try:
            timeout_ns = self._timeout_ns if timeout_s is None else _nanoseconds(timeout_s)
            operation = self._native.all_reduce_here(array, reduce, average, timeout_ns)
        except (ValueError, TypeError) as error:
            self.note_refusal(error)
            raise
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
        """Wait for a submitted operation; raises its error. WaitTimeout where only the wait ended.

        timeout_s: None waits until the operation is done, at its own deadline at the latest. 0 or less polls once.
        """
        timeout_ns = -1 if timeout_s is None else _nanoseconds(timeout_s)
        self.check_can_end(operation)
        if not operation.done and not self._native.wait(operation, timeout_ns):
            raise WaitTimeout(f"rank {self.rank}: the wait timed out: the operation is not done after {timeout_s} s")
        if operation.failure is not None:
            raise self.error(operation)

    def check_can_end(self, operation: Any) -> None:
        """RuntimeError for an operation that was under way at a fork, in the child: the parent alone ends it."""
        if not operation.done and self._pid != os.getpid():
            self._refuse()

    def error(self, operation: Any) -> NetfoldError:
        """The exception for a failed operation, with the ranks that it waited for where these are known."""
        return self._failures.error(operation)

    @property
    def failure(self) -> NetfoldError | None:
        """The failure that ended this group, for callers without an operation under way. None while the group works."""
        failure = self._native.failure
        return None if failure is None else error_of(engine.FAILURES[failure[0]], failure[1], failure[2])

    @property
    def collectives_submitted(self) -> int:
        """The number of collectives that this rank has submitted. Equal on all ranks between collectives."""
        return int(self._native.collectives_submitted)

    def candidates(self, operation: str, size_bytes: int) -> list[Candidate]:
        """All algorithms for `operation` with the times that this group's cost model expects, the fastest first.

        size_bytes: of the whole tensor. This is what is reduced or broadcast, what all ranks gather together, or what
        one rank gives to reduce_scatter and all_to_all.
        """
        wire = self.table.choose(operation, size_bytes).wire
        return candidates(operation, size_bytes, self.topology, self.links, switch=self._switch, wire=wire)

    def why(self, operation: str, size_bytes: int) -> str:
        """The algorithm that would run, the reason, and the predicted times of all; sizes as in `candidates`."""
        row = self.table.choose(operation, size_bytes)
        if row.algorithm == "local":
            return f"{row.algorithm} ({row.reason})"
        times = [
            f"{each.algorithm} {units.seconds(each.seconds)}"
            for each in self.candidates(operation, size_bytes)
            if each.seconds is not None
        ]
        reasons = [row.reason]
        if "split" in (row.algorithm, row.between) and self._native.shares is not None:
            reasons.append(capacity.describe_shares(self._native.shares))
        if {row.algorithm, row.between} & {"in_network", "split"}:
            reasons += [recovery.state for recovery in self.recoveries if recovery.state]
        if self._no_switch:
            reasons.append(self._no_switch)
        if self._port is not None and self._port.why_not_rma:
            reasons.append(f"over the fabric in segments, which are copied: {self._port.why_not_rma}")
        if row.algorithm == "shared_memory" and operation in _COPIES:
            reasons.append(self._copies)
        over = f"; over {self.fabric}" if self.fabric else ""
        return f"{row.algorithm} ({'; '.join(reasons)}); for {size_bytes} bytes the model says {', '.join(times)}{over}"

    def lease(self, region: Region) -> Any:
        """A lease that lets a fabric keep this memory registered. None where there is no fabric.

        The caller promises that the memory stays mapped as it is until the lease is destroyed.
        """
        return None if self._port is None else self._port.lease(*region)

    @property
    def over_fabric(self) -> bool:
        """Whether data to other ranks goes over libfabric."""
        return self._port is not None

    def fabric_counters(self) -> dict[str, int] | None:
        """Counters of this process's fabric port, for all its groups; None without a fabric.

        They count segments, writes, grants, registrations, and hits of the registration cache.
        """
        return None if self._port is None else dict(self._port.counters)

    def events(self) -> Records:
        """The newest records of this group's operations (`netfold.profile.RECORD`), oldest first."""
        _, raw = self._native.events()
        return records_of(raw)

    def traffic(self, switch: int = 0) -> dict[str, Any] | None:
        """Counters of the path to a switch, by its place in NETFOLD_SWITCH; None without one."""
        traffic: dict[str, Any] | None = self._native.shard(switch).traffic()
        return traffic

    def abort(self, reason: str) -> None:
        """Fail all operations under way and to come. Other ranks get the reason."""
        text = f"rank {self.rank} aborted the group: {reason}"
        self._native.fail(engine.FAILURES.index("aborted"), self.rank, text)

    def lose(self, rank: int, reason: str) -> None:
        """Fail as by the loss of a rank, which this process learned otherwise. -1: not known which."""
        self._native.fail(engine.FAILURES.index("peer_lost"), rank, reason)

    def meeting(self, ranks: Sequence[int], name: str = "", store_host: str | None = None) -> ParentMeeting:
        """For a new group of some of this group's ranks, this one included; each of them calls this, and no other rank.

        ranks: by their numbers in the new group.
        name: keeps groups of the same ranks apart that several threads make at the same time.
        store_host: as of `Group`.
        Raises ParentLost where this group has failed or was closed.
        """
        if self._closed or self._pid != os.getpid() or self.failure is not None:
            raise ParentLost("the group whose ranks form a new one has failed, or was closed", rank=None)
        with self._close_lock:
            self._new_groups[tuple(ranks), name] += 1
            number = self._new_groups[tuple(ranks), name]
        parent = Parent(
            rank=self.rank,
            native=self._native,
            secret=self._secret,
            options=self.options,
            interfaces=self.endpoint.interfaces,
            peer_addresses=self._peer_addresses,
            nodes=self.nodes,
            peer_memory=self.peer_memory,
            copies=self._copies,
            links=self.links,
        )
        return ParentMeeting(parent, ranks, f"{name} {number}", store_host)

    def close(self, reason: str | None = None, *, in_background: bool = False) -> None:
        """End the group. Idempotent.

        Operations under way have 2 s to end, unless a thread waits for one. Those that have not ended fail.
        reason: why operations under way fail at once, also on other ranks; None: this rank closed the group.
        in_background: do not wait for the connections' end, which comes 0.3 s later where a rank was lost, so that the
        other ranks find that out themselves. Memberships of switches end first in any case.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._pid != os.getpid():
            return
        if reason is not None:
            text = f"rank {self.rank} left the group: {reason}"
            self._native.fail(engine.FAILURES.index("aborted"), self.rank, text, orderly=True)
        if in_background and not self.recoveries:
            threading.Thread(target=self._leave, name="netfold close").start()
        else:
            self._leave()
        recording.left(self._member)

    def _leave(self) -> None:
        # Before this rank announces its end: from then on nobody makes the connections that a send may still need.
        self._native.drain()
        self._resources.close()


def _nanoseconds(timeout_s: float | None) -> int:
    return int(timeout_seconds(timeout_s) * 1e9)


def region(array: np.ndarray[Any, Any]) -> Region:
    return array.ctypes.data, array.nbytes


def _announce_end(group_id: int, monitor: GroupMonitor, recoveries: Sequence[Recovery], listener: Listener) -> None:
    """Tell switches, and ranks that will ask, that this rank has left and why."""
    failure = monitor.mark_closed()
    why, fault = ("it closed the group", -1) if failure is None else (failure[2], failure[1])
    for recovery in recoveries:
        recovery.close(why, fault)
    connection_manager.manager.remove(group_id)
    native = monitor.native
    listener.deregister(monitor.registered_group, failure, int(native.collectives_submitted), native.expired)


def _log_to_stderr() -> None:
    """NETFOLD_LOG=info: for programs that do not configure logging themselves."""
    level = os.environ.get("NETFOLD_LOG", "").upper()
    if not level or log.handlers:
        return
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"NETFOLD_LOG={level.lower()!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    log.addHandler(handler)
    log.setLevel(level)


def _registrations(port: Any) -> dict[str, int]:
    """Counters for a profile. A function of the port, since a method would keep the group alive."""
    if port is None:
        return {}
    counters = port.counters
    named = {"evictions": "registration_evictions", "ranges": "registrations", "bytes": "registered_bytes"}
    return {name: counters[counter] for name, counter in named.items()}
