"""The type of computation: f32, or bf16 or f16 with weights kept in f32 (Micikevicius et al. 2018).

Parameters are f32, and so are their gradients: sums over parts of a batch and over ranks are f32. If a rank holds whole
weights (no ZeRO, and ZeRO 1), layers compute with lower copies that live from the forward to the backward pass. If
weights are cut (ZeRO 2 and 3), FSDP2 casts the gathered weights, and reduces in f32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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

    def use_lower_copies(self, module: nn.Module) -> None:
        """From now on `module` computes with lower copies of its parameters, made when its forward pass begins.

        The parameters stay f32, and get f32 gradients. Buffers are cast in place. Modules that keep running statistics
        stay f32: a running mean in bf16 stops changing after some steps, and torch's CPU kernels of batch norm need
        weights and statistics of one type. Layer norm and group norm sum in f32 for weights of any type. Only whole
        passes through `module` are lower: a layer called by itself computes in f32.
        """
        parts = _cast_buffers(module, self.dtype)
        _LowerCopies(parts, self.dtype).attach(module)

    def lower(self, module: nn.Module) -> None:
        """Cast parameters and buffers in place, of the modules that `use_lower_copies` lowers: to measure layers."""
        for part in _cast_buffers(module, self.dtype):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.to(self.dtype)

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
        lower = None if self.name == "f32" else self.dtype
        return MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=None if lower is None else torch.float32)


class SubstituteParameters(ABC):
    """Tensors that hide parameters of a module while the module computes. The parameters stay registered."""

    def __init__(self) -> None:
        self._hidden: list[tuple[nn.Module, str, Any]] = []

    @abstractmethod
    def tensors(self, module: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
        """(the part of the module, its parameter's name, the tensor) for each substitute of one forward pass."""

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._hide)
        module.register_forward_hook(self._restore, always_call=True)

    def _hide(self, module: nn.Module, _inputs: Any) -> None:
        for part, name, tensor in self.tensors(module):
            # An attribute of the object hides a parameter of the same name. Another substitute may be there already.
            self._hidden.append((part, name, part.__dict__.get(name)))
            part.__dict__[name] = tensor

    def _restore(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        while self._hidden:
            part, name, before = self._hidden.pop()
            part.__dict__.pop(name, None)
            if before is not None:
                part.__dict__[name] = before


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the module is a batch norm of any kind."""
    return getattr(module, "running_mean", None) is not None


class _LowerCopies(SubstituteParameters):
    def __init__(self, parts: Sequence[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._names = [
            (part, name)
            for part in parts
            for name, parameter in part.named_parameters(recurse=False)
            if parameter.is_floating_point()
        ]

    def tensors(self, module: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
        # A parameter that two modules share is copied once.
        copies: dict[nn.Parameter, Tensor] = {}
        for part, name in self._names:
            parameter = part.get_parameter(name)
            if parameter not in copies:
                copies[parameter] = parameter.to(self._dtype)
            yield part, name, copies[parameter]


def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Cast the buffers of the parts without running statistics, and return these parts."""
    parts = [part for part in module.modules() if not keeps_statistics(part)]
    for part in parts:
        for buffer in part.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    return parts
