"""`init` and `shutdown`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from netfold.communicator import Options
from netfold.horovod import job
from netfold.horovod.torch.process_sets import bind, unbind
from netfold.horovod.torch.world import World, enter, is_initialized, leave

_own_job = False
_pid = 0


def init(comm: Any = None, process_sets: Any = None, *, options: Options | None = None) -> None:
    """Join the job as the launcher's variables say (torchrun, mpirun, srun); without a launcher, a job of one rank.

    process_sets: a list of ProcessSet, or "dynamic", which changes nothing: sets can always be added later. comm: only
    None or an empty list, for all ranks of the job. A second call does nothing. Where `netfold.horovod.init` was called
    before, its job is joined, and outlives `shutdown`. Raises ValueError, RendezvousError, SwitchError.
    """
    global _own_job, _pid
    if is_initialized():
        return
    _pid = os.getpid()
    if comm is not None and not (isinstance(comm, Sequence) and len(comm) == 0):
        raise ValueError(
            "init(comm=...): netfold takes the ranks that the launcher started and no MPI communicator; start fewer "
            "ranks, or make a ProcessSet of some"
        )
    _own_job = not job.is_initialized()
    if _own_job:
        options = options or Options()
        # Its ranks only meet there: a switch's memory is for the groups that carry tensors.
        job.init(options=replace(options, switch=""))
    session = job.session()
    try:
        made = World(session.communicator, session.local, options)
        enter(made)
        bind(made, [] if process_sets is None or isinstance(process_sets, str) else list(process_sets))
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the job: waits for no other rank; operations under way fail. Does nothing before `init`."""
    global _own_job
    left = leave()
    if _pid != os.getpid():
        return  # a forked child: the job is its parent's
    if left is not None:
        unbind()
        left.close()
    if _own_job:
        _own_job = False
        job.shutdown()


atexit.register(shutdown)
