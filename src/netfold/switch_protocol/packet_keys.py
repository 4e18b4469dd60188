"""Keys of a job's data packets, from secrets that the switch draws and says over TLS.

A key a job, epoch, sender and direction, so that nothing that was tagged in one life of a job, or by one worker, holds
in another life or for another worker. Both ends derive them alike (HKDF, RFC 5869); docs/reference/protocol.md has the
bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from typing import Any

from netfold._native import auth

SECRET_BYTES = 32


def draw_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def hello_key_of(admitted: Mapping[str, Any]) -> bytes | None:
    """The key of who was `admitted` (control_messages.py); None where packets carry no tags."""
    if "secret" not in admitted:
        return None
    return hello_key(admitted["secret"], job=int(admitted["job_id"]), worker=int(admitted["worker"]))


def member_keys(admitted: Mapping[str, Any], epoch: int) -> tuple[bytes, bytes] | None:
    """The keys of what it sends, and of what the switch answers; None where packets carry no tags."""
    if "secret" not in admitted:
        return None
    job, worker = int(admitted["job_id"]), int(admitted["worker"])
    return (
        contribution_key(admitted["secret"], job=job, epoch=epoch, worker=worker),
        result_key(admitted["result_secret"], job=job, epoch=epoch),
    )


def hello_key(secret: bytes, *, job: int, worker: int) -> bytes:
    """`secret`: the worker's own. Of its hellos, before there is an epoch."""
    return _derived(secret, b"hellos", job, 0, worker)


def contribution_key(secret: bytes, *, job: int, epoch: int, worker: int) -> bytes:
    """`secret`: the worker's own."""
    return _derived(secret, b"contributions", job, epoch, worker)


def result_key(secret: bytes, *, job: int, epoch: int) -> bytes:
    """`secret`: the one that all workers of the job are told."""
    return _derived(secret, b"answers", job, epoch, 0)


def _derived(secret: bytes, kind: bytes, job: int, epoch: int, worker: int) -> bytes:
    # Here: only a process that speaks to a switch with tokens pays for the import.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {SECRET_BYTES} bytes was expected, not of {len(secret)}")
    info = b"netfold packets 1 " + kind + struct.pack(">IIH", job, epoch, worker)
    return HKDF(algorithm=SHA256(), length=auth.KEY_BYTES, salt=None, info=info).derive(secret)
