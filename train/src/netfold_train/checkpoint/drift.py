"""Compare, before a checkpoint, the weights that every rank of a tensor group holds whole (norms, embeddings, heads).

Each rank updates its own copy, so nothing else would detect that the copies differ.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from netfold.units import first_few
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.parallel.shards import axes, local


class DriftError(RuntimeError):
    """Copies of a weight that must be equal differ."""


def check_replicated(parameters: Mapping[str, nn.Parameter], mesh: Mesh, step: int) -> None:
    """Compare the CRC-32 of each weight that is not cut, between the ranks of a tensor group.

    Collective over the world if there are tensor groups: an all_gather of the names and checksums. Raises DriftError on
    all ranks, with the first such weight of each group and its ranks.
    """
    if mesh.tensor.size == 1:
        return
    # By ranks: torch keeps a mesh of equal shape for new DTensors, with groups of its own.
    ranks_of = dist.get_process_group_ranks
    own = {
        name: zlib.crc32(local(each.detach()).contiguous().cpu().view(torch.uint8).numpy().tobytes())
        for name, each in parameters.items()
        if ranks_of(mesh.tensor.group) not in map(ranks_of, axes(each))
    }
    found = gather((own, socket.gethostname()))
    parts = []
    for ranks in mesh.ranks.reshape(-1, mesh.tensor.size).tolist():
        unlike = [name for name in found[ranks[0]][0] if len({found[rank][0][name] for rank in ranks}) > 1]
        if unlike:
            hosts = ", ".join(f"{rank} ({found[rank][1]})" for rank in ranks)
            parts.append(f"{first_few(unlike, 1)} on ranks {hosts}")
    if parts:
        raise DriftError(
            f"step {step}: copies of weights differ between ranks of a tensor group: {'; '.join(parts)}; no checkpoint "
            "was written. The newest checkpoint is from before. Processors or libraries that compute differently, a "
            "layer that draws its own random numbers, or bad memory can cause this"
        )
