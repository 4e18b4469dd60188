"""From a store to a mesh: every rank leaves its addresses, and is connected with every other.

Rank i knocks at the listeners (listener.py) of all ranks below it, once for each lane and rail. A connection counts
only after both ends have proved that they know the job's secret, which rank 0 drew and left in the store
(handshake.py).
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
from netfold.bootstrap.listener import Listener, RegisteredGroup
from netfold.bootstrap.secure_stream import secure_stream
from netfold.bootstrap.store import PrefixStore, Store
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import format_endpoint, parse_endpoint, switches_of
from netfold.tuning import check_words

Sockets = list[list[list[socket.socket]]]  # by lane, rank and rail; none at our own place

_RETRY_S = 0.05
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EINVAL)
# One of several addresses of a rank is given up for the next after this; its handshake is waited for while it is alive.
_TRY_S = 1.0
# Longest wait for the word of whoever has a rank; it is there unless that process died right then.
_OWNER_TIMEOUT_S = 5.0
_process = (os.getpid(), secrets.token_hex(16))


@dataclass(frozen=True)
class Job:
    """What rank 0 decides for all."""

    name: str
    secret: bytes
    algorithm: str
    wire: str
    switch: str | None
    window_bytes: int
    probe: bool
    security: str
    no_switch: str  # why the switch that was named is not used; empty where it is, or none was


def claim(store: Store, rank: int, size: int, deadline: float) -> Store:
    """Take this rank, once a life of the group; the part of the store that this life has to itself.

    One process may come again: torch hands out the same keys after destroy_process_group. All ranks do so equally
    often, and each time is a life of its own. RendezvousError when another process has this rank.
    """
    claims = store.add(f"claim/{rank}", 1)
    me = _process_token().encode()
    if claims == 1:
        store.set(f"owner/{rank}", me)
    else:
        try:
            owner = store.get(f"owner/{rank}", min(_left(deadline), _OWNER_TIMEOUT_S))
        except TimeoutError:
            owner = b""
        if owner != me:
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
    # Every rank looks at the words, so that none waits for a rank 0 that gave up over them.
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
        drawn = bytes.fromhex(str(job["secret"]))
        job["check"] = security.digest_of(security.job_secret(drawn, options.secret_file))
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
    # Everyone uses what rank 0 chose; that another rank's environment says otherwise is worth an error, not a guess.
    # Which switches is each rank's own affair, as long as there are as many, and the first of all are in one tree, the
    # second in one, and so on (switch_tree.py).
    if len(switches_of(own_switch)) != len(switches_of(read["switch"])):
        refused = f" (rank {rank}: {no_switch})" if no_switch else ""
        raise RendezvousError(
            f"rank {rank} has NETFOLD_SWITCH={options.switch}, rank 0 has {read['switch']}: all ranks need as many, or "
            f"none{refused}",
            rank=rank,
        )
    return Job(
        name=read["name"],
        secret=secret,
        algorithm=read["algorithm"],
        wire=read["wire"],
        switch=read["switch"],
        window_bytes=int(read["window_bytes"]),
        probe=bool(read["probe"]),
        security=own_security,
        no_switch=no_switch,
    )


@dataclass
class PeerAddresses:
    """Where the other ranks listen, and which of their addresses has been found to lead there."""

    interfaces: Interfaces
    endpoints: list[list[tuple[str, int]]]  # by rank
    used: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # by rank and rail
    failed: list[str] = field(default_factory=list)  # what was tried in vain, in words

    def candidates(self, peer: int, rail: int) -> list[tuple[str, int]]:
        """In order: what led there before, or leads to others; of named interfaces only the rail's own at first."""
        endpoints = self.endpoints[peer]
        if (peer, rail) in self.used:
            first = self.used[peer, rail]
            return [first, *(each for each in endpoints if each != first)]
        if self.interfaces.named:
            return [endpoints[rail]]
        places = {self.endpoints[other].index(used) for (other, _), used in self.used.items()}
        return sorted(endpoints, key=lambda each: endpoints.index(each) not in places)

    def record_failures(self, errors: Iterable[str]) -> None:
        self.failed.extend(error for error in dict.fromkeys(errors) if error not in self.failed)

    def source(self, rail: int) -> tuple[str, int] | None:
        """What to connect from: the interface that the user named; else what the routing table says."""
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
    """A socket a lane, rank and rail, and where the ranks are. Raises RendezvousError naming the ranks that did not
    come, or that are to go over another fabric."""
    rank, size, lanes, rails = (
        registered_group.rank,
        registered_group.size,
        registered_group.lanes,
        registered_group.rails,
    )
    mine = {"at": [format_endpoint(host, listener.port) for host in interfaces.hosts], "rails": rails, "fabric": fabric}
    store.set(_address(rank), json.dumps(mine).encode())
    # All before the first connection: whoever cannot be of this group is known to everybody then, and at once.
    peer_addresses = PeerAddresses(interfaces, _everybodys_endpoints(store, registered_group, fabric, deadline))
    places = list(itertools.product(range(size), range(lanes), range(rails)))
    try:
        for peer, lane, rail in places:
            if peer < rank:
                token = handshake.token_of(registered_group.secret)
                hello = Hello(JOIN, token, rank, peer, size, lane, rail, registered_group.security)
                registered_group.accepted[peer, lane, rail] = connect(
                    peer_addresses, hello, registered_group.secret, deadline
                )
        _await_arrivals(registered_group, {place for place in places if place[0] > rank}, deadline)
    except BaseException as error:
        absent = sorted({place[0] for place in places if place[0] != rank and place not in registered_group.accepted})
        with registered_group.changed:
            for stream in registered_group.accepted.values():
                stream.close()
        if isinstance(error, TimeoutError):
            raise RendezvousError(
                f"rank {rank}: rank {', '.join(map(str, absent))} of {size} did not connect in time; did every rank "
                f"start, and does {', '.join(interfaces.hosts)} reach their hosts (NETFOLD_INTERFACE, NETFOLD_PORTS)?"
                f"{_tried(peer_addresses)}",
                rank=absent[0] if absent else None,
            ) from None
        raise
    sockets: Sockets = [
        [
            [registered_group.accepted[peer, lane, rail] for rail in range(rails)] if peer != rank else []
            for peer in range(size)
        ]
        for lane in range(lanes)
    ]
    for row in itertools.chain.from_iterable(sockets):
        for stream in row:
            stream.settimeout(_left(deadline))
    return sockets, peer_addresses


def _tried(peer_addresses: PeerAddresses) -> str:
    return f" Tried in vain: {'; '.join(peer_addresses.failed)}." if peer_addresses.failed else ""


def publish_failure(store: Store, rank: int, why: str) -> None:
    """Tell the ranks that wait for this one's addresses that there will be none."""
    with contextlib.suppress(Exception):  # who cannot be told finds out by waiting
        store.set(_address(rank), json.dumps({"gave_up": why}).encode())


def _address(rank: int) -> str:
    return f"address/{rank}"


def _everybodys_endpoints(
    store: Store, registered_group: RegisteredGroup, fabric: str | None, deadline: float
) -> list[list[tuple[str, int]]]:
    """By rank; none of our own. RendezvousError that names who is absent, gave up, or is to go another way."""
    others = [peer for peer in range(registered_group.size) if peer != registered_group.rank]
    endpoints: list[list[tuple[str, int]]] = [[] for _ in range(registered_group.size)]
    try:
        for peer in others:
            endpoints[peer] = _endpoints(
                json.loads(store.get(_address(peer), _left(deadline))), registered_group, peer, fabric
            )
    except TimeoutError:
        absent = [peer for peer in others if not endpoints[peer] and not _is_there(store, _address(peer))]
        raise RendezvousError(
            f"rank {registered_group.rank}: rank {', '.join(map(str, absent))} of {registered_group.size} did not "
            f"come in time; did "
            "every rank start, and does each reach the store that they meet by?",
            rank=absent[0] if absent else None,
        ) from None
    return endpoints


def _is_there(store: Store, key: str) -> bool:
    try:
        store.get(key, 0.0)
    except TimeoutError:
        return False
    return True


def _endpoints(
    theirs: dict[str, Any], registered_group: RegisteredGroup, peer: int, fabric: str | None
) -> list[tuple[str, int]]:
    if "gave_up" in theirs:
        raise RendezvousError(f"rank {peer} could not join; it said: {theirs['gave_up']}", rank=peer)
    if theirs["fabric"] != fabric:
        raise RendezvousError(
            f"rank {peer} is to go over {_way(theirs['fabric'])}, rank {registered_group.rank} over {_way(fabric)}: "
            f"every rank "
            "needs the same (NETFOLD_TRANSPORT)",
            rank=peer,
        )
    if theirs["rails"] != registered_group.rails:
        raise RendezvousError(
            f"rank {peer} names {theirs['rails']} interfaces, rank {registered_group.rank} {registered_group.rails}: "
            f"every rank needs "
            "as many (NETFOLD_INTERFACE)",
            rank=peer,
        )
    return [parse_endpoint(each, what=f"rank {peer}'s address") for each in theirs["at"]]


def _way(fabric: str | None) -> str:
    return "TCP" if fabric is None else "MPI" if fabric == "mpi" else f"the fabric {fabric}"


def _await_arrivals(registered_group: RegisteredGroup, places: set[tuple[int, int, int]], deadline: float) -> None:
    with registered_group.changed:
        while registered_group.duplicate is None and not places <= registered_group.accepted.keys():
            registered_group.changed.wait(_left(deadline))
    if registered_group.duplicate is not None:
        raise RendezvousError(
            f"rank {registered_group.duplicate} connected to rank {registered_group.rank} twice: two processes were "
            f"started with the same "
            "rank",
            rank=registered_group.duplicate,
        )


def connect(peer_addresses: PeerAddresses, hello: Hello, secret: bytes, deadline: float) -> socket.socket:
    """A connection to a rank's listener that both ends have proved, over the first of its addresses that leads there.

    Raises RendezvousError when nobody listens there any more, or somebody else does; TimeoutError at the deadline.
    """
    peer, rail = hello.target, hello.rail
    while True:
        errors: list[str] = []
        final = 0  # errors that time will not mend
        for host, port in peer_addresses.candidates(peer, rail):
            where = format_endpoint(host, port)
            try:
                stream = _try(peer_addresses, hello, secret, (host, port), deadline)
            except ConnectionRefusedError:
                final += 1
                errors.append(f"rank {peer} is not listening on {where} any more; it died or gave up")
            except handshake.GroupNotFoundError:
                final += 1
                errors.append(f"who listens on {where} is not rank {peer} of this group")
            except handshake.WrongSecretError:
                final += 1
                errors.append(
                    f"who listens on {where} is not rank {peer} of this job: it does not know the job's secret"
                )
            except TimeoutError:
                errors.append(f"rank {peer} did not answer at {where} in time")
            except (EOFError, ConnectionError):
                # It lost patience with us, or has just gone: the next try is answered, or refused.
                errors.append(f"rank {peer} at {where} closed the connection while it was made")
            except OSError as error:
                # A link that is down may come back; one that never was there will not.
                final += hello.purpose == JOIN and error.errno in _NO_WAY
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
    patience_s = _left(deadline) if alone else min(_left(deadline), _TRY_S)
    stream = socket.create_connection(endpoint, patience_s, source_address=peer_addresses.source(hello.rail))
    try:
        # A busy peer answers late: wait for it as long as there is time.
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
    """By rank: what ranks speak over before the native floor takes the sockets."""
    return [row[0] if row else None for row in lane]


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time to come together is over")
    return left
