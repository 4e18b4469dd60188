"""The metric over all held-out examples, shared out among the data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from netfold.train.examples import Data
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.replica import Replica


def evaluate(replica: Replica, model: Model, data: Data, mesh: Mesh, batch: int) -> dict[str, float]:
    """The mean of the metric's scores and of the loss over the held-out examples, the same on every rank.

    In batches of `batch` samples a rank, as large as those trained on: stages of a pipeline know no other shape. The
    last one is filled up with examples that count for nothing. Collective over the world.
    """
    total, ranks = len(data.held_out), mesh.data.size
    # score, loss, samples
    sums = torch.zeros(3, dtype=torch.float64)
    for first in range(mesh.data.rank * batch, -(-total // (batch * ranks)) * batch * ranks, batch * ranks):
        indices = [min(index, total - 1) for index in range(first, first + batch)]
        held = data.held_out.batch(indices, indices)
        output = replica.outputs(held)
        count = max(0, min(batch, total - first))
        if output is not None and count:
            with torch.no_grad():
                sums[0] += data.metric.score(output[:count], held.target[:count]).double().sum()
                sums[1] += model.loss(output[:count], held.target[:count]).double() * count
            sums[2] += count
    dist.all_reduce(sums)
    return {data.metric.name: float(sums[0] / sums[2]), "loss": float(sums[1] / sums[2])}
