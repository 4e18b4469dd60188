"""What a model is computed in: f32, or bf16 or f16 with its weights kept in f32 beside it (Micikevicius et al. 2018).

Where a rank holds whole weights (no ZeRO, and ZeRO 1), the module's parameters are of the lower kind, and
`optimizers.master` keeps the f32 ones. Where weights are cut (ZeRO 2 and 3), the parts are f32 and FSDP2 casts what it
gathers. Either way gradients travel in the lower kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

UNROUNDED = "unrounded"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The recipe's `training.precision`, as casts."""

    name: Literal["f32", "bf16", "f16"]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def lower(self, module: nn.Module) -> None:
        """Cast parameters and buffers in place, but those of modules that keep running statistics.

        What a parameter was lies in its `unrounded`, for the optimizer to start from (`optimizers.make_optimizer`).

        A running mean in bf16 stops moving after some steps, and torch's CPU kernels of batch norm take weights and
        statistics of one kind alone: both stay f32. Layer norm and group norm sum in f32 whatever their weights are.
        """
        for part in module.modules():
            if not keeps_statistics(part):
                for parameter in part.parameters(recurse=False):
                    if parameter.dtype == self.dtype:
                        continue  # two modules have it
                    setattr(parameter, UNROUNDED, parameter.data)
                    parameter.data = parameter.data.to(self.dtype)
                for buffer in part.buffers(recurse=False):
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(self.dtype)

    def inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Floats as the model computes them; numbers of tokens and categories as they are. "f32" casts nothing: it is
        what models are made in."""
        if self.name == "f32":
            return inputs
        return tuple(tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs)

    def output(self, output: Tensor) -> Tensor:
        """What a loss is computed of: f32 where the model computes in less."""
        return output if self.name == "f32" else output.float()

    def policy(self) -> MixedPrecisionPolicy:
        """What FSDP2 casts gathered weights, and a layer's inputs, to."""
        return MixedPrecisionPolicy(param_dtype=None if self.name == "f32" else self.dtype)


def keeps_statistics(module: nn.Module) -> bool:
    """Batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None
