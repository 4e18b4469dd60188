"""The only session of a script, from `init` to `shutdown`."""

from __future__ import annotations

from netfold.communicator import Communicator, Options
from netfold.horovod.session import Session

_session: Session | None = None


def init(communicator: Communicator | None = None, *, options: Options | None = None) -> None:
    """Join the job that the launcher's variables describe. Without a launcher, this process is a job of one rank.

    communicator: use this one instead; the caller closes it.
    options: of the group that this makes.
    A second call does nothing. Raises ValueError, RendezvousError.
    """
    global _session
    if _session is None:
        _session = Session.join(options) if communicator is None else Session(communicator, options)


def shutdown() -> None:
    """Leave the job without waiting for other ranks. Does nothing before `init` or a second time."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return _session is not None


def session() -> Session:
    """Return the session. ValueError before `init`."""
    if _session is None:
        raise ValueError("call netfold.horovod.init() first")
    return _session
