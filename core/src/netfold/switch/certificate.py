"""The switch's certificate: self-signed, identified by its fingerprint, stored in a folder where one is given.

Workers compare the SHA-256 of the whole certificate with the fingerprint that they were given. Its name, dates and
issuer mean nothing.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from netfold.switch_protocol import control_messages

FILE = "switch.pem"
_VALIDITY = datetime.timedelta(days=36500)


def server_context(state_dir: Path | None) -> tuple[ssl.SSLContext, str]:
    """Make a TLS 1.3 context with the certificate of `state_dir`; return it and the certificate's fingerprint.

    A missing folder is made with mode 0700, in a folder that exists. A missing certificate is made.
    state_dir: None: the certificate lasts as long as the process.
    Raises ValueError where the file is not private or holds no certificate, OSError where it can be neither read nor
    written; no file is left half written.
    """
    if state_dir is None:
        with tempfile.TemporaryDirectory(prefix="netfold-") as folder:
            return _context(_stored(Path(folder)))
    # Not the parents: a mistyped path must not grow a tree of folders.
    if not state_dir.parent.is_dir():
        raise ValueError(f"--state-dir {state_dir}: there is no folder {state_dir.parent} to make it in")
    state_dir.mkdir(mode=0o700, exist_ok=True)
    return _context(_stored(state_dir))


def _stored(folder: Path) -> Path:
    path = folder / FILE
    if not path.exists():
        _write(path, _make())
    control_messages.read_private(path)
    return path


def _context(path: Path) -> tuple[ssl.SSLContext, str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no resumption: each connection shows the certificate, which workers pin
    try:
        context.load_cert_chain(path)
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"{path} holds no key and certificate ({error}); remove it to get a new one") from None
    return context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def _make() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "netfold switch")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + _VALIDITY)
        .sign(key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes) -> None:
    """Write the file atomically, readable by its owner alone."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
