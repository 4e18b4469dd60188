"""A rank's membership of a job on a switch: join, supervise the switch, learn which ranks left.

A job's ranks may have several switches, in a tree. Each rank joins its own switch, and its join names the tree
(switch_tree.py). If that switch cannot be reached, the rank joins the next switch above it that this process knows of.

Where several ranks share memory, one rank of a host joins for all of them. A worker is a rank that joined, and the
switch identifies a worker by its rank.

The control connection lives as long as the membership, with two daemon threads. One reads messages. The other watches
results and queries the switch: switch_watch.py decides from both whether the switch is lost, and recovery.py acts on
that. A rank that left the switch fails the group only while a chunk waits for that rank, since leaving after the last
contribution harms nobody. The rank must also be gone from the group: it may only have lost its own connection.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from netfold._native.transport import DataPort
from netfold.bootstrap.tree import StartTree
from netfold.communicator.switch_tree import path_message, trees_of
from netfold.communicator.switch_watch import Lost, Query, SwitchWatch
from netfold.errors import RendezvousError, SwitchError
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.control_client import GRACE_S, ControlClient, SwitchAccess, connected
from netfold.switch_protocol.control_messages import Message, ProtocolError
from netfold.switch_protocol.data_path import PathError, open_path

# Between two polls of the watch (switch_watch.py).
_WATCH_S = 0.2
# Longest text from the switch that goes into the log, in characters.
_MAX_LOG_TEXT = 600


class _Reply(NamedTuple):
    ranks: tuple[int, ...] | None  # that are missing; None where the switch does not know


def _ranks(listed: Any) -> tuple[int, ...]:
    """The ranks in a message. Raises ValueError for anything else."""
    if not isinstance(listed, list) or any(not isinstance(rank, int) or rank < 0 for rank in listed):
        raise ValueError(f"no list of ranks: {listed!r:.60}")
    return tuple(listed)


class Membership:
    """One rank's membership, made by `join`.

    `attach` or `stand_by` hands the data port to the native group. `listen` starts the threads. Thread-safe.
    """

    def __init__(self, client: ControlClient, rank: int, workers: Sequence[int]) -> None:
        self.endpoint = client.endpoint
        self.rank = rank
        self.workers = tuple(workers)
        self.payload_bytes = 0
        self.window = 0
        self.window_shortfall = ""  # why the window is smaller than it should be, and what to set; else empty
        self.authenticated = client.authenticated  # packets carry MACs
        self.encrypts = False  # packets with values are encrypted
        self.hardware = False  # the switch, or another of its tree, has the hardware profile
        self.generation = 0  # unique to this membership (collective::Channel::generation)
        self._client = client
        self._port: DataPort | None = None
        self._attach_arguments: dict[str, Any] = {}
        self._serials = itertools.count(1)
        # Guards the fields below, and signals their changes.
        self._changed = threading.Condition()
        # Replies by serial of open queries; None until the reply is here.
        self._replies: dict[int, _Reply | None] = {}
        self._left: dict[int, tuple[str, int]] = {}  # by rank that left the switch: why, and the rank at fault
        self._given_up = False
        self._closed = False

    @classmethod
    def join(
        cls,
        access: SwitchAccess,
        *,
        job: str,
        tree: list[Any] | None = None,
        timeout_s: float,
        endpoint: str | None = None,
    ) -> Membership:
        """Join `job` at a switch; returns when all workers have. Raises SwitchError with the reason.

        job: the digest that identifies the job to the switch.
        tree: the switches from the joined one to the root, from `trees_of`; None where all workers join this switch.
        endpoint: of another switch than `access` names, above that.
        """
        deadline = time.monotonic() + timeout_s
        message: Message = {
            "type": "join",
            "job": job,
            "name": access.name,
            "rank": access.rank,
            **({"ranks": list(access.workers)} if tree is None else {"tree": tree}),
            "window_bytes": access.window_bytes,
            "timeout_s": timeout_s,
            "profiles": [control_messages.HARDWARE],
        }
        if access.security == "encrypt":
            message["encrypt"] = True
        with connected(access, endpoint or access.endpoint, timeout_s) as client:
            self = cls(client, access.rank, access.workers)
            self._join(message, access.window_bytes, access.fabric, deadline)
            return self

    def _join(self, message: Message, window_bytes: int, fabric: str | None, deadline: float) -> None:
        client = self._client
        try:
            # Packets leave from the control connection's address: the switch accepts them from no other host.
            path = open_path(fabric, client.local_host, window_bytes)
            client.send_first({**message, **path.join_fields()})
            admitted = client.expect("admitted", deadline, is_first=True)
            packet_keys.check_admitted(admitted, pinned=self.authenticated, encrypt=message.get("encrypt", False))
            self.encrypts = bool(admitted.get("encrypt", False))
            self.hardware = admitted.get("profile") == control_messages.HARDWARE
            ready = path.connect(client.remote_host, admitted, deadline)
        except PathError:
            # A switch that has ended the job answers none of its packets, and has sent the reason as a refusal.
            with contextlib.suppress(OSError, EOFError, ProtocolError):
                client.expect("refused", time.monotonic() - GRACE_S)
            raise
        self._port = path.port
        client.send({"type": "ready", **ready})
        start = client.expect("start", deadline)
        # In a tree, the pipeline may be another switch than the joined one.
        self.hardware = self.hardware or start.get("profile") == control_messages.HARDWARE
        self.payload_bytes = int(start["payload_bytes"])
        self.window = int(start["window"])
        self.window_shortfall = str(start.get("window_shortfall", ""))[:_MAX_LOG_TEXT]
        # A job's digest is used once. The switch's own epochs are unique only per switch.
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
        """The protection of packets, in words."""
        return "encrypted" if self.encrypts else "authenticated" if self.authenticated else "not authenticated"

    def attach(self, native: Any, table: Sequence[tuple[int, int, int, int, int]], table_hash: int) -> None:
        """Give the data port to a native group that has none. table, table_hash: without a switch, and its hash."""
        native.attach(self._port, **self._attach_arguments, table=table, table_hash=table_hash, hardware=self.hardware)
        self._port = None

    def stand_by(self, native: Any) -> None:
        """Give the data port to a native group whose switch is lost. Unused until all ranks are told to use it."""
        native.stand_by(self._port, **self._attach_arguments)
        self._port = None

    def listen(
        self,
        native: Any,
        fail: Callable[[str, int, str], None],
        lost: Callable[[int, str], None],
        is_healthy: Callable[[int], bool],
        capacity: Callable[[], float | None],
    ) -> None:
        """Start both threads.

        fail(kind, rank, text): ends the group.
        lost(generation, why): the switch is lost.
        is_healthy(rank): whether a rank that left the switch is still there, and in the group.
        capacity(): bytes of tensor a second through this switch as known now, called every _WATCH_S; the lowest rank
        reports them to the switch.
        """
        self._client.set_blocking()
        watch = (native, fail, lost, is_healthy, capacity)
        for target, arguments in ((self._receive, (lost,)), (self._watch, watch)):
            threading.Thread(target=target, args=arguments, name="netfold-membership", daemon=True).start()

    def give_up(self) -> None:
        """Ignore everything that the switch sends from here on. Idempotent."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def stragglers(self, chunk: int, timeout_s: float = 1.0) -> list[int]:
        """Ranks whose contribution to `chunk` the switch has not seen; empty where no reply comes in time."""
        serial = self._open_query()
        try:
            self._client.send({"type": "stragglers", "chunk": chunk, "serial": serial})
            with self._changed:
                self._changed.wait_for(
                    lambda: self._replies[serial] is not None or self._given_up or self._closed, timeout_s
                )
                reply = self._replies[serial]
                return list(reply.ranks or ()) if reply is not None else []
        except OSError:
            return []
        finally:
            with self._changed:
                del self._replies[serial]

    def leave(self, reason: str, fault: int = -1) -> None:
        """Tell the switch why this rank leaves, and close. Idempotent. fault: the rank at fault, -1 for none."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._client.leave({"type": "leave", "reason": reason[:400], "fault": fault})

    def _open_query(self) -> int:
        serial = next(self._serials)
        with self._changed:
            self._replies[serial] = None
        return serial

    def _receive(self, lost: Callable[[int, str], None]) -> None:
        pid = os.getpid()
        reason, lost_endpoint = "it closed the connection", self.endpoint
        try:
            while True:
                message = self._client.receive()
                if message["type"] in ("stragglers", "alive"):
                    ranks = _ranks(message.get("ranks", []))
                    with self._changed:
                        if message["serial"] in self._replies:
                            self._replies[message["serial"]] = _Reply(None if message.get("unknown") else ranks)
                        self._changed.notify_all()
                elif message["type"] == "left":
                    fault = message.get("fault")
                    why = str(message.get("reason", "")), fault if isinstance(fault, int) else -1
                    with self._changed:
                        self._left.update((rank, why) for rank in _ranks(message["ranks"]))
                elif message["type"] == "refused":
                    # The lost switch may be another one of the tree.
                    reason = str(message.get("reason"))
                    lost_endpoint = str(message.get("switch") or lost_endpoint)
        except (EOFError, OSError):
            pass
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it sent a malformed control message: {error!r}"
        if os.getpid() == pid:
            self._report_loss(lost, reason, lost_endpoint)

    def _report_loss(self, lost: Callable[[int, str], None], reason: str, endpoint: str) -> None:
        with self._changed:
            if self._given_up or self._closed:
                return
            self._given_up = True
            self._changed.notify_all()
        lost(self.generation, f"the switch at {endpoint} is gone ({reason})")

    def _watch(
        self,
        native: Any,
        fail: Callable[[str, int, str], None],
        lost: Callable[[int, str], None],
        is_healthy: Callable[[int], bool],
        capacity: Callable[[], float | None],
    ) -> None:
        watch = SwitchWatch(self.rank, time.monotonic())
        open_query: tuple[int, Query] | None = None  # with its serial
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._given_up or self._closed, _WATCH_S):
                    return
                if open_query is not None and (reply := self._replies[open_query[0]]) is not None:
                    del self._replies[open_query[0]]
                    watch.answer(reply.ranks if open_query[1].chunk is not None else None)
                    open_query = None
            bytes_per_s = capacity()
            traffic = native.traffic()
            is_current = traffic is not None and traffic["generation"] == self.generation
            if is_current and traffic["path_error"]:
                return self._report_loss(lost, traffic["path_error"], self.endpoint)
            awaited = traffic["oldest_outstanding"] if is_current and not traffic["idle"] else None
            action = watch.poll(time.monotonic(), awaited, urgent=bool(self._left))
            if isinstance(action, Lost):
                send_error = f" ({traffic['send_error']})" if is_current and traffic["send_error"] else ""
                return self._report_loss(lost, action.why + send_error, self.endpoint)
            if isinstance(action, Query):
                open_query = self._open_query(), action
                query: Message = {"type": "alive", "serial": open_query[0]}
                if action.chunk is not None:
                    query.update(type="stragglers", chunk=action.chunk)
                elif bytes_per_s is not None and self.rank == self.workers[0]:
                    query["bytes_per_s"] = bytes_per_s
                with contextlib.suppress(OSError):  # then no reply comes, which the watch notices
                    self._client.send(query)
            gone = [rank for rank in watch.stragglers if rank in self._left and not is_healthy(rank)]
            if gone:
                reason, fault = self._left[gone[0]]
                fail(
                    "peer_lost",
                    fault if fault >= 0 and fault != self.rank else gone[0],
                    f"rank {gone[0]} left while its contribution was needed: {reason}; see its own output",
                )
                return


def join_for_host(access: SwitchAccess, *, job: str, tree: StartTree, deadline: float) -> Membership | None:
    """Join on a rank that is a worker; None on the others, once all workers have joined. Every rank calls this.

    If the rank's own switch cannot be reached, and was joined before, the next switch above it is joined instead.

    job: the digest that identifies the job to the switch.
    Raises SwitchError on every rank where a worker was refused, with the same reason.
    """
    rank, workers = access.rank, access.workers
    own = path_message(access, _left(deadline)) if rank in workers else None
    refusal = "" if own is None else str(own.get("refused", ""))
    messages = _gathered(tree, own, "its workers said which switches they are below", refusal)
    trees = trees_of(dict(enumerate(messages)), workers, rank)
    membership = None
    if own is not None:
        try:
            endpoint = own["endpoints"][0]
            place = trees[workers.index(rank)]
            membership = Membership.join(access, job=job, tree=place, timeout_s=_left(deadline), endpoint=endpoint)
        except SwitchError as error:
            refusal = str(error)
    refusals = _gathered(tree, refusal, "its workers joined the switch", refusal)
    if any(refusals):
        if membership is not None:
            membership.leave("another worker of its group was refused")
        raise SwitchError(refusal or f"rank {rank}: {next(filter(None, refusals))}")
    return membership


def _gathered(tree: StartTree, value: Any, what: str, refusal: str) -> list[Any]:
    """As `StartTree.all_gather`. Where that fails, and this rank was refused, the refusal is the better reason."""
    try:
        return tree.all_gather(value, what, grace_s=2 * GRACE_S)
    except RendezvousError:
        if refusal:
            raise SwitchError(refusal) from None
        raise


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())
