"""From handles to a tree: the members of a new group know each other's addresses, and connect without a store.

Every member computes the same start-up tree from the handles (tree.py), and connects to its parent there. Rank 0 is the
first member. Until all neighbours are connected, a member asks each missing one how far it is (endpoint.py):

    it has begun        connect, or wait for its connection
    it has not          ask again, at most every _LONGEST_PAUSE_S
    it is gone, gave up, forms another group    this member gives up, and so tells its neighbours

A member that gives up tells its connected neighbours over their connections, and every other neighbour when that asks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from netfold.bootstrap import handle, rendezvous
from netfold.bootstrap.endpoint import Caller, Endpoint
from netfold.bootstrap.handle import Handle
from netfold.bootstrap.listener import RegisteredGroup
from netfold.bootstrap.rendezvous import Job, PeerAddresses
from netfold.bootstrap.tree import SocketLinks, StartTree, failure_frame, place_of
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import ProtocolError

_ASK_TIMEOUT_S = 1.0
# A child that is alive connects by itself; it is asked only where that takes longer than usual.
_CHILD_PAUSE_S = 0.03
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
# How soon a failure is noticed that a connected neighbour sent.
_CHECK_S = 0.02
_DOING = "the members connected"


@dataclass(frozen=True)
class Proposal:
    """A group that is to form: what this member was called with."""

    uuid: str
    handles: tuple[str, ...]
    members: tuple[Handle, ...]  # by rank
    rank: int
    digest: str  # of the handles in order
    secret: bytes


def propose(own: Handle, uuid: str, handles: Sequence[str], secret_file: str | None) -> Proposal:
    """ValueError with a sentence where these handles can form no group with this member."""
    members = handle.check_members(own, handles)
    secret = handle.generation_secret(uuid, handles, secret_file)
    # The token of a secret is what a listener shows to unauthenticated peers.
    digest = handle.generation_secret("digest " + uuid, handles, None).hex()[:32]
    return Proposal(uuid, tuple(handles), tuple(members), members.index(own), digest, secret)


def connect_members(
    proposal: Proposal,
    endpoint: Endpoint,
    registered_group: RegisteredGroup,
    options: Options,
    deadline: float,
) -> tuple[StartTree, PeerAddresses, list[list[int]], Job]:
    """Connect to this rank's neighbours in the tree. As `rendezvous.connect_tree`, and the job that all ranks accept.

    registered_group: registered at the listener. Raises RendezvousError that names the rank at fault.
    """
    rank, members = proposal.rank, proposal.members
    peer_addresses = PeerAddresses(
        endpoint.interfaces,
        [[] if peer == rank else member.endpoints() for peer, member in enumerate(members)],
        published=[(list(member.addresses), member.host) for member in members],
    )
    hosts = rendezvous.hosts_of([member.host for member in members])
    links = SocketLinks({})
    tree = StartTree(rank, place_of(rank, hosts), links, deadline, lambda: endpoint.check_forming(proposal.uuid))
    endpoint.begin(proposal.uuid, proposal.digest, members)
    try:
        with _searches(proposal, endpoint, registered_group, peer_addresses, tree, deadline) as searches:
            _await_neighbours(proposal, registered_group, tree, links, searches, deadline)
        proposed = tree.broadcast(lambda: rendezvous.propose(options, len(members)), "the members learned the job")
        job = rendezvous.accept(proposed, rank, len(members), options, proposal.secret)
    except BaseException as error:
        # In this order: a neighbour that sees the connection end asks, and gets the reason.
        endpoint.end(proposal.uuid, error)
        # A search may still be making its connection.
        registered_group.refuse_later(tree.place.neighbours, failure_frame(error))
        _add_arrived(registered_group, links, set(tree.place.neighbours) - links.streams.keys())
        tree.fail(str(error) or type(error).__name__, getattr(error, "rank", None))
        raise
    return tree, peer_addresses, hosts, job


class _Search:
    """Finds out how far one neighbour is, on a thread, until it is connected."""

    def __init__(self, peer: int, is_parent: bool, proposal: Proposal, endpoint: Endpoint) -> None:
        self.peer, self._is_parent, self._proposal, self._endpoint = peer, is_parent, proposal, endpoint
        self._member = proposal.members[peer]
        self.state = "it did not answer"  # in words, for the deadline
        self.failure: RendezvousError | None = None

    def run(
        self, group: RegisteredGroup, peer_addresses: PeerAddresses, ended: threading.Event, deadline: float
    ) -> None:
        endpoint, proposal = self._endpoint, self._proposal
        caller = Caller(self._member, endpoint)
        request = {
            "type": "reconfigure",
            "uuid": proposal.uuid,
            "digest": proposal.digest,
            "identity": endpoint.handle.identity,
        }
        pause_s = _FIRST_PAUSE_S if self._is_parent else _CHILD_PAUSE_S
        if not self._is_parent and ended.wait(pause_s):
            return
        while not ended.is_set() and not self._is_connected(group):
            try:
                reply = caller.call(request, min(_ASK_TIMEOUT_S, max(0.01, deadline - time.monotonic())))
            except RendezvousError:
                self._give_up(group, "is gone: nobody answers for it at its address any more")
            except (OSError, EOFError, ProtocolError) as error:
                self.state = f"it did not answer at {self._member.where} ({error})"
            else:
                self._judge(group, reply)
                if reply["type"] == "forming" and self._is_parent:
                    # The next reply gives the reason of a failure.
                    with contextlib.suppress(RendezvousError, OSError, EOFError):
                        rendezvous.join(group, peer_addresses, self.peer, min(deadline, time.monotonic() + 10.0))
                        return
            if self.failure is not None or ended.wait(pause_s):
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _judge(self, group: RegisteredGroup, reply: dict[str, Any]) -> None:
        kind, text = reply["type"], reply.get("text", "")
        if kind == "idle":
            self.state = "it has not been called with these handles"
        elif kind == "forming":
            self.state = "it waits for others"
        elif kind == "failed":
            with group.changed:
                self.failure = RendezvousError(text, rank=None if reply["rank"] < 0 else reply["rank"])
                group.changed.notify_all()
        elif kind == "formed":
            self._give_up(group, f"formed the group {self._proposal.uuid} before, and this rank was not there")
        elif kind == "other":
            self.state = text
            if self._endpoint.conflicts(self._proposal.uuid, reply):
                self._give_up(group, f"takes part in something else: {text}. All members need the same call")
        else:  # the listener's, for a communicator that was closed
            self._give_up(group, "is gone: its communicator was closed")

    def _give_up(self, group: RegisteredGroup, why: str) -> None:
        with group.changed:
            if not self._is_connected(group):
                self.failure = RendezvousError(
                    f"rank {self._proposal.rank}: the group {self._proposal.uuid} of {len(self._proposal.members)} "
                    f"members did not form: rank {self.peer} ({self._member.where}) {why}",
                    rank=self.peer,
                )
                group.changed.notify_all()

    def _is_connected(self, group: RegisteredGroup) -> bool:
        return (self.peer, 0, 0) in group.accepted


@contextlib.contextmanager
def _searches(
    proposal: Proposal,
    endpoint: Endpoint,
    group: RegisteredGroup,
    peer_addresses: PeerAddresses,
    tree: StartTree,
    deadline: float,
) -> Iterator[dict[int, _Search]]:
    """A search for each neighbour. They end with this context."""
    place = tree.place
    searches = {peer: _Search(peer, peer == place.parent, proposal, endpoint) for peer in place.neighbours}
    ended = threading.Event()
    threads = [
        threading.Thread(
            target=search.run, args=(group, peer_addresses, ended, deadline), name="netfold regroup", daemon=True
        )
        for search in searches.values()
    ]
    for thread in threads:
        thread.start()
    try:
        yield searches
    finally:
        ended.set()
        for thread in threads:
            # A thread in `call` ends within its timeout, and touches nothing that ends before it.
            thread.join(0.01)


def _await_neighbours(
    proposal: Proposal,
    group: RegisteredGroup,
    tree: StartTree,
    links: SocketLinks,
    searches: dict[int, _Search],
    deadline: float,
) -> None:
    missing = set(searches)
    while missing:
        with group.changed:
            if not any((peer, 0, 0) in group.accepted for peer in missing):
                _raise_failure(searches, missing)
                group.changed.wait(_CHECK_S)
        missing -= _add_arrived(group, links, missing)
        tree.check(_DOING)
        if missing and time.monotonic() > deadline:
            absent = sorted(missing)
            states = "; ".join(
                f"rank {peer} ({proposal.members[peer].where}): {searches[peer].state}" for peer in absent
            )
            raise RendezvousError(
                f"rank {proposal.rank}: the group {proposal.uuid} of {len(proposal.members)} members did not form in "
                f"time. Missing: {states}",
                rank=absent[0],
            )


def _add_arrived(group: RegisteredGroup, links: SocketLinks, missing: Collection[int]) -> set[int]:
    """Use the connections of these ranks that have been made; returns the ranks."""
    with group.changed:
        arrived = {peer: group.accepted[peer, 0, 0] for peer in missing if (peer, 0, 0) in group.accepted}
    for peer, stream in arrived.items():
        links.add(peer, stream)
    return set(arrived)


def _raise_failure(searches: dict[int, _Search], missing: set[int]) -> None:
    for peer in sorted(missing):
        failure = searches[peer].failure
        if failure is not None:
            raise failure
