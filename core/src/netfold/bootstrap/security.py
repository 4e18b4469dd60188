"""Whether this host, and the named switches, can give the protection that NETFOLD_SECURITY asks for.

docs/explanation/security.md has the levels.
"""

from __future__ import annotations

import hashlib
import hmac

from netfold._native import auth
from netfold.options import SECURITIES, Options
from netfold.switch_protocol import control_messages


def why_not_secure(options: Options) -> str:
    """Return why this process cannot give the security of `options`, resolved; empty where it can."""
    if options.security == SECURITIES[0]:
        return ""
    setting = f"NETFOLD_SECURITY={options.security}"
    if options.fabric is not None:
        return (
            f"{setting} and NETFOLD_TRANSPORT={options.transport} exclude each other: only streams over TCP are "
            "authenticated or encrypted, and data over a fabric is not"
        )
    if auth.unavailable_reason():
        reason = auth.unavailable_reason()
        return f"{setting} needs OpenSSL 3's libcrypto on every host of the job, and this host cannot: {reason}"
    return ""


def why_no_switch(security: str, switch: str | None) -> str:
    """Return why packets may not go to `switch`, as in NETFOLD_SWITCH, under that security; empty where they may."""
    if switch is None or security == SECURITIES[0]:
        return ""
    for endpoint in control_messages.switches_of(switch):
        host, port, fingerprint = control_messages.parse_switch(endpoint, what="NETFOLD_SWITCH")
        if fingerprint is None:
            return (
                f"the switch at {control_messages.format_endpoint(host, port)} is not used: "
                f"NETFOLD_SECURITY={security}, and a switch that NETFOLD_SWITCH names without a fingerprint has no keys"
            )
    return ""


def job_secret(drawn: bytes, secret_file: str | None) -> bytes:
    """The secret that authenticates all connections of a job: rank 0's from the store, mixed with the file's, if any.

    ValueError with a sentence where the file cannot be read, or other users can read it.
    """
    if secret_file is None:
        return drawn
    try:
        text = control_messages.read_private(secret_file).strip()
        control_messages.check_token(text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"NETFOLD_SECRET_FILE={secret_file}: {why}") from None
    return hmac.new(text.encode(), b"netfold job secret" + drawn, hashlib.sha256).digest()


def digest_of(secret: bytes) -> str:
    """Compares secrets of two ranks without revealing them."""
    return hmac.new(secret, b"netfold secret check", hashlib.sha256).hexdigest()[:16]
