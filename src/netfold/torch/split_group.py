"""`torch.distributed.split_group` on ranks that are in none of the new groups.

torch asks the backend of such a rank, too, and its trampoline ends the process where a backend in Python answers that
there is none (PyBackend::initSlotAndCast). netfold needs nothing from such a rank, so torch need not ask.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from netfold.torch.operations import operations_of


@functools.cache
def patch_split_group() -> None:
    """Have `split_group` return NON_GROUP_MEMBER on outsiders of netfold groups. Idempotent; for torch from 2.14 on."""
    torchs: Any = distributed_c10d  # the stubs of older torch lack the function
    original = torchs.split_group

    @functools.wraps(original)
    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **options: Any) -> Any:
        parent = parent_pg if parent_pg is not None else dist.group.WORLD
        if (
            split_ranks
            and isinstance(parent, dist.ProcessGroup)
            and operations_of(parent) is not None
            and not any(parent.rank() in ranks for ranks in split_ranks)
        ):
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(parent_pg, split_ranks, *args, **options)

    module: Any
    for module in (dist, distributed_c10d):
        module.split_group = split_group
