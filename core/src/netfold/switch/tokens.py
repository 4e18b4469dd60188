"""The tenants of a switch, from a file with one line for each.

    # tenant  token (32 characters or more)   bounds
    vision    8f14e45fceea167a5a36dedd4bea2543
    speech    c9f0f895fb98ab9159f51fd0297e236d   weight=2 names=asr-*,tts-* slots=4096 memory=512M

weight: the tenant's share of the switch, relative to the other tenants (default 1).
names: patterns of NETFOLD_JOB_NAME, separated by commas (default: all).
slots, memory: bounds on all its jobs together (default: its quota).
"""

from __future__ import annotations

import fnmatch
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from netfold.switch_protocol import control_messages

MAX_TENANTS = 1024
_TENANT = re.compile(r"[\w.-]{1,64}", re.ASCII)
_SIZE = re.compile(r"(\d+)([KMG]?)")


@dataclass(frozen=True)
class Tenant:
    """A customer of the switch, whose jobs share one quota.

    slots, memory_bytes: None for no bound but the quota.
    """

    name: str
    weight: int = 1
    names: tuple[str, ...] = ("*",)
    slots: int | None = None
    memory_bytes: int | None = None

    def allows_job_name(self, label: str) -> bool:
        return any(fnmatch.fnmatchcase(label, pattern) for pattern in self.names)


class Tokens:
    """The tenants of a file. It keeps a key of each token, never a token."""

    def __init__(self, tenants: dict[str, Tenant]) -> None:
        self._tenants = [(control_messages.credential_key(token), tenant) for token, tenant in tenants.items()]

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Read a token file.

        Raises ValueError with file and line where it is not private or malformed, OSError where it cannot be read.
        """
        tenants: dict[str, Tenant] = {}
        for number, line in enumerate(control_messages.read_private(path).splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                token, tenant = _tenant(words)
                if token in tenants or tenant.name in [other.name for other in tenants.values()]:
                    raise ValueError(f"tenant {tenant.name!r}, or its token, occurs twice")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            tenants[token] = tenant
        if not 0 < len(tenants) <= MAX_TENANTS:
            raise ValueError(f"{path} has {len(tenants)} tenants; expected 1 to {MAX_TENANTS}")
        return cls(tenants)

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._tenants]

    def credentials(self, fingerprint: str) -> Credentials:
        """The credentials of peers with these tokens at the switch whose certificate has this fingerprint."""
        return Credentials(
            [(control_messages.credential_by(key, fingerprint), tenant) for key, tenant in self._tenants]
        )


class Credentials:
    """The tenants of one switch, found by credential (`control_messages.credential_of`)."""

    def __init__(self, tenants: list[tuple[bytes, Tenant]]) -> None:
        self._tenants = tenants

    def find(self, credential: bytes) -> Tenant | None:
        """Find the tenant in constant time: a nearly right credential takes as long as any other."""
        found = None
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, credential):
                found = tenant
        return found


def _tenant(words: list[str]) -> tuple[str, Tenant]:
    # An error never quotes a word of the line except names: any other word may be the token.
    if len(words) < 2 or not _TENANT.fullmatch(words[0]):
        raise ValueError("expected: tenant token [weight=] [names=] [slots=] [memory=]")
    control_messages.check_token(words[1])
    bounds: dict[str, str] = {}
    for word in words[2:]:
        name, equals, value = word.partition("=")
        if not equals or name not in ("weight", "names", "slots", "memory") or name in bounds:
            raise ValueError(
                f"tenant {words[0]!r}: weight=, names=, slots= and memory= may follow the token, each once"
            )
        bounds[name] = value
    tenant = Tenant(
        words[0],
        weight=_positive("weight", bounds.get("weight", "1")),
        names=tuple(bounds.get("names", "*").split(",")),
        slots=_positive("slots", bounds["slots"]) if "slots" in bounds else None,
        memory_bytes=_positive("memory", bounds["memory"]) if "memory" in bounds else None,
    )
    return words[1], tenant


def _positive(name: str, text: str) -> int:
    found = _SIZE.fullmatch(text)
    value = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2]] if found else 0
    if value <= 0:
        raise ValueError(f"{name}= needs a number above 0, such as 2 or 512M")
    return value
