"""Which parameters weight decay leaves alone: what scales, shifts or is looked up, as Megatron-LM and BERT do."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_KINDS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)


def undecayed(module: nn.Module) -> frozenset[str]:
    """The names of norms' and embeddings' parameters and of those with fewer than two dimensions (biases, scales).

    module: the whole model, not cut. A parameter that several layers share is left alone where one of them is such; all
    its names are told. A bare `nn.Parameter` of two dimensions or more is a weight, whatever it is for.
    """
    parameters = [
        parameter
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.ndim < 2 or isinstance(part, _KINDS)
    ]
    alone = {id(parameter) for parameter in parameters}
    named = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in alone)
