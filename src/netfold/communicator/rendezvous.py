"""From a store to a mesh: every rank listens, leaves its address, and is connected with every other.

Rank i connects to all ranks below it, once for each lane. A connection counts only after both ends have proved, by HMAC
over fresh nonces, that they know the job's secret, which rank 0 drew and left in the store: a stranger that finds the
port is dropped, and cannot block the others, since each handshake has a deadline of its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import itertools
import json
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from netfold.communicator.errors import RendezvousError
from netfold.communicator.options import Options
from netfold.communicator.store import PrefixStore, Store
from netfold.control import format_endpoint, parse_endpoint, receive_exactly
from netfold.plan import check_words

_HELLO = struct.Struct(">8sIII32s")  # magic, rank, size, lane, nonce
_MAGIC = b"netfold2"
_PROOF_BYTES = 32
_WELCOME = b"+"
# A stranger holds a listener up for no longer than this.
_HANDSHAKE_TIMEOUT_S = 5.0
_RETRY_S = 0.05
ANY_PORT = range(1)  # the kernel's choice
_SIOCGIFADDR = 0x8915
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
    # Every rank looks at the words, so that none waits for a rank 0 that gave up over them.
    check_words(ranks=size, switch=options.switch, algorithm=str(options.algorithm), wire=str(options.wire))
    if rank == 0:
        job = {
            "name": secrets.token_hex(8),
            "secret": secrets.token_hex(32),
            "size": size,
            "algorithm": options.algorithm,
            "wire": options.wire,
            "switch": options.switch,
            "window_bytes": options.window_bytes,
            "probe": options.probe == "on",
        }
        store.set("job", json.dumps(job).encode())
    try:
        read = json.loads(store.get("job", _left(deadline)))
    except TimeoutError:
        raise RendezvousError(
            f"rank {rank}: rank 0 did not publish the job in time; did it start, and does it use the same store?",
            rank=0,
        ) from None
    if read["size"] != size:
        raise RendezvousError(f"rank {rank} was told of {size} ranks, rank 0 of {read['size']} (check WORLD_SIZE)")
    # Everyone uses what rank 0 chose; that another rank's environment says otherwise is worth an error, not a guess.
    if options.switch != read["switch"]:
        raise RendezvousError(
            f"rank {rank} has NETFOLD_SWITCH={options.switch}, rank 0 has {read['switch']}: all ranks need the same",
            rank=rank,
        )
    return Job(
        name=read["name"],
        secret=bytes.fromhex(read["secret"]),
        algorithm=read["algorithm"],
        wire=read["wire"],
        switch=read["switch"],
        window_bytes=int(read["window_bytes"]),
        probe=bool(read["probe"]),
    )


def local_host(options: Options, store_host: str | None) -> str:
    """The address to listen on: the named interface's, or the one from which the others' meeting point is reached."""
    if options.interface:
        return _interface_host(options.interface)
    towards = store_host
    if towards is None and options.switch is not None:
        towards = parse_endpoint(options.switch, what="NETFOLD_SWITCH")[0]
    if towards is None:
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        source = "the rendezvous" if store_host is not None else "NETFOLD_SWITCH"
        raise RendezvousError(f"{source} names {towards!r}, no host that is known here ({error.strerror})") from None
    except OSError as error:
        raise RendezvousError(f"no route to {towards} ({error}); name an interface by NETFOLD_INTERFACE") from None


def connect_mesh(
    store: Store,
    rank: int,
    size: int,
    host: str,
    secret: bytes,
    deadline: float,
    lanes: int = 1,
    ports: range = ANY_PORT,
) -> list[list[socket.socket | None]]:
    """For each lane one socket a rank, None at our own place. Listens on one of `ports` until all have come. Raises
    RendezvousError naming the ranks that did not come."""
    sockets: list[list[socket.socket | None]] = [[None] * size for _ in range(lanes)]
    if size == 1:
        return sockets
    with _listen(rank, host, ports, min(lanes * size + 16, 4096), deadline) as listener:
        store.set(f"address/{rank}", format_endpoint(host, listener.getsockname()[1]).encode())
        try:
            for peer in range(rank):
                for lane in range(lanes):
                    sockets[lane][peer] = _connect(store, rank, peer, size, lane, secret, deadline)
            while any(sockets[lane][peer] is None for lane in range(lanes) for peer in range(rank + 1, size)):
                accepted = _accept(listener, rank, size, lanes, secret, deadline)
                if accepted is None:
                    continue
                peer, lane, stream = accepted
                if peer <= rank or sockets[lane][peer] is not None:
                    stream.close()
                    raise RendezvousError(
                        f"rank {peer} connected to rank {rank} twice: two processes were started with the same rank",
                        rank=peer,
                    )
                sockets[lane][peer] = stream
        except BaseException as error:
            absent = [peer for peer in range(size) if peer != rank and any(row[peer] is None for row in sockets)]
            close_all(sockets)
            if isinstance(error, TimeoutError):
                raise RendezvousError(
                    f"rank {rank}: rank {', '.join(map(str, absent))} of {size} did not connect in time; did every "
                    f"rank start, and does {host} reach their hosts?",
                    rank=absent[0] if absent else None,
                ) from None
            raise
    return sockets


def _listen(rank: int, host: str, ports: range, backlog: int, deadline: float) -> socket.socket:
    """A listener on the first port that is free; other groups that are coming together leave theirs soon."""
    while True:
        for port in ports:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            try:
                # Connections of former groups keep the port, but nobody listens there.
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host, port))
                listener.listen(backlog)
                return listener
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise RendezvousError(
                        f"rank {rank} cannot listen on {format_endpoint(host, port)}: {error} (NETFOLD_INTERFACE)"
                    ) from None
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {rank}: no port of {ports.start}-{ports.stop - 1} is free on {host} (NETFOLD_PORTS); every rank "
                "of a host that comes into a group at the same time needs one"
            )
        time.sleep(_RETRY_S)


def close_all(sockets: list[list[socket.socket | None]]) -> None:
    for stream in itertools.chain.from_iterable(sockets):
        if stream is not None:
            stream.close()


def _connect(store: Store, rank: int, peer: int, size: int, lane: int, secret: bytes, deadline: float) -> socket.socket:
    host, port = parse_endpoint(store.get(f"address/{peer}", _left(deadline)).decode(), what=f"rank {peer}'s address")
    while True:
        try:
            stream = socket.create_connection((host, port), timeout=min(_left(deadline), _HANDSHAKE_TIMEOUT_S))
        except ConnectionRefusedError:
            raise RendezvousError(
                f"rank {peer} is not listening on {format_endpoint(host, port)} any more; it died or gave up",
                rank=peer,
            ) from None
        except TimeoutError:
            continue  # _left raises when the whole time is over
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} cannot reach rank {peer} at {format_endpoint(host, port)}: {error} (NETFOLD_INTERFACE)",
                rank=peer,
            ) from None
        # A busy peer answers handshakes one by one: wait for it as long as there is time.
        stream.settimeout(_left(deadline))
        try:
            if _prove(stream, rank, peer, size, lane, secret):
                return stream
        except (EOFError, ConnectionError):
            # It lost patience with us, or has just gone: the next try is answered, or refused.
            stream.close()
            time.sleep(_RETRY_S)
            continue
        except BaseException:
            stream.close()
            raise
        stream.close()
        raise RendezvousError(
            f"who listens on {format_endpoint(host, port)} is not rank {peer} of this job: it does not know the "
            "job's secret",
            rank=peer,
        )


def _prove(stream: socket.socket, rank: int, peer: int, size: int, lane: int, secret: bytes) -> bool:
    """The connecting side of the handshake; False when who listens does not know the secret."""
    mine = secrets.token_bytes(32)
    stream.sendall(_HELLO.pack(_MAGIC, rank, size, lane, mine))
    theirs = receive_exactly(stream, 32)
    proof = receive_exactly(stream, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"accept", mine, theirs, rank, peer, lane)):
        return False
    stream.sendall(_proof(secret, b"connect", mine, theirs, rank, peer, lane))
    receive_exactly(stream, len(_WELCOME))  # else we would count a connection that the peer has given up
    return True


def _accept(
    listener: socket.socket, rank: int, size: int, lanes: int, secret: bytes, deadline: float
) -> tuple[int, int, socket.socket] | None:
    listener.settimeout(_left(deadline))
    stream, _ = listener.accept()
    stream.settimeout(min(_left(deadline), _HANDSHAKE_TIMEOUT_S))
    try:
        magic, peer, peer_size, lane, theirs = _HELLO.unpack(receive_exactly(stream, _HELLO.size))
        if magic == _MAGIC and peer_size == size and peer < size and lane < lanes:
            mine = secrets.token_bytes(32)
            stream.sendall(mine + _proof(secret, b"accept", theirs, mine, peer, rank, lane))
            proof = receive_exactly(stream, _PROOF_BYTES)
            if hmac.compare_digest(proof, _proof(secret, b"connect", theirs, mine, peer, rank, lane)):
                stream.sendall(_WELCOME)
                return peer, lane, stream
    except (EOFError, OSError):
        pass
    stream.close()  # a stranger, or a peer that gave up: the real one, if any, is still to come
    return None


def _proof(secret: bytes, side: bytes, connecter: bytes, accepter: bytes, low: int, high: int, lane: int) -> bytes:
    message = side + connecter + accepter + struct.pack(">III", low, high, lane)
    return hmac.new(secret, message, hashlib.sha256).digest()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the time to come together is over")
    return left


def _interface_host(interface: str) -> str:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in interface else socket.AF_INET, interface)
        return interface  # an address already
    except OSError:
        pass
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(interface)[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RendezvousError(
                f"NETFOLD_INTERFACE={interface}: {error.strerror}; this host has {names} (give its address for IPv6)"
            ) from None
    return socket.inet_ntoa(packed[20:24])
