"""The type of computation: f32, or bf16 or f16 with weights kept in f32 (Micikevicius et al. 2018).

Parameters are f32, and so are their gradients: sums over parts of a batch and over ranks are f32. If a rank holds whole
weights (no ZeRO), layers compute with lower copies that live from the forward to the backward pass. If
weights are cut (ZeRO), FSDP2 casts the gathered weights, and reduces in f32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.hooks import RemovableHandle

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The recipe's `training.precision`, as casts."""

    name: Literal["f32", "bf16", "f16"]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def use_lower_copies(self, module: nn.Module) -> list[RemovableHandle]:
        """From now on `module` computes with lower copies of its parameters, made when its forward pass begins.

        The parameters stay f32, and get f32 gradients. Buffers are cast in place. Modules that keep running statistics
        stay f32: a running mean in bf16 stops changing after some steps, and torch's CPU kernels of batch norm need
        weights and statistics of one type. Layer norm and group norm sum in f32 for weights of any type. Only whole
        passes through `module` are lower: a layer called by itself computes in f32. Returns the hooks.
        """
        if self.name == "f32":
            return []
        parts = [part for part in module.modules() if not keeps_statistics(part)]
        for part in parts:
            for buffer in part.buffers(recurse=False):
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(self.dtype)

        def copies(_module: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
            # A parameter that two modules share is copied once.
            made: dict[nn.Parameter, Tensor] = {}
            for part in parts:
                for name, parameter in part.named_parameters(recurse=False):
                    if parameter.is_floating_point():
                        if parameter not in made:
                            made[parameter] = parameter.to(self.dtype)
                        yield part, name, made[parameter]

        return substitute_parameters(module, copies)

    def inputs(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cast floating-point tensors to the type of computation. "f32" casts nothing: models are made in f32."""
        if self.name == "f32":
            return inputs
        return tuple(tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs)

    def output(self, output: Tensor) -> Tensor:
        """The input of the loss: f32 if the model computes in less."""
        return output if self.name == "f32" else output.float()

    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's casts of gathered weights and of a layer's inputs; gradients are added up in f32."""
        if self.name == "f32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)


def substitute_parameters(
    module: nn.Module, tensors: Callable[[nn.Module], Iterable[tuple[nn.Module, str, Tensor]]]
) -> list[RemovableHandle]:
    """Hide parameters of `module` by other tensors whenever it computes. The parameters stay registered.

    tensors: the module -> (a part of the module, its parameter's name, the tensor) for each substitute of one pass. A
    substitute that is attached later is in place earlier. Returns the hooks.
    """
    hidden: list[tuple[nn.Module, str, Any]] = []

    def hide(module: nn.Module, _inputs: Any) -> None:
        for part, name, tensor in tensors(module):
            # An attribute of the object hides a parameter of the same name. Another substitute may be there already.
            hidden.append((part, name, part.__dict__.get(name)))
            part.__dict__[name] = tensor

    def restore(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        while hidden:
            part, name, before = hidden.pop()
            part.__dict__.pop(name, None)
            if before is not None:
                part.__dict__[name] = before

    return [
        module.register_forward_pre_hook(hide, prepend=True),
        module.register_forward_hook(restore, always_call=True),
    ]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the module is a batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None
