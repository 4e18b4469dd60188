"""A rank's membership of a job on a switch: joining, and hearing who left.

Where several ranks share memory, one of a host joins, for all of them: a worker is a rank that joined, and the switch
calls it by its rank.

The control connection lives as long as the membership. A daemon thread reads it; another looks at what comes of
operations. The switch is lost when the connection ends, and when nothing comes back for a while and it does not answer
a question over the connection either: one that waits for a rank does answer, and says for which. What is done about it
is another's (recovery.py). A rank that left fails the group only when a chunk is waiting for it, since one that leaves
after its last contribution harms nobody; and only if it is gone, and has not just lost its connection to the switch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from netfold import control
from netfold._native import protocol
from netfold._native.transport import UdpPort
from netfold.communicator.errors import RendezvousError, SwitchError
from netfold.communicator.pinned import FingerprintError, PinnedStream

# Longest first; the first whose packets come back from the switch is used. 8896 bytes fill a jumbo frame (MTU 9000)
# with headers and an authentication tag, 1408 an MTU of 1500; 1152 fits IPv6's least MTU of 1280. Longer packets, on
# loopback, measured no faster, and a small operation pads to a whole packet.
PAYLOAD_CANDIDATES = (8896, protocol.ETHERNET_PAYLOAD_BYTES, 1152)
_PROBE_S = 0.12
# How often a rank that waits looks whether it waits for one that has left, or for a switch that is silent.
_WATCH_S = 0.2
# Several of the longest timeouts without a result, and as long again and more for the word that all is well.
_QUIET_S = 1.0
_WORD_S = 3.0
# Time beyond the job's own for the switch's word that it has given up.
_GRACE_S = 2.0


class Membership:
    """Made by `join`. `attach` or `stand_by` hands the data port to the native group; `listen` says what is heard."""

    def __init__(self, stream: socket.socket | PinnedStream, endpoint: str, rank: int, workers: Sequence[int]) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.workers = tuple(workers)
        self.payload_bytes = 0
        self.window = 0
        self._stream = stream
        self.life = 0  # names this membership and no other (collective::Channel::life)
        self._port: UdpPort | None = None
        self._attach_arguments: dict[str, Any] = {}
        self._send_lock = threading.Lock()
        self._serials = itertools.count(1)
        self._answers: dict[int, list[int]] = {}
        self._answered = threading.Condition()
        self._left: dict[int, tuple[str, int]] = {}  # why, and the rank at fault
        self._given_up = False
        self._closed = False

    @classmethod
    def join(
        cls,
        endpoint: str,
        *,
        job: str,
        name: str,
        token_file: str | None,
        rank: int,
        workers: Sequence[int],
        window_bytes: int,
        timeout_s: float,
    ) -> Membership:
        """Join `job` at the switch as `rank`, one of `workers`; returns when all have.

        job: the digest that names it to the switch; name: what people call it; token_file: sent only to a switch whose
        certificate has the fingerprint that `endpoint` names. SwitchError says what failed.
        """
        deadline = time.monotonic() + timeout_s
        switch_host, switch_port, fingerprint = control.parse_switch(endpoint, what="NETFOLD_SWITCH")
        endpoint = control.format_endpoint(switch_host, switch_port)
        who = f"rank {rank}: the switch at {endpoint} (NETFOLD_SWITCH)"
        token = _token(who, token_file, fingerprint)
        try:
            stream = socket.create_connection((switch_host, switch_port), timeout=timeout_s)
        except ConnectionRefusedError:
            raise SwitchError(
                f"{who} refused the connection: nothing listens there. Start it with `netfold switch --listen "
                f"{endpoint}`, or unset NETFOLD_SWITCH to use host algorithms"
            ) from None
        except socket.gaierror as error:
            raise SwitchError(f"{who}: {switch_host!r} is no host that is known here ({error.strerror})") from None
        except TimeoutError:
            raise SwitchError(f"{who} did not answer within {timeout_s:.1f} s; is the address right?") from None
        except OSError as error:
            raise SwitchError(f"{who} cannot be reached: {error.strerror or error}") from None
        self = cls(_shake_hands(who, stream, fingerprint), endpoint, rank, workers)
        try:
            self._join(who, job, name, token, window_bytes, deadline, timeout_s)
        except TimeoutError:
            stream.close()
            raise SwitchError(
                f"{who} did not answer within {timeout_s:.1f} s: either it is no netfold switch, or not all of the "
                f"{len(workers)} ranks joined"
            ) from None
        except (EOFError, OSError, KeyError, TypeError, ValueError) as error:
            stream.close()
            hint = "" if fingerprint else "; one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint"
            raise SwitchError(
                f"{who} is no netfold switch, or it stopped while this rank joined: {error}{hint}"
            ) from None
        except BaseException:
            stream.close()
            raise
        return self

    def _join(
        self, who: str, job: str, name: str, token: str | None, window_bytes: int, deadline: float, timeout_s: float
    ) -> None:
        control.send(
            self._stream,
            {
                **({"token": token} if token is not None else {}),
                "type": "join",
                "version": control.VERSION,
                "job": job,
                "name": name,
                "rank": self.rank,
                "ranks": list(self.workers),
                "window_bytes": window_bytes,
                "timeout_s": timeout_s,
            },
        )
        admitted = self._expect("admitted", who, deadline)
        switch_host = self._stream.getpeername()[0]
        # From the address that the control connection uses: the switch may see another host otherwise.
        local = self._stream.getsockname()[0]
        self._port = UdpPort(host=local, buffer_bytes=4 * window_bytes)
        payload = self._probe(switch_host, admitted, deadline)
        if payload is None:
            raise SwitchError(
                f"{who} is reached by TCP, but no UDP packet came back from its data port {admitted['port']}: a "
                "firewall may drop UDP"
            )
        control.send(self._stream, {"type": "ready", "payload_bytes": payload})
        start = self._expect("start", who, deadline)
        self.payload_bytes = int(start["payload_bytes"])
        self.window = int(start["window"])
        self.life = int(admitted["incarnation"]) << 32 | int(start["epoch"])
        self._attach_arguments = {
            "host": switch_host,
            "to_port": int(admitted["port"]),
            "job": int(admitted["job_id"]),
            "epoch": int(start["epoch"]),
            "incarnation": int(admitted["incarnation"]),
            "worker": int(admitted["worker"]),
            "ranks": list(self.workers),
            "window": self.window,
            "payload_bytes": self.payload_bytes,
        }

    def _probe(self, switch_host: str, admitted: control.Message, deadline: float) -> int | None:
        assert self._port is not None
        for payload in PAYLOAD_CANDIDATES:
            last = payload == PAYLOAD_CANDIDATES[-1]
            seconds = max(0.0, deadline - time.monotonic()) if last else _PROBE_S
            if self._port.hello(
                host=switch_host,
                port=int(admitted["port"]),
                job=int(admitted["job_id"]),
                incarnation=int(admitted["incarnation"]),
                worker=int(admitted["worker"]),
                nonce=int(admitted["nonce"]),
                packet_bytes=payload + protocol.HEADER_BYTES,
                timeout_ns=int(min(seconds, 5.0) * 1e9),
            ):
                return payload
        return None

    def _expect(self, kind: str, who: str, deadline: float) -> control.Message:
        self._stream.settimeout(max(0.01, deadline + _GRACE_S - time.monotonic()))
        message = control.receive(self._stream)
        if message["type"] == "refused":
            raise SwitchError(f"{who} refused: {message.get('reason')}")
        if message["type"] != kind:
            raise control.ProtocolError(f"expected {kind!r}, got {message['type']!r}")
        return message

    def attach(self, native: Any, rows: Sequence[tuple[int, int, int]], table_hash: int) -> None:
        """Give the data port to a native group that has none; `rows` and hash of the table without a switch."""
        native.attach(self._port, **self._attach_arguments, rows=rows, table_hash=table_hash)
        self._port = None

    def stand_by(self, native: Any) -> None:
        """Give the data port to a native group whose switch is lost, for the day when all ranks are told to go on."""
        native.stand_by(self._port, **self._attach_arguments)
        self._port = None

    def listen(
        self,
        native: Any,
        fail: Callable[[str, int, str], None],
        lost: Callable[[int, str], None],
        is_alive: Callable[[int], bool],
    ) -> None:
        """Begin to listen. `fail(kind, rank, text)` ends the group; `lost(life, why)`: the switch is; `is_alive`:
        whether a rank that the switch calls gone is there, and in the group."""
        self._stream.settimeout(None)
        for target, arguments in ((self._listen, (lost,)), (self._watch, (native, fail, lost, is_alive))):
            threading.Thread(target=target, args=arguments, name="netfold-membership", daemon=True).start()

    def give_up(self) -> None:
        """What the switch says from now on means nothing. Idempotent."""
        with self._answered:
            self._given_up = True
            self._answered.notify_all()

    def missing(self, chunk: int, timeout_s: float = 1.0) -> list[int]:
        """Ranks whose contribution to `chunk` the switch has not seen; empty where it does not say in time."""
        return self._ask(chunk, timeout_s) or []

    def _ask(self, chunk: int, timeout_s: float) -> list[int] | None:
        """`missing`; None where the switch does not say in time."""
        serial = next(self._serials)
        try:
            with self._send_lock:
                control.send(self._stream, {"type": "missing", "chunk": chunk, "serial": serial})
        except OSError:
            return None
        with self._answered:
            self._answered.wait_for(lambda: serial in self._answers or self._given_up or self._closed, timeout_s)
            return self._answers.pop(serial, None)

    def leave(self, reason: str, fault: int = -1) -> None:
        """Say goodbye and close; `fault`: the rank that is the reason, -1 for none. Idempotent."""
        with self._answered:
            if self._closed:
                return
            self._closed = True
            self._answered.notify_all()
        try:
            with self._send_lock:
                self._stream.settimeout(1.0)
                control.send(self._stream, {"type": "leave", "reason": reason[:400], "fault": fault})
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._stream.close()

    def _listen(self, lost: Callable[[int, str], None]) -> None:
        pid = os.getpid()
        reason = "it closed the connection"
        try:
            while True:
                message = control.receive(self._stream)
                if message["type"] == "missing":
                    with self._answered:
                        self._answers[int(message["serial"])] = [int(rank) for rank in message["ranks"]]
                        self._answered.notify_all()
                elif message["type"] == "left":
                    with self._answered:
                        fault = message.get("fault")
                        why = str(message.get("reason", "")), fault if isinstance(fault, int) else -1
                        self._left[int(message["rank"])] = why
                elif message["type"] == "refused":
                    reason = str(message.get("reason"))
        except (EOFError, OSError, control.ProtocolError, ValueError):
            pass
        if os.getpid() == pid:
            self._say_lost(lost, reason)

    def _say_lost(self, lost: Callable[[int, str], None], reason: str) -> None:
        with self._answered:
            if self._given_up or self._closed:
                return
            self._given_up = True
            self._answered.notify_all()
        lost(self.life, reason)

    def _watch(
        self,
        native: Any,
        fail: Callable[[str, int, str], None],
        lost: Callable[[int, str], None],
        is_alive: Callable[[int], bool],
    ) -> None:
        chunk, since = -1, 0.0
        while True:
            with self._answered:
                if self._answered.wait_for(lambda: self._given_up or self._closed, _WATCH_S):
                    return
            traffic = native.traffic()
            if traffic is None or traffic["life"] != self.life or traffic["idle"]:
                chunk = -1
                continue
            now = time.monotonic()
            if traffic["oldest_unanswered"] != chunk:
                chunk, since = traffic["oldest_unanswered"], now
            is_quiet = now - since >= _QUIET_S
            if not is_quiet and not self._left:
                continue
            missing = self._ask(chunk, _WORD_S)
            if missing is None:
                self._say_lost(lost, f"it has not answered for {time.monotonic() - since:.1f} s")
                return
            since = time.monotonic() if is_quiet else since
            gone = [rank for rank in missing if rank in self._left and not is_alive(rank)]
            if gone:
                reason, fault = self._left[gone[0]]
                fail(
                    "peer_lost",
                    fault if fault >= 0 and fault != self.rank else gone[0],
                    f"rank {gone[0]} left while its contribution was needed: {reason}; see its own output",
                )
                return


def _token(who: str, token_file: str | None, fingerprint: str | None) -> str | None:
    if token_file is None:
        return None
    if fingerprint is None:
        raise SwitchError(
            f"{who}: NETFOLD_TOKEN_FILE is set, and NETFOLD_SWITCH has no fingerprint: whoever answers there would get "
            "the token. Set NETFOLD_SWITCH to all of what the switch says when it starts, host:port#fingerprint"
        )
    try:
        token = control.read_private(token_file).strip()
        control.check_token(token)
    except OSError as error:
        raise SwitchError(f"{who}: NETFOLD_TOKEN_FILE={token_file}: {error.strerror}") from None
    except ValueError as error:
        raise SwitchError(f"{who}: NETFOLD_TOKEN_FILE={token_file}: {error}") from None
    return token


def _shake_hands(who: str, stream: socket.socket, fingerprint: str | None) -> socket.socket | PinnedStream:
    if fingerprint is None:
        return stream
    try:
        return PinnedStream(stream, fingerprint)
    except FingerprintError as error:
        stream.close()
        raise SwitchError(
            f"{who} is not the one that NETFOLD_SWITCH names: {error}. Either it was started again without "
            "--state-dir, or somebody else answers there; nothing was sent"
        ) from None
    except (EOFError, OSError) as error:  # ssl.SSLError is an OSError
        stream.close()
        what = error.reason if isinstance(error, ssl.SSLError) else error
        raise SwitchError(
            f"{who} did not shake hands ({what}): is it a netfold switch, started with --token-file? One that is open "
            "speaks no TLS and has no fingerprint"
        ) from None


def join_for_host(
    endpoint: str,
    *,
    job: str,
    name: str,
    token_file: str | None,
    rank: int,
    workers: Sequence[int],
    host: Mapping[int, socket.socket | None],
    window_bytes: int,
    deadline: float,
) -> Membership | None:
    """Join, where `rank` is one of `workers`; None on the other ranks, once the worker of their host has joined.

    `host`: a connection to each rank of this host, None to itself. Raises SwitchError on every rank of a host whose
    worker was refused, with the same reason.
    """
    others = {peer: stream for peer, stream in host.items() if stream is not None}
    if rank not in workers:
        (worker,) = (peer for peer in others if peer in workers)
        _hear_of_join(others[worker], worker, rank, deadline)
        return None
    timeout_s = max(0.1, deadline - time.monotonic())
    waiting = [stream for peer, stream in others.items() if peer not in workers]
    refused: str | None = f"rank {rank} failed while it joined the switch; see its own output"
    try:
        membership = Membership.join(
            endpoint,
            job=job,
            name=name,
            token_file=token_file,
            rank=rank,
            workers=workers,
            window_bytes=window_bytes,
            timeout_s=timeout_s,
        )
        refused = None
        return membership
    except SwitchError as error:
        refused = str(error)
        raise
    finally:
        for stream in waiting:
            with contextlib.suppress(OSError):  # one that is gone is missed at the first operation
                stream.settimeout(_GRACE_S)
                control.send(stream, {"type": "joined", "refused": refused})


def _hear_of_join(stream: socket.socket, worker: int, rank: int, deadline: float) -> None:
    stream.settimeout(max(0.1, deadline - time.monotonic()) + 2 * _GRACE_S)
    try:
        refused = control.receive(stream).get("refused")
    except (EOFError, OSError, control.ProtocolError) as error:
        raise RendezvousError(
            f"rank {rank}: rank {worker}, which joins the switch for this host, did not say that it has ({error}); "
            "see its own output",
            rank=worker,
        ) from None
    if refused is not None:
        raise SwitchError(f"rank {rank}: {refused}")
