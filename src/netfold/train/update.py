"""From gradients to new weights: what happens to them between the backward pass and the next batch."""

from __future__ import annotations

from typing import Any

import torch

from netfold.train.loss_scale import LossScale
from netfold.train.mesh import Mesh
from netfold.train.optimizers import local_optimizer
from netfold.train.optimizers.master import MasterWeights
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


class Update:
    """One optimizer's step a call, on every rank; all ranks call alike."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, recipe: Recipe, mesh: Mesh) -> None:
        self.optimizer = optimizer
        self._replica = replica
        self._scale = LossScale() if recipe.training.precision == "f16" else None
        self.skipped = False
        """The last step left weights as they were: its gradients had overflowed."""

    @property
    def loss_scale(self) -> float:
        """What the next losses are multiplied by before their backward pass, and so the gradients that `step` takes."""
        return 1.0 if self._scale is None else self._scale.value

    def step(self, lr: float) -> float | None:
        """Take the gradients that lie in the parameters. Returns their norm where they are clipped."""
        if self._scale is not None:
            scale = self._scale.value
            parameters = (parameter for _, parameter in self._replica.named_parameters())
            self.skipped = self._scale.overflowed(
                parameter.grad for parameter in parameters if parameter.grad is not None
            )
            if self.skipped:
                return None
            local = local_optimizer(self.optimizer)
            assert isinstance(local, MasterWeights)
            local.gradient_factor = 1.0 / scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return None

    def state_dict(self) -> dict[str, Any]:
        """What goes on beside the optimizer's own state (a loss scale, an outer optimizer's momentum): name -> tensor
        or number, for a checkpoint. Tensors of a parameter are under "<what>.<the parameter's name>"."""
        return {} if self._scale is None else self._scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scale is not None:
            self._scale.load_state_dict(state)
