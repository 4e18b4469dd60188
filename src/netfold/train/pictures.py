"""Pictures of what a model has learnt: where the data can show some, the replica makes them, however it is split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.train.examples import Panel, Pictures
from netfold.train.mesh import Mesh
from netfold.train.replica import Replica


def render(replica: Replica, pictures: Pictures, mesh: Mesh, batch: int) -> Sequence[Panel]:
    """The panels on rank 0, none elsewhere. Collective over the world; batches as large as those trained on.

    Cost: a forward pass of all their examples, and an all_reduce of their outputs.
    """
    total, ranks = len(pictures), mesh.data.size
    outputs: Tensor | None = None
    # How many ranks have computed an example: those that share its layers all have.
    times = torch.zeros(total)
    for first in range(mesh.data.rank * batch, -(-total // (batch * ranks)) * batch * ranks, batch * ranks):
        shown = pictures.batch([min(index, total - 1) for index in range(first, first + batch)])
        if outputs is None:
            outputs = torch.zeros(total, *shown.target.shape[1:])
        output = replica.outputs(shown)
        count = max(0, min(batch, total - first))
        if output is not None and count:
            outputs[first : first + count] = output[:count].float()
            times[first : first + count] = 1.0
    assert outputs is not None, "a rank's share has at least one batch, be it of examples that count for nothing"
    dist.all_reduce(outputs)
    dist.all_reduce(times)
    if dist.get_rank() != 0:
        return ()
    return pictures.panels(outputs / times.view(-1, *[1] * (outputs.dim() - 1)))
