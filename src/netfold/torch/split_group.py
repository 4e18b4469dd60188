"""`torch.distributed.split_group` on ranks outside of all new groups.

torch calls the backend on such a rank, too. torch's trampoline ends the process if a Python backend returns None
(PyBackend::initSlotAndCast). netfold needs no call on such a rank, so the patched function skips it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from netfold.torch.operations import operations_of


@functools.cache
def patch_split_group() -> None:
    """Have `split_group` return NON_GROUP_MEMBER on such ranks of netfold groups. Idempotent; for torch >= 2.14."""
    module: Any = distributed_c10d  # the stubs of older torch lack the function
    original = module.split_group

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

    for module in (dist, distributed_c10d):
        module.split_group = split_group
