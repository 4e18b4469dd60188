"""Sets of ranks that run operations of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from netfold.horovod.torch.world import Engine, World, world


class ProcessSet:
    """Some ranks of the job, for the `process_set` argument of every operation.

    Give it to `init` or `add_process_set`, which every rank of the job calls with the same sets in the same order.
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
        """Ranks in the set; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set; None before the set is added. Root ranks are numbers in the job."""
        if self.process_set_id is None:
            return None
        return self.ranks.index(world().base.rank) if self.included() else -1

    def included(self) -> bool:
        """Whether this process is in the set."""
        return world().base.rank in self.ranks

    def root(self, root_rank: int) -> int:
        """The number in the set of a rank of the job. ValueError where it is not in the set."""
        if root_rank not in self.ranks:
            raise ValueError(f"root rank {root_rank} is not in {self}")
        return self.ranks.index(root_rank)

    def engine(self) -> Engine:
        """What runs this set's operations; ValueError where this process is not in it."""
        here = world()
        if self.process_set_id is None or self.process_set_id not in here.engines:
            raise ValueError(f"{self} is no process set of this job; give it to init() or add_process_set() first")
        engine = here.engines[self.process_set_id]
        if engine is None:
            raise ValueError(f"rank {here.base.rank} is not in {self} and cannot take part in its operations")
        return engine

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


# All ranks of the job.
global_process_set = ProcessSet([])

_bound: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set after `init`, and return it. Every rank of the job calls this, members or not.

    Raises ValueError where a set of these ranks exists already, or a rank is not in the job.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    here = world()
    if made.ranks in here.sets.values():
        raise ValueError(f"there is a process set of the ranks {made.ranks} already")
    if not made.ranks or not set(made.ranks) <= set(range(here.base.size)) or len(set(made.ranks)) < len(made.ranks):
        raise ValueError(f"the ranks {made.ranks} are not different ranks of a job of {here.base.size}")
    made.process_set_id = here.add(made.ranks)
    _bound.append(made)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """End a set; every rank of the job calls this. False for the global set, and for one that was not added."""
    number = process_set.process_set_id
    if number is None or not world().remove(number):
        return False
    process_set.process_set_id = None
    _bound.remove(process_set)
    return True


def bind(here: World, process_sets: Sequence[ProcessSet]) -> None:
    """At `init`: the global set, then the given ones."""
    global_process_set.ranks = list(range(here.base.size))
    global_process_set.process_set_id = 0
    for process_set in process_sets:
        add_process_set(process_set)


def unbind() -> None:
    """At `shutdown`: no set is of a job any more."""
    for process_set in (global_process_set, *_bound):
        process_set.process_set_id = None
    _bound.clear()


__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
