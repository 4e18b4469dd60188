"""Handles: a rank's end as text, which a program passes to the ranks that shall form a group with it.

A handle names the addresses of its process's listener, an identity, and what all members of a group must have in
common. It is made without any peer, and stays the same until its communicator is closed.
A handle also carries a secret. The secret of a group that forms over handles is derived from all of its members'
handles (`generation_secret`), so a process that knows them all can be a member. A program passes handles as it would
pass a password. NETFOLD_SECRET_FILE is mixed in where it is set.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

import netfold
from netfold.bootstrap import security
from netfold.options import SECURITIES, Options
from netfold.switch_protocol.control_messages import parse_endpoint

_PREFIX = "netfold"
MAX_HANDLE_BYTES = 1 << 14
_ID_BYTES, _SECRET_BYTES = 8, 32


class _Fields(NamedTuple):
    """The fields of a handle's text, in the order of its bytes."""

    version: str
    identity: bytes
    secret: bytes
    addresses: list[str]
    rails: int
    fabric: str
    host: str
    security: str
    file_check: str


@dataclass(frozen=True)
class Handle:
    """A handle, read. Two handles are equal where their texts are."""

    identity: bytes
    secret: bytes
    addresses: tuple[str, ...]
    """host:port of the listener, by interface."""
    rails: int
    fabric: str
    """The provider of libfabric that replaces TCP; empty for TCP."""
    host: str
    """As `shm_discovery.host_identity`; empty for a rank that shares no memory."""
    security: str
    file_check: str
    """Compares secret files; empty without one."""

    @property
    def text(self) -> str:
        fields = _Fields(
            netfold.__version__,
            self.identity,
            self.secret,
            list(self.addresses),
            self.rails,
            self.fabric,
            self.host,
            self.security,
            self.file_check,
        )
        packed = base64.urlsafe_b64encode(msgpack.packb(list(fields))).decode()
        # The address comes first, so that sorted handles keep the ranks of a host together.
        return f"{_PREFIX}:{self.addresses[0]}:{packed}"

    def endpoints(self) -> list[tuple[str, int]]:
        return [parse_endpoint(each, what="a handle's address") for each in self.addresses]

    @property
    def where(self) -> str:
        return self.addresses[0]


def parse(text: str) -> Handle:
    """Raises ValueError with a sentence for a text that is no handle, or one of another version of netfold."""
    prefix, _, rest = text.partition(":")
    if prefix != _PREFIX or len(text) > MAX_HANDLE_BYTES:
        raise ValueError(f"{_shortened(text)} is no handle of netfold")
    try:
        values = msgpack.unpackb(base64.urlsafe_b64decode(rest.rpartition(":")[2].encode()))
        version = values[0]
        if version == netfold.__version__:
            _, identity, secret, addresses, rails, fabric, host, level, check = values
            handle = Handle(identity, secret, tuple(addresses), rails, fabric, host, level, check)
            handle.endpoints()
            whole = len(identity) == _ID_BYTES and len(secret) == _SECRET_BYTES and level in SECURITIES
            if whole and handle.text == text:
                return handle
    except (ValueError, TypeError, LookupError, msgpack.UnpackException):
        raise ValueError(f"{_shortened(text)} is no whole handle of netfold") from None
    if version != netfold.__version__:
        raise ValueError(
            f"{_shortened(text)} was made by netfold {version}, and this rank runs netfold {netfold.__version__}: "
            "install the same version on every host"
        )
    raise ValueError(f"{_shortened(text)} is no whole handle of netfold")


def make(
    identity: bytes,
    secret: bytes,
    addresses: Sequence[str],
    *,
    rails: int,
    fabric: str | None,
    host: str,
    security_level: str,
    secret_file: str | None,
) -> Handle:
    """identity, secret: random bytes, or bytes that only the ranks of a group can derive."""
    check = "" if secret_file is None else security.digest_of(security.job_secret(b"", secret_file))
    return Handle(
        identity[:_ID_BYTES],
        secret[:_SECRET_BYTES],
        tuple(addresses),
        rails,
        fabric or "",
        host,
        security_level,
        check,
    )


def of_rank(
    secret: bytes, rank: int, addresses: Sequence[str], host: str, *, rails: int, security_level: str, options: Options
) -> Handle:
    """The handle of a rank of a group that met by a store. Every rank of the group derives the same, and sends none.

    secret: of the group.
    """

    def derive(purpose: bytes) -> bytes:
        return hmac.new(secret, b"netfold handle %s %d" % (purpose, rank), hashlib.sha256).digest()

    return make(
        derive(b"identity"),
        derive(b"secret"),
        addresses,
        rails=rails,
        fabric=options.fabric,
        host=host,
        security_level=security_level,
        secret_file=options.secret_file,
    )


def in_order(handles: Collection[str]) -> list[str]:
    """The members by rank: a list is in order, a set is sorted as text."""
    return sorted(handles) if isinstance(handles, Set) else list(handles)


def check_members(own: Handle, handles: Sequence[str]) -> list[Handle]:
    """Read the members' handles, by rank. ValueError with a sentence where they cannot form a group."""
    if not handles:
        raise ValueError("a group needs at least one handle")
    members = [parse(text) for text in handles]
    first: dict[bytes, int] = {}
    for rank, member in enumerate(members):
        if member.identity in first:
            raise ValueError(
                f"handles {first[member.identity]} and {rank} are the same one ({member.where}): every member needs "
                "one place"
            )
        first[member.identity] = rank
    if own not in members:
        raise ValueError(f"this rank's own handle ({own.where}) is not one of the {len(handles)} handles")
    for rank, member in enumerate(members):
        for what, its, ours in (
            ("NETFOLD_SECURITY", member.security, own.security),
            ("fabric (NETFOLD_TRANSPORT)", member.fabric or "none", own.fabric or "none"),
            ("number of named interfaces (NETFOLD_INTERFACE)", member.rails, own.rails),
        ):
            if its != ours:
                raise ValueError(
                    f"the member of handle {rank} ({member.where}) has another {what} than this rank: {its}, not {ours}"
                )
        if member.file_check != own.file_check:
            raise ValueError(
                f"the member of handle {rank} ({member.where}) has another secret than this rank: every member needs "
                "the same NETFOLD_SECRET_FILE, or none has one"
            )
    return members


def generation_secret(uuid: str, handles: Sequence[str], secret_file: str | None) -> bytes:
    """The secret of the group that these handles form as `uuid`. Another order, member or uuid gives another one."""
    key = hashlib.sha256("\n".join(handles).encode()).digest()
    drawn = hmac.new(key, b"netfold generation " + uuid.encode(), hashlib.sha256).digest()
    return security.job_secret(drawn, secret_file)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
