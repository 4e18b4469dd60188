"""A new group of ranks that are in a group already: its parent, which goes on.

The members exchange messages over the parent's connections (message_links.py), in a tree below the lowest rank of each
node. No other rank of the parent takes part, and no store is asked. A member whose options are those of the parent
takes over what the parent found out:

    ranks that share memory   the lowest of them makes the new group's memory, and sends it to the host's other ranks
    reads of their memory     the parent has tried them
    addresses                 those that worked for the parent come first
    links                     as the parent measured them; rank 0 makes the choice table from them
    the secret                is derived from the parent's, so first connections prove the new group's own

Members with other options than the parent's exchange their addresses, and find out the rest as any group does.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from netfold.bootstrap import rendezvous, security
from netfold.bootstrap.addresses import Interfaces, own_interfaces
from netfold.bootstrap.listener import RegisteredGroup
from netfold.bootstrap.rendezvous import PeerAddresses
from netfold.bootstrap.shm_discovery import Node, NodeSocket, give_memory, take_memory
from netfold.bootstrap.tree import StartTree, place_of
from netfold.communicator.meeting import LATER_SWITCH_SHARE, Agreement, Inherited, Meeting, Mesh, listen
from netfold.communicator.message_links import MessageLinks
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import format_endpoint, parse_endpoint
from netfold.tuning import Links

_DOING = "the ranks of a group formed a new one"


@dataclass(frozen=True)
class Parent:
    """The group that the members are in, as this rank knows it."""

    rank: int
    native: Any
    secret: bytes
    options: Options
    interfaces: Interfaces
    peer_addresses: PeerAddresses
    nodes: tuple[int, ...]
    peer_memory: Any
    copies: str
    links: Links


class ParentMeeting(Meeting):
    """The members meet as ranks of their parent."""

    switch_share = LATER_SWITCH_SHARE

    def __init__(self, parent: Parent, ranks: Sequence[int], name: str, store_host: str | None) -> None:
        """ranks: of the members in the parent, by their ranks in the new group.

        name: the same on all members, and of no other group of the same members.
        """
        self.rank, self.size = ranks.index(parent.rank), len(ranks)
        self.former_switch = parent.options.switch
        self._parent, self._ranks, self._store_host = parent, ranks, store_host
        self._secret = hmac.digest(parent.secret, f"netfold group {list(ranks)} {name}".encode(), "sha256")

    def agree(self, options: Options, deadline: float) -> Agreement:
        """Derive the job, and listen. The members that wait for this one get its failure."""
        try:
            return self._agree(options, deadline)
        except BaseException as error:
            self._tree(self._links(), self._by_node(), deadline).fail(str(error) or type(error).__name__, self.rank)
            raise

    def _agree(self, options: Options, deadline: float) -> Agreement:
        rendezvous.check_options(options, self.size)
        parent = self._parent
        secret = security.job_secret(self._derive("secret"), options.secret_file)
        job = rendezvous.accept(self._proposal(options), self.rank, self.size, options, secret)
        interfaces = parent.interfaces
        if options.interface != parent.options.interface:
            interfaces = own_interfaces(options, self._store_host)
        return listen(job, self.rank, interfaces, options, deadline)

    def connect(
        self,
        agreement: Agreement,
        group: RegisteredGroup,
        options: Options,
        node_socket: NodeSocket | None,
        deadline: float,
        undo: ExitStack,
    ) -> Mesh:
        parent, rank = self._parent, self.rank
        by_node = self._by_node()
        own_node = next(ranks for ranks in by_node if rank in ranks)
        inherits = options == parent.options
        node: Node | None = None

        def own(memory: int) -> Node:
            assert node_socket is not None
            made = Node(tuple(own_node), own_node.index(rank), memory, node_socket)
            undo.callback(made.close)
            return made

        def give() -> None:
            nonlocal node
            if inherits and node_socket is not None and len(own_node) > 1:
                node = own(give_memory(node_socket, own_node))

        links = self._links()
        tree = self._tree(links, by_node, deadline)
        try:
            offer = None if inherits else self._offer(agreement, options, node_socket)
            offers = tree.all_gather(offer, _DOING, host_is_here=give)
            self._check_alike(offers, options)
            if not inherits:
                return self._mesh_of(offers, agreement, options, links, deadline)
            if node_socket is not None and len(own_node) == 1:
                node_socket.close()
            elif node_socket is not None and node is None:
                memory = take_memory(node_socket, own_node)
                if memory is None:
                    raise RendezvousError(f"rank {rank} did not get the memory of its host's ranks", rank=rank)
                node = own(memory)
        except BaseException as error:
            tree.fail(str(error) or type(error).__name__, getattr(error, "rank", None))
            tree.close()
            raise
        reader, copies = None, ""
        if node is not None and parent.peer_memory is not None:
            reader, copies = parent.peer_memory.select(self._positions(own_node)), parent.copies
        elif node is not None:
            copies = f"as in the group that this one is made of: {parent.copies}"
        inherited = Inherited(node, reader, copies, parent.links)
        return Mesh(tree, self._addresses_of_parent(), by_node, agreement.job, inherited)

    def _links(self) -> MessageLinks:
        tag = -1 - int.from_bytes(self._derive("tag")[:4], "big") % (1 << 31)
        return MessageLinks(self._parent.native, self._ranks, tag)

    def _tree(self, links: MessageLinks, hosts: list[list[int]], deadline: float) -> StartTree:
        return StartTree(self.rank, place_of(self.rank, hosts), links, deadline)

    def _by_node(self) -> list[list[int]]:
        nodes: dict[int, list[int]] = {}
        for member, rank in enumerate(self._ranks):
            nodes.setdefault(self._parent.nodes[rank], []).append(member)
        return list(nodes.values())

    def _positions(self, node: Sequence[int]) -> list[int]:
        """The positions of a node's members in the parent's node."""
        number = self._parent.nodes[self._parent.rank]
        of_parent = (rank for rank, each in enumerate(self._parent.nodes) if each == number)
        position_of = {rank: position for position, rank in enumerate(of_parent)}
        return [position_of[self._ranks[member]] for member in node]

    def _addresses_of_parent(self) -> PeerAddresses:
        of_parent, member_of = self._parent.peer_addresses, {rank: member for member, rank in enumerate(self._ranks)}
        return PeerAddresses(
            of_parent.interfaces,
            [of_parent.endpoints[rank] for rank in self._ranks],
            {(member_of[rank], rail): at for (rank, rail), at in of_parent.used.copy().items() if rank in member_of},
            [of_parent.published[rank] for rank in self._ranks],
        )

    def _proposal(self, options: Options) -> dict[str, Any]:
        # Every member derives the same name.
        return {**rendezvous.propose(options, self.size), "name": self._derive("name").hex()[:16]}

    def _offer(self, agreement: Agreement, options: Options, node_socket: NodeSocket | None) -> dict[str, Any]:
        """The part of a member with other options than the parent's that the other members need."""
        interfaces = agreement.interfaces
        return {
            "at": [format_endpoint(host, agreement.listener.port) for host in interfaces.hosts],
            "rails": interfaces.rails,
            "fabric": options.fabric,
            "host": "" if node_socket is None else node_socket.host,
            "job": self._proposal(options) if self.rank == 0 else None,
            "check": security.digest_of(agreement.job.secret),
        }

    def _check_alike(self, offers: Sequence[Any], options: Options) -> None:
        first = offers[0]
        for member, offer in enumerate(offers):
            if (offer is None) != (first is None):
                same, other = (member, 0) if offer is None else (0, member)
                raise RendezvousError(
                    f"rank {same} makes a new group with the options of the group that its ranks are in, and rank "
                    f"{other} with other ones: every rank needs the same",
                    rank=member,
                )
            if offer is None:
                continue
            if offer["check"] != first["check"]:
                raise RendezvousError(
                    f"rank {member} has another secret than rank 0: every rank needs the same NETFOLD_SECRET_FILE, or "
                    "none has one",
                    rank=member,
                )
            rendezvous.check_fit(offer, member, self.rank, offers[self.rank]["rails"], options.fabric)

    def _mesh_of(
        self, offers: Sequence[Any], agreement: Agreement, options: Options, links: MessageLinks, deadline: float
    ) -> Mesh:
        """The members' options are not the parent's."""
        job = rendezvous.accept(offers[0]["job"], self.rank, self.size, options, agreement.job.secret)
        addresses = PeerAddresses(
            agreement.interfaces,
            [
                []
                if member == self.rank
                else [parse_endpoint(at, what=f"rank {member}'s address") for at in offer["at"]]
                for member, offer in enumerate(offers)
            ],
            published=[(offer["at"], offer["host"]) for offer in offers],
        )
        by_host = rendezvous.hosts_of([offer["host"] for offer in offers])
        tree = self._tree(links, by_host, deadline)
        return Mesh(tree, addresses, by_host, job)

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, purpose.encode(), "sha256")
