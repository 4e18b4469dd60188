"""The job that `init` joins: its ranks, its process sets, and the engine behind each set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from netfold.communicator import Communicator, Options
from netfold.horovod.torch.execution import Executor
from netfold.horovod.torch.negotiation import Negotiation

_UNINITIALIZED = "Horovod has not been initialized; use hvd.init()."


class Engine:
    """Runs the operations of one process set."""

    def __init__(self, control: Communicator, data: Communicator) -> None:
        self.control = control
        self.data = data
        self.executor = Executor(control, data)
        self.negotiation = Negotiation(control, self.executor.execute, self._abort)
        self._unnamed: dict[str, int] = {}

    @property
    def rank(self) -> int:
        return self.data.rank

    @property
    def size(self) -> int:
        return self.data.size

    def name(self, kind: str, name: str | None) -> str:
        """`name`, or a number that counts this kind's operations without one: equal on ranks that call alike."""
        if name is not None:
            return name
        number = self._unnamed.get(kind, 0)
        self._unnamed[kind] = number + 1
        return f"noname.{number}"

    def count_anew(self) -> None:
        """Number unnamed operations from 0: all ranks have joined, after different numbers of them."""
        self._unnamed.clear()

    def close(self) -> None:
        self.negotiation.close()
        self.data.close()

    def _abort(self, reason: str) -> None:
        self.control.group.abort(reason)
        self.data.group.abort(reason)


class World:
    """From `init` to `shutdown`."""

    def __init__(self, base: Communicator, local: tuple[int, int], options: Options | None) -> None:
        """options: of the groups that carry tensors; None: as `base` has them."""
        self.base = base
        self.local = local
        self._options = options
        everyone = base.all_gather(np.array(local, np.int64))
        # Ranks with the same number on their hosts, in the order of their hosts' first ranks.
        alike = [rank for rank, (local_rank, _) in enumerate(everyone) if local_rank == local[0]]
        self.cross = (alike.index(base.rank), len(alike))
        self.homogeneous = bool((everyone[:, 1] == everyone[0, 1]).all())
        self.engines: dict[int, Engine | None] = {}
        self.sets: dict[int, list[int]] = {}
        self._next_set = 0
        self.add(list(range(base.size)))

    def add(self, ranks: list[int]) -> int:
        """Make a process set; every rank of the job calls this. The set's number."""
        member = 0 if self.base.rank in ranks else None
        # What ranks negotiate is a few bytes that must not queue behind gradients, and is not worth a switch's memory.
        control = self.base.split(member, self.base.rank, options=replace(self.base.group.options, switch=""))
        data = self.base.split(member, self.base.rank, options=self._options)
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = ranks
        self.engines[number] = Engine(control, data) if control is not None and data is not None else None
        return number

    def remove(self, number: int) -> bool:
        if number == 0 or number not in self.sets:
            return False
        # Ranks wait for each other, so that none closes while another is in an operation of the set.
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


def enter(made: World) -> None:
    """From now on, `world` is this one."""
    global _world
    _world = made


def leave() -> World | None:
    """From now on, there is none; the one that was."""
    global _world
    left, _world = _world, None
    return left


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not yet."""
    return _world is not None


def world() -> World:
    """ValueError before `init`."""
    if _world is None:
        raise ValueError(_UNINITIALIZED)
    return _world


def rank() -> int:
    """This process's number, from 0."""
    return world().base.rank


def size() -> int:
    """Ranks in the job."""
    return world().base.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return world().local[0]


def local_size() -> int:
    """Ranks on this host."""
    return world().local[1]


def cross_rank() -> int:
    """This process's number among those with the same `local_rank`."""
    return world().cross[0]


def cross_size() -> int:
    """Ranks with the same `local_rank`: hosts that have so many ranks."""
    return world().cross[1]


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    return world().homogeneous
