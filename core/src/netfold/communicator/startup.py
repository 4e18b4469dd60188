"""The start-up of a group: from a meeting to a tree of connections, shared memory, a choice table, switches and a
native group.

Every rank runs the same steps in the same order. A step is a function that returns what it set up, and that registers
in an ExitStack how to undo this. A failure in a later step, and the end of the group, run that stack.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from netfold._native import engine
from netfold.bootstrap import capacity, fabric, peer_memory, probe, rendezvous
from netfold.bootstrap.addresses import interface_of
from netfold.bootstrap.listener import RegisteredGroup, release_listener
from netfold.bootstrap.probe import TableChoice
from netfold.bootstrap.rendezvous import Job, PeerAddresses
from netfold.bootstrap.secure_stream import mesh_secrets
from netfold.bootstrap.shm_discovery import Node, NodeSocket, form_node
from netfold.bootstrap.tree import StartTree
from netfold.communicator.meeting import Agreement, Meeting, Mesh, Regrouping
from netfold.communicator.membership import Membership, join_for_host
from netfold.communicator.switch_tree import check_size
from netfold.errors import SwitchError
from netfold.options import SECURITIES, Options, warn_of_unknown_variables
from netfold.switch_protocol.control_client import SwitchAccess
from netfold.switch_protocol.open_files import allow_open_files, files_needed
from netfold.tuning import DEFAULT_LINKS, ChoiceTable, Links, Topology, build_table
from netfold.tuning.cost import BY_SWITCH

log = logging.getLogger("netfold")

# Connections between two ranks: one for collectives and one for messages, so that neither waits for the other. One more
# for each switch carries the switch's operations after that switch is lost.
_LANES = 2
# Why a rank leaves a switch that took it.
_NOT_ALL = "it could not join all of its switches"
# How long a waiting thread polls. Data in memory comes within microseconds if its sender runs. Where ranks outnumber
# cores, the polling thread yields, so a longer poll costs the other ranks nothing.
_SPIN_US, _CROWDED_SPIN_US = 200, 1000


class Fabric(NamedTuple):
    """The fabric that replaces TCP between ranks; empty for TCP."""

    port: Any = None
    rma_min_bytes: int = 0  # the same on all ranks
    description: str = ""


class SharedMemory(NamedTuple):
    """The ranks that share memory."""

    nodes: tuple[int, ...]  # by rank, the number of its node
    node: Node | None  # this rank's own, None where the rank is alone on its node
    peer_memory: Any = None  # reads the node's other ranks; None where some rank of the node may not
    copies: str = ""  # a sentence that says so


class ChosenTable(NamedTuple):
    """The choice table, and what it was made from."""

    table: ChoiceTable
    links: Links
    topology: Topology
    build: Callable[[Links], ChoiceTable]  # makes the table again, for other links
    measures_switches: bool  # whether a choice depends on the switches' rates, which are then measured


@dataclass(frozen=True)
class Connections:
    """All that start-up sets up for one rank."""

    rank: int
    size: int
    options: Options
    agreement: Agreement
    registered_group: RegisteredGroup
    mesh: Mesh
    regrouping: Regrouping
    fabric: Fabric
    memory: SharedMemory
    choice: ChosenTable
    workers: tuple[int, ...]  # the ranks that join switches
    accesses: list[SwitchAccess]  # by switch
    memberships: list[Membership]  # by switch; none on a rank that is no worker

    @property
    def job(self) -> Job:
        return self.agreement.job


def connect_group(
    meeting: Meeting,
    options: Options,
    deadline: float,
    undo: ExitStack,
) -> Connections:
    """Run all steps before the native group. options: resolved. Raises ValueError, RendezvousError, SwitchError."""
    rank, size = meeting.rank, meeting.size
    if rank == 0:
        warn_of_unknown_variables()
    allow_open_files(files_needed(size))
    agreement = meeting.agree(options, deadline)
    undo.callback(release_listener, agreement.listener)
    registered_group = RegisteredGroup(
        agreement.job.secret,
        rank,
        size,
        _LANES + len(agreement.switches),
        agreement.interfaces.rails,
        SECURITIES.index(agreement.job.security),
    )
    agreement.listener.register(registered_group)
    # Without effect where the group has been deregistered with another reason.
    failure = engine.FAILURES.index("system"), -1, "it could not join"
    undo.callback(agreement.listener.deregister, registered_group, failure)
    undo.callback(registered_group.close_connections)
    # Before this rank's address is published: whoever reads that may reach the socket at once.
    node_socket = NodeSocket(rank, agreement.job.secret) if options.shares_memory else None
    if node_socket is not None:
        undo.callback(node_socket.close)
        if not node_socket.host:
            log.warning(
                "rank %d communicates by TCP with other ranks of its host: without /proc it cannot tell which those "
                "are; mount it",
                rank,
            )
    mesh = meeting.connect(agreement, registered_group, options, node_socket, deadline, undo)
    agreement = agreement._replace(job=mesh.job)
    with _failure_told(mesh.tree):
        # Before any rank can have formed the group, and lose it.
        regrouping = meeting.regrouping(agreement, mesh, options, deadline)
        undo.callback(regrouping.endpoint.release)
        over = _open_fabric(agreement, mesh, options, rank)
        memory = _share_memory(mesh, node_socket, options, rank, undo)
        choice = _choose(agreement, registered_group, mesh, over, memory, options, rank, deadline)
        workers = choice.table.workers(choice.topology)
        now = time.monotonic()
        joined_by = now + meeting.switch_share * (deadline - now)
        try:
            check_size(len(workers))
            accesses = _accesses(agreement, options, rank, workers)
            memberships = _join_switches(accesses, agreement.job, mesh.tree, joined_by, undo)
        except SwitchError as error:  # on every rank
            if not _goes_on_without_switch(meeting, options, mesh.tree):
                raise
            # The connections for the time without a switch stay unused.
            agreement = agreement._replace(job=_without_switch(agreement.job, str(error)), switches=())
            choice = _choose(agreement, registered_group, mesh, over, memory, options, rank, deadline, choice.links)
            workers, accesses, memberships = (), [], []
        if mesh.inherited is None:  # else the tree has no connections of its own
            mesh.tree.end()
    setup = (agreement, registered_group, mesh, regrouping, over, memory, choice, workers, accesses, memberships)
    return Connections(rank, size, options, *setup)


def _goes_on_without_switch(meeting: Meeting, options: Options, tree: StartTree) -> bool:
    """Whether a group that its switches did not take forms without them. The same on all ranks, which all call this."""
    if meeting.switch_share == 1.0:
        return False  # the first group of its ranks
    # A newcomer was in no group: the members know the job.
    was_theirs = meeting.former_switch == options.switch
    return any(tree.all_gather(was_theirs, "the ranks found out whether they go on without their switch"))


def _without_switch(job: Job, why: str) -> Job:
    """For a group that the switches do not take. Algorithms that need a switch become auto."""
    needs_one = any(name in job.algorithm for name in BY_SWITCH)
    algorithm = "auto" if needs_one else job.algorithm
    return replace(job, switch=None, algorithm=algorithm, no_switch=f"this group goes on without its switch: {why}")


@contextmanager
def _failure_told(tree: StartTree) -> Iterator[None]:
    """End the tree with the block. Tell the other ranks why this one fails in it: they give up with the same reason."""
    try:
        yield
    except BaseException as error:
        tree.fail(str(error) or type(error).__name__, getattr(error, "rank", None))
        raise
    finally:
        tree.close()


def _open_fabric(agreement: Agreement, mesh: Mesh, options: Options, rank: int) -> Fabric:
    """Open this process's port on NETFOLD_TRANSPORT's fabric, and agree with the other ranks on its use."""
    if options.fabric is None:
        return Fabric()
    hosts = agreement.interfaces.hosts[: agreement.interfaces.rails]
    names = ("rma_min_bytes", "registration_cache_entries", "registration_cache_bytes")
    settings = {name: getattr(options, name) for name in names}
    port, rma_min_bytes = fabric.agree(mesh.tree, options.fabric, hosts, rank, settings=settings)
    return Fabric(port, rma_min_bytes, f"{fabric.describe_port(port)} (NETFOLD_TRANSPORT={options.transport})")


class HostExchange:
    """The exchange of shm_discovery.py among the ranks of this host."""

    def __init__(self, tree: StartTree) -> None:
        self._tree = tree

    def all_gather(self, value: Any) -> list[Any]:
        return self._tree.all_gather_on_host(value, "the ranks found out which of them share memory")


def _share_memory(
    mesh: Mesh, node_socket: NodeSocket | None, options: Options, rank: int, undo: ExitStack
) -> SharedMemory:
    if mesh.inherited is not None:
        number_of = {each: number for number, ranks in enumerate(mesh.by_host) for each in ranks}
        nodes = tuple(number_of[each] for each in range(len(number_of)))
        return SharedMemory(nodes, mesh.inherited.node, mesh.inherited.peer_memory, mesh.inherited.copies)
    leader, node, reader, copies = rank, None, None, ""
    if node_socket is not None:
        candidates = next(ranks for ranks in mesh.by_host if rank in ranks)
        exchange = HostExchange(mesh.tree)
        leaders, node = form_node(node_socket, candidates, exchange)
        leader = leaders[candidates.index(rank)]
        if node is None:
            node_socket.close()
        else:
            undo.callback(node.close)
        single_copy = options.single_copy != "off"
        reader, copies = peer_memory.negotiate(node, rank, candidates, exchange, enabled=single_copy)
    found = mesh.tree.all_gather(leader, "the ranks found out which of them share memory")
    numbers = {each: number for number, each in enumerate(dict.fromkeys(found))}
    return SharedMemory(tuple(numbers[each] for each in found), node, reader, copies)


def _choose(
    agreement: Agreement,
    registered_group: RegisteredGroup,
    mesh: Mesh,
    over: Fabric,
    memory: SharedMemory,
    options: Options,
    rank: int,
    deadline: float,
    found: Links | None = None,
) -> ChosenTable:
    """Measure links where that is wanted; every rank gets rank 0's table.

    found: the links, where they were measured before.
    """
    job, size, topology = agreement.job, len(memory.nodes), Topology(memory.nodes)
    measures = job.switch is not None and job.algorithm == "auto" and topology.node_count > 1 and job.probe

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

    known = capacity.cached_rates(mesh.hosts, job.switch) if measures and job.switch is not None else ()
    links = DEFAULT_LINKS if mesh.inherited is None else replace(mesh.inherited.links, switches=known)
    links = found or links
    if found is not None or mesh.inherited is not None or not job.probe or size == 1 or is_shared(memory):
        # Built once, since that takes each rank longer than to read it.
        what = "rank 0 told the ranks their algorithms"
        told = mesh.tree.broadcast(lambda: TableChoice(build_first(links), links).to_json(), what)
        return ChosenTable(*TableChoice.from_json(told), topology, build, measures)

    hosts = mesh.hosts
    if options.fabric is not None:
        hosts = frozenset(f"{options.fabric} {host}" for host in hosts)
    with ExitStack() as streams:

        def stream_to(peer: int) -> probe.ByteStream:
            connection = rendezvous.connected(registered_group, mesh.peer_addresses, peer, deadline)
            if over.port is None:
                return connection
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            stream = fabric.stream_beside(connection, over.port)
            streams.callback(stream.close)
            return stream

        agreed = probe.agree(
            mesh.tree,
            stream_to,
            topology,
            build_first,
            deadline,
            hosts=hosts,
            rails=agreement.interfaces.rails,
            switches=known,
            progress=None if over.port is None else over.port.progress,
        )
    return ChosenTable(*agreed, topology, build, measures)


def _accesses(agreement: Agreement, options: Options, rank: int, workers: Sequence[int]) -> list[SwitchAccess]:
    """By switch; none for a group whose choice table needs none."""
    return [
        SwitchAccess(
            endpoint=endpoint,
            token_file=options.token_file,
            rank=rank,
            workers=tuple(workers),
            name=options.job_name or "",
            window_bytes=agreement.job.window_bytes,
            fabric=options.fabric,
            security=agreement.job.security,
        )
        for endpoint in (agreement.switches if workers else ())
    ]


def _join_switches(
    accesses: Sequence[SwitchAccess],
    job: Job,
    tree: StartTree,
    deadline: float,
    undo: ExitStack,
) -> list[Membership]:
    """Join all of them, or none. Raises SwitchError on every rank."""
    memberships: list[Membership] = []
    for number, access in enumerate(accesses):
        # A digest tells the switch which ranks belong together, and hides the secret.
        digest = hashlib.sha256(switch_secret(number, job)).hexdigest()[:32]
        try:
            membership = join_for_host(access, job=digest, tree=tree, deadline=deadline)
        except SwitchError:
            for joined in memberships:
                joined.leave(_NOT_ALL)
            raise
        if membership is not None:
            undo.callback(membership.leave, _NOT_ALL)
            memberships.append(membership)
    return memberships


def start_native(connections: Connections, group_id: int, undo: ExitStack) -> Any:
    """Give sockets and shared memory to a new native group."""
    job, options, memory = connections.job, connections.options, connections.memory
    node, nodes, group = memory.node, memory.nodes, connections.registered_group
    spinners = 1 if node is None else len(node.ranks)
    crowded = spinners > len(os.sched_getaffinity(0))
    spin_us = (_CROWDED_SPIN_US if crowded else _SPIN_US) if options.spin_us is None else options.spin_us
    native = engine.add_group(
        rank=connections.rank,
        nodes=list(nodes),
        lanes=group.lanes,
        rails=group.rails,
        connections=[
            (lane, peer, rail, _detached(stream), mesh_secrets(stream))
            for (peer, lane, rail), stream in group.accepted.items()
        ],
        resumable=options.reconnect_s != 0,
        id=group_id,
        job=hashlib.sha256(b"status" + job.name.encode() + job.secret).hexdigest()[:32],
        spin_us=spin_us,
        spins_for_sockets=options.spin_us is not None,
        yields=crowded,
        table=native_rows(connections.choice.table),
        table_hash=connections.choice.table.hash16,
        fabric=connections.fabric.port,
        rma_min_bytes=connections.fabric.rma_min_bytes,
        security=job.security,
    )
    undo.callback(engine.remove_group, native)
    if node is not None:
        name, token = node.socket.name, node.socket.token
        native.share(node.position, list(node.ranks), *node.take_descriptors(), name, token, memory.peer_memory)
    return native


def is_shared(memory: SharedMemory) -> bool:
    """Whether all ranks of the group share memory."""
    return memory.node is not None and len(memory.node.ranks) == len(memory.nodes)


def switch_secret(number: int, job: Job) -> bytes:
    """A secret of this group's ranks, another one for each of its switches."""
    return (b"%d " % number if number else b"") + job.name.encode() + job.secret


def native_rows(table: ChoiceTable) -> list[tuple[int, int, int, int, int]]:
    return [
        (
            engine.KINDS[row.operation],
            row.min_bytes,
            engine.ALGORITHMS[row.algorithm],
            engine.DTYPES.get(row.wire, -1),
            engine.ALGORITHMS[row.between],
        )
        for row in table.rows
    ]


def describe_interfaces(addresses: PeerAddresses) -> tuple[str, ...]:
    """Say in words which ranks are reached over which interface."""
    peers: dict[str, list[int]] = {}
    for peer, endpoints in enumerate(addresses.endpoints):
        for host in addresses.sources(peer) if endpoints else ():
            peers.setdefault(host, []).append(peer)
    return tuple(
        f"reaches rank {', '.join(map(str, ranks))} over {interface_of(host)} ({host})" for host, ranks in peers.items()
    )


def _detached(stream: socket.socket) -> int:
    stream.settimeout(None)
    return stream.detach()
