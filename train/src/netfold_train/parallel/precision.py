"""The type of computation: f32, or bf16 or f16 with weights kept in f32 (Micikevicius et al. 2018).

Parameters are f32, and so are their gradients: sums over parts of a batch and over ranks are f32. torch.autocast
computes matrix products and convolutions in the lower type. Where FSDP2 holds the weights, it casts those that it
gathers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The recipe's `training.precision`, as casts."""

    name: Literal["f32", "bf16", "f16"]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def context(self, module: nn.Module, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The context of a forward pass of `module`."""
        if self.name == "f32" or isinstance(module, FSDPModule):
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.dtype)

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's casts of gathered weights and of a layer's inputs; gradients are added up in f32."""
        if self.name == "f32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the module is a batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None


def needs_f32(module: nn.Module) -> bool:
    """Whether the module computes with f32 weights, whatever the type of its input: a batch norm, or a router."""
    return keeps_statistics(module) or getattr(module, "in_f32", False)
