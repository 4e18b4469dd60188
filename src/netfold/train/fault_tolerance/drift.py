"""Weights that every rank of a tensor group has whole (norms, embeddings, heads) are computed by each of them for
itself: before a checkpoint they are compared, since nothing else would notice that they have drifted apart."""

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
from netfold.train.optimizers.norms import local
from netfold.train.replica import Replica


class DriftError(RuntimeError):
    """Copies of a weight that must be alike are not."""


def check_replicated(replica: Replica, parameters: Mapping[str, nn.Parameter], mesh: Mesh, step: int) -> None:
    """Compare the CRC-32 of what the ranks of a tensor group have of each weight that is not cut among them.

    Collective over the world where there are tensor groups: an all_gather of 8 bytes a weight in each, and an
    all_reduce of 8 bytes. Raises DriftError on all ranks, with the first such weight of each group and its ranks.
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
    groups = mesh.device_mesh.mesh.reshape(-1, mesh.tensor.size).tolist()
    parts = [_described(ranks, [found[rank][1] for rank in ranks], found[ranks[0]][0]) for ranks in groups]
    raise DriftError(
        f"step {step}: weights that ranks of a tensor group hold whole are not alike any more: "
        f"{'; '.join(part for part in parts if part)}; no checkpoint was written. Processors or libraries that compute "
        "differently, a layer that draws its own numbers, or bad memory can do it: the newest checkpoint is from before"
    )


def _described(ranks: list[int], hosts: list[str], names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} on ranks {', '.join(f'{r} ({host})' for r, host in zip(ranks, hosts, strict=True))}"


def _is_cut(tensor: Tensor) -> bool:
    """Along the tensor axis."""
    if not isinstance(tensor, DTensor):
        return False
    axes = tensor.device_mesh.mesh_dim_names or ()
    return any(axis == "tensor" and not kind.is_replicate() for axis, kind in zip(axes, tensor.placements, strict=True))


def _checksum(parameter: nn.Parameter) -> int:
    return zlib.crc32(local(parameter.detach()).contiguous().cpu().view(torch.uint8).numpy().tobytes())
