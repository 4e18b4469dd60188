"""What a model is computed in: f32, or bf16 or f16 with its weights kept in f32 beside it (Micikevicius et al. 2018).

Parameters are f32, and so are their gradients: sums over parts of a batch and over ranks are taken in f32. Where a rank
holds whole weights (no ZeRO, and ZeRO 1), layers compute with lower copies that live from the forward to the backward
pass. Where weights are cut (ZeRO 2 and 3), FSDP2 casts what it gathers, and reduces in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The recipe's `training.precision`, as casts."""

    name: Literal["f32", "bf16", "f16"]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def lend(self, module: nn.Module) -> None:
        """From now on `module` computes with lower copies of its parameters, made when its forward pass begins; the
        parameters stay f32, and get f32 gradients. Buffers are cast in place.

        Not those of modules that keep running statistics: a running mean in bf16 stops moving after some steps, and
        torch's CPU kernels of batch norm take weights and statistics of one kind alone. Layer norm and group norm sum
        in f32 whatever their weights are. Only whole passes through `module` are lower: a layer called by itself
        computes in f32.
        """
        parts = [part for part in module.modules() if not keeps_statistics(part)]
        _cast_buffers(parts, self.dtype)
        lent = _Lent(parts, self.dtype)
        module.register_forward_pre_hook(lent.lend)
        module.register_forward_hook(lent.take_back, always_call=True)

    def lower(self, module: nn.Module) -> None:
        """Cast parameters and buffers in place, of the modules for which `lend` lends: for who measures layers."""
        parts = [part for part in module.modules() if not keeps_statistics(part)]
        _cast_buffers(parts, self.dtype)
        for part in parts:
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.to(self.dtype)

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
        """What FSDP2 casts gathered weights, and a layer's inputs, to; gradients are added up in f32."""
        lower = None if self.name == "f32" else self.dtype
        return MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=None if lower is None else torch.float32)


def keeps_statistics(module: nn.Module) -> bool:
    """Batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None


class _Lent:
    """Lower copies of parameters, in their places while a module computes."""

    def __init__(self, parts: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._held = [
            (part, [name for name, each in part.named_parameters(recurse=False) if each.is_floating_point()])
            for part in parts
        ]

    def lend(self, _module: nn.Module, _inputs: Any) -> None:
        # Two modules may have one parameter: it is copied once.
        copies: dict[nn.Parameter, Tensor] = {}
        for part, names in self._held:
            for name in names:
                parameter = part.get_parameter(name)
                if parameter not in copies:
                    copies[parameter] = parameter.to(self._dtype)
                # An attribute of the object hides the parameter of this name, which stays registered.
                part.__dict__[name] = copies[parameter]

    def take_back(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        for part, names in self._held:
            for name in names:
                part.__dict__.pop(name, None)


def _cast_buffers(parts: Sequence[nn.Module], dtype: torch.dtype) -> None:
    for part in parts:
        for buffer in part.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
