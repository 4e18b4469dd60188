"""Experts divided among the data-parallel ranks (Lepikhin et al. 2020, GShard); the layers around them stay
data-parallel.

Each rank owns a run of the experts. Forward: an all_to_all of the numbers of tokens, an all_to_all of the tokens to the
owners of their experts, and an all_to_all of the results. Backward: an all_to_all of the results' gradients, and an
all_to_all of the tokens' gradients. An expert takes all tokens that are sent to it: none is dropped, whatever the load.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from netfold.train.models.model import Model
from netfold.train.parallel.mesh import Mesh
from netfold.train.parallel.owned import Owned
from netfold.train.recipe import Recipe


class Experts(nn.Module):
    """Modules by number: (tokens [t, width], numbers int64 [t] of their experts) -> [t, width].

    experts: each maps [any, width] to [any, width], each row by itself. Every expert runs in each pass, if need be on 0
    tokens, so that all parameters have gradients. `parallel.experts` divides every such module inside a model.
    """

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleDict(experts)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        parts = zip(self.experts.values(), tokens[order].split(counts), strict=True)  # type: ignore[no-untyped-call]
        return torch.cat([expert(part) for expert, part in parts])[order.argsort()]


def shard_experts(model: Model, recipe: Recipe, mesh: Mesh) -> None:
    """Replace every `Experts` in `model` by this rank's part, as `parallel.experts` says; no communication.

    With one data-parallel rank nothing changes. Raises ValueError if the model has none.
    """
    paths = experts_to_shard(model, recipe)
    if mesh.data.size == 1:
        return
    for path in paths:
        whole = model.module.get_submodule(path)
        assert isinstance(whole, Experts)
        model.module.set_submodule(path, ShardedExperts(whole, mesh))


def experts_to_shard(model: Model, recipe: Recipe) -> list[str]:
    """The paths of the modules that `parallel.experts` divides. Raises ValueError if there is none."""
    if recipe.parallel.experts == "replicated":
        return []
    paths = [path for path, module in model.module.named_modules() if isinstance(module, Experts)]
    if not paths:
        raise ValueError(
            'parallel.experts = "sharded": the model has no experts (Experts), as gpt-moe has; use experts = '
            '"replicated"'
        )
    return paths


class ShardedExperts(Owned):
    """This rank's part of `Experts`, with the same names: a run of the experts, in the order of ranks.

    The runs differ by one expert at most; with more ranks than experts, some ranks have none. Collective over the data
    axis. Ranks may have different numbers of tokens.
    """

    def __init__(self, whole: Experts, mesh: Mesh) -> None:
        super().__init__()
        axis, names = mesh.data, list(whole.experts)
        bounds = [rank * len(names) // axis.size for rank in range(axis.size + 1)]
        self._axis = axis
        # The number of experts of each rank.
        self._runs = [end - first for first, end in itertools.pairwise(bounds)]
        held = names[bounds[axis.rank] : bounds[axis.rank + 1]]
        self.experts = nn.ModuleDict({name: whole.experts[name] for name in held})
        for parameter in self.parameters():
            # Each rank's loss is the mean over its share. Owners add up the gradients, which must become their mean.
            parameter.register_hook(lambda gradient: gradient / axis.size)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """As `Experts`."""
        group, held = self._axis.group, len(self.experts)
        order = chosen.argsort(stable=True)
        leaving = chosen.bincount(minlength=sum(self._runs))
        # Of each rank, the numbers of tokens for each of this rank's experts: [ranks, held].
        arriving = all_to_all_single(leaving, [held] * self._axis.size, self._runs, group).view(-1, held)
        out, back = [int(part.sum()) for part in leaving.split(self._runs)], arriving.sum(1).tolist()  # type: ignore[no-untyped-call]
        arrived = all_to_all_single(tokens[order], back, out, group)
        found = all_to_all_single(self._computed(arrived, arriving), out, back, group)
        return found[order.argsort()]

    def _computed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """tokens: sorted by the rank they came from, then by expert, as `counts` [ranks, held] says."""
        numbers = torch.arange(counts.shape[1], device=tokens.device).repeat(len(counts))
        order = numbers.repeat_interleave(counts.flatten()).argsort(stable=True)
        parts = zip(self.experts.values(), tokens[order].split(counts.sum(0).tolist()), strict=True)  # type: ignore[no-untyped-call]
        weight = next(self.parameters(), tokens)
        # FSDP2 lowers the tokens' type, and not that of weights that are left to their owner.
        with torch.autocast(tokens.device.type, tokens.dtype, enabled=tokens.dtype != weight.dtype):
            found = [expert(part) for expert, part in parts]
        # A rank without experts must take part in the exchange of gradients too.
        return torch.cat(found)[order.argsort()] if found else tokens[:0]
