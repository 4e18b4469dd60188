"""From a store to a tree: every rank publishes its addresses and is connected with its neighbours in a tree (tree.py).

Rank 0 reads all addresses and tells each rank its place. A rank connects to its parent's listener (listener.py);
further connections are made when they are first used (connection_manager.py). A connection counts only after both ends
have proved that they know the job's secret (handshake.py). Rank 0 draws the secret and puts it in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import netfold
from netfold.bootstrap import handshake, security
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.handshake import JOIN, Hello
from netfold.bootstrap.listener import ConnectionKey, Listener, RegisteredGroup
from netfold.bootstrap.secure_stream import secure_stream
from netfold.bootstrap.store import MAX_KEYS, PrefixStore, Store, get_first, release, set_all
from netfold.bootstrap.tree import Place, SocketLinks, StartTree, failure_frame, places_of
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import format_endpoint, parse_endpoint, switches_of
from netfold.tuning import check_words

_RETRY_S = 0.05
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
# An interface that has just come up does not find its neighbours at once: IPv6 checks its addresses first. The kernel
# says EHOSTUNREACH 3 s after it began to look for one.
_SETTLES_S = 10.0
# How long one of several addresses of a rank is tried. Once connected, its handshake is awaited until the deadline.
_TRY_S = 1.0
# With more ranks, each closes its connection to the store once it needs none: rank 0 would have one for each of them.
_KEEPS_STORE = 32
# Longest wait for the token of the process that has a rank: it is there unless that process died just then.
_OWNER_TIMEOUT_S = 5.0
_IP_BIND_ADDRESS_NO_PORT = 24
# Rank 0 names the absent ranks at its deadline. All ranks wait so much longer to read the names.
_PLACE_GRACE_S = 0.5
_process = (os.getpid(), secrets.token_hex(16))


@dataclass(frozen=True)
class Job:
    """Rank 0's choices for all ranks."""

    name: str
    secret: bytes
    algorithm: str
    wire: str
    switch: str | None
    window_bytes: int
    probe: bool
    security: str
    no_switch: str  # why the switch that was named is not used; else empty


def claim(store: Store, rank: int, size: int, deadline: float) -> Store:
    """Claim this rank for a new generation of the group; returns the generation's own part of the store.

    A process may claim its rank again: torch reuses keys after destroy_process_group. All ranks do so equally often,
    and each time is a generation. RendezvousError if another process has this rank.
    """
    claims = store.add(f"claim/{rank}", 1)
    token = _process_token().encode()
    if claims == 1:
        store.set(f"owner/{rank}", token)
    else:
        try:
            owner = store.get(f"owner/{rank}", min(_left(deadline), _OWNER_TIMEOUT_S))
        except TimeoutError:
            owner = b""
        if owner != token:
            raise RendezvousError(
                f"rank {rank} of {size} was claimed {claims} times: two processes were started with the same rank "
                "(check RANK), or a former run's store is being used again",
                rank=rank,
            )
    return PrefixStore(store, f"{claims}/")


def _process_token() -> str:
    global _process
    if _process[0] != os.getpid():
        _process = (os.getpid(), secrets.token_hex(16))
    return _process[1]


def agree(store: Store, rank: int, size: int, options: Options, deadline: float) -> Job:
    """Rank 0 publishes the job; every rank reads it. `options` are resolved."""
    check_options(options, size)
    if rank == 0:
        job = propose(options, size)
        job["secret"] = secrets.token_hex(32)
        secret = security.job_secret(bytes.fromhex(str(job["secret"])), options.secret_file)
        job["check"] = security.digest_of(secret)
        store.set("job", json.dumps(job).encode())
    try:
        read = json.loads(store.get("job", _left(deadline)))
    except TimeoutError:
        raise RendezvousError(
            f"rank {rank}: rank 0 did not publish the job in time; did it start, and does it use the same store?",
            rank=0,
        ) from None
    # The exchange between ranks has no version of its own (docs/reference/versions.md).
    if read.get("netfold") != netfold.__version__:
        raise RendezvousError(
            f"rank {rank} runs netfold {netfold.__version__}, rank 0 runs {read.get('netfold', 'an earlier one')}: "
            "install the same version on every host of the job",
            rank=rank,
        )
    job_here = accept(read, rank, size, options, bytes.fromhex(read["secret"]))
    secret = security.job_secret(job_here.secret, options.secret_file)
    if security.digest_of(secret) != read["check"]:
        raise RendezvousError(
            f"rank {rank} has another secret than rank 0: every rank needs the same NETFOLD_SECRET_FILE, or none has "
            "one",
            rank=rank,
        )
    return replace(job_here, secret=secret)


def check_options(options: Options, size: int) -> None:
    """ValueError for options that no group can have. Every rank checks, so that none waits for a rank 0 that gave up.

    options: resolved.
    """
    no_switch = security.why_no_switch(str(options.security), options.switch)
    switch = None if no_switch else options.switch
    try:
        check_words(ranks=size, switch=switch, algorithm=str(options.algorithm), wire=str(options.wire_dtype))
        problem = security.why_not_secure(options)
        if problem:
            raise ValueError(problem)
    except ValueError as error:
        raise ValueError(f"{error}; {no_switch}" if no_switch else str(error)) from None


def propose(options: Options, size: int) -> dict[str, Any]:
    """Rank 0's choices, for `accept` on every rank."""
    own_security = str(options.security)
    return {
        "netfold": netfold.__version__,
        "name": secrets.token_hex(8),
        "size": size,
        "algorithm": options.algorithm,
        "wire": options.wire_dtype,
        "switch": None if security.why_no_switch(own_security, options.switch) else options.switch,
        "security": own_security,
        "window_bytes": options.window_bytes,
        "probe": options.probe == "on",
    }


def accept(read: dict[str, Any], rank: int, size: int, options: Options, secret: bytes) -> Job:
    """Compare rank 0's choices with this rank's options. RendezvousError where they do not fit."""
    own_security = str(options.security)
    no_switch = security.why_no_switch(own_security, options.switch)
    own_switch = None if no_switch else options.switch
    if read["size"] != size:
        raise RendezvousError(f"rank {rank} was told of {size} ranks, rank 0 of {read['size']} (check WORLD_SIZE)")
    if read["security"] != own_security:
        raise RendezvousError(
            f"rank {rank} has NETFOLD_SECURITY={own_security}, rank 0 has NETFOLD_SECURITY={read['security']}: every "
            "rank needs the same",
            rank=rank,
        )
    # Ranks may name different switches, as long as they name as many: the first ones of all ranks are in one tree, so
    # are the second ones, and so on (switch_tree.py).
    if len(switches_of(own_switch)) != len(switches_of(read["switch"])):
        refused = f" (rank {rank}: {no_switch})" if no_switch else ""
        raise RendezvousError(
            f"rank {rank} has NETFOLD_SWITCH={options.switch}, rank 0 has {read['switch']}: all ranks need as many, or "
            f"none{refused}",
            rank=rank,
        )
    fields = {name: read[name] for name in ("name", "algorithm", "wire", "switch", "window_bytes", "probe")}
    return Job(secret=secret, security=own_security, no_switch=no_switch, **fields)


@dataclass
class PeerAddresses:
    """The addresses where other ranks listen, and which of their addresses worked."""

    interfaces: Interfaces
    endpoints: list[list[tuple[str, int]]]  # by rank
    used: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # by rank and rail
    # By rank, this one included: the published addresses, and the host's identity.
    published: list[tuple[list[str], str]] = field(default_factory=list)
    # Failed tries, in words, each once. Several threads may record the same one.
    failed: dict[str, None] = field(default_factory=dict)

    def candidates(self, peer: int, rail: int) -> list[tuple[str, int]]:
        """Addresses to try, in order: first one that worked for this rank, then those that worked for others.

        Of named interfaces, only the rail's own until it has worked.
        """
        endpoints = self.endpoints[peer]
        if (peer, rail) in self.used:
            used = self.used[peer, rail]
            return [used, *(each for each in endpoints if each != used)]
        if self.interfaces.named:
            return [endpoints[rail]]
        # A copy: another thread of this rank may connect meanwhile, and enter the address that worked.
        working = {self.endpoints[other].index(used) for (other, _), used in self.used.copy().items()}
        return sorted(endpoints, key=lambda each: endpoints.index(each) not in working)

    def record_failures(self, errors: Iterable[str]) -> None:
        self.failed.update(dict.fromkeys(errors))

    def sources(self, peer: int) -> list[str]:
        """This host's addresses from which it reaches a rank, by rail; empty for a rank that it has no route to."""
        if self.interfaces.named:
            return list(self.interfaces.hosts)
        own = ""
        for host, port in self.candidates(peer, 0):
            # Connecting a datagram socket sends nothing, and finds the route.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as found, contextlib.suppress(OSError):
                found.connect((host, port))
                own = found.getsockname()[0]
                if own != host:  # else it is this host's address, too, as those of bridges often are
                    return [own]
        return [own] if own else []

    def source(self, rail: int) -> tuple[str, int] | None:
        """The address to connect from: the interface that the user named, else None for the routing table's choice."""
        return (self.interfaces.hosts[rail], 0) if self.interfaces.named else None


def connect_tree(
    store: Store,
    registered_group: RegisteredGroup,
    listener: Listener,
    interfaces: Interfaces,
    deadline: float,
    *,
    fabric: str | None = None,
    host: str = "",
) -> tuple[StartTree, PeerAddresses, list[list[int]]]:
    """Connect to this rank's neighbours in the tree; returns it with the addresses of all ranks, and the hosts' ranks.

    host: an identity that the ranks of one host share; empty for a rank that counts as a host of its own.
    Raises RendezvousError that names the ranks that did not come, or that use another fabric.
    """
    group = registered_group
    rank, size = group.rank, group.size
    publish_address(store, group, [format_endpoint(name, listener.port) for name in interfaces.hosts], fabric, host)
    peer_addresses = PeerAddresses(interfaces, [[] for _ in range(size)])
    published = _publish_places(store, group, fabric, deadline) if rank == 0 else None
    place, parent_at = _read_place(store, group, deadline)
    if size > _KEEPS_STORE:
        release(store)
    neighbours: set[int] = set(place.children)
    try:
        if place.parent is not None:
            neighbours.add(place.parent)
            peer_addresses.endpoints[place.parent] = _parsed(place.parent, parent_at)
            join(group, peer_addresses, place.parent, deadline)
        _await_connections(group, {(child, 0, 0) for child in place.children}, deadline)
        tree = StartTree(rank, place, SocketLinks(_first_streams(group, neighbours)), deadline)
        everyone = tree.broadcast(lambda: published, "the ranks learned each other's addresses")
    except BaseException as error:
        reason = _explain_absence(error, group, neighbours, peer_addresses)
        group.refuse_later(neighbours, failure_frame(reason))
        StartTree(rank, place, SocketLinks(_first_streams(group, neighbours)), deadline).fail(
            str(reason), getattr(reason, "rank", None)
        )
        raise reason from None
    assert everyone is not None
    peer_addresses.published = [(list(addresses), identity) for addresses, identity in everyone]
    for peer, (addresses, _) in enumerate(everyone):
        peer_addresses.endpoints[peer] = [] if peer == rank else _parsed(peer, addresses)
    return tree, peer_addresses, hosts_of([identity for _, identity in everyone])


def connected(group: RegisteredGroup, peer_addresses: PeerAddresses, peer: int, deadline: float) -> socket.socket:
    """The connection to a rank, which is made where there is none. Both ranks call this."""
    try:
        if (peer, 0, 0) not in group.accepted and peer < group.rank:
            join(group, peer_addresses, peer, deadline)
        _await_connections(group, {(peer, 0, 0)}, deadline)
    except BaseException as error:
        raise _explain_absence(error, group, {peer}, peer_addresses) from None
    return group.accepted[peer, 0, 0]


def join(group: RegisteredGroup, peer_addresses: PeerAddresses, peer: int, deadline: float) -> None:
    """Connect to the listener of a rank of the starting group."""
    hello = Hello(JOIN, handshake.token_of(group.secret), group.rank, peer, group.size, security=group.security)
    group.add_connection((peer, 0, 0), group.run(connect(peer_addresses, hello, group.secret, deadline)))


def _first_streams(group: RegisteredGroup, neighbours: set[int]) -> dict[int, socket.socket]:
    """Not those of other ranks: one that is ahead may have connected already, and sent what is not for the tree."""
    with group.changed:
        return {peer: group.accepted[peer, 0, 0] for peer in neighbours if (peer, 0, 0) in group.accepted}


def _explain_absence(
    error: BaseException, group: RegisteredGroup, expected: set[int], peer_addresses: PeerAddresses
) -> BaseException:
    """The error to raise: where the time is over, one that names the expected ranks that did not connect."""
    if not isinstance(error, TimeoutError):
        return error
    absent = sorted(peer for peer in expected if (peer, 0, 0) not in group.accepted)
    tried = f" Tried in vain: {'; '.join(peer_addresses.failed)}." if peer_addresses.failed else ""
    return RendezvousError(
        f"rank {group.rank}: rank {', '.join(map(str, absent))} of {group.size} did not connect in time; did every "
        f"rank start, and does {', '.join(peer_addresses.interfaces.hosts)} reach their hosts (NETFOLD_INTERFACE, "
        f"NETFOLD_PORTS)?{tried}",
        rank=absent[0] if absent else None,
    )


def publish_address(store: Store, group: RegisteredGroup, at: Sequence[str], fabric: str | None, host: str) -> None:
    """Tell rank 0 where this rank listens. host: as of `connect_tree`."""
    published = {"at": at, "rails": group.rails, "fabric": fabric, "host": host}
    store.set(_address(group.rank), json.dumps(published).encode())


def publish_failure(store: Store, rank: int, size: int, why: str) -> None:
    """Tell the ranks that wait for this one's addresses why there will be none."""
    with contextlib.suppress(Exception):  # then they find out at their deadline
        store.set(_address(rank), json.dumps({"gave_up": why}).encode())
        if rank == 0:
            _publish_refusal(store, size, {"gave_up": why, "rank": 0})


def _address(rank: int) -> str:
    return f"address/{rank}"


def _place(rank: int) -> str:
    return f"place/{rank}"


def hosts_of(identities: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, by their hosts' identities."""
    hosts: dict[str | int, list[int]] = {}
    for rank, identity in enumerate(identities):
        hosts.setdefault(identity or rank, []).append(rank)
    return list(hosts.values())


def _publish_places(
    store: Store, group: RegisteredGroup, fabric: str | None, deadline: float
) -> list[tuple[list[str], str]]:
    """At rank 0: read all addresses, and tell each rank its place in the tree. Returns addresses and hosts, by rank.

    So a rank reads one value of the store, not one for each other rank. Where a rank is absent, gave up, or does not
    fit, all ranks are told, and RendezvousError names it.
    """
    found: list[tuple[list[str], str]] = []
    try:
        keys = [_address(peer) for peer in range(group.size)]
        while len(found) < group.size:
            for value in get_first(store, keys[len(found) : len(found) + MAX_KEYS], _left(deadline)):
                peer, published = len(found), json.loads(value)
                if "gave_up" in published:
                    raise RendezvousError(f"rank {peer} could not join; it said: {published['gave_up']}", rank=peer)
                check_fit(published, peer, group.rank, group.rails, fabric)
                found.append((published["at"], published["host"]))
    except (TimeoutError, RendezvousError) as error:
        refusal: dict[str, Any] = {"absent": _absent(store, group)}
        if isinstance(error, RendezvousError):
            refusal = {"refused": str(error), "rank": error.rank}
        _publish_refusal(store, group.size, refusal)
        raise _refused(refusal, group) from None
    hosts = hosts_of([identity for _, identity in found])

    def place_of(rank: int, place: Place) -> tuple[str, bytes]:
        parent_at = [] if place.parent is None else found[place.parent][0]
        return _place(rank), json.dumps([place, parent_at]).encode()

    set_all(store, (place_of(*each) for each in places_of(hosts)))
    return found


def _publish_refusal(store: Store, size: int, refusal: dict[str, Any]) -> None:
    set_all(store, ((_place(peer), json.dumps(refusal).encode()) for peer in range(size)))


def _read_place(store: Store, group: RegisteredGroup, deadline: float) -> tuple[Place, list[str]]:
    """This rank's place in the tree, and its parent's addresses."""
    try:
        read = json.loads(store.get(_place(group.rank), _left(deadline) + _PLACE_GRACE_S))
    except TimeoutError:
        raise _refused({"absent": _absent(store, group)}, group) from None
    if isinstance(read, dict):
        raise _refused(read, group)
    (parent, leads, own_host, other_hosts, height), parent_at = read
    return Place(parent, leads, tuple(own_host), tuple(other_hosts), height), parent_at


def _refused(refusal: dict[str, Any], group: RegisteredGroup) -> RendezvousError:
    """The error for a group that does not form, as rank 0 or this rank found it out."""
    if "refused" in refusal:
        return RendezvousError(refusal["refused"], rank=refusal["rank"])
    if "gave_up" in refusal:
        return RendezvousError(
            f"rank {refusal['rank']} could not join; it said: {refusal['gave_up']}", rank=refusal["rank"]
        )
    absent = refusal["absent"] or [0]  # all came, and rank 0 did not say so
    return RendezvousError(
        f"rank {group.rank}: rank {', '.join(map(str, absent))} of {group.size} did not come in time; did every rank "
        "start, and does each reach the store that they meet by?",
        rank=absent[0],
    )


def _absent(store: Store, group: RegisteredGroup) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.rank and not _has(store, _address(peer))]


def _has(store: Store, key: str) -> bool:
    try:
        store.get(key, 0.0)
    except TimeoutError:
        return False
    return True


def check_fit(published: dict[str, Any], peer: int, rank: int, rails: int, fabric: str | None) -> None:
    """RendezvousError where the published fabric and rails of `peer` are not those of this rank."""
    if published["fabric"] != fabric:
        raise RendezvousError(
            f"rank {peer} is to go over {_describe_transport(published['fabric'])}, rank {rank} over "
            f"{_describe_transport(fabric)}: every rank needs the same (NETFOLD_TRANSPORT)",
            rank=peer,
        )
    if published["rails"] != rails:
        raise RendezvousError(
            f"rank {peer} names {published['rails']} interfaces, rank {rank} {rails}: every rank needs as "
            "many (NETFOLD_INTERFACE)",
            rank=peer,
        )


def _parsed(peer: int, addresses: Sequence[str]) -> list[tuple[str, int]]:
    return [parse_endpoint(each, what=f"rank {peer}'s address") for each in addresses]


def _describe_transport(fabric: str | None) -> str:
    return "TCP" if fabric is None else f"the fabric {fabric}"


def _await_connections(group: RegisteredGroup, keys: set[ConnectionKey], deadline: float) -> None:
    with group.changed:
        while group.duplicate is None and not keys <= group.accepted.keys():
            group.changed.wait(_left(deadline))
    if group.duplicate is not None:
        raise RendezvousError(
            f"rank {group.duplicate} connected to rank {group.rank} twice: two processes were started with the same "
            "rank",
            rank=group.duplicate,
        )


async def connect(peer_addresses: PeerAddresses, hello: Hello, secret: bytes, deadline: float) -> socket.socket:
    """An authenticated connection to a rank's listener, over the first of its addresses that works; non-blocking.

    Raises RendezvousError if nothing listens there any more, or another process does; TimeoutError at the deadline;
    handshake.RefusedError.
    """
    peer, rail, began = hello.target, hello.rail, time.monotonic()
    while True:
        errors: list[str] = []
        final = 0  # errors that further tries cannot fix
        for host, port in peer_addresses.candidates(peer, rail):
            where = format_endpoint(host, port)
            try:
                stream = await _try(peer_addresses, hello, secret, (host, port), deadline)
            except ConnectionRefusedError:
                final += 1
                errors.append(f"rank {peer} is not listening on {where} any more; it died or gave up")
            except handshake.GroupNotFoundError:
                final += 1
                errors.append(f"the process that listens on {where} is not rank {peer} of this group")
            except handshake.WrongSecretError:
                final += 1
                errors.append(
                    f"the process that listens on {where} is not rank {peer} of this job: it does not know the job's "
                    "secret"
                )
            except TimeoutError:
                errors.append(f"rank {peer} did not answer at {where} in time")
            except handshake.RefusedError:
                raise
            except (EOFError, ConnectionError):
                # The peer timed out, or is gone. The next try shows which.
                errors.append(f"rank {peer} at {where} closed the connection while it was made")
            except OSError as error:
                # A link that is down may come back; one that never was there will not.
                settles = error.errno == errno.EHOSTUNREACH and time.monotonic() - began < _SETTLES_S
                final += hello.purpose == JOIN and error.errno in _UNREACHABLE and not settles
                errors.append(
                    f"rank {hello.initiator} cannot reach rank {peer} at {where}: {error} (NETFOLD_INTERFACE)"
                )
            else:
                peer_addresses.used[peer, rail] = (host, port)
                peer_addresses.record_failures(errors)
                return stream
        if final and final == len(errors):
            raise RendezvousError("; ".join(errors), rank=peer)
        if time.monotonic() > deadline:
            peer_addresses.record_failures(errors)
            raise TimeoutError("; ".join(errors))
        await asyncio.sleep(_RETRY_S)


async def _try(
    peer_addresses: PeerAddresses, hello: Hello, secret: bytes, endpoint: tuple[str, int], deadline: float
) -> socket.socket:
    alone = len(peer_addresses.candidates(hello.target, hello.rail)) == 1
    timeout_s = _left(deadline) if alone else min(_left(deadline), _TRY_S)
    stream = socket.socket(socket.AF_INET6 if ":" in endpoint[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        source = peer_addresses.source(hello.rail)
        if source is not None:
            # A port at `connect`, where it need be free for this peer only: else a host runs out of ports.
            stream.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            stream.bind(source)
        await _connect_socket(stream, endpoint, timeout_s)
        # A busy peer replies late: wait until the deadline.
        left_s = _left(deadline)
        session = await asyncio.wait_for(handshake.initiate(stream, hello, secret), left_s)
        return secure_stream(stream, session)
    except asyncio.TimeoutError:
        stream.close()
        raise TimeoutError from None
    except BaseException:
        stream.close()
        raise


async def _connect_socket(stream: socket.socket, endpoint: tuple[str, int], timeout_s: float) -> None:
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(stream, endpoint), timeout_s)
    except OSError as error:
        # asyncio's own text names a call and not the reason.
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno)) from None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time to form the group is over")
    return left
