"""Everything between the backward pass and the next batch: unscale, clip, step, and DiLoCo's rounds.

Clipping: by the norm of the whole model's gradient (Pascanu, Mikolov, Bengio 2013). Loss scaling keeps small gradients
above f16's rounding to zero (Micikevicius et al. 2018, section 3.2). Its constants are those of
torch.amp.GradScaler. GradScaler itself does not fit: it refuses f16 gradients, which it would divide in f16 (here they
are f32: `Precision.use_lower_copies`), and each rank would decide alone whether a step overflowed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.train.mesh import Mesh
from netfold.train.model import Replica
from netfold.train.optimizers.norms import local, pieces, settle, square_sum
from netfold.train.parallel.diloco import DiLoCoRounds, is_diloco_key
from netfold.train.recipe import Recipe

INITIAL = 2.0**16
GROWS_AFTER_STEPS = 2000


class OptimizerStep:
    """Steps one optimizer. All methods but the dictionaries of the state are collective over the world."""

    def __init__(
        self,
        replica: Replica,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        mesh: Mesh,
        island: dist.ProcessGroup | None = None,
    ) -> None:
        """island: `Mesh.island`, which `diloco` needs; made here if not given. Collective over the world."""
        self.optimizer = optimizer
        self._replica = replica
        self._scale = LossScale() if recipe.training.precision == "f16" else None
        limit, diloco = recipe.training.clip, recipe.diloco
        if diloco is not None and island is None:
            island = mesh.island()
        self._clip = Clip(replica, limit, mesh, island=island) if limit is not None else None
        self._rounds = DiLoCoRounds(replica, optimizer, diloco, mesh.data) if diloco is not None else None
        self.skipped = False
        """The last step left weights unchanged, because its gradients overflowed."""

    @property
    def loss_scale(self) -> float:
        """The factor of the next losses before their backward pass, and so of the gradients that `step` takes."""
        return 1.0 if self._scale is None else self._scale.value

    def step(self, lr: float) -> float | None:
        """Apply the parameters' gradients. Returns their norm before clipping, or None without clipping.

        Under `diloco` the norm is that of this rank's copy of the model.
        """
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
        return norm

    def end_step(self, number: int) -> None:
        """End step `number` of the job (from 1), applied or left out; under `diloco` also a complete round."""
        if self._rounds is not None:
            self._rounds.end_step(number)

    def settle(self) -> None:
        """End an unfinished round, so that data-parallel ranks hold the same weights."""
        if self._rounds is not None:
            self._rounds.settle()

    def state_dict(self) -> dict[str, Any]:
        """State beside the optimizer's own, for a checkpoint: name -> tensor or number.

        A parameter's tensor is "<what>.<the parameter's name>".
        """
        scale = {} if self._scale is None else self._scale.state_dict()
        return scale if self._rounds is None else {**scale, **self._rounds.state_dict()}

    def wanted(self, saved: Iterable[str]) -> set[str]:
        """Select the tensors of a checkpoint that `load_state_dict` needs on this rank."""
        names = set(saved)
        rounds = {name for name in names if is_diloco_key(name)}
        return names - rounds | (self._rounds.wanted(rounds) if self._rounds is not None else set())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load after the weights. State that the checkpoint lacks (other precision, no `diloco`) stays initial."""
        if self._scale is not None and "loss_scale" in state:
            self._scale.load_state_dict(state)
        if self._rounds is not None:
            self._rounds.load_state_dict(state)


class Clip:
    """Scale gradients to a norm of at most `limit`.

    The norm is that of the whole model's gradient: all shards, stages and tables, each element once. So a rank counts
    its own elements of each parameter, divided by the number of ranks that hold the same elements: the ranks that have
    the parameter's name, over the number of pieces.
    """

    def __init__(self, replica: Replica, limit: float, mesh: Mesh, *, island: dist.ProcessGroup | None = None) -> None:
        """Collective over the world.

        island: the ranks of this rank's copy of the model (`Mesh.island`), if each copy has its own gradients and norm.
        """
        self._replica, self._limit, self._group = replica, limit, island
        here = {name: pieces(replica.as_shard(name, held.detach())) for name, held in replica.named_parameters()}
        everywhere: list[tuple[int, dict[str, int]]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(everywhere, (mesh.data.rank, here))
        together = [held for rank, held in everywhere if island is None or rank == mesh.data.rank]
        holders = Counter(name for held in together for name in held)
        # If every rank holds every parameter whole, no communication is needed.
        self._alone = all(held.keys() == holders.keys() and set(held.values()) <= {1} for held in together)
        self._weights = {name: 1.0 if self._alone else count / holders[name] for name, count in here.items()}

    def clip(self) -> float:
        """Scale the gradients in place; return their norm before, which may be NaN or infinite.

        If ranks hold different parts: one all_reduce of 8 bytes over the world, or the island.
        """
        held = dict(self._replica.named_parameters())
        settle(held.values())
        gradients = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
        total = torch.zeros(1, dtype=torch.float64)
        for name, gradient in gradients.items():
            total += square_sum(gradient).cpu() * self._weights[name]
        if not self._alone:
            dist.all_reduce(total, group=self._group)
        norm = math.sqrt(float(total))
        if norm > self._limit:
            for gradient in gradients.values():
                local(gradient).mul_(self._limit / norm)
        return norm


class LossScale:
    """The factor that losses are multiplied by: doubled after 2000 good steps in a row, halved by an overflow."""

    def __init__(self) -> None:
        self.value = INITIAL
        """A power of two: dividing by it is exact."""
        self._good_steps = 0

    def overflowed(self, gradients: Iterable[Tensor]) -> bool:
        """Whether any rank's gradients hold a number that is not finite; also sets the next step's scale.

        Collective over the world: one all_reduce of one number, so all ranks leave the same steps out. Raises
        ArithmeticError on all ranks if gradients overflow at a scale of 1.
        """
        parts = [part for part in map(local, gradients) if part.numel()]
        # The largest magnitude is infinite or NaN exactly if one element is; unlike a sum, it cannot overflow.
        largest = torch.nn.utils.get_total_norm(parts, float("inf"))
        found = torch.logical_not(torch.isfinite(largest)).to(torch.int32).reshape(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        overflowed = bool(found)
        if overflowed:
            self.value, self._good_steps = self.value / 2, 0
            if self.value < 1.0:
                raise ArithmeticError(
                    "gradients overflow f16 at a loss scale of 1: the loss diverges, or the model needs a larger "
                    'range; try training.precision = "bf16" or a smaller optimizer.lr'
                )
        else:
            self._good_steps += 1
            if self._good_steps == GROWS_AFTER_STEPS:
                self.value, self._good_steps = self.value * 2, 0
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.value, "loss_scale_good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["loss_scale"]), int(state["loss_scale_good_steps"])
