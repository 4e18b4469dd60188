"""The type of computation: f32, or bf16 or f16 with weights kept in f32 (Micikevicius et al. 2018).

Parameters are f32, and so are their gradients: sums over parts of a batch and over ranks are f32. If a rank holds whole
weights (no ZeRO), layers compute with lower copies that live from the forward to the backward pass. If
weights are cut (ZeRO), FSDP2 casts the gathered weights, and reduces in f32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.stateless import _reparametrize_module
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
        lower: dict[str, nn.Parameter] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            if not keeps_statistics(part):
                lower |= dict(part.named_parameters(path, recurse=False, remove_duplicate=False))
                for buffer in part.buffers(recurse=False):
                    if buffer.is_floating_point():
                        buffer.data = buffer.data.to(self.dtype)

        def copies(_module: nn.Module) -> dict[str, Tensor]:
            # A parameter that two modules share is copied once.
            made = {each: each.to(self.dtype) for each in dict.fromkeys(lower.values()) if each.is_floating_point()}
            return {name: made.get(each, each) for name, each in lower.items()}

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
    module: nn.Module, tensors: Callable[[nn.Module], dict[str, Tensor]]
) -> list[RemovableHandle]:
    """Replace parameters of `module` by other tensors whenever it computes.

    tensors: the module -> the substitutes of one pass, by the parameters' names. A substitute that is attached later is
    in place earlier. Returns the hooks.
    """
    replaced = contextlib.ExitStack()
    return [
        module.register_forward_pre_hook(
            # Restored in reverse order: a part of the module may have several names.
            lambda module, _: replaced.enter_context(
                _reparametrize_module(module, tensors(module), stack_weights=True)
            ),
            prepend=True,
        ),
        module.register_forward_hook(lambda *_: replaced.close(), always_call=True),
    ]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the module is a batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None
