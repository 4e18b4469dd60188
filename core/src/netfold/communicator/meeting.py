"""The ways in which the ranks of a new group find each other: a store, handles that each of them was given, or a group
that they are in (parent_meeting.py).

Start-up (startup.py) is called with a meeting. The meeting agrees on the job and listens (`agree`), connects this rank
to its neighbours in the start-up tree (`connect`), and makes the endpoint by which a later group forms (`regrouping`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from netfold.bootstrap import handle, regroup, rendezvous
from netfold.bootstrap.addresses import Interfaces, own_interfaces
from netfold.bootstrap.endpoint import Endpoint
from netfold.bootstrap.listener import Listener, RegisteredGroup, acquire_listener
from netfold.bootstrap.regroup import Proposal
from netfold.bootstrap.rendezvous import Job, PeerAddresses
from netfold.bootstrap.shm_discovery import Node, NodeSocket
from netfold.bootstrap.store import Store
from netfold.bootstrap.tree import StartTree
from netfold.options import Options
from netfold.switch_protocol.control_messages import switches_of
from netfold.tuning import Links

# `Meeting.switch_share` of a group that is not its ranks' first. The rest is for the group without its switches.
LATER_SWITCH_SHARE = 1 / 3


class Agreement(NamedTuple):
    """The knowledge of this rank before it connects, and the address where it listens."""

    job: Job
    switches: tuple[str, ...]
    interfaces: Interfaces
    listener: Listener


class Inherited(NamedTuple):
    """The findings of a parent that hold for a group of its ranks."""

    node: Node | None  # of this group's own memory, None where this rank is alone on its node
    peer_memory: Any  # as SharedMemory's
    copies: str
    links: Links


class Mesh(NamedTuple):
    """The way to all other ranks."""

    tree: StartTree  # over the first connections
    peer_addresses: PeerAddresses
    by_host: list[list[int]]
    job: Job  # as rank 0 has it
    inherited: Inherited | None = None

    @property
    def hosts(self) -> frozenset[str]:
        """The addresses of all ranks."""
        addresses = self.peer_addresses
        hosts = {host for endpoints in addresses.endpoints for host, _ in endpoints}
        return frozenset(hosts.union(addresses.interfaces.hosts))


class Regrouping(NamedTuple):
    """The means of a later group."""

    endpoint: Endpoint
    handles: Callable[[], tuple[str, ...]]  # of all ranks


class Meeting(ABC):
    rank: int
    size: int
    switch_share = 1.0
    """Of the time that is left: how much of it the group may wait for its switches."""
    former_switch: str | None = None
    """The switches of the group that this rank is or was in. A group with the same ones forms without them where they
    do not take it: they may have been lost since."""

    @abstractmethod
    def agree(self, options: Options, deadline: float) -> Agreement:
        """Acquires a listener, which the caller releases. options: resolved."""

    @abstractmethod
    def connect(
        self,
        agreement: Agreement,
        group: RegisteredGroup,
        options: Options,
        node_socket: NodeSocket | None,
        deadline: float,
        undo: ExitStack,
    ) -> Mesh:
        """group: registered at the listener. node_socket: None where this rank shares no memory."""

    def regrouping(self, agreement: Agreement, mesh: Mesh, options: Options, deadline: float) -> Regrouping:
        """The caller owns the endpoint."""
        return first_endpoint(self.rank, agreement, mesh, options, deadline)


class StoreMeeting(Meeting):
    """The ranks publish their addresses in a store."""

    def __init__(
        self, store: Store, rank: int, size: int, store_host: str | None, former_switch: str | None = None
    ) -> None:
        """former_switch: as of `Meeting`, the same on all ranks, or None on all."""
        self.rank, self.size = rank, size
        self.former_switch = former_switch
        if former_switch is not None:
            self.switch_share = LATER_SWITCH_SHARE
        self._store, self._store_host = store, store_host

    def agree(self, options: Options, deadline: float) -> Agreement:
        """Claim the rank, read the job, and listen. A failure is published to the ranks that wait for this one."""
        rank, size = self.rank, self.size
        store = rendezvous.claim(self._store, rank, size, deadline)
        try:
            job = rendezvous.agree(store, rank, size, options, deadline)
            agreement = listen(job, rank, own_interfaces(options, self._store_host), options, deadline)
        except BaseException as error:
            rendezvous.publish_failure(store, rank, size, str(error) or type(error).__name__)
            raise
        self._generation = store
        return agreement

    def connect(
        self,
        agreement: Agreement,
        group: RegisteredGroup,
        options: Options,
        node_socket: NodeSocket | None,
        deadline: float,
        undo: ExitStack,
    ) -> Mesh:
        tree, peer_addresses, by_host = rendezvous.connect_tree(
            self._generation,
            group,
            agreement.listener,
            agreement.interfaces,
            deadline,
            fabric=options.fabric,
            host="" if node_socket is None else node_socket.host,
        )
        return Mesh(tree, peer_addresses, by_host, agreement.job)


class HandleMeeting(Meeting):
    """The members have each other's handles. See regroup.py."""

    switch_share = LATER_SWITCH_SHARE

    def __init__(self, proposal: Proposal, endpoint: Endpoint, former_switch: str | None) -> None:
        """endpoint: of the former group, which the new one keeps."""
        self.rank, self.size = proposal.rank, len(proposal.members)
        self.former_switch = former_switch
        self._proposal, self._endpoint = proposal, endpoint

    def agree(self, options: Options, deadline: float) -> Agreement:
        rendezvous.check_options(options, self.size)
        own = rendezvous.propose(options, self.size)
        # Until rank 0's is known.
        job = rendezvous.accept(own, self.rank, self.size, options, self._proposal.secret)
        return listen(job, self.rank, self._endpoint.interfaces, options, deadline)

    def connect(
        self,
        agreement: Agreement,
        group: RegisteredGroup,
        options: Options,
        node_socket: NodeSocket | None,
        deadline: float,
        undo: ExitStack,
    ) -> Mesh:
        return Mesh(*regroup.connect_members(self._proposal, self._endpoint, group, options, deadline))

    def regrouping(self, agreement: Agreement, mesh: Mesh, options: Options, deadline: float) -> Regrouping:
        handles = self._proposal.handles
        return Regrouping(self._endpoint.retain(), lambda: handles)


def listen(job: Job, rank: int, interfaces: Interfaces, options: Options, deadline: float) -> Agreement:
    """Begin to listen for the ranks of a job. The caller releases the listener."""
    listener = acquire_listener(rank, interfaces.hosts, options.port_range(), deadline)
    # A switch that is less secure than the job is not used.
    return Agreement(job, switches_of(None if job.no_switch else options.switch), interfaces, listener)


def first_endpoint(rank: int, agreement: Agreement, mesh: Mesh, options: Options, deadline: float) -> Regrouping:
    """An endpoint for a rank that has none: every rank derives the handles of all from the group's secret."""
    secret, security = agreement.job.secret, agreement.job.security
    published, interfaces = mesh.peer_addresses.published, agreement.interfaces

    def handle_of(peer: int) -> handle.Handle:
        addresses, host = published[peer]
        return handle.of_rank(
            secret, peer, addresses, host, rails=interfaces.rails, security_level=security, options=options
        )

    own = handle_of(rank)
    listener = acquire_listener(rank, interfaces.hosts, options.port_range(), deadline)
    endpoint = Endpoint(own, listener, interfaces)
    return Regrouping(endpoint, functools.cache(lambda: tuple(handle_of(peer).text for peer in range(len(published)))))
