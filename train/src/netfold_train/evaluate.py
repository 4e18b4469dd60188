"""Evaluate the held-out examples, and compute pictures of them, divided among the data-parallel ranks.

Batches are as large as training batches, because stages of a pipeline accept no other shape. The last batch is padded
with repeated examples, which do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from netfold_train.data.examples import Data, Examples, Panel, Pictures
from netfold_train.models.model import Model, Replica
from netfold_train.parallel.context import all_tokens, own_tokens
from netfold_train.parallel.mesh import Mesh


@torch.no_grad()
def evaluate(replica: Replica, model: Model, data: Data, mesh: Mesh, batch: int) -> dict[str, float]:
    """The mean metric and loss over the held-out items, the same on every rank.

    batch: samples per rank. Collective over the world.
    """
    metric = data.metric
    # The sums of scores and of losses, each with its number of items.
    sums = torch.zeros(4, dtype=torch.float64)
    for _, output, target in _outputs(replica, data.held_out, mesh, batch):
        if output is not None:
            losses, scores = model.losses(output, target), metric.score(output, target).double()
            items = scores.new_tensor(scores.numel()) if metric.items is None else metric.items(target)
            found = (scores.sum(), items, losses.double().sum(), model.count(losses, target))
            sums += torch.stack([each.double() for each in found]).cpu()
    dist.all_reduce(sums)
    score, items, loss, losses_count = sums.tolist()
    return {metric.name: score / max(1.0, items), "loss": loss / max(1.0, losses_count)}


def render(replica: Replica, pictures: Pictures, mesh: Mesh, batch: int) -> Sequence[Panel]:
    """The pictures' panels on rank 0, and none on other ranks. batch: samples per rank. Collective over the world.

    Cost: a forward pass of all their examples, and an all_reduce of their outputs.
    """
    found: Tensor | None = None
    for first, output, target in _outputs(replica, pictures.examples, mesh, batch):
        if found is None:
            found = torch.zeros(len(pictures.examples), *target.shape[1:])
        if output is not None:
            found[first : first + len(target)] = output.float().cpu()
    assert found is not None, "each rank has at least one batch, perhaps of padding only"
    dist.all_reduce(found)
    # Each example was computed by all ranks of one tensor group.
    return pictures.panels(found / mesh.tensor.size) if dist.get_rank() == 0 else ()


@torch.no_grad()
def predict(replica: Replica, data: Data, mesh: Mesh, batch: int, folder: Path) -> None:
    """Write the outputs for the held-out examples as safetensors, one file for each share of the samples.

    A file has `output` [n, ...] and `number` [n] int64, the examples' numbers. Only the last stage and the first tensor
    rank write. batch: samples per rank. Collective over the world. Cost: one rank's outputs in memory, on the CPU.
    """
    from safetensors.torch import save_file

    numbers, outputs = [], []
    for first, output, target in _outputs(replica, data.held_out, mesh, batch):
        if output is not None:
            numbers.append(torch.arange(first, first + len(target)))
            outputs.append(all_tokens(output, mesh).cpu())
    if outputs and mesh.tensor.rank == 0 and (mesh.context is None or mesh.context.rank == 0):
        name = f"predictions-{mesh.share + 1:05}-of-{mesh.shares:05}.safetensors"
        save_file({"number": torch.cat(numbers), "output": torch.cat(outputs).contiguous()}, folder / name)


def _outputs(
    replica: Replica, examples: Examples, mesh: Mesh, batch: int
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """(index of the first example, outputs, targets) for each batch of this rank, without the padding.

    The outputs are None before the last stage, and for a batch of padding only.
    """
    total, stride = len(examples), batch * mesh.shares
    for first in range(mesh.share * batch, -(-total // stride) * stride, stride):
        # An example's number is also the seed of its random choices.
        numbers = [min(index, total - 1) for index in range(first, first + batch)]
        made = own_tokens(examples.batch(numbers, numbers), mesh).to(mesh.device)
        output = replica.outputs(made)
        count = max(0, min(batch, total - first))
        yield first, output[:count] if output is not None and count else None, made.target[:count]
