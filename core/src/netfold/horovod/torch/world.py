"""The job that `init` joins: its ranks, its process sets, and the engine of each set."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from netfold.communicator import Communicator, Options
from netfold.horovod import job
from netfold.horovod.torch.execution import Engine

__all__ = [
    "ProcessSet",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]


class World:
    """The job from `init` to `shutdown`."""

    def __init__(self, base: Communicator, local: tuple[int, int], options: Options | None) -> None:
        """local: this rank's number on its host, and the host's number of ranks.
        options: of the groups that carry tensors; None: those of `base`.
        """
        self.base = base
        self.local = local
        self._options = options
        everyone = base.all_gather(np.array(local, np.int64))
        # The ranks with this rank's number on their hosts, in the order of their hosts' first ranks.
        alike = [rank for rank, (local_rank, _) in enumerate(everyone) if local_rank == local[0]]
        self.cross = (alike.index(base.rank), len(alike))
        self.homogeneous = bool((everyone[:, 1] == everyone[0, 1]).all())
        self.engines: dict[int, Engine | None] = {}
        self.sets: dict[int, list[int]] = {}
        self._next_set = 0
        self.add(list(range(base.size)))

    def add(self, ranks: list[int]) -> int:
        """Make a process set and return its number. Every rank of the job calls this."""
        color = 0 if self.base.rank in ranks else None
        # A negotiation takes a few bytes. These must not queue behind gradients, and need no switch's memory.
        control = self.base.split(color, self.base.rank, options=replace(self.base.group.options, switch=""))
        data = self.base.split(color, self.base.rank, options=self._options)
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = ranks
        self.engines[number] = Engine(control, data) if control is not None and data is not None else None
        return number

    def remove(self, number: int) -> bool:
        """End a process set. Every rank of the job calls this. False for the global set and for unknown numbers."""
        if number == 0 or number not in self.sets:
            return False
        # Ranks wait for each other, so none closes while another is in an operation of the set.
        self.base.barrier()
        engine = self.engines.pop(number)
        if engine is not None:
            engine.close()
        del self.sets[number]
        return True

    def close(self) -> None:
        for engine in self.engines.values():
            if engine is not None:
                engine.close()


_world: World | None = None
# Whether `init` joined the job, so that `shutdown` leaves the job.
_owns_job = False
_pid = 0


def init(comm: Any = None, process_sets: Any = None, *, options: Options | None = None) -> None:
    """Join the job that the launcher's variables describe (torchrun, mpirun, srun); without a launcher, make a job of
    one rank.

    comm: None or an empty list, for all ranks of the job.
    process_sets: a list of ProcessSet, or "dynamic", which changes nothing: sets can always be added later.
    A second call does nothing. If `netfold.horovod.init` was called before, this uses its job, and `shutdown` does not
    end that job. Raises ValueError, RendezvousError, SwitchError.
    """
    global _world, _owns_job, _pid
    if _world is not None:
        return
    _pid = os.getpid()
    if comm is not None and not (isinstance(comm, Sequence) and len(comm) == 0):
        raise ValueError(
            "init(comm=...): netfold takes the ranks that the launcher started and no MPI communicator; start fewer "
            "ranks, or make a ProcessSet of some"
        )
    _owns_job = not job.is_initialized()
    if _owns_job:
        options = options or Options()
        # The job's own group carries no tensors, so it needs no switch's memory.
        job.init(options=replace(options, switch=""))
    session = job.session()
    try:
        _world = World(session.communicator, session.local, options)
        global_process_set.ranks = list(range(size()))
        global_process_set.process_set_id = 0
        for process_set in [] if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Leave the job without waiting for other ranks. Operations under way fail. Does nothing before `init`."""
    global _world, _owns_job
    left, _world = _world, None
    if _pid != os.getpid():
        return  # a forked child: the job belongs to the parent
    if left is not None:
        for process_set in (global_process_set, *_added):
            process_set.process_set_id = None
        _added.clear()
        left.close()
    if _owns_job:
        _owns_job = False
        job.shutdown()


atexit.register(shutdown)


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return _world is not None


def world() -> World:
    """Return the job. ValueError before `init`."""
    if _world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _world


def rank() -> int:
    """This process's rank in the job, from 0."""
    return world().base.rank


def size() -> int:
    """The number of ranks in the job."""
    return world().base.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return world().local[0]


def local_size() -> int:
    """The number of ranks on this host."""
    return world().local[1]


def cross_rank() -> int:
    """This process's number among the ranks with the same `local_rank`."""
    return world().cross[0]


def cross_size() -> int:
    """The number of ranks with the same `local_rank`: one on each host that has so many ranks."""
    return world().cross[1]


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return world().homogeneous


# --- process sets ----------------------------------------------------------------------------------------------------


class ProcessSet:
    """Some ranks of the job, for the `process_set` argument of every operation.

    Pass it to `init` or `add_process_set`. Every rank of the job adds the same sets in the same order.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ValueError("a ProcessSet takes a list of ranks; netfold has no MPI communicators to take them from")
        listed = sorted(ranks)
        if any(not isinstance(rank, int) for rank in listed):
            raise ValueError(f"a ProcessSet takes ranks, which are whole numbers, not {listed}")
        self.ranks: list[int] = listed
        self.process_set_id: int | None = None

    def size(self) -> int | None:
        """The number of ranks in the set; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set, -1 outside of the set; None before the set is added.

        Root ranks are numbers in the job.
        """
        if self.process_set_id is None:
            return None
        return self.ranks.index(rank()) if self.included() else -1

    def included(self) -> bool:
        """Whether this process is in the set."""
        return rank() in self.ranks

    def root(self, root_rank: int) -> int:
        """The number in the set of a rank of the job. ValueError if that rank is not in the set."""
        if root_rank not in self.ranks:
            raise ValueError(f"root rank {root_rank} is not in {self}")
        return self.ranks.index(root_rank)

    def engine(self) -> Engine:
        """The engine of this set's operations. ValueError if this process is not in the set."""
        engines = world().engines
        if self.process_set_id is None or self.process_set_id not in engines:
            raise ValueError(f"{self} is no process set of this job; give it to init() or add_process_set() first")
        engine = engines[self.process_set_id]
        if engine is None:
            raise ValueError(f"rank {rank()} is not in {self} and cannot take part in its operations")
        return engine

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


# All ranks of the job.
global_process_set = ProcessSet([])

_added: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set after `init`, and return it. Every rank of the job calls this, members or not.

    Raises ValueError if a set of these ranks exists already, or a rank is not in the job.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if made.ranks in world().sets.values():
        raise ValueError(f"there is a process set of the ranks {made.ranks} already")
    if not made.ranks or not set(made.ranks) <= set(range(size())) or len(set(made.ranks)) < len(made.ranks):
        raise ValueError(f"the ranks {made.ranks} are not different ranks of a job of {size()}")
    made.process_set_id = world().add(made.ranks)
    _added.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set. Every rank of the job calls this. False for the global set, and for a set that was not added."""
    number = process_set.process_set_id
    if number is None or not world().remove(number):
        return False
    process_set.process_set_id = None
    _added.remove(process_set)
    return True
