"""Experts, which can be divided among the data-parallel ranks (Lepikhin et al. 2020, GShard).

Each rank owns a run of the experts. Forward: an all_to_all of the numbers of tokens, an all_to_all of the tokens to the
owners of their experts, and an all_to_all of the results. Backward: an all_to_all of the results' gradients, and an
all_to_all of the tokens' gradients. An expert takes all tokens that are sent to it: none is dropped, whatever the load.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from netfold_train.parallel.mesh import Mesh
from netfold_train.parallel.owned import Owned


class Experts(Owned):
    """Modules by number: (tokens [t, width], numbers int64 [t] of their experts) -> [t, width].

    experts: each maps [any, width] to [any, width], each row by itself. Every expert runs in each pass, if need be on 0
    tokens, so that all parameters have gradients. Divided, each rank has a run of the experts, in the order of ranks.
    The runs differ by one expert at most; with more ranks than experts, some ranks have none. Ranks may have different
    numbers of tokens.
    """

    key = "experts"

    def __init__(self, experts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleDict(experts)

    def divide(self, mesh: Mesh, how: str) -> None:
        names, ranks = list(self.experts), mesh.data.size
        bounds = [rank * len(names) // ranks for rank in range(ranks + 1)]
        self._held = [end - first for first, end in itertools.pairwise(bounds)]
        for name in (*names[: bounds[mesh.data.rank]], *names[bounds[mesh.data.rank + 1] :]):
            del self.experts[name]

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        if self.axis is not None:
            return self.exchange(tokens, chosen, self._held, self._computed)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        return self._computed(tokens[order], counts)[order.argsort()]

    def _computed(self, tokens: Tensor, counts: list[int]) -> Tensor:
        if not len(self.experts):
            # A rank without experts takes part in the exchanges only.
            return tokens
        weight = next(self.parameters())
        # FSDP2 lowers the tokens' type, and not that of weights that are left to their owner.
        with torch.autocast(tokens.device.type, tokens.dtype, enabled=tokens.dtype != weight.dtype):
            parts = zip(self.experts.values(), torch.split(tokens, counts), strict=True)
            return torch.cat([expert(part) for expert, part in parts])
