"""Weights that layers of several pipeline stages share (an embedding and the head, as in GPT-2): each rank that needs
one has a copy, and in every step the gradients of the copies are added up (Megatron-LM: Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from netfold.train.mesh import Mesh
from netfold.train.model import Chain
from netfold.train.optimizers.norms import local


class Tied:
    """The shared weights of a chain that is cut into stages. All copies go by the first layer's name."""

    def __init__(self, chain: Chain, stage_of: Callable[[str], int], rank_of: Callable[[int], int], mesh: Mesh) -> None:
        """chain: whole, on every rank. stage_of: a layer's stage. rank_of: a stage's rank on the pipeline axis.
        Collective over the world: makes groups."""
        self.names: dict[str, str] = {}
        """Every other name of a shared weight -> the first."""
        self._groups: list[tuple[dist.ProcessGroup, list[str]]] = []
        self.on_one_rank: list[tuple[str, str]] = []
        """Two names of a weight that lie in different stages of one rank."""
        between: dict[tuple[int, ...], list[str]] = {}
        for names in tied_names(chain):
            stages = {name: stage_of(name.split(".")[1]) for name in names}
            if len(set(stages.values())) == 1:
                continue
            self.names |= dict.fromkeys(names[1:], names[0])
            by_rank: dict[int, dict[int, str]] = {}
            for name, stage in stages.items():
                by_rank.setdefault(rank_of(stage), {}).setdefault(stage, name)
            for held in by_rank.values():
                if len(held) > 1:
                    self.on_one_rank.append(cast(tuple[str, str], tuple(held.values())[:2]))
            if len(by_rank) > 1:
                between.setdefault(tuple(sorted(by_rank)), []).append(names[0])
        whole = mesh.device_mesh.mesh
        for ranks, weights in between.items():
            for line in whole[list(ranks)].reshape(len(ranks), -1).T.tolist():
                group = dist.new_group(line)
                if dist.get_rank() in line:
                    self._groups.append((cast(dist.ProcessGroup, group), weights))

    def all_reduce_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make the gradient of each copy the sum of all copies'. parameters: those here, under their first names.
        Collective over the ranks that have copies: one all_reduce for each set of ranks."""
        for group, names in self._groups:
            held = [parameters[name] for name in names]
            for each in held:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
            gradients = [local(cast(Tensor, each.grad)) for each in held]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, total in zip(gradients, parts, strict=True):
                gradient.copy_(total.view_as(gradient))


def tied_names(module: nn.Module) -> list[Sequence[str]]:
    """The names of each parameter that has several, in the order of the module."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]
