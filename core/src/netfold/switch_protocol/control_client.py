"""A rank's control connection to a switch: connect, authenticate the switch, send messages, receive the replies.

Membership (communicator/membership.py) keeps such a connection for as long as a job; `query_quota` and
`query_path_to_root` (communicator/switch_tree.py) ask one question and close it. A switch connects to its parent from
its own event loop instead (switch/parent.py). What both say and accept is in `control_messages`, `pinned_tls`,
`packet_keys` and `data_path`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from netfold._native import auth, protocol
from netfold.errors import SwitchError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_messages import Message, ReplyError, format_endpoint, parse_switch
from netfold.switch_protocol.data_path import ReceiveBuffer
from netfold.switch_protocol.pinned_tls import FingerprintError, PinnedStream

# Added to a deadline: the switch reports a passed deadline itself, and its reason is the better one.
GRACE_S = 2.0
# How long, and with how many packets, `query_quota` tests whether UDP passes.
UDP_S, _UDP_TRIES = 1.0, 5


class UnreachableError(SwitchError):
    """Nobody answers at the switch's address."""


class ControlClient:
    """One open control connection. One thread may receive while any number of threads send."""

    def __init__(self, stream: socket.socket, endpoint: str, name: str, credential: bytes | None) -> None:
        """stream: connected and authenticated; owned from here on.

        endpoint: the switch's host:port, without the fingerprint.
        name: what error texts call the switch, with this rank.
        credential: for this switch, sent with the first message; None where there is no token.
        """
        self.endpoint = endpoint
        self.name = name
        self.authenticated = isinstance(stream, PinnedStream)  # whether the switch proved its fingerprint
        self._stream = stream
        self._credential = credential
        self._send_lock = threading.Lock()

    @property
    def local_host(self) -> str:
        return str(self._stream.getsockname()[0])

    @property
    def remote_host(self) -> str:
        return str(self._stream.getpeername()[0])

    def send(self, message: Message) -> None:
        with self._send_lock:
            control_messages.send(self._stream, message)

    def send_first(self, message: Message) -> None:
        """Send the first message of a connection: the version and the credential are added."""
        self.send(control_messages.first_message(message, self._credential))

    def set_blocking(self) -> None:
        """Let `receive` and `send` wait without a timeout from here on."""
        self._stream.settimeout(None)

    def receive(self) -> Message:
        return control_messages.receive(self._stream)

    def expect(self, kind: str, deadline: float, *, is_first: bool = False) -> Message:
        """Receive a message of this kind. Raises TimeoutError, and as `control_messages.check_reply` does."""
        self._stream.settimeout(max(0.01, deadline + GRACE_S - time.monotonic()))
        message = control_messages.receive(self._stream)
        control_messages.check_reply(message, kind, us="this worker", is_first=is_first)
        return message

    def leave(self, message: Message) -> None:
        """Send a last message, for at most a second, and close the connection."""
        with contextlib.suppress(OSError):
            with self._send_lock:
                self._stream.settimeout(1.0)
                control_messages.send(self._stream, message)
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def close(self) -> None:
        self._stream.close()

    def udp_error(self, test: Message) -> str:
        """Return why the switch's UDP port sends no packet back; empty where it does. test: `udp` of a quota reply."""
        own, peer, port = self._stream.getsockname(), self._stream.getpeername(), int(test["port"])
        # As long as the shortest packets that a job can have, from the address that they would come from.
        packet = bytes(test["nonce"]).ljust(control_messages.PAYLOAD_CANDIDATES[-1] + protocol.HEADER_BYTES, b"\0")
        with socket.socket(socket.AF_INET6 if ":" in own[0] else socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.bind((own[0], 0, *own[2:]))
            udp.connect((peer[0], port, *peer[2:]))
            udp.settimeout(UDP_S / _UDP_TRIES)
            for _ in range(_UDP_TRIES):
                # TimeoutError is an OSError. A firewall may also reject the packet on either side.
                with contextlib.suppress(OSError):
                    udp.send(packet)
                    if udp.recv(len(packet) + 1) == packet:
                        return ""
        return (
            f"{self.name} is reached by TCP, but no UDP packet came back from its port {port}: a firewall may drop "
            "UDP, or an address translation change its port"
        )


@dataclass(frozen=True)
class SwitchAccess:
    """All that a rank needs to reach a switch and join it, the first time and again after a loss."""

    endpoint: str  # of the rank's own switch, as NETFOLD_SWITCH names it
    token_file: str | None  # from it a credential is made, for a switch with the fingerprint that the endpoint names
    rank: int
    workers: tuple[int, ...]  # the ranks that join, in worker order
    security: str = "none"
    name: str = ""  # the job's name in the switch's log and metrics
    window_bytes: int = 1 << 20
    fabric: str | None = None  # the provider that packets go over; None for UDP

    def require_keys(self, endpoint: str) -> None:
        """Raise SwitchError where packets to this switch would have no keys, and `security` is more than none."""
        host, port, fingerprint = parse_switch(endpoint, what="NETFOLD_SWITCH")
        if self.security != "none" and fingerprint is None:
            raise SwitchError(
                f"rank {self.rank}: the switch at {format_endpoint(host, port)} has no keys, and "
                f"NETFOLD_SECURITY={self.security}",
                remedy="start it with --token-file, and name it with its fingerprint",
            )


@contextlib.contextmanager
def connected(access: SwitchAccess, endpoint: str, timeout_s: float) -> Iterator[ControlClient]:
    """Connect to the switch at `endpoint`, and explain errors of the block as a SwitchError. The caller closes.

    An error in the block closes the connection.
    UnreachableError where nobody answers; SwitchError for a wrong address, token or fingerprint.
    """
    access.require_keys(endpoint)
    host, port, fingerprint = parse_switch(endpoint, what="NETFOLD_SWITCH")
    address = format_endpoint(host, port)
    name = f"rank {access.rank}: the switch at {address} (NETFOLD_SWITCH)"
    credential = _credential(name, access.token_file, fingerprint)
    if fingerprint is not None and auth.unavailable_reason():
        raise SwitchError(
            f"{name} wants packets to be authenticated, and this host cannot: {auth.unavailable_reason()}",
            remedy="without it only a switch with --open can be joined",
        )
    stream = _connect(name, host, port, address, timeout_s)
    client = ControlClient(_authenticate(name, stream, fingerprint), address, name, credential)
    try:
        yield client
    except TimeoutError:
        client.close()
        alone = len(access.workers) == 1
        missing = "it is stopped" if alone else f"not all of the {len(access.workers)} ranks joined"
        raise SwitchError(
            f"{name} did not answer within {timeout_s:.1f} s: either it is no netfold switch, or {missing}",
            remedy="check the address" + ("" if alone else ", and that every rank of the job started"),
        ) from None
    except ReplyError as error:
        client.close()
        raise SwitchError(f"{name} {error}", remedy=error.remedy) from None
    except (EOFError, OSError, KeyError, TypeError, ValueError) as error:
        client.close()
        hint = "" if fingerprint else "; one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint"
        what = f"{name} is no netfold switch, or it stopped while this rank joined: {error}"
        raise SwitchError(what, remedy=f"check the address{hint}") from None
    except BaseException:
        client.close()
        raise


class AvailableQuota(NamedTuple):
    """The quota that a switch can still grant to a holder of this token."""

    jobs: int
    workers: int
    memory_bytes: int
    slots: int  # -1 where only the memory bounds them
    udp_error: str = ""  # why UDP does not pass, though TCP does; empty where it passes or was not tested
    buffer_bytes: int = 0  # with window_bytes, the switch's `ReceiveBuffer`; 0 where not reported
    window_bytes: int = 0
    threads: int = 1  # that handle packets

    @property
    def buffer(self) -> ReceiveBuffer:
        return ReceiveBuffer(self.buffer_bytes, self.window_bytes)


def query_quota(
    endpoint: str, *, token_file: str | None, rank: int, timeout_s: float, udp: bool = False
) -> AvailableQuota:
    """Ask the switch at `endpoint` what it can still grant. Reserves nothing.

    udp: also test whether UDP passes both ways. Cost: a round trip; UDP_S where UDP does not pass.
    Raises SwitchError where the switch cannot be asked, or refuses.
    """
    deadline = time.monotonic() + timeout_s
    with connected(SwitchAccess(endpoint, token_file, rank, (rank,)), endpoint, timeout_s) as client:
        client.send_first({"type": "quota", **({"udp": True} if udp else {})})
        reply = client.expect("quota", deadline, is_first=True)
        quota = AvailableQuota(
            **{name: int(reply[name]) for name in ("jobs", "workers", "memory_bytes", "slots")},
            udp_error=client.udp_error(reply["udp"]) if "udp" in reply else "",
            buffer_bytes=int(reply.get("buffer_bytes", 0)),
            window_bytes=int(reply.get("window_bytes", 0)),
            threads=max(1, int(reply.get("threads", 1))),
        )
        client.close()
    return quota


def _connect(name: str, host: str, port: int, address: str, timeout_s: float) -> socket.socket:
    try:
        stream = socket.create_connection((host, port), timeout=timeout_s)
        # A message that follows another one waits for no delayed acknowledgement.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream
    except ConnectionRefusedError:
        raise UnreachableError(
            f"{name} refused the connection: nothing listens there",
            remedy=f"start it with `netfold switch --listen {address}`, or unset NETFOLD_SWITCH to use host algorithms",
        ) from None
    except socket.gaierror as error:
        what = f"{name}: {host!r} is no host that is known here ({error.strerror})"
        raise SwitchError(what, remedy="correct the name, or give the address") from None
    except TimeoutError:
        raise UnreachableError(
            f"{name} did not answer within {timeout_s:.1f} s",
            remedy="check the address, and whether a firewall drops what this host sends there",
        ) from None
    except OSError as error:
        what = f"{name} cannot be reached: {error.strerror or error}"
        raise UnreachableError(what, remedy="check the address and this host's routes") from None


def _authenticate(name: str, stream: socket.socket, fingerprint: str | None) -> socket.socket:
    """TLS with a switch that has the fingerprint; the plain stream where none is named."""
    if fingerprint is None:
        return stream
    try:
        return PinnedStream(stream, fingerprint)
    except FingerprintError as error:
        raise SwitchError(
            f"{name} is not the one that NETFOLD_SWITCH names: {error}. Either it was started again without "
            "--state-dir, or somebody else answers there; nothing was sent",
            remedy="if it is yours, set NETFOLD_SWITCH to what it says when it starts",
        ) from None
    except (EOFError, OSError) as error:  # ssl.SSLError is an OSError
        what = error.reason if isinstance(error, ssl.SSLError) else error
        raise SwitchError(
            f"{name} did not shake hands ({what}): is it a netfold switch, started with --token-file? One that is open "
            "speaks no TLS and has no fingerprint",
            remedy="check the address; for an open switch, leave #fingerprint out and unset NETFOLD_TOKEN_FILE",
        ) from None


def _credential(name: str, token_file: str | None, fingerprint: str | None) -> bytes | None:
    if token_file is None:
        return None
    if fingerprint is None:
        raise SwitchError(
            f"{name}: NETFOLD_TOKEN_FILE is set, and NETFOLD_SWITCH has no fingerprint: no certificate proves "
            "which switch answers there",
            remedy="set NETFOLD_SWITCH to all of what the switch says when it starts, host:port#fingerprint",
        )
    try:
        token = control_messages.read_private(token_file).strip()
        control_messages.check_token(token)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        remedy = "write the token that the switch's operator gave you there, and let nobody else read it (mode 600)"
        raise SwitchError(f"{name}: NETFOLD_TOKEN_FILE={token_file}: {why}", remedy=remedy) from None
    return control_messages.credential_of(token, fingerprint)
