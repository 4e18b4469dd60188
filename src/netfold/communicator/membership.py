"""A rank's membership of a job on a switch: joining, and hearing who left.

A job's ranks may have several switches, in a tree: each joins its own, and says in its join which tree all of them make
(switch_tree.py). A rank whose switch cannot be reached joins the next one above it, if it heard of that before.

Where several ranks share memory, one of a host joins, for all of them: a worker is a rank that joined, and the switch
calls it by its rank.

The control connection lives as long as the membership. A daemon thread reads it; another looks at what comes of
operations and asks the switch questions; switch_watch.py decides from both whether the switch is lost, and recovery.py
does what follows. A rank that left fails the group only when a chunk is waiting for it, since one that leaves
after its last contribution harms nobody; and only if it is gone, and has not just lost its connection to the switch.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from netfold._native import auth, protocol
from netfold._native.transport import DataPort
from netfold.communicator.switch_tree import PathToRoot, agree_on_tree, known_parents
from netfold.communicator.switch_watch import Lost, Query, SwitchWatch
from netfold.errors import RendezvousError, SwitchError
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.data_path import PathError, ReceiveBuffer, open_path
from netfold.switch_protocol.pinned_tls import FingerprintError, PinnedStream

log = logging.getLogger("netfold")

# To connect to a switch, where there is another to try.
_CONNECT_S = 5.0
# Between two ticks of the watch (switch_watch.py).
_WATCH_S = 0.2
# Whether UDP passes: how long it is tried, and how often.
UDP_S, _UDP_TRIES = 1.0, 5
# Time beyond the job's own for the switch's word that it has given up.
_GRACE_S = 2.0


# Characters of a sentence of the switch's that go into the log.
_MOST_TEXT = 600


class _UnreachableError(Exception):
    """Nobody answers there; the sentence for a SwitchError."""


class Membership:
    """Made by `join`. `attach` or `stand_by` hands the data port to the native group; `listen` says what is heard."""

    def __init__(self, stream: socket.socket | PinnedStream, endpoint: str, rank: int, workers: Sequence[int]) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.workers = tuple(workers)
        self.payload_bytes = 0
        self.window = 0
        self.window_shortfall = (
            ""  # why the window is smaller than it should be, with what to set; empty where it is not
        )
        self.authenticated = isinstance(stream, PinnedStream)  # whether its packets carry tags
        self.encrypts = False  # ... and are encrypted
        self._stream = stream
        self.generation = 0  # names this membership and no other (collective::Channel::generation)
        self._port: DataPort | None = None
        self._attach_arguments: dict[str, Any] = {}
        self._send_lock = threading.Lock()
        self._serials = itertools.count(1)
        # By serial, of open questions: the ranks; None until they are known.
        self._answers: dict[int, list[int] | None] = {}
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
        paths: Sequence[Sequence[int]],
        window_bytes: int,
        fabric: str | None,
        timeout_s: float,
        security: str = "none",
    ) -> Membership:
        """Join `job` at the switch as `rank`, one of `workers`; returns when all have.

        job: the digest that names it to the switch; name: what people call it; token_file: sent only to a switch whose
        certificate has the fingerprint that `endpoint` names; paths: of all workers, from `agree_on_tree`; fabric: the
        provider that packets go over, None for UDP. SwitchError says what failed.
        """
        deadline = time.monotonic() + timeout_s
        tree = {"paths": [list(path) for path in paths]} if any(len(path) > 1 for path in paths) else {}
        message = {
            "type": "join",
            "version": control_messages.VERSION,
            "job": job,
            "name": name,
            "rank": rank,
            "ranks": list(workers),
            "window_bytes": window_bytes,
            "timeout_s": timeout_s,
            **tree,
            **({"encrypt": True} if security == "encrypt" else {}),
        }
        try:
            refuse_open(endpoint, security, rank)
            with _conversation(endpoint, token_file, rank, len(workers), timeout_s) as (stream, who, token):
                self = cls(stream, _bare(endpoint), rank, workers)
                self._join(who, {**message, **token}, window_bytes, fabric, deadline)
                return self
        except _UnreachableError as error:
            raise SwitchError(str(error)) from None

    def _join(
        self, who: str, message: control_messages.Message, window_bytes: int, fabric: str | None, deadline: float
    ) -> None:
        try:
            # From the address that the control connection uses: the switch takes packets from no other host.
            path = open_path(fabric, self._stream.getsockname()[0], window_bytes)
            control_messages.send(self._stream, {**message, **path.join_fields()})
            admitted = _expect(self._stream, "admitted", who, deadline, is_first=True)
            if self.authenticated and "secret" not in admitted:
                raise SwitchError(f"{who} speaks TLS and gave no keys for packets")
            self.encrypts = bool(admitted.get("encrypt", False))
            if message.get("encrypt", False) and not self.encrypts:
                raise SwitchError(f"{who} does not encrypt packets, and NETFOLD_SECURITY=encrypt: upgrade it")
            ready = path.connect(self._stream.getpeername()[0], admitted, deadline)
        except PathError as error:
            # Nor does it answer packets of a job that it has ended meanwhile; then it has said why.
            with contextlib.suppress(OSError, EOFError, control_messages.ProtocolError):
                _expect(self._stream, "refused", who, time.monotonic() - _GRACE_S)
            raise SwitchError(f"{who} {error}") from None
        self._port = path.port
        control_messages.send(self._stream, {"type": "ready", **ready})
        start = _expect(self._stream, "start", who, deadline)
        self.payload_bytes = int(start["payload_bytes"])
        self.window = int(start["window"])
        self.window_shortfall = str(start.get("window_shortfall", ""))[:_MOST_TEXT]
        # A job's name is used once; that a switch gives epochs as well is between each worker and its own switch.
        self.generation = int(message["job"][:16], 16) or 1
        self._attach_arguments = {
            "generation": self.generation,
            "job": int(admitted["job_id"]),
            "epoch": int(start["epoch"]),
            "incarnation": int(admitted["incarnation"]),
            "worker": int(admitted["worker"]),
            "ranks": list(self.workers),
            "window": self.window,
            "payload_bytes": self.payload_bytes,
            "keys": packet_keys.member_keys(admitted, int(start["epoch"])),
            "encrypts": self.encrypts,
        }

    @property
    def protection(self) -> str:
        """What its packets are, in words."""
        return "encrypted" if self.encrypts else "authenticated" if self.authenticated else "not authenticated"

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
        capacity: Callable[[], float | None],
    ) -> None:
        """Begin to listen. `fail(kind, rank, text)` ends the group; `lost(generation, why)`: a switch is; `is_alive`:
        whether a rank that the switch calls gone is there, and in the group. capacity: bytes of tensor a second through
        this switch as they are known now, asked every _WATCH_S; the lowest rank's is told to the switch."""
        self._stream.settimeout(None)
        watch = (native, fail, lost, is_alive, capacity)
        for target, arguments in ((self._listen, (lost,)), (self._watch, watch)):
            threading.Thread(target=target, args=arguments, name="netfold-membership", daemon=True).start()

    def give_up(self) -> None:
        """What the switch says from now on means nothing. Idempotent."""
        with self._answered:
            self._given_up = True
            self._answered.notify_all()

    def stragglers(self, chunk: int, timeout_s: float = 1.0) -> list[int]:
        """Ranks whose contribution to `chunk` the switch has not seen; empty where it does not say in time."""
        serial = next(self._serials)
        with self._answered:
            self._answers[serial] = None
        try:
            self._send({"type": "stragglers", "chunk": chunk, "serial": serial})
            with self._answered:
                self._answered.wait_for(
                    lambda: self._answers[serial] is not None or self._given_up or self._closed, timeout_s
                )
                return self._answers[serial] or []
        except OSError:
            return []
        finally:
            with self._answered:
                del self._answers[serial]

    def _send(self, message: control_messages.Message) -> None:
        with self._send_lock:
            control_messages.send(self._stream, message)

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
                control_messages.send(self._stream, {"type": "leave", "reason": reason[:400], "fault": fault})
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._stream.close()

    def _listen(self, lost: Callable[[int, str], None]) -> None:
        pid = os.getpid()
        reason, gone = "it closed the connection", self.endpoint
        try:
            while True:
                message = control_messages.receive(self._stream)
                if message["type"] in ("stragglers", "alive"):
                    ranks = [int(rank) for rank in message.get("ranks", ())]
                    with self._answered:
                        if message["serial"] in self._answers:
                            self._answers[message["serial"]] = ranks
                        self._answered.notify_all()
                elif message["type"] == "left":
                    with self._answered:
                        fault = message.get("fault")
                        why = str(message.get("reason", "")), fault if isinstance(fault, int) else -1
                        self._left[int(message["rank"])] = why
                elif message["type"] == "refused":
                    # Another switch of the tree may be the one that is gone.
                    reason, gone = str(message.get("reason")), str(message.get("switch") or gone)
        except (EOFError, OSError, control_messages.ProtocolError, ValueError):
            pass
        if os.getpid() == pid:
            self._say_lost(lost, reason, gone)

    def _say_lost(self, lost: Callable[[int, str], None], reason: str, gone: str) -> None:
        with self._answered:
            if self._given_up or self._closed:
                return
            self._given_up = True
            self._answered.notify_all()
        lost(self.generation, f"the switch at {gone} is gone ({reason})")

    def _watch(
        self,
        native: Any,
        fail: Callable[[str, int, str], None],
        lost: Callable[[int, str], None],
        is_alive: Callable[[int], bool],
        capacity: Callable[[], float | None],
    ) -> None:
        watch = SwitchWatch(self.rank, time.monotonic())
        open_question: tuple[int, Query] | None = None
        while True:
            with self._answered:
                if self._answered.wait_for(lambda: self._given_up or self._closed, _WATCH_S):
                    return
                if open_question is not None and (ranks := self._answers[open_question[0]]) is not None:
                    del self._answers[open_question[0]]
                    watch.answer(ranks if open_question[1].chunk is not None else None)
                    open_question = None
            bytes_per_s = capacity()
            traffic = native.traffic()
            operates = traffic is not None and traffic["generation"] == self.generation
            if operates and traffic["path_error"]:
                self._say_lost(lost, traffic["path_error"], self.endpoint)
                return
            awaited = traffic["oldest_outstanding"] if operates and not traffic["idle"] else None
            action = watch.poll(time.monotonic(), awaited, urgent=bool(self._left))
            if isinstance(action, Lost):
                refused = f" ({traffic['send_error']})" if operates and traffic["send_error"] else ""
                self._say_lost(lost, action.why + refused, self.endpoint)
                return
            if isinstance(action, Query):
                serial = next(self._serials)
                open_question = serial, action
                with self._answered:
                    self._answers[serial] = None
                about: control_messages.Message
                if action.chunk is not None:
                    about = {"type": "stragglers", "chunk": action.chunk}
                elif bytes_per_s is not None and self.rank == self.workers[0]:
                    about = {"type": "alive", "bytes_per_s": bytes_per_s}
                else:
                    about = {"type": "alive"}
                with contextlib.suppress(OSError):  # then no answer comes, which the watch sees
                    self._send({**about, "serial": serial})
            gone = [rank for rank in watch.stragglers if rank in self._left and not is_alive(rank)]
            if gone:
                reason, fault = self._left[gone[0]]
                fail(
                    "peer_lost",
                    fault if fault >= 0 and fault != self.rank else gone[0],
                    f"rank {gone[0]} left while its contribution was needed: {reason}; see its own output",
                )
                return


def refuse_open(endpoint: str, security: str, rank: int) -> None:
    """SwitchError where packets would go to a switch without keys, and `security` is more than none."""
    host, port, fingerprint = control_messages.parse_switch(endpoint, what="NETFOLD_SWITCH")
    if security != "none" and fingerprint is None:
        raise SwitchError(
            f"rank {rank}: the switch at {control_messages.format_endpoint(host, port)} has no keys, and "
            f"NETFOLD_SECURITY={security}: start it with --token-file, and name it with its fingerprint"
        )


def query_path_to_root(
    endpoint: str,
    *,
    token_file: str | None,
    rank: int,
    workers: Sequence[int],
    timeout_s: float,
    security: str = "none",
) -> PathToRoot:
    """The switches above `endpoint`, or, where that cannot be reached, above the next that it is known to be below.

    SwitchError where one of them has no keys and `security` is more than none.
    """
    deadline = time.monotonic() + timeout_s
    candidates = [endpoint, *known_parents(endpoint)]
    failure = ""
    for place, candidate in enumerate(candidates):
        refuse_open(candidate, security, rank)
        left_s = max(0.1, deadline - time.monotonic())
        if place + 1 < len(candidates):
            left_s = min(left_s, _CONNECT_S)
        try:
            with _conversation(candidate, token_file, rank, len(workers), left_s) as (stream, who, token):
                control_messages.send(
                    stream, {"type": "path", "version": control_messages.VERSION, "below": [], **token}
                )
                way = PathToRoot.parse(
                    _expect(stream, "path", who, time.monotonic() + left_s, is_first=True), candidate
                )
                stream.close()
        except _UnreachableError as error:
            failure = failure or str(error)
            continue
        for each in way.endpoints:
            refuse_open(each, security, rank)
        if failure:
            log.warning("%s; joins the one above it, at %s", failure, _bare(candidate))
        return way
    raise SwitchError(failure)


class AvailableQuota(NamedTuple):
    """What a switch could still grant to whoever holds this token. slots: -1 where only the memory bounds them.

    udp_error: why packets would not reach it, though it answers over TCP; empty where they do, or nobody tried.
    buffer_bytes, window_bytes: its `data_path.ReceiveBuffer`; 0 where it does not say. threads: that handle packets.
    """

    jobs: int
    workers: int
    memory_bytes: int
    slots: int
    udp_error: str = ""
    buffer_bytes: int = 0
    window_bytes: int = 0
    threads: int = 1

    @property
    def buffer(self) -> ReceiveBuffer:
        return ReceiveBuffer(self.buffer_bytes, self.window_bytes)


def query_quota(
    endpoint: str, *, token_file: str | None, rank: int, timeout_s: float, udp: bool = False
) -> AvailableQuota:
    """What the switch at `endpoint` has left; nothing is reserved. SwitchError where it cannot be asked or refuses.

    udp: try, too, whether UDP passes both ways. Cost: a round trip; UDP_S where it does not pass.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with _conversation(endpoint, token_file, rank, 1, timeout_s) as (stream, who, token):
            asked = {"udp": True} if udp else {}
            control_messages.send(stream, {"type": "quota", "version": control_messages.VERSION, **asked, **token})
            answer = _expect(stream, "quota", who, deadline, is_first=True)
            jobs, workers, memory_bytes, slots = (int(answer[name]) for name in AvailableQuota._fields[:4])
            udp_error = _udp_error(stream, answer["udp"], who) if "udp" in answer else ""
            buffer = int(answer.get("buffer_bytes", 0)), int(answer.get("window_bytes", 0))
            threads = max(1, int(answer.get("threads", 1)))
            room = AvailableQuota(jobs, workers, memory_bytes, slots, udp_error, *buffer, threads)
            stream.close()
    except _UnreachableError as error:
        raise SwitchError(str(error)) from None
    return room


def _udp_error(stream: socket.socket | PinnedStream, place: control_messages.Message, who: str) -> str:
    """Why no packet comes back from the switch's UDP port; empty where one does."""
    own, theirs, port = stream.getsockname(), stream.getpeername(), int(place["port"])
    # As long as the shortest packets that a job can have, from the address that they would come from.
    packet = bytes(place["nonce"]).ljust(control_messages.PAYLOAD_CANDIDATES[-1] + protocol.HEADER_BYTES, b"\0")
    with socket.socket(socket.AF_INET6 if ":" in own[0] else socket.AF_INET, socket.SOCK_DGRAM) as ours:
        ours.bind((own[0], 0, *own[2:]))
        ours.connect((theirs[0], port, *theirs[2:]))
        ours.settimeout(UDP_S / _UDP_TRIES)
        for _ in range(_UDP_TRIES):
            # TimeoutError is an OSError; a firewall may also refuse to send, or answer for the switch.
            with contextlib.suppress(OSError):
                ours.send(packet)
                if ours.recv(len(packet) + 1) == packet:
                    return ""
    return (
        f"{who} is reached by TCP, but no UDP packet came back from its port {port}: a firewall may drop UDP, or an "
        "address translation change its port"
    )


@contextlib.contextmanager
def _conversation(
    endpoint: str, token_file: str | None, rank: int, workers: int, timeout_s: float
) -> Iterator[tuple[socket.socket | PinnedStream, str, dict[str, str]]]:
    """A connection to the switch, what it is called in errors, and the token as it stands in a message.

    _UnreachableError where there is none. What goes wrong inside closes it, and becomes a SwitchError that says what it
    may mean.
    """
    host, port, fingerprint = control_messages.parse_switch(endpoint, what="NETFOLD_SWITCH")
    who = f"rank {rank}: the switch at {_bare(endpoint)} (NETFOLD_SWITCH)"
    token = _token(who, token_file, fingerprint)
    if fingerprint is not None and auth.unavailable_reason():
        raise SwitchError(
            f"{who} wants packets to be authenticated, and this host cannot: {auth.unavailable_reason()}. Without it "
            f"only a "
            "switch with --open can be joined"
        )
    try:
        stream = socket.create_connection((host, port), timeout=timeout_s)
    except ConnectionRefusedError:
        raise _UnreachableError(
            f"{who} refused the connection: nothing listens there. Start it with `netfold switch --listen "
            f"{_bare(endpoint)}`, or unset NETFOLD_SWITCH to use host algorithms"
        ) from None
    except socket.gaierror as error:
        raise SwitchError(f"{who}: {host!r} is no host that is known here ({error.strerror})") from None
    except TimeoutError:
        raise _UnreachableError(f"{who} did not answer within {timeout_s:.1f} s; is the address right?") from None
    except OSError as error:
        raise _UnreachableError(f"{who} cannot be reached: {error.strerror or error}") from None
    pinned = _shake_hands(who, stream, fingerprint)
    try:
        yield pinned, who, {} if token is None else {"token": token}
    except TimeoutError:
        stream.close()
        raise SwitchError(
            f"{who} did not answer within {timeout_s:.1f} s: either it is no netfold switch, or not all of the "
            f"{workers} ranks joined"
        ) from None
    except (EOFError, OSError, KeyError, TypeError, ValueError) as error:
        stream.close()
        hint = "" if fingerprint else "; one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint"
        raise SwitchError(f"{who} is no netfold switch, or it stopped while this rank joined: {error}{hint}") from None
    except BaseException:
        stream.close()
        raise


def _expect(
    stream: socket.socket | PinnedStream, kind: str, who: str, deadline: float, *, is_first: bool = False
) -> control_messages.Message:
    """Receive a message of this kind, or raise. is_first: it answers a first message, so it carries a version."""
    stream.settimeout(max(0.01, deadline + _GRACE_S - time.monotonic()))
    message = control_messages.receive(stream)
    # Up to control protocol 5 a refusal has no version, but its reason has one.
    if is_first and ("version" in message or message["type"] == kind):
        problem = control_messages.version_problem(message, them="it", us="this worker")
        if problem:
            raise SwitchError(f"{who} cannot be joined: {problem}")
    if message["type"] == "refused":
        raise SwitchError(f"{who} refused: {message.get('reason')}")
    if message["type"] != kind:
        raise control_messages.ProtocolError(f"expected {kind!r}, got {message['type']!r}")
    return message


def _bare(endpoint: str) -> str:
    """Without the fingerprint."""
    host, port, _ = control_messages.parse_switch(endpoint, what="NETFOLD_SWITCH")
    return control_messages.format_endpoint(host, port)


def _token(who: str, token_file: str | None, fingerprint: str | None) -> str | None:
    if token_file is None:
        return None
    if fingerprint is None:
        raise SwitchError(
            f"{who}: NETFOLD_TOKEN_FILE is set, and NETFOLD_SWITCH has no fingerprint: whoever answers there would get "
            "the token. Set NETFOLD_SWITCH to all of what the switch says when it starts, host:port#fingerprint"
        )
    try:
        token = control_messages.read_private(token_file).strip()
        control_messages.check_token(token)
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
    streams: Sequence[socket.socket | None],
    host: Sequence[int],
    window_bytes: int,
    fabric: str | None,
    deadline: float,
    security: str = "none",
) -> Membership | None:
    """Join, where `rank` is one of `workers`; None on the other ranks, once the worker of their host has joined.

    endpoint: of this rank's own switch; where that cannot be reached, and was joined before, the next above it takes
    its place. May be called again, for a new job, once all have left the old one. `streams`: a connection to each rank,
    None to itself; `host`: the ranks of this host. Raises SwitchError on every rank of a host whose worker was refused,
    with the same reason.
    """
    others = {peer: stream for peer in host if (stream := streams[peer]) is not None}
    if rank not in workers:
        (worker,) = (peer for peer in others if peer in workers)
        _hear_of_join(others[worker], worker, rank, deadline)
        return None
    timeout_s = max(0.1, deadline - time.monotonic())
    waiting = [stream for peer, stream in others.items() if peer not in workers]
    refused: str | None = f"rank {rank} failed while it joined the switch; see its own output"
    try:
        way: PathToRoot | SwitchError
        try:
            way = query_path_to_root(
                endpoint, token_file=token_file, rank=rank, workers=workers, timeout_s=timeout_s, security=security
            )
        except SwitchError as error:
            way = error
        among = {peer: stream for peer in workers if (stream := streams[peer]) is not None}
        paths = agree_on_tree(way, rank, workers, among, deadline)
        assert isinstance(way, PathToRoot)
        membership = Membership.join(
            way.endpoints[0],
            job=job,
            name=name,
            token_file=token_file,
            rank=rank,
            workers=workers,
            paths=paths,
            window_bytes=window_bytes,
            fabric=fabric,
            timeout_s=max(0.1, deadline - time.monotonic()),
            security=security,
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
                control_messages.send(stream, {"type": "joined", "refused": refused})


def _hear_of_join(stream: socket.socket, worker: int, rank: int, deadline: float) -> None:
    stream.settimeout(max(0.1, deadline - time.monotonic()) + 2 * _GRACE_S)
    try:
        refused = control_messages.receive(stream).get("refused")
    except (EOFError, OSError, control_messages.ProtocolError) as error:
        raise RendezvousError(
            f"rank {rank}: rank {worker}, which joins the switch for this host, did not say that it has ({error}); "
            "see its own output",
            rank=worker,
        ) from None
    if refused is not None:
        raise SwitchError(f"rank {rank}: {refused}")
