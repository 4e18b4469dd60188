"""Modules of parts that can be divided among the data-parallel ranks, so that each part has one owner.

Ranks send items (tokens, numbers of rows) to the owners of their parts, which compute, and send the results back. So an
owner's gradient is complete: no rank averages it, and no two ranks hold the same parameter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single

from netfold_train.models.model import Model
from netfold_train.parallel.mesh import Axis, Mesh
from netfold_train.recipe import Recipe


class Owned(nn.Module, ABC):
    """A module that `divide_owned` may cut. Then `axis` is the data axis, and this rank has some of the parts.

    The gradients of a part are those of the mean loss over all data-parallel ranks, as for every other parameter.
    """

    key: ClassVar[Literal["embeddings", "experts"]]
    """The key of `parallel` that divides it."""
    axis: Axis | None = None

    @abstractmethod
    def divide(self, mesh: Mesh, how: str) -> None:
        """Keep this rank's parts, under the same names. how: the key's value. No communication."""

    def exchange(
        self,
        items: Tensor,
        places: Tensor,
        held: Sequence[int],
        compute: Callable[[Tensor, list[int]], Tensor],
        arriving: Tensor | None = None,
    ) -> Tensor:
        """The result of each item [t, ...], computed by the owner of its place. Collective over the data axis.

        places: of the items, int64 [t]; each rank has a run of them, `held[rank]`, in the order of ranks.
        compute: (items sorted by place, how many there are of each of this rank's places) -> as many results.
        arriving: items from each rank for each of this rank's places, [ranks, places], where they are known.
        Cost: an all_to_all of numbers without `arriving`, one of items, one of results; backward one of each gradient.
        """
        axis = self.axis
        assert axis is not None
        own = held[axis.rank]
        order = places.argsort(stable=True)
        leaving = places.bincount(minlength=sum(held))
        if arriving is None:
            arriving = all_to_all_single(leaving, [own] * axis.size, list(held), axis.group).view(axis.size, own)
        out, back = [int(part.sum()) for part in torch.split(leaving, list(held))], arriving.sum(1).tolist()
        arrived = all_to_all_single(items[order], back, out, axis.group)
        # They are sorted by rank, then by place.
        numbers = torch.arange(own, device=items.device).repeat(axis.size).repeat_interleave(arriving.flatten())
        by_place = numbers.argsort(stable=True)
        computed = compute(arrived[by_place], arriving.sum(0).tolist())[by_place.argsort()]
        # Each rank's loss is the mean over its share. Owners add up the weights' gradients, which must become their
        # mean; those of the items go back to their ranks as they are. The hooks are not the parameters' own, because a
        # model gets its values, as new parameters, after it was cut.
        for tensor, factor in ((computed, 1 / axis.size), (arrived, float(axis.size))):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient, by=factor: gradient * by)  # type: ignore[no-untyped-call]
        return all_to_all_single(computed, out, back, axis.group)[order.argsort()]


def owned_modules(model: Model, recipe: Recipe) -> list[tuple[Owned, str]]:
    """The modules that `parallel` divides, and how. Raises ValueError if a key finds none."""
    found: list[tuple[Owned, str]] = []
    kinds = {"embeddings": "embedding tables (Embeddings)", "experts": "experts (Experts), as gpt-moe has"}
    for key, what in kinds.items():
        how: str = getattr(recipe.parallel, key)
        if how == "replicated":
            continue
        parts = [part for part in model.module.modules() if isinstance(part, Owned) and part.key == key]
        if not parts:
            raise ValueError(f'parallel.{key} = "{how}": the model has no {what}; use {key} = "replicated"')
        found += [(part, how) for part in parts]
    return found


def divide_owned(model: Model, recipe: Recipe, mesh: Mesh) -> None:
    """Divide what the recipe asks for; nothing with one data-parallel rank. No communication."""
    for part, how in owned_modules(model, recipe):
        if mesh.data.size > 1:
            part.axis = mesh.data
            part.divide(mesh, how)


def own_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of all divided parts inside `module`: nothing averages their gradients."""
    parts = (part for part in module.modules() if isinstance(part, Owned) and part.axis is not None)
    return {parameter for part in parts for parameter in part.parameters()}
