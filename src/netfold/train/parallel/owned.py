"""Modules whose parameters are divided among the data-parallel ranks, so that each has one owner.

Ranks send samples to the owner, and their gradients back. So the owner's gradient is complete: no rank averages it, and
no two ranks hold the same parameter.
"""

from __future__ import annotations

from torch import nn


class Owned(nn.Module):
    """This rank's part of a divided module: its parameters are in no other data-parallel rank.

    Their gradients are those of the mean loss over all data-parallel ranks, as for every other parameter.
    """


def own_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of all `Owned` parts inside `module`: nothing averages their gradients."""
    parts = (part for part in module.modules() if isinstance(part, Owned))
    return {parameter for part in parts for parameter in part.parameters()}
