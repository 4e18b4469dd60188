"""The loop: a batch, gradients, the word of all ranks on them, a step of the optimizer, and who is told.

Every decision that all ranks must take alike is taken from one small all_reduce a step (`word`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.train import listeners as said
from netfold.train.datasets import make_data
from netfold.train.evaluate import evaluate
from netfold.train.examples import Data, Panel
from netfold.train.feed import Feed
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.models import make_model
from netfold.train.optimizers import make_optimizer
from netfold.train.order import sample_seed
from netfold.train.parallel import parallelise
from netfold.train.pictures import render
from netfold.train.recipe import Recipe
from netfold.train.schedule import learning_rate
from netfold.train.update import Update


@dataclass(frozen=True)
class Outcome:
    """What came of a run, the same on every rank."""

    step: int
    losses: tuple[float, ...]
    """The mean over the global batch, one a step that this process has run."""
    metric: float
    """On the held-out examples, after the last step."""
    reason: str
    """ "done", or why it ended before its last step."""


class Trainer:
    """Trains what a recipe says, on the ranks of the world that this process is one of.

    `model` and `data` may be given instead of being made by the recipe's names. torch.distributed must be initialised
    (`netfold train` does it, and starts ranks where it must).
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: Model | None = None,
        data: Data | None = None,
        listeners: Sequence[said.Listener] = (),
    ) -> None:
        self.recipe = recipe
        self._listeners = listeners
        self.mesh = Mesh(recipe.parallel)
        self.data = data or make_data(recipe.data)
        torch.manual_seed(recipe.training.seed)
        self.model = model or make_model(recipe.model)
        self._parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        self.replica = parallelise(self.model, recipe, self.mesh)
        self.optimizer = make_optimizer(self.replica, recipe, self.mesh)
        self.update = Update(self.replica, self.optimizer, recipe, self.mesh)
        self.batch = recipe.training.batch * (self.mesh.data.size if recipe.training.scaling == "weak" else 1)
        self.steps = recipe.training.steps or -(-(recipe.training.epochs or 0) * len(self.data.train) // self.batch)
        self.step = 0

    def fit(self) -> Outcome:
        """Train to the last step. Collective over the world."""
        training, data = self.recipe.training, self.mesh.data
        losses: list[float] = []
        began_s = time.perf_counter()
        self._tell(
            said.Started(
                self.recipe, self.model, dist.get_world_size(), dist.get_rank(), self.step, self.steps, self.batch,
                self._parameters, self.data.metric,
            )
        )  # fmt: skip
        values: dict[str, float] = {}
        with Feed(self.data.train, training.seed, self.batch, data.rank, data.size) as feed:
            while self.step < self.steps:
                losses.append(self._one_step(feed))
                every = training.evaluate_every
                if self.step == self.steps or (every is not None and self.step % every == 0):
                    values = self._evaluate()
        self._tell(said.Ended(self.step, "done", time.perf_counter() - began_s))
        return Outcome(self.step, tuple(losses), values[self.data.metric.name], "done")

    def _one_step(self, feed: Feed) -> float:
        began_s = time.perf_counter()
        batch = feed.get(self.step * self.batch)
        data_s = time.perf_counter() - began_s
        # What a model draws (dropout) is a function of the seed, the step and the share of the data: nothing to save.
        # torch.manual_seed would do it for every kind of accelerator that is not there as well, sixty times as dear.
        torch.default_generator.manual_seed(
            sample_seed(self.recipe.training.seed, self.step * self.mesh.data.size + self.mesh.data.rank)
        )
        lr = learning_rate(self.recipe.optimizer.lr, self.recipe.schedule, self.step, self.steps, self.batch)
        self.optimizer.zero_grad()
        loss = self._word(self.replica.gradients(batch))
        norm = self.update.step(lr)
        self.step += 1
        seconds = time.perf_counter() - began_s
        self._tell(said.Stepped(self.step, loss, lr, norm, seconds, data_s, self.step * self.batch))
        return loss

    def _word(self, loss: Tensor | None) -> float:
        """The mean loss over all who have computed one."""
        word = torch.zeros(2, dtype=torch.float64)
        if loss is not None:
            word[0], word[1] = loss, 1.0
        dist.all_reduce(word)
        return float(word[0] / word[1])

    def _evaluate(self) -> dict[str, float]:
        began_s = time.perf_counter()
        share = self.batch // self.mesh.data.size
        values = evaluate(self.replica, self.model, self.data, self.mesh, share)
        seconds = time.perf_counter() - began_s
        panels: Sequence[Panel] = ()
        if self.step == self.steps and self.data.pictures is not None:
            panels = render(self.replica, self.data.pictures, self.mesh, share)
        self._tell(said.Evaluated(self.step, values, seconds, panels))
        return values

    def _tell(self, event: said.Started | said.Stepped | said.Evaluated | said.Noted | said.Ended) -> None:
        for listener in self._listeners:
            getattr(listener, type(event).__name__.lower())(event)
