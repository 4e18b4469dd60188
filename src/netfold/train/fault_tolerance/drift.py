"""Compare, before a checkpoint, the weights that every rank of a tensor group holds whole (norms, embeddings, heads).

Each rank updates its own copy, so nothing else would detect that the copies differ.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from netfold.train.mesh import Mesh
from netfold.train.model import Replica
from netfold.train.optimizers.norms import local


class DriftError(RuntimeError):
    """Copies of a weight that must be equal differ."""


def check_replicated(replica: Replica, parameters: Mapping[str, nn.Parameter], mesh: Mesh, step: int) -> None:
    """Compare the CRC-32 of each weight that is not cut, between the ranks of a tensor group.

    Collective over the world if there are tensor groups: an all_gather of 8 bytes per weight in each, and an all_reduce
    of 8 bytes. Raises DriftError on all ranks, with the first such weight of each group and its ranks.
    """
    if mesh.tensor.size == 1:
        return
    whole = [name for name, each in parameters.items() if not _is_cut(replica.as_shard(name, each.detach()))]
    sums = torch.tensor([_checksum(parameters[name]) for name in whole], dtype=torch.int64)
    rows = [torch.empty_like(sums) for _ in range(mesh.tensor.size)]
    dist.all_gather(rows, sums, group=mesh.tensor.group)
    unlike = [name for name, *each in zip(whole, *(row.tolist() for row in rows), strict=True) if len(set(each)) > 1]
    count = torch.tensor([len(unlike)], dtype=torch.int64)
    dist.all_reduce(count)
    if not count:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (unlike, socket.gethostname()))
    parts = []
    for ranks in mesh.device_mesh.mesh.reshape(-1, mesh.tensor.size).tolist():
        if names := found[ranks[0]][0]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"{names[0]}{more} on ranks {', '.join(f'{rank} ({found[rank][1]})' for rank in ranks)}")
    raise DriftError(
        f"step {step}: copies of weights differ between ranks of a tensor group: {'; '.join(parts)}; no checkpoint was "
        "written. The newest checkpoint is from before. Processors or libraries that compute differently, a layer that "
        "draws its own random numbers, or bad memory can cause this"
    )


def _is_cut(tensor: Tensor) -> bool:
    """Whether the tensor is cut along the tensor axis."""
    if not isinstance(tensor, DTensor):
        return False
    axes = tensor.device_mesh.mesh_dim_names or ()
    return any(axis == "tensor" and not kind.is_replicate() for axis, kind in zip(axes, tensor.placements, strict=True))


def _checksum(parameter: nn.Parameter) -> int:
    return zlib.crc32(local(parameter.detach()).contiguous().cpu().view(torch.uint8).numpy().tobytes())
