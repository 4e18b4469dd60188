"""Blocks of a model, each by itself: recomputed in the backward pass, and compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# The results that are slow to compute again, by torch's names: matrix products, convolutions, attention.
_SLOW = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *(f"_scaled_dot_product_{kind}" for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")),
    "_scaled_dot_product_cudnn_attention",
)


def recompute(blocks: Iterable[nn.Module], kept: Literal["nothing", "products"]) -> None:
    """From now on keep each block's inputs instead of its activations, and compute these again in the backward pass.

    kept: "products" also keeps the results of matrix products, convolutions and attention (selective recomputation,
    Korthikanti et al. 2022): less memory is saved, and little time is lost. By torch.utils.checkpoint; random numbers
    are the same in both passes.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if kept == "products":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, slow_operations())
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **options)


def slow_operations() -> list[Any]:
    """torch's operations whose results "products" keeps."""
    return [getattr(torch.ops.aten, name).default for name in _SLOW]


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block by torch.compile, so that equal blocks are compiled once. Names of parameters stay."""
    for block in blocks:
        block.compile()
