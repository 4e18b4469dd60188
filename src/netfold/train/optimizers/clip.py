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

    def __init__(self, replica: Replica, limit: float, mesh: Mesh, *, apart: bool = False) -> None:
        """Collective over the world. `apart`: data-parallel ranks have gradients of their own, and a norm each."""
        self._replica, self._limit, self._data = replica, limit, mesh.data
        self._apart = apart
        here = {name: pieces(replica.as_part(name, held.detach())) for name, held in replica.named_parameters()}
        everywhere: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(everywhere, (mesh.data.rank, here))
        together = [held for rank, held in everywhere if not apart or rank == mesh.data.rank]
        holders = Counter(name for held in together for name in held)
        # Where everybody holds everything whole, there is nothing to ask others for.
        self._alone = all(held.keys() == holders.keys() and set(held.values()) <= {1} for held in together)
        self._weights = {name: 1.0 if self._alone else count / holders[name] for name, count in here.items()}

    def clip(self, scale: float = 1.0) -> float:
        """Scale the gradients, which are `scale` times what they mean, in place; the norm that they meant.

        Where ranks hold different things, one all_reduce of 8 bytes over the world (8 for each data-parallel rank where
        they train apart). A norm that is no number stays one.
        """
        held = dict(self._replica.named_parameters())
        settle(held.values())
        gradients = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
        sums = torch.zeros(self._data.size if self._apart else 1, dtype=torch.float64)
        own = self._data.rank if self._apart else 0
        for name, gradient in gradients.items():
            sums[own] += square_sum(gradient).cpu() * self._weights[name]
        if not self._alone:
            dist.all_reduce(sums)
        norm = math.sqrt(float(sums[own])) / scale
        if norm > self._limit:
            for gradient in gradients.values():
                local(gradient).mul_(self._limit / norm)
        return norm
