"""From a store to a mesh: every rank publishes its addresses and is connected with every other.

Rank i connects to the listeners (listener.py) of all ranks below it, once for each lane and rail. A connection counts
only after both ends have proved that they know the job's secret (handshake.py). Rank 0 draws the secret and puts it in
the store.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import netfold
from netfold.bootstrap import handshake, security
from netfold.bootstrap.addresses import Interfaces
from netfold.bootstrap.handshake import JOIN, Hello
from netfold.bootstrap.listener import ConnectionKey, Listener, RegisteredGroup
from netfold.bootstrap.secure_stream import secure_stream
from netfold.bootstrap.store import PrefixStore, Store
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import format_endpoint, parse_endpoint, switches_of
from netfold.tuning import check_words

Sockets = list[list[list[socket.socket]]]  # by lane, rank and rail; none at this rank

_RETRY_S = 0.05
_UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
# How long one of several addresses of a rank is tried. Once connected, its handshake is awaited until the deadline.
_TRY_S = 1.0
# Longest wait for the token of the process that has a rank: it is there unless that process died just then.
_OWNER_TIMEOUT_S = 5.0
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
    own_security = str(options.security)
    no_switch = security.why_no_switch(own_security, options.switch)
    own_switch = None if no_switch else options.switch
    # Every rank checks the options, so that none waits for a rank 0 that gave up on them.
    try:
        check_words(ranks=size, switch=own_switch, algorithm=str(options.algorithm), wire=str(options.wire_dtype))
        problem = security.why_not_secure(options)
        if problem:
            raise ValueError(problem)
    except ValueError as error:
        raise ValueError(f"{error}; {no_switch}" if no_switch else str(error)) from None
    version = netfold.__version__
    if rank == 0:
        job = {
            "netfold": version,
            "name": secrets.token_hex(8),
            "secret": secrets.token_hex(32),
            "size": size,
            "algorithm": options.algorithm,
            "wire": options.wire_dtype,
            "switch": own_switch,
            "security": own_security,
            "window_bytes": options.window_bytes,
            "probe": options.probe == "on",
        }
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
    if read.get("netfold") != version:
        raise RendezvousError(
            f"rank {rank} runs netfold {version}, rank 0 runs {read.get('netfold', 'an earlier one')}: install the "
            "same version on every host of the job",
            rank=rank,
        )
    if read["size"] != size:
        raise RendezvousError(f"rank {rank} was told of {size} ranks, rank 0 of {read['size']} (check WORLD_SIZE)")
    if read["security"] != own_security:
        raise RendezvousError(
            f"rank {rank} has NETFOLD_SECURITY={own_security}, rank 0 has NETFOLD_SECURITY={read['security']}: every "
            "rank needs the same",
            rank=rank,
        )
    secret = security.job_secret(bytes.fromhex(read["secret"]), options.secret_file)
    if security.digest_of(secret) != read["check"]:
        raise RendezvousError(
            f"rank {rank} has another secret than rank 0: every rank needs the same NETFOLD_SECRET_FILE, or none has "
            "one",
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

    def source(self, rail: int) -> tuple[str, int] | None:
        """The address to connect from: the interface that the user named, else None for the routing table's choice."""
        return (self.interfaces.hosts[rail], 0) if self.interfaces.named else None


def connect_mesh(
    store: Store,
    registered_group: RegisteredGroup,
    listener: Listener,
    interfaces: Interfaces,
    deadline: float,
    *,
    fabric: str | None = None,
) -> tuple[Sockets, PeerAddresses]:
    """Connect a socket for each lane, rank and rail; returns them with the addresses of all ranks.

    Raises RendezvousError that names the ranks that did not come, or that use another fabric.
    """
    group = registered_group
    rank, size, lanes, rails = group.rank, group.size, group.lanes, group.rails
    own = {"at": [format_endpoint(host, listener.port) for host in interfaces.hosts], "rails": rails, "fabric": fabric}
    store.set(_address(rank), json.dumps(own).encode())
    # All addresses before the first connection, so that all ranks learn at once of one that does not fit.
    peer_addresses = PeerAddresses(interfaces, _read_endpoints(store, group, fabric, deadline))
    keys = list(itertools.product(range(size), range(lanes), range(rails)))
    try:
        token = handshake.token_of(group.secret)
        for peer, lane, rail in keys:
            if peer < rank:
                hello = Hello(JOIN, token, rank, peer, size, lane, rail, group.security)
                group.accepted[peer, lane, rail] = connect(peer_addresses, hello, group.secret, deadline)
        _await_connections(group, {key for key in keys if key[0] > rank}, deadline)
    except BaseException as error:
        absent = sorted({key[0] for key in keys if key[0] != rank and key not in group.accepted})
        with group.changed:
            for stream in group.accepted.values():
                stream.close()
        if isinstance(error, TimeoutError):
            tried = f" Tried in vain: {'; '.join(peer_addresses.failed)}." if peer_addresses.failed else ""
            raise RendezvousError(
                f"rank {rank}: rank {', '.join(map(str, absent))} of {size} did not connect in time; did every rank "
                f"start, and does {', '.join(interfaces.hosts)} reach their hosts (NETFOLD_INTERFACE, NETFOLD_PORTS)?"
                f"{tried}",
                rank=absent[0] if absent else None,
            ) from None
        raise
    sockets: Sockets = [
        [[group.accepted[peer, lane, rail] for rail in range(rails)] if peer != rank else [] for peer in range(size)]
        for lane in range(lanes)
    ]
    for row in itertools.chain.from_iterable(sockets):
        for stream in row:
            stream.settimeout(_left(deadline))
    return sockets, peer_addresses


def publish_failure(store: Store, rank: int, why: str) -> None:
    """Tell the ranks that wait for this one's addresses why there will be none."""
    with contextlib.suppress(Exception):  # then they find out at their deadline
        store.set(_address(rank), json.dumps({"gave_up": why}).encode())


def _address(rank: int) -> str:
    return f"address/{rank}"


def _read_endpoints(
    store: Store, group: RegisteredGroup, fabric: str | None, deadline: float
) -> list[list[tuple[str, int]]]:
    """By rank; none of this rank. RendezvousError that names a rank that is absent, gave up, or does not fit."""
    others = [peer for peer in range(group.size) if peer != group.rank]
    endpoints: list[list[tuple[str, int]]] = [[] for _ in range(group.size)]
    try:
        for peer in others:
            published = json.loads(store.get(_address(peer), _left(deadline)))
            endpoints[peer] = _endpoints(published, group, peer, fabric)
    except TimeoutError:
        absent = [peer for peer in others if not endpoints[peer] and not _has(store, _address(peer))]
        raise RendezvousError(
            f"rank {group.rank}: rank {', '.join(map(str, absent))} of {group.size} did not come in time; did every "
            "rank start, and does each reach the store that they meet by?",
            rank=absent[0] if absent else None,
        ) from None
    return endpoints


def _has(store: Store, key: str) -> bool:
    try:
        store.get(key, 0.0)
    except TimeoutError:
        return False
    return True


def _endpoints(
    published: dict[str, Any], group: RegisteredGroup, peer: int, fabric: str | None
) -> list[tuple[str, int]]:
    if "gave_up" in published:
        raise RendezvousError(f"rank {peer} could not join; it said: {published['gave_up']}", rank=peer)
    if published["fabric"] != fabric:
        raise RendezvousError(
            f"rank {peer} is to go over {_describe_transport(published['fabric'])}, rank {group.rank} over "
            f"{_describe_transport(fabric)}: every rank needs the same (NETFOLD_TRANSPORT)",
            rank=peer,
        )
    if published["rails"] != group.rails:
        raise RendezvousError(
            f"rank {peer} names {published['rails']} interfaces, rank {group.rank} {group.rails}: every rank needs as "
            "many (NETFOLD_INTERFACE)",
            rank=peer,
        )
    return [parse_endpoint(each, what=f"rank {peer}'s address") for each in published["at"]]


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


def connect(peer_addresses: PeerAddresses, hello: Hello, secret: bytes, deadline: float) -> socket.socket:
    """An authenticated connection to a rank's listener, over the first of its addresses that works.

    Raises RendezvousError if nothing listens there any more, or another process does; TimeoutError at the deadline.
    """
    peer, rail = hello.target, hello.rail
    while True:
        errors: list[str] = []
        final = 0  # errors that further tries cannot fix
        for host, port in peer_addresses.candidates(peer, rail):
            where = format_endpoint(host, port)
            try:
                stream = _try(peer_addresses, hello, secret, (host, port), deadline)
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
            except (EOFError, ConnectionError):
                # The peer timed out, or is gone. The next try shows which.
                errors.append(f"rank {peer} at {where} closed the connection while it was made")
            except OSError as error:
                # A link that is down may come back; one that never was there will not.
                final += hello.purpose == JOIN and error.errno in _UNREACHABLE
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
        time.sleep(_RETRY_S)


def _try(
    peer_addresses: PeerAddresses, hello: Hello, secret: bytes, endpoint: tuple[str, int], deadline: float
) -> socket.socket:
    alone = len(peer_addresses.candidates(hello.target, hello.rail)) == 1
    timeout_s = _left(deadline) if alone else min(_left(deadline), _TRY_S)
    stream = socket.create_connection(endpoint, timeout_s, source_address=peer_addresses.source(hello.rail))
    try:
        # A busy peer replies late: wait until the deadline.
        stream.settimeout(_left(deadline))
        return secure_stream(stream, handshake.initiate(stream, hello, secret))
    except BaseException:
        stream.close()
        raise


def close_all(sockets: Sockets) -> None:
    for row in itertools.chain.from_iterable(sockets):
        for stream in row:
            stream.close()


def first_rail(lane: Sequence[Sequence[socket.socket]]) -> list[socket.socket | None]:
    """By rank, the socket that Python uses before the native engine takes over the sockets."""
    return [row[0] if row else None for row in lane]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time to form the group is over")
    return left
