"""A group of ranks: mesh, switch membership, choice table, and the native queue behind them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import netfold
from netfold._native import engine, protocol
from netfold.bootstrap import capacity, fabric, mpi, peer_memory, probe, rendezvous
from netfold.bootstrap.addresses import interface_of, own_interfaces
from netfold.bootstrap.listener import RegisteredGroup, acquire_listener, release_listener
from netfold.bootstrap.secure_stream import mesh_secrets
from netfold.bootstrap.shm_discovery import Node, discover_nodes
from netfold.bootstrap.store import Store
from netfold.communicator import connection_manager
from netfold.communicator.capacity_watch import CapacityWatch
from netfold.communicator.connection_manager import GroupMonitor
from netfold.communicator.membership import Membership, join_for_host, query_path_to_root
from netfold.communicator.recovery import Recovery
from netfold.communicator.switch_tree import PathToRoot
from netfold.errors import NetfoldError, RendezvousError, WaitTimeout, error_of
from netfold.options import SECURITIES, Options
from netfold.profile import Records, recording, records_of
from netfold.profile.run import GroupName
from netfold.switch_protocol.control_messages import Message, switches_of
from netfold.tuning import (
    DEFAULT_LINKS,
    Candidate,
    ChoiceTable,
    Links,
    Topology,
    build_table,
    candidates,
    format_seconds,
    table_without_switch,
)

log = logging.getLogger("netfold")
_LOG_FORMAT = "%(asctime)s %(name)s %(levelname)-7s %(message)s"

KINDS: dict[str, int] = engine.KINDS
DTYPES: dict[str, int] = engine.DTYPES
REDUCE_OPS: dict[str, int] = engine.REDUCE_OPS
_SEND = KINDS["send"]
# The `root` of a receive from whoever sends first.
ANY_SOURCE: int = engine.ANY_SOURCE

# (address, bytes). The caller keeps the memory alive until the operation is done.
Region = tuple[int, int]

# Connections between two ranks: one for collectives, one for messages, so that neither waits for the other; and one a
# switch, for what it was to do, should it be lost.
_LANES = 2
# What comes through memory comes in microseconds, if its sender runs; who yields meanwhile takes nothing from anybody.
_SPIN_US, _CROWDED_SPIN_US = 200, 1000

# What only moves values: where ranks share memory, in one copy if the kernel lets them.
_COPIES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")

# Where the user's own lines begin.
engine.hide_from_call_sites(os.path.dirname(netfold.__file__) + os.sep)

_ids = itertools.count(1)
# How many groups of this process could have logged how they communicate at info; the first one did.
_announced = itertools.count()


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
        job_ranks: Sequence[int] = (),
    ) -> None:
        """Meet the other ranks through `store`, then join the switch, if one is named.

        `timeout_s` is the deadline of each operation that names none; `join_timeout_s` that of coming together.
        `job_ranks`: who the ranks of this group are in the job, for profiles; empty where that is not known.
        Raises ValueError for options that make no sense, RendezvousError, SwitchError.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of a group of {size}")
        options = (options or Options()).resolved()
        _log_to_stderr()
        deadline = time.monotonic() + join_timeout_s
        self.rank = rank
        self.job_ranks = job_ranks
        self.size = size
        self.timeout_s = timeout_s
        self.options = options  # for groups that are to be like this one
        self._pid = os.getpid()
        self._closed = False
        self._close_lock = threading.Lock()
        self._seen: dict[int, Message] | None = None  # what others said when an operation timed out
        # By switch; none on a rank that did not join any.
        self.recoveries: list[Recovery] = []
        memberships: list[Membership] = []

        # The part of the store that this life of the group has to itself.
        self.store = store = rendezvous.claim(store, rank, size, deadline)
        try:
            job = rendezvous.agree(store, rank, size, options, deadline)
            interfaces = own_interfaces(options, store_host)
            # The one that was named may not be as secure as the job.
            switches = switches_of(None if job.no_switch else options.switch)
            self._no_switch = job.no_switch
            lanes = _LANES + len(switches)
            security = SECURITIES.index(job.security)
            self._registered_group = RegisteredGroup(job.secret, rank, size, lanes, interfaces.rails, security)
            self._listener = listener = acquire_listener(rank, interfaces.hosts, options.port_range(), deadline)
        except BaseException as error:
            rendezvous.publish_failure(store, rank, str(error) or type(error).__name__)
            raise
        sockets: rendezvous.Sockets = []
        node: Node | None = None
        try:
            listener.register(self._registered_group)
            sockets, peer_addresses = rendezvous.connect_mesh(
                store, self._registered_group, listener, interfaces, deadline, fabric=options.fabric
            )
            streams = rendezvous.first_rail(sockets[0])
            on_this_host = 1 + sum(_is_here(stream) for stream in streams if stream is not None)
            over: list[list[Any]] = []
            # What is gone over in the place of TCP, in words, and why; empty for TCP.
            self.fabric = ""
            self._port: Any = None
            probed: Sequence[Any] = streams
            if options.fabric is not None:
                hosts = interfaces.hosts[: interfaces.rails]
                port = mpi.port_of(rank, streams, deadline) if options.over_mpi else None
                settings = {
                    name: getattr(options, name)
                    for name in ("rma_min_bytes", "registration_cache_entries", "registration_cache_bytes")
                }
                over = fabric.connect(
                    options.fabric, hosts, rank, lanes, streams, deadline, settings=settings, port=port
                )
                self._port = port or fabric.port_of(options.fabric, hosts)
                self.fabric = f"{fabric.describe_port(self._port)} (NETFOLD_TRANSPORT={options.transport})"
                probed = fabric.byte_streams(over[0], streams, options.fabric)
            self.nodes, node = discover_nodes(rank, size, streams, enabled=options.shares_memory, deadline=deadline)
            self.peer_memory: Any = None
            self._single_copy = ""
            if node is not None:
                enabled = options.single_copy != "off"
                self.peer_memory, self._single_copy = peer_memory.negotiate(node, enabled=enabled, deadline=deadline)
            shared = node is not None and len(node.ranks) == size
            self.shares_buckets = shared and options.share_buckets != "off"
            topology = Topology(self.nodes)

            # What the switch takes is measured where something is chosen by it.
            measures = job.switch is not None and job.algorithm == "auto" and topology.node_count > 1 and job.probe
            ends = frozenset(
                end
                for stream in streams
                if stream is not None
                for end in (stream.getsockname()[0], stream.getpeername()[0])
            )

            def build(links: Links, measuring: bool = False) -> ChoiceTable:
                table = build_table(
                    ranks=size,
                    switch=job.switch,
                    algorithm=job.algorithm,
                    wire=job.wire,
                    topology=topology,
                    links=links,
                    measuring=measuring,
                )
                return capacity.with_learned_split(table, topology.node_count) if measures and not measuring else table

            def build_first(links: Links) -> ChoiceTable:
                return build(links, measuring=measures and not links.switches)

            if job.probe and not shared and size > 1:
                switched = capacity.cached_rates(ends, job.switch) if measures and job.switch is not None else ()
                choice = probe.agree(
                    probed, rank, topology, build_first, deadline, rails=interfaces.rails, switches=switched
                )
            else:
                choice = probe.Choice(build(DEFAULT_LINKS), DEFAULT_LINKS, topology)
            self.table: ChoiceTable = choice.table
            self.links = choice.links
            self.topology = choice.topology
            workers = self.table.workers(self.topology)
            if len(workers) > protocol.MAX_WORKERS:
                raise ValueError(f"a switch adds for at most {protocol.MAX_WORKERS} workers, not {len(workers)}")
            for number, switch in enumerate(switches if workers else ()):
                membership = join_for_host(
                    switch,
                    # A digest: the switch learns which ranks belong together, not the secret behind it.
                    job=hashlib.sha256(_of_switch(number, job)).hexdigest()[:32],
                    name=options.job_name or "",
                    token_file=options.token_file,
                    rank=rank,
                    workers=workers,
                    streams=streams,
                    host=[peer for peer in range(size) if self.nodes[peer] == self.nodes[rank]],
                    window_bytes=job.window_bytes,
                    fabric=options.switch_fabric,
                    security=job.security,
                    deadline=deadline,
                )
                if membership is not None:
                    memberships.append(membership)
        except BaseException:
            for joined in memberships:
                joined.leave("it could not join all of its switches")
            rendezvous.close_all(sockets)
            if node is not None:
                node.close()
            listener.deregister(self._registered_group, (engine.FAILURES.index("system"), -1, "it could not join"))
            release_listener(listener)
            raise
        self._switch = job.switch
        # Which ranks are reached over which interface, in words.
        self.interfaces = used = tuple(_by_interface(sockets[0]))
        secrets = [[[mesh_secrets(stream) for stream in row] for row in lane] for lane in sockets]
        fds, lane_fds, *spares = ([[_detached(stream) for stream in row] for row in lane] for lane in sockets)
        # A connection inside a host breaks only where a process dies.
        mends = [options.reconnect_s != 0 and node != self.nodes[rank] for node in self.nodes]
        self._id = next(_ids)
        # An MPI wakes nobody: who slept at once would look long after the other rank's word had come.
        polls = options.over_mpi
        spinners = len(node.ranks) if node is not None else on_this_host if polls else 1
        crowded = spinners > len(os.sched_getaffinity(0))
        self._native = engine.add_group(
            rank=rank,
            fds=fds,
            lane_fds=lane_fds,
            fallback_fds=spares,
            resumable=mends,
            id=self._id,
            job=hashlib.sha256(b"status" + job.name.encode() + job.secret).hexdigest()[:32],
            spin_us=(_CROWDED_SPIN_US if crowded else _SPIN_US) if options.spin_us is None else options.spin_us,
            spins_for_sockets=options.spin_us is not None or polls,
            yields=crowded,
            table=_native_rows(self.table),
            table_hash=self.table.hash16,
            nodes=list(self.nodes),
            fabric=over,
            secrets=[] if job.security == SECURITIES[0] else secrets,
        )
        if node is not None:
            self._native.share(
                node.position, list(node.ranks), node.segments, node.doorbells, node.links, self.peer_memory
            )
            log.debug("rank %d of %d: %s", rank, size, self._single_copy)
        self._monitor = GroupMonitor(
            self._native, self._registered_group, peer_addresses, float(options.reconnect_s or 0)
        )
        native = self._native
        watch = CapacityWatch(lambda: native.shares, rank=rank, ends=ends, switch=job.switch or "")
        for number, (switch, joined) in enumerate(zip(switches, memberships, strict=bool(memberships))):
            looks = functools.partial(watch.look, number)
            self.recoveries.append(self._attach_switch(number, switch, joined, job, options, looks))
        connection_manager.watch_group(self._id, self._monitor)
        if job.switch is not None and workers:
            run = functools.partial(self._run_once, deadline)
            try:
                if measures and not self.links.switches:
                    self.table, self.links = capacity.agree(
                        run, rank, self.links, build, ends, job.switch, self.lost_switches
                    )
                    self._native.set_table(_native_rows(self.table), self.table.hash16)
                if self.recoveries:
                    found = capacity.shares_of(self.links, len(workers), len(switches), fixed=not job.probe)
                    self._native.set_shares(found)
                    if job.probe:
                        watch.begin(measured=bool(self.links.switches))
            except BaseException:
                self._end()
                raise
        name = GroupName(f"netfold {job.name[:8]}", "netfold", list(job_ranks))
        self._member = recording.Member(
            self._id, name, rank, size, self._native.events, functools.partial(_registrations, self._port)
        )
        recording.joined(self._member)
        if job.no_switch and rank == 0:
            log.warning("rank 0 of %d: %s", size, job.no_switch)
        # Frameworks that configure logging (Ray) show info of every rank, so one group of one rank logs at info.
        speaks = rank == 0 and (not job_ranks or job_ranks[0] == 0) and next(_announced) == 0
        log.log(
            logging.INFO if speaks else logging.DEBUG,
            "rank %d of %d listens on %s, port %d; %s; all_reduce: %s",
            rank,
            size,
            ", ".join(listener.hosts),
            listener.port,
            "; ".join([*used, *_secured(job.security), *(f"not used: {failed}" for failed in peer_addresses.failed)]),
            self.why("all_reduce", 1 << 24),
        )

    def _attach_switch(
        self,
        number: int,
        switch: str,
        membership: Membership,
        job: rendezvous.Job,
        options: Options,
        looks: Callable[[], float | None],
    ) -> Recovery:
        """Give a membership of a switch to the native group, and see to it that its loss costs no step."""
        log.debug(
            "rank %d joined the switch at %s as one of %d workers: window %d x %d bytes over %s, packets %s",
            self.rank,
            membership.endpoint,
            len(membership.workers),
            membership.window,
            membership.payload_bytes,
            options.switch_fabric or "UDP",
            membership.protection,
        )
        if membership.window_shortfall and self.rank == membership.workers[0]:
            log.warning("the switch at %s: %s", membership.endpoint, membership.window_shortfall)
        table = table_without_switch(len(membership.workers), wire=job.wire, links=self.links)
        rows = [(KINDS[row.operation], row.min_bytes, engine.ALGORITHMS[row.algorithm]) for row in table.rows]
        membership.attach(self._native, rows, table.hash16)

        mine: dict[str, Any] = {
            "token_file": options.token_file,
            "rank": self.rank,
            "workers": membership.workers,
            "security": job.security,
        }

        def look_up(timeout_s: float) -> PathToRoot:
            return query_path_to_root(switch, **mine, timeout_s=timeout_s)

        def join(digest: str, way: PathToRoot, paths: Sequence[Sequence[int]], timeout_s: float) -> Membership:
            return Membership.join(
                way.endpoints[0],
                **mine,
                job=digest,
                name=options.job_name or "",
                paths=paths,
                window_bytes=job.window_bytes,
                fabric=options.switch_fabric,
                timeout_s=timeout_s,
            )

        return Recovery(
            self._monitor,
            membership,
            look_up,
            join,
            number=number,
            job=_of_switch(number, job),
            rejoin_s=float(options.rejoin_s or 0),
            table=table,
            capacity=looks,
        )

    def _run_once(self, deadline: float, kind: str, dtype: str, reduce: str, array: np.ndarray[Any, Any]) -> None:
        """One operation in place, from rank 0 where there is a root, before this group is given to anybody."""
        left_s = max(0.1, deadline - time.monotonic())
        output = (region(array),)
        self.wait(self.submit(kind, dtype=dtype, reduce=reduce, outputs=output, timeout_s=left_s, wait_here=True))

    def lost_switches(self) -> str:
        """Which switches do not do this rank's operations now, in words; empty where all do."""
        return "; ".join(recovery.state for recovery in self.recoveries if recovery.state)

    @property
    def shares(self) -> Any:
        """What of a split all_reduce goes which way now, native; None in a group that joined no switch."""
        return self._native.shares

    @property
    def membership(self) -> Membership | None:
        """Of the first switch; None on a rank that did not join one, and while the switch is gone."""
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
        timeout_s: float | None = None,
        wait_here: bool,
    ) -> Any:
        """Enqueue a call; the native Operation. With `wait_here` it may run on this thread and be done on return.

        send and receive name the other rank by `root` (receive: ANY_SOURCE for whoever comes first; the operation's
        `peer` then says who it was) and are matched by `tag`. They are no part of the group's order of calls.
        all_reduce takes an input where the wire is i8: the residual, as long as the output. It is added to this rank's
        part, and then holds what rounding took from that.
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

    def start_in_place(
        self,
        kind: int,
        dtype: int,
        reduce: int,
        average: bool,
        region: Region,
        timeout_s: float | None,
        *,
        wait_here: bool,
    ) -> Any:
        """`submit` for one region, by native codes: nothing on the way that a small call would feel."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        return self._native.submit(kind, dtype, reduce, average, 0, (), (region,), int(seconds * 1e9), wait_here)

    def run_in_place(
        self, kind: int, dtype: int, reduce: int, average: bool, region: Region, timeout_s: float | None = None
    ) -> None:
        """`start_in_place` and `wait` at once. Raises what befell the operation."""
        operation = self.start_in_place(kind, dtype, reduce, average, region, timeout_s, wait_here=True)
        if not operation.done:
            self._native.wait(operation, -1)
        if operation.failure is not None:
            raise self.error(operation)

    def start_transfer(self, kind: int, dtype: int, peer: int, tag: int, region: Region) -> Any:
        """`submit` for a send or receive, by native codes."""
        if self._pid != os.getpid() or self._closed:
            self._refuse()
        ours, none = (region,), ()
        inputs, outputs = (ours, none) if kind == _SEND else (none, ours)
        return self._native.submit(kind, dtype, 0, False, peer, inputs, outputs, int(self.timeout_s * 1e9), False, tag)

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

    @property
    def failure_kind(self) -> str | None:
        """The kind of the failure that ended this group, one of `engine.FAILURES`. None while the group works."""
        failure = self._native.failure
        return None if failure is None else str(engine.FAILURES[failure[0]])

    @property
    def failure(self) -> NetfoldError | None:
        """What ended this group, for who has no operation under way to hear of it. None while the group works."""
        failure = self._native.failure
        return None if failure is None else error_of(engine.FAILURES[failure[0]], failure[1], failure[2])

    @property
    def collectives_submitted(self) -> int:
        """The number of collectives that this rank has submitted. Equal on all ranks between collectives."""
        return int(self._native.collectives_submitted)

    def wait(self, operation: Any, timeout_s: float | None = None) -> None:
        """Wait for a submitted operation; raises what befell it. WaitTimeout when only the waiting ended."""
        if not operation.done and not self._native.wait(operation, -1 if timeout_s is None else int(timeout_s * 1e9)):
            raise WaitTimeout(f"rank {self.rank}: the wait timed out: the operation is not done after {timeout_s} s")
        if operation.failure is not None:
            raise self.error(operation)

    def error(self, operation: Any) -> NetfoldError:
        """What befell a failed operation, with the missing ranks where the switch knows them."""
        kind, rank, text = operation.failure
        name = engine.FAILURES[kind]
        record = records_of(operation.record())[0]
        in_network = record["algorithm"] in [
            engine.ALGORITHMS[name] for name in ("in_network", "split", "hierarchical")
        ]
        if name == "timeout":
            if rank < 0 and in_network and self.recoveries:
                for recovery in self.recoveries:
                    missing, words = recovery.stragglers()
                    rank = missing[0] if missing and rank < 0 else rank
                    text += f"; {words}"
                text += ". Did every rank make this call?"
            else:
                text += "."
            is_transfer = record["operation"] in (_SEND, KINDS["receive"])
            rank, seen = self._last_seen(rank, None if is_transfer else int(record["sequence"]))
            text += seen
        if self._native.failure is not None:
            # Who waits at a switch for this rank hears why now, and not when this rank closes the group.
            for recovery in self.recoveries:
                recovery.leave(text, rank)
        return error_of(name, rank, text)

    def _last_seen(self, rank: int, sequence: int | None) -> tuple[int, str]:
        """The rank at fault in an operation that timed out, and what that rank says it does. Costs up to a second.

        rank: whom this rank waits for, -1 where that is not known; in collective `sequence` that rank may itself wait
        for another. Where no rank is found that has not made the call, all are told of, `rank` first.
        """
        with self._close_lock:
            if self._seen is None:
                others = [each for each in range(self.size) if each != self.rank]
                self._seen = self._monitor.query_status(sorted(others, key=lambda each: each != rank))
        if not self._seen:
            return rank, ""
        ranks = [] if sequence is None else connection_manager.overdue_ranks(self._seen, sequence)
        if ranks and rank not in ranks:
            rank = ranks[0]
        ranks = sorted(ranks or self._seen, key=lambda each: (each != rank, each))
        return rank, f" Just now {connection_manager.describe_status({each: self._seen[each] for each in ranks})}"

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
        if "split" in (row.algorithm, row.between) and self._native.shares is not None:
            reason += f"; {capacity.describe_shares(self._native.shares)}"
        if {row.algorithm, row.between} & {"in_network", "split"}:
            reason += "".join(f"; {recovery.state}" for recovery in self.recoveries if recovery.state)
        reason += f"; {self._no_switch}" if self._no_switch else ""
        if self._port is not None and self._port.why_not_rma:
            reason += f"; over the fabric in segments, which are copied: {self._port.why_not_rma}"
        if row.algorithm == "shared_memory" and operation in _COPIES:
            reason += f"; {self._single_copy}"
        over = f"; over {self.fabric}" if self.fabric else ""
        return f"{row.algorithm} ({reason}); for {size_bytes} bytes the model says {', '.join(times)}{over}"

    def lease(self, region: Region) -> Any:
        """Says that this memory stays mapped as it is until the object that comes back ends: a fabric then keeps it
        registered. None where there is no fabric, which is all the same to the caller."""
        return None if self._port is None else self._port.lease(*region)

    @property
    def over_fabric(self) -> bool:
        """Whether what goes to other ranks goes over libfabric, or over MPI."""
        return self._port is not None

    def fabric_counters(self) -> dict[str, int] | None:
        """Of this process's place on the fabric, for all of its groups: segments, writes, grants, registrations and how
        often they were hit; None without one."""
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
        self._end()
        recording.left(self._member)

    def _end(self) -> None:
        failure = self._monitor.mark_closed()
        why, fault = ("it closed the group", -1) if failure is None else (failure[2], failure[1])
        for recovery in self.recoveries:
            recovery.close(why, fault)
        connection_manager.unwatch_group(self._id)
        self._listener.deregister(self._registered_group, failure, self.collectives_submitted, self._native.expired)
        engine.remove_group(self._native)
        release_listener(self._listener)

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


def _by_interface(lane: Sequence[Sequence[socket.socket]]) -> list[str]:
    """Which ranks are reached over which interface, in words."""
    peers: dict[str, list[int]] = {}
    for peer, row in enumerate(lane):
        for stream in row:
            peers.setdefault(stream.getsockname()[0], []).append(peer)
    return [
        f"reaches rank {', '.join(map(str, ranks))} over {interface_of(host)} ({host})" for host, ranks in peers.items()
    ]


def _secured(security: str) -> list[str]:
    """What the streams to other ranks are, in words, where they are more than plain."""
    return [] if security == SECURITIES[0] else [f"streams between ranks: NETFOLD_SECURITY={security}"]


def _is_here(stream: socket.socket) -> bool:
    """Whether the other end is on this host, as far as addresses tell."""
    return bool(stream.getsockname()[0] == stream.getpeername()[0])


def _detached(stream: socket.socket) -> int:
    stream.settimeout(None)
    return stream.detach()


__all__ = ["Group", "Region", "RendezvousError", "region"]


def _native_rows(table: ChoiceTable) -> list[tuple[int, int, int, int, int]]:
    return [
        (
            KINDS[row.operation],
            row.min_bytes,
            engine.ALGORITHMS[row.algorithm],
            DTYPES.get(row.wire, -1),
            engine.ALGORITHMS[row.between],
        )
        for row in table.rows
    ]


def _of_switch(number: int, job: rendezvous.Job) -> bytes:
    """What only this group's ranks know, another thing for each of its switches."""
    return (b"%d " % number if number else b"") + job.name.encode() + job.secret


def _registrations(port: Any) -> dict[str, int]:
    """For a profile. Of the port and not of the group, which would keep itself alive by it."""
    if port is None:
        return {}
    counters = port.counters
    named = {"evictions": "registration_evictions", "ranges": "registrations", "bytes": "registered_bytes"}
    return {name: counters[counter] for name, counter in named.items()}
