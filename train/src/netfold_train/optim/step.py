"""Everything between the backward pass and the next batch: unscale, clip, step, and DiLoCo's rounds.

Clipping: by the norm of the whole model's gradient (Pascanu, Mikolov, Bengio 2013). Loss scaling keeps small gradients
above f16's rounding to zero (Micikevicius et al. 2018, section 3.2). It is torch's ShardedGradScaler: one all_reduce of
4 bytes over the world, so that all ranks leave the same steps out. In an elastic job every rank has the whole averaged
gradient, with the same bits, and so they agree without: after the step's vote no rank may wait for another.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from netfold_train.models.model import Replica
from netfold_train.optim.ema import Ema
from netfold_train.parallel.diloco import DiLoCoRounds
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.parallel.shards import axes, local, square_sum
from netfold_train.recipe import Recipe

# kind -> parameter -> key -> tensor
States = Mapping[str, Mapping[Tensor, dict[str, Any]]]


class OptimizerStep:
    """Steps one optimizer. All methods but the dictionaries of the state are collective over the world."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, recipe: Recipe, mesh: Mesh) -> None:
        """Collective over the world."""
        self.optimizer = optimizer
        scales = recipe.training.precision == "f16"
        self._scaler = (
            torch.amp.GradScaler(mesh.device.type, enabled=scales)
            if recipe.fault_tolerance.elastic
            # Its default group is that of the time of import.
            else ShardedGradScaler(mesh.device.type, enabled=scales, process_group=None)
        )
        self._device = mesh.device
        limit, diloco = recipe.training.clip, recipe.diloco
        self.island = mesh.site_ranks() if diloco is not None else None
        """Under `diloco` the ranks of this rank's site, which train independently within a round."""
        self._clip = Clip(replica, limit, island=self.island) if limit is not None else None
        self._rounds = DiLoCoRounds(replica, diloco, mesh) if diloco is not None else None
        self._site = mesh.between.rank if mesh.between is not None else 0
        ema = recipe.training.ema
        self.ema = Ema(replica, ema) if ema is not None else None
        self.skipped = False
        """The last step left weights unchanged, because its gradients overflowed."""

    def regroup(self, replica: Replica) -> None:
        """Go on with the groups of `replica`, whose parameters are the same. Only without `diloco`; collective."""
        if self._clip is not None:
            self._clip = Clip(replica, self._clip.limit)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Of the losses; None: they are not scaled."""
        return self._scaler if self._scaler.is_enabled() else None

    @property
    def loss_scale(self) -> float:
        """The factor of the next losses before their backward pass, and so of the gradients that `step` takes."""
        return float(self._scaler.scale(torch.ones((), device=self._device)))

    def step(self, lr: float) -> float | None:
        """Apply the parameters' gradients. Returns their norm before clipping, or None without clipping.

        Under `diloco` the norm is that of this rank's site. Raises ArithmeticError on all ranks if
        gradients overflow at a loss scale of 1.
        """
        scale = self.loss_scale
        self._scaler.unscale_(self.optimizer)
        norm = self._clip.clip() if self._clip is not None else None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._scaler.step(self.optimizer)
        self._scaler.update()
        # torch halves the scale after an overflow, and only then.
        self.skipped = self.loss_scale < scale
        if self.ema is not None and not self.skipped:
            self.ema.step()
        if self.loss_scale < 1.0:
            raise ArithmeticError(
                "gradients overflow f16 at a loss scale of 1: the loss diverges, or the model needs a larger "
                'range; try training.precision = "bf16" or a smaller optimizer.lr'
            )
        return None if self.skipped else norm

    def end_step(self, number: int) -> None:
        """End step `number` of the job (from 1), applied or left out; under `diloco` also a complete round."""
        if self._rounds is not None:
            self._rounds.end_step(number)

    def averages_in_place(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the parameters are their moving averages, if the recipe asks for these (`training.ema`)."""
        return self.ema.in_place() if self.ema is not None else contextlib.nullcontext()

    def settle(self) -> None:
        """End an unfinished round, so that no exchange between sites is under way."""
        if self._rounds is not None:
            self._rounds.settle()

    def finish(self) -> None:
        """Make all ranks' weights equal, at the end of training."""
        if self._rounds is not None:
            self._rounds.finish()

    def common(self) -> contextlib.AbstractContextManager[None]:
        """Inside, all ranks hold the weights that checkpoints and evaluations are of; ends an unfinished round."""
        return self._rounds.common() if self._rounds is not None else contextlib.nullcontext()

    def states(self, saved: Collection[str] | None = None) -> States:
        """The states of parameters in a checkpoint, by their kind.

        saved: the kinds of a checkpoint to load. Under `diloco` each site has kinds of its own. With more sites than
        saved ones, the further sites reuse them in order; without `diloco` all ranks load the first.
        """
        site = self._site
        apart = self._rounds is not None if saved is None else "inner0" in saved
        if saved is not None and apart:
            site %= sum(kind.startswith("inner") for kind in saved)
        states: dict[str, Mapping[Any, dict[str, Any]]] = {
            f"inner{site}" if apart else "optimizer": self.optimizer.state
        }
        if self._rounds is not None:
            states["outer"] = self._rounds.state
            if self._rounds.ahead:
                states[f"ahead{site}"] = self._rounds.ahead
        if self.ema is not None:
            states["ema"] = self.ema.state
        return states

    def state_dict(self) -> dict[str, float]:
        """Numbers for a checkpoint, the same on every rank."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load after the weights and `states`. A checkpoint of another precision has no scale: it stays initial."""
        if "scale" in state:
            self._scaler.load_state_dict(state)
        if self._rounds is not None:
            self._rounds.begin()
        if self.ema is not None:
            self.ema.begin()


class Clip:
    """Scale gradients to a norm of at most `limit`.

    The norm is that of the whole model's gradient: all shards, stages and tables, each element once. So a rank counts
    its own elements of each parameter, divided by the number of ranks that hold the same elements: the ranks that have
    the parameter's name, over the number of pieces.
    """

    def __init__(self, replica: Replica, limit: float, *, island: dist.ProcessGroup | None = None) -> None:
        """Collective over the world, or the island.

        island: the ranks of this rank's site (`Mesh.site_ranks`), if each site has its own gradients and norm.
        """
        self._held, self.limit, self._group = dict(replica.named_parameters()), limit, island
        # The number of pieces of each whole parameter.
        here = {name: math.prod(axis.size() for axis in axes(held)) for name, held in self._held.items()}
        together = gather(here, island)
        holders = Counter(name for held in together for name in held)
        # If every rank holds every parameter whole, no communication is needed.
        self._alone = all(held.keys() == holders.keys() and set(held.values()) <= {1} for held in together)
        self._weights = {name: 1.0 if self._alone else count / holders[name] for name, count in here.items()}

    def clip(self) -> float:
        """Scale the gradients in place; return their norm before, which may be NaN or infinite.

        If ranks hold different parts: one all_reduce of 8 bytes over the world, or the island.
        """
        gradients = {name: held.grad for name, held in self._held.items() if held.grad is not None}
        total = torch.zeros(1, dtype=torch.float64)
        for name, gradient in gradients.items():
            total += square_sum(gradient).cpu() * self._weights[name]
        if not self._alone:
            dist.all_reduce(total, group=self._group)
        norm = math.sqrt(float(total))
        if norm > self.limit:
            for gradient in gradients.values():
                local(gradient).mul_(self.limit / norm)
        return norm
