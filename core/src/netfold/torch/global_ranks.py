"""Global ranks of a group whose members change. torch leaves its table of them as it was, also for its own backends.

torch translates global ranks (`dist.broadcast(src=...)`) by that table, and makes subgroups of the default group by it.
Its private table is written here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from netfold.torch.operations import Operations, operations_of


def of_next(operations: Operations, handles: Sequence[str]) -> list[int | None]:
    """The global rank of each member of the next group, by its rank there; None for a member that has none.

    The members of the default group have the global ranks 0 to size - 1. In any other group a member keeps the global
    rank that it had there, and a member that joins has none.
    """
    assert operations.generations is not None
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None and operations_of(world) is operations:
        return list(range(len(handles)))
    known = dict(zip(operations.generations.handles, operations.netfold.job_ranks, strict=False))
    return [known.get(each) for each in handles]


def job_ranks(ranks: Sequence[int | None]) -> list[int]:
    """For a `Group`: empty unless all are known."""
    known = [rank for rank in ranks if rank is not None]
    return known if len(known) == len(ranks) else []


def publish(operations: Operations, ranks: Sequence[int | None]) -> None:
    """Have torch translate the global ranks of this group by `ranks`. It refuses one that is not among them."""
    table: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    for group in list(table):
        # Also there: NON_GROUP_MEMBER, a number.
        if isinstance(group, dist.ProcessGroup) and operations_of(group) is operations:
            table[group] = {rank: place for place, rank in enumerate(ranks) if rank is not None}
