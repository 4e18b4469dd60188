"""From gradients to new weights: what happens to them between the backward pass and the next batch."""

from __future__ import annotations

from typing import Any

import torch

from netfold.train.mesh import Mesh
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


class Update:
    """One optimizer's step a call, on every rank; all ranks call alike."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, recipe: Recipe, mesh: Mesh) -> None:
        self.optimizer = optimizer

    def step(self, lr: float) -> float | None:
        """Take the gradients that lie in the parameters. Returns their norm where they are clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return None

    def state_dict(self) -> dict[str, Any]:
        """What goes on beside the optimizer's own state (a loss scale, an outer optimizer's momentum): name -> tensor
        or number, for a checkpoint. Tensors of a parameter are under "<what>.<the parameter's name>"."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
