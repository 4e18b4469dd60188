"""Horovod's PyTorch interface on netfold: change one import.

    import netfold.horovod.torch as hvd

    hvd.init()                                       # torchrun, mpirun, srun; without a launcher: one rank
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

Ranks match operations by name, in whatever order they submit them (`negotiation`). Then they run the operations as
collectives of a Communicator (`execution`). May import: netfold.communicator, netfold.horovod, torch.

Always: all ranks run operations in one order; operations that differ under one name end with an error that names both
ranks, and never with a wrong sum; tensors live until their operation is done; no thread starts before the first
asynchronous operation.

Tests: `.venv/bin/pytest core/tests/horovod`
"""

from netfold.extras import need_at_import

need_at_import("netfold.horovod.torch", "torch")

from netfold.horovod.torch import elastic, operations, queries, world
from netfold.horovod.torch.compression import Compression
from netfold.horovod.torch.execution import Handle
from netfold.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from netfold.horovod.torch.negotiation import HorovodInternalError
from netfold.horovod.torch.operations import *  # noqa: F403 - the names that it lists
from netfold.horovod.torch.optimizer import DistributedOptimizer
from netfold.horovod.torch.queries import *  # noqa: F403
from netfold.horovod.torch.sync_batch_norm import SyncBatchNorm
from netfold.horovod.torch.world import *  # noqa: F403

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "HorovodInternalError",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
]
__all__ += operations.__all__ + queries.__all__ + world.__all__
