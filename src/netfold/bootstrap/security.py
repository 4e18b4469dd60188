"""What NETFOLD_SECURITY requires, and why this host or a path cannot give it (docs/explanation/security.md)."""

from __future__ import annotations

import hashlib
import hmac

from netfold._native import auth
from netfold.options import SECURITIES, Options
from netfold.switch_protocol import control_messages


def why_not_secure(options: Options) -> str:
    """Why this process cannot keep to the security that `options`, resolved, ask for; empty where it can."""
    if options.security == SECURITIES[0]:
        return ""
    asked = f"NETFOLD_SECURITY={options.security}"
    if options.fabric is not None:
        return (
            f"{asked} and NETFOLD_TRANSPORT={options.transport} exclude each other: only streams over TCP are "
            "authenticated or encrypted, and what goes over a fabric or MPI is not"
        )
    if auth.unavailable_reason():
        reason = auth.unavailable_reason()
        return f"{asked} needs OpenSSL 3's libcrypto on every host of the job, and this host cannot: {reason}"
    return ""


def why_no_switch(security: str, switch: str | None) -> str:
    """Why packets may not go to `switch`, as NETFOLD_SWITCH names it, under that security; empty where they may."""
    if switch is None or security == SECURITIES[0]:
        return ""
    for endpoint in control_messages.switches_of(switch):
        host, port, fingerprint = control_messages.parse_switch(endpoint, what="NETFOLD_SWITCH")
        if fingerprint is None:
            return (
                f"the switch at {control_messages.format_endpoint(host, port)} is not used: "
                f"NETFOLD_SECURITY={security}, and a "
                "switch that NETFOLD_SWITCH names without a fingerprint has no keys"
            )
    return ""


def job_secret(drawn: bytes, secret_file: str | None) -> bytes:
    """The secret that all connections of a job are proved by: what rank 0 drew and left in the store, with what is in
    the file that the store never sees. ValueError with a sentence where there is no such file, or another may read it.
    """
    if secret_file is None:
        return drawn
    try:
        text = control_messages.read_private(secret_file).strip()
        control_messages.check_token(text)
    except OSError as error:
        raise ValueError(f"NETFOLD_SECRET_FILE={secret_file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"NETFOLD_SECRET_FILE={secret_file}: {error}") from None
    return hmac.new(text.encode(), b"netfold job secret" + drawn, hashlib.sha256).digest()


def digest_of(secret: bytes) -> str:
    """What shows whether two ranks have the same secret, and tells nothing of it."""
    return hmac.new(secret, b"netfold secret check", hashlib.sha256).hexdigest()[:16]
