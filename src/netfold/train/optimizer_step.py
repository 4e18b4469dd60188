"""From gradients to new weights: what happens to them between the backward pass and the next batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from netfold.train.mesh import Mesh
from netfold.train.optimizers.clip import Clip
from netfold.train.optimizers.loss_scale import LossScale
from netfold.train.optimizers.norms import local
from netfold.train.parallel.diloco import DiLoCoRounds, is_diloco_key
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


class OptimizerStep:
    """One optimizer's step a call, on every rank; all ranks call alike."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        mesh: Mesh,
        island: dist.ProcessGroup | None = None,
    ) -> None:
        """`island`: under `diloco`, as of `Mesh.island`; without, it is made. Collective over the world."""
        self.optimizer = optimizer
        self._replica = replica
        self._scale = LossScale() if recipe.training.precision == "f16" else None
        limit, outer = recipe.training.clip, recipe.diloco
        if outer is not None and island is None:
            island = mesh.island()
        self._clip = Clip(replica, limit, mesh, island=island) if limit is not None else None
        self._rounds = DiLoCoRounds(replica, optimizer, outer, mesh.data) if outer is not None else None
        self.skipped = False
        """The last step left weights as they were: its gradients had overflowed."""

    @property
    def loss_scale(self) -> float:
        """What the next losses are multiplied by before their backward pass, and so the gradients that `step` takes."""
        return 1.0 if self._scale is None else self._scale.value

    def step(self, lr: float) -> float | None:
        """Take the gradients that lie in the parameters. Returns their norm before, where they are clipped; under
        `diloco` that of this data-parallel rank's own."""
        scale = self.loss_scale
        if self._scale is not None:
            held = (parameter.grad for _, parameter in self._replica.named_parameters())
            gradients = [gradient for gradient in held if gradient is not None]
            self.skipped = self._scale.overflowed(gradients)
            if self.skipped:
                return None
            for gradient in gradients:
                local(gradient).mul_(1.0 / scale)
        norm = self._clip.clip() if self._clip is not None else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self._rounds is not None:
            self._rounds.moved()
        return norm

    def end_step(self, number: int) -> None:
        """Step `number` of the job, from 1, is over, its update taken or left out: under `diloco` the round may end."""
        if self._rounds is not None:
            self._rounds.end_step(number)

    def may_checkpoint(self) -> bool:
        """Data-parallel ranks hold the same weights: not while an outer round is under way. The same on every rank."""
        return self._rounds is None or self._rounds.between

    def settle(self) -> None:
        """Make it so: an outer round that is under way ends early. All ranks call alike."""
        if self._rounds is not None:
            self._rounds.settle()

    def state_dict(self) -> dict[str, Any]:
        """What goes on beside the optimizer's own state (a loss scale, an outer optimizer's momentum): name -> tensor
        or number, for a checkpoint. Tensors of a parameter are under "<what>.<the parameter's name>"."""
        scale = {} if self._scale is None else self._scale.state_dict()
        return scale if self._rounds is None else {**scale, **self._rounds.state_dict()}

    def wanted(self, saved: Iterable[str]) -> set[str]:
        """Of the names of tensors in a checkpoint, those that `load_state_dict` wants on this rank."""
        names = set(saved)
        rounds = {name for name in names if is_diloco_key(name)}
        return names - rounds | (self._rounds.wanted(rounds) if self._rounds is not None else set())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Weights have been loaded before. What a checkpoint of another precision, or of one without `diloco`, does not
        have begins anew."""
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state_dict(state)
        if self._rounds is not None:
            self._rounds.load_state_dict(state)
