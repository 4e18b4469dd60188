"""Keys of a job's data packets, from secrets that the switch draws and sends over TLS.

There is a key for each job, epoch, sender and direction. So a packet of one epoch, or of one worker, is not valid in
another epoch or for another worker. Both ends derive the keys in the same way (HKDF, RFC 5869);
docs/reference/protocol.md has the bytes.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from typing import Any

from netfold._native import auth
from netfold.switch_protocol.control_messages import ReplyError

SECRET_BYTES = 32


def draw_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def check_admitted(admitted: Mapping[str, Any], *, pinned: bool, encrypt: bool) -> None:
    """Raise ReplyError where packets would lack the promised protection, or this host cannot give it.

    pinned: the switch proved its fingerprint, so it has keys for packets.
    encrypt: the job requires that values in packets are encrypted.
    """
    has_keys = "secret" in admitted
    if pinned and not has_keys:
        raise ReplyError("speaks TLS and gave no keys for packets")
    if has_keys and auth.unavailable_reason():
        raise ReplyError(
            f"requires packet authentication, which is unavailable on this host: {auth.unavailable_reason()}"
        )
    if encrypt and not (has_keys and admitted.get("encrypt")):
        raise ReplyError("does not encrypt packets, and the job requires it (NETFOLD_SECURITY=encrypt): upgrade it")


def hello_key_of(admitted: Mapping[str, Any]) -> bytes | None:
    """The hello key of the worker with this `admitted` (control_messages.py); None where packets carry no MACs."""
    if "secret" not in admitted:
        return None
    return hello_key(admitted["secret"], job=int(admitted["job_id"]), worker=int(admitted["worker"]))


def member_keys(admitted: Mapping[str, Any], epoch: int) -> tuple[bytes, bytes] | None:
    """The keys of the worker's contributions and of the switch's results; None where packets carry no MACs."""
    if "secret" not in admitted:
        return None
    job, worker = int(admitted["job_id"]), int(admitted["worker"])
    return (
        contribution_key(admitted["secret"], job=job, epoch=epoch, worker=worker),
        result_key(admitted["result_secret"], job=job, epoch=epoch),
    )


def hello_key(secret: bytes, *, job: int, worker: int) -> bytes:
    """The key of a worker's hello packets, before there is an epoch. secret: the worker's own."""
    return _derived(secret, b"hellos", job, 0, worker)


def contribution_key(secret: bytes, *, job: int, epoch: int, worker: int) -> bytes:
    """secret: the worker's own."""
    return _derived(secret, b"contributions", job, epoch, worker)


def result_key(secret: bytes, *, job: int, epoch: int) -> bytes:
    """secret: the one that the switch gives all workers of the job."""
    return _derived(secret, b"answers", job, epoch, 0)


def _derived(secret: bytes, kind: bytes, job: int, epoch: int, worker: int) -> bytes:
    # Imported here, since only processes that use a switch with tokens need it.
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret of {SECRET_BYTES} bytes was expected, not of {len(secret)}")
    info = b"netfold packets 1 " + kind + struct.pack(">IIH", job, epoch, worker)
    return HKDF(algorithm=SHA256(), length=auth.KEY_BYTES, salt=None, info=info).derive(secret)
