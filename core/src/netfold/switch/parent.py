"""The parent switch: a leaf joins it as a worker, once for each job.

A `Link` is the membership of one job. It has its own control connection and data port, as a worker has. It does what
communicator/membership.py does for a worker, on the daemon's event loop. Both share the checks of certificates, replies
and keys (switch_protocol).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import ssl
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netfold.switch.bmv2 import Bmv2
from netfold.switch.control_io import TIMEOUTS, PacedReader, enable_keepalive, send, send_encoded, send_nowait
from netfold.switch_protocol import control_messages, packet_keys
from netfold.switch_protocol.control_messages import ReplyError
from netfold.switch_protocol.data_path import open_path
from netfold.switch_protocol.pinned_tls import FingerprintError, check_fingerprint, client_context

# Timeout of connecting to the parent, and of its reply to a request.
PARENT_S = 5.0


class ParentError(ReplyError):
    """The reason why the parent cannot be reached or its refusal, as a whole sentence."""


class Parent:
    """The parent's address, and this switch's token there.

    Raises ValueError for a malformed address or token file; the text never holds the token.
    """

    def __init__(self, text: str, token_file: Path | None) -> None:
        self._address = control_messages.parse_switch(text, what="--parent")
        self.endpoint = control_messages.format_endpoint(self._address.host, self._address.port)
        # With the fingerprint: what a worker needs to join the parent.
        self.full_endpoint = text.strip()
        self._credential: bytes | None = None
        if token_file is not None:
            if self._address.fingerprint is None:
                raise ValueError(
                    "--parent-token-file needs a fingerprint in --parent (host:port#fingerprint): without it no "
                    "certificate proves which switch answers there"
                )
            token = control_messages.read_private(token_file).strip()
            control_messages.check_token(token)
            self._credential = control_messages.credential_of(token, self._address.fingerprint)
        # Whether the parent speaks TLS: its packets then carry MACs.
        self.authenticated = self._address.fingerprint is not None
        # For operators: why the last request or join failed; "" where it succeeded.
        self.last_error = ""

    async def path(self, below: Sequence[int]) -> control_messages.Message:
        """Ask for the switches from the parent to the root.

        below: the switches from the first that asked to this one, which the parent checks for a cycle.
        Raises ParentError where the parent gives no answer.
        """
        stream = await self.connect()
        try:
            await stream.send_first({"type": "path", "below": list(below)})
            answer = await stream.expect("path", PARENT_S)
        except ReplyError as error:
            raise self.error(str(error), loop=error.loop) from None
        finally:
            stream.close()
        self.last_error = ""
        return answer

    async def connect(self) -> Stream:
        """Open a control connection, and check the certificate before the first byte is sent. Raises ParentError."""
        host, port, fingerprint = self._address
        context = None if fingerprint is None else client_context()
        try:
            opening = asyncio.open_connection(host, port, ssl=context, limit=control_messages.MAX_MESSAGE_BYTES)
            reader, writer = await asyncio.wait_for(opening, PARENT_S)
        except TIMEOUTS:
            raise self.error(f"did not answer within {PARENT_S:.0f} s") from None
        except OSError as error:  # ssl.SSLError is one
            if isinstance(error, ssl.SSLError):
                raise self.error(f"failed the TLS handshake: {error.reason}") from None
            raise self.error(f"cannot be reached: {os.strerror(error.errno) if error.errno else error}") from None
        if fingerprint is not None:
            try:
                check_fingerprint(writer.get_extra_info("ssl_object").getpeercert(binary_form=True), fingerprint)
            except FingerprintError as error:
                writer.transport.abort()
                raise self.error(f"is another switch: {error}") from None
        enable_keepalive(writer.get_extra_info("socket"))
        return Stream(reader, writer, self._credential)

    def error(self, what: str, *, loop: bool = False) -> ParentError:
        self.last_error = f"the parent switch at {self.endpoint} {what}"
        return ParentError(self.last_error, loop=loop)


class Stream:
    """A control connection to the parent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credential: bytes | None) -> None:
        self._reader, self._writer, self._credential = PacedReader(reader, asyncio.Lock()), writer, credential
        self.pinned = writer.get_extra_info("ssl_object") is not None  # the parent proved its fingerprint

    async def read(self) -> control_messages.Message:
        """Read one message. Raises EOFError, OSError or ProtocolError where there is none."""
        return await self._reader.read()

    async def expect(self, kind: str, seconds: float) -> control_messages.Message:
        """Read the reply of type `kind` to a first message.

        Raises ReplyError for a refusal, another reply, or none within `seconds`.
        """
        try:
            message = await asyncio.wait_for(self.read(), seconds)
            control_messages.check_reply(message, kind, us="this switch")
            return message
        except TIMEOUTS:
            raise ReplyError(f"did not answer within {seconds:.0f} s") from None
        except (asyncio.IncompleteReadError, OSError, control_messages.ProtocolError) as error:
            hint = "" if self.pinned else "; does it want TLS: --parent host:port#fingerprint?"
            raise ReplyError(f"is no netfold switch, or it stopped: {error}{hint}") from None

    async def send_first(self, message: control_messages.Message) -> None:
        """Send the first message of the connection: the version and the credential are added."""
        await self.send(control_messages.first_message(message, self._credential))

    async def send(self, message: control_messages.Message) -> None:
        await send(self._writer, message)

    async def send_encoded(self, encoded: bytes) -> None:
        await send_encoded(self._writer, encoded)

    def send_nowait(self, message: control_messages.Message) -> None:
        send_nowait(self._writer, control_messages.encode(message))

    def addresses(self) -> tuple[str, str]:
        """The IP addresses of both ends: this host's, and the parent's."""
        return self._writer.get_extra_info("sockname")[0], self._writer.get_extra_info("peername")[0]

    def close(self) -> None:
        self._writer.close()


class Link:
    """The membership of this switch in one job at the parent, from `join` to `leave`.

    pipeline: of this switch, which fixes the length of packets; None for a switch in software.
    """

    def __init__(self, parent: Parent, pipeline: Bmv2 | None) -> None:
        self.parent = parent
        self._pipeline = pipeline
        self.hardware = False  # the parent is a pipeline, so `payload_bytes` is fixed
        self.payload_bytes = 0  # 0 until the data path has been probed
        self.port: Any = None  # the data port, connected to the parent's
        self.identity: tuple[int, int, int] = (0, 0, 0)  # job, incarnation and worker, as the parent gave them
        # Over UDP: this end's address and port, and the parent's.
        self.addresses: tuple[str, int, str, int] = ("", 0, "", 0)
        self.ready_fields: control_messages.Message = {}  # what the data path adds to `ready`
        self.ready: tuple[int, int] | None = None  # largest payload and window that `ready` offered
        self.open_queries = 0  # `stragglers` queries of the parent that have no reply yet
        self.asked = 0  # `stragglers` queries to the parent that have no reply yet
        self.left: set[int] = set()  # ranks beyond this switch that the parent announced as left
        self._admitted: control_messages.Message = {}
        self._stream: Stream | None = None

    async def join(
        self, join: control_messages.Message, listens: tuple[str, int], provider: str | None, timeout_s: float
    ) -> None:
        """Send `join` and probe the data path.

        listens: host and port of this switch.
        provider: the fabric's provider; None for UDP.
        Raises ParentError.
        """
        deadline = time.monotonic() + timeout_s
        stream = self._stream = await self.parent.connect()
        local, remote = stream.addresses()
        host, port = listens
        # A switch that listens on all addresses names the one that it uses towards the parent.
        endpoint = control_messages.format_endpoint(local if ipaddress.ip_address(host).is_unspecified else host, port)
        loop = asyncio.get_running_loop()
        try:
            path = open_path(provider, local, int(join["window_bytes"]))
            own = path.join_fields()
            profiles = {"profiles": [control_messages.HARDWARE]}
            await stream.send_first({**join, "type": "join", "endpoint": endpoint, **profiles, **own})
            admitted = await stream.expect("admitted", max(PARENT_S, deadline - time.monotonic()))
            packet_keys.check_admitted(admitted, pinned=stream.pinned, encrypt=join["encrypt"])
            self._admitted = admitted
            self.identity = int(admitted["job_id"]), int(admitted["incarnation"]), int(admitted["worker"])
            self.hardware = admitted.get("profile") == control_messages.HARDWARE
            if provider is None:
                self.addresses = local, int(own["port"]), remote, int(admitted["port"])
            if self._pipeline is not None:
                admitted = _with_length(admitted, self._pipeline.payload_bytes)
            self.ready_fields = await loop.run_in_executor(None, path.connect, remote, admitted, deadline)
        except ReplyError as error:
            raise self.parent.error(str(error)) from None
        self.port = path.port
        self.payload_bytes = int(self.ready_fields["payload_bytes"])
        self.parent.last_error = ""

    def keys(self, epoch: int) -> tuple[bytes, bytes] | None:
        """The keys of sums and of the parent's results in its epoch; None where the parent uses no MACs."""
        return packet_keys.member_keys(self._admitted, epoch)

    async def read(self) -> control_messages.Message:
        assert self._stream is not None
        return await self._stream.read()

    async def send(self, message: control_messages.Message) -> None:
        if self._stream is not None:
            await self._stream.send(message)

    async def send_encoded(self, encoded: bytes) -> None:
        """As `send`, of encoded messages; all of them are queued before this waits."""
        if self._stream is not None:
            await self._stream.send_encoded(encoded)

    def leave(self, messages: Sequence[control_messages.Message]) -> None:
        """Send the last messages and close the connection, without waiting."""
        if self._stream is not None:
            for message in messages:
                self._stream.send_nowait(message)
            self._stream.close()


def _with_length(admitted: control_messages.Message, payload_bytes: int) -> control_messages.Message:
    """The parent's reply, so that packets of a pipeline's own length are tried and no other.

    Raises ReplyError where the parent is a pipeline of another length.
    """
    theirs = admitted.get("payload_bytes", payload_bytes)
    if theirs != payload_bytes:
        raise ReplyError(
            f"is a P4 pipeline with {theirs} bytes of values in a packet, and this one has {payload_bytes}: compile "
            "all pipelines of a tree with one NETFOLD_VALUES"
        )
    return {**admitted, "profile": control_messages.HARDWARE, "payload_bytes": payload_bytes}
