"""Gradients are clipped by their norm all together (Pascanu, Mikolov, Bengio 2013), wherever they lie."""

from __future__ import annotations

import math
from collections import Counter

import torch
import torch.distributed as dist

from netfold.train.mesh import Mesh
from netfold.train.optimizers.norms import local, pieces, settle, square_sum
from netfold.train.replica import Replica


class Clip:
    """Makes the gradients' norm at most `limit`.

    The norm is that of the whole model's gradient: shards, stages and the tables of all ranks, and once what several
    ranks hold. So a rank counts of each parameter its own elements, divided by the number of ranks that hold the same
    ones: ranks that know its name, over the pieces it was cut into.
    """

    def __init__(self, replica: Replica, limit: float, mesh: Mesh, *, island: dist.ProcessGroup | None = None) -> None:
        """Collective over the world. `island`: data-parallel ranks have gradients of their own, and a norm each; the
        ranks that share this rank's (`Mesh.island`)."""
        self._replica, self._limit, self._group = replica, limit, island
        here = {name: pieces(replica.as_shard(name, held.detach())) for name, held in replica.named_parameters()}
        everywhere: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(everywhere, (mesh.data.rank, here))
        together = [held for rank, held in everywhere if island is None or rank == mesh.data.rank]
        holders = Counter(name for held in together for name in held)
        # Where everybody holds everything whole, there is nothing to ask others for.
        self._alone = all(held.keys() == holders.keys() and set(held.values()) <= {1} for held in together)
        self._weights = {name: 1.0 if self._alone else count / holders[name] for name, count in here.items()}

    def clip(self) -> float:
        """Scale the gradients in place; the norm that they had.

        Where ranks hold different things, one all_reduce of 8 bytes over the world, or the island. A norm that is no
        number stays one.
        """
        held = dict(self._replica.named_parameters())
        settle(held.values())
        gradients = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
        total = torch.zeros(1, dtype=torch.float64)
        for name, gradient in gradients.items():
            total += square_sum(gradient).cpu() * self._weights[name]
        if not self._alone:
            dist.all_reduce(total, group=self._group)
        norm = math.sqrt(float(total))
        if norm > self._limit:
            for gradient in gradients.values():
                local(gradient).mul_(self._limit / norm)
        return norm
