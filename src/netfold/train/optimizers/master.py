"""f32 weights beside bf16 or f16 ones: an optimizer steps on them, and the model gets them rounded.

With Adam: 2 bytes of weight, 2 of gradient, 12 here (weight, two moments) a parameter; where
ZeroRedundancyOptimizer shares the optimizer out, the 12 are a rank's share (Rajbhandari et al. 2020, section 3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from netfold.train.precision import UNROUNDED

MASTER = "master"


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer, stepping on f32 copies of the parameters that are not f32; it steps on f32 ones themselves.

    A parameter's `state` has what the other optimizer keeps for it, and "master" [the parameter's shape], f32: the
    weight itself, of which the parameter is the rounded copy. It begins as the parameter's `unrounded` where it has
    one (`Precision.lower`), else as the parameter. While a step runs there is an f32 copy of the gradients too.
    """

    def __init__(self, params: Iterable[Any], inner: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        """params, options: as `inner` takes them."""
        super().__init__(params, options)
        self.gradient_factor = 1.0
        """What the next step multiplies gradients by, in f32: 1 / the loss scale."""
        self.masters: dict[Tensor, Tensor] = {}
        """What the other optimizer steps on in each parameter's place; an f32 one itself."""
        groups = []
        for group in self.param_groups:
            masters = []
            for parameter in group["params"]:
                low = parameter.dtype != torch.float32
                master = torch.nn.Parameter(unrounded(parameter)) if low else parameter
                if low:
                    self.state[parameter][MASTER] = master.data
                self.masters[parameter] = master
                masters.append(master)
            groups.append({**group, "params": masters})
        self.inner = inner(groups, **options)
        for group, filled in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update((key, value) for key, value in filled.items() if key != "params")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for mine, group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update((key, value) for key, value in mine.items() if key != "params")
        for parameter, master in self.masters.items():
            # One dict under both keys, so that what a checkpoint has put into it is what is stepped on; and without
            # the master, since optimizers begin where they find no state.
            state = self.state[parameter]
            self.inner.state[master] = state
            if master is not parameter:
                master.data = state.pop(MASTER)
                master.grad = None if parameter.grad is None else parameter.grad.float()
            if master.grad is not None and self.gradient_factor != 1.0:
                master.grad.mul_(self.gradient_factor)
        self.inner.step()
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.grad = None
                parameter.copy_(master)
                self.state[parameter][MASTER] = master.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch's own would round all that is loaded to what the parameter is.
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for mine, group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            mine.update((key, value) for key, value in group.items() if key != "params")
        for index, state in state_dict["state"].items():
            self.state[parameters[index]] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()
            }


def unrounded(parameter: Tensor) -> Tensor:
    found: Tensor = getattr(parameter, UNROUNDED, parameter.detach())
    return found.float()
