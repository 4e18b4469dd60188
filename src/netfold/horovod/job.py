"""The one session of a script, from `init` to `shutdown`."""

from __future__ import annotations

from netfold.communicator import Communicator, Options
from netfold.horovod.session import Session

_session: Session | None = None


def init(communicator: Communicator | None = None, *, options: Options | None = None) -> None:
    """Join the job: as the launcher's variables say, or over a Communicator of yours, which you then close yourself.

    Without any launcher this process is a job of one rank. A second call does nothing. `options`: of the group that is
    made here. Raises ValueError, RendezvousError.
    """
    global _session
    if _session is None:
        _session = Session.join(options) if communicator is None else Session(communicator, options)


def shutdown() -> None:
    """Leave the job: waits for no other rank. Does nothing before `init` or a second time."""
    global _session
    if _session is not None:
        _session.close()
        _session = None


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not yet."""
    return _session is not None


def session() -> Session:
    """What is behind these functions; ValueError before `init`."""
    if _session is None:
        raise ValueError("call netfold.horovod.init() first")
    return _session
