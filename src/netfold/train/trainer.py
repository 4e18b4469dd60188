"""The loop: a batch, gradients, the word of all ranks on them, a step of the optimizer, and who is told.

Every decision that all ranks must take alike is taken from one small all_reduce a step (`word`), under [diloco] from
one a round: within a round only the ranks of one copy of the model wait for each other. What is done when
something goes wrong is in files of its own (`policies`, `recovery`, `stop`, `straggler`, `unreadable`); here is when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from netfold.train import events as said
from netfold.train.datasets import make_data
from netfold.train.equal_weights import EqualWeights
from netfold.train.evaluate import evaluate
from netfold.train.examples import Batch, Data, Panel
from netfold.train.fault_tolerance.bad_examples import BadExampleReplacer
from netfold.train.fault_tolerance.policies import (
    Buffers,
    NonFinite,
    NonFiniteError,
    abort_groups,
    bad_gradients,
    explain_device_error,
    what_is_bad,
)
from netfold.train.fault_tolerance.recovery import Recovery
from netfold.train.fault_tolerance.stop import StopRequest
from netfold.train.fault_tolerance.straggler import Straggler, StragglerError
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.models import make_model
from netfold.train.optimizer_step import OptimizerStep
from netfold.train.optimizers import make_optimizer
from netfold.train.optimizers.decay import undecayed
from netfold.train.parallel import parallelise
from netfold.train.pictures import render
from netfold.train.prefetch import Prefetcher
from netfold.train.recipe import Recipe, constraints
from netfold.train.recipe.errors import RecipeError, error_kind, error_text
from netfold.train.sampler import sample_seed
from netfold.train.schedule import learning_rate
from netfold.train.step_vote import StepVote, merge_votes, vote


@dataclass(frozen=True)
class Outcome:
    """What came of a run, the same on every rank."""

    step: int
    losses: tuple[float, ...]
    """The mean over the global batch, one a step that this process has run."""
    metric: float
    """On the held-out examples, after the last step; nan where the run was asked to stop before it."""
    reason: str
    """ "done", or "SIGTERM": asked to stop, and a checkpoint is written."""


class Trainer:
    """Trains what a recipe says, on the ranks of the world that this process is one of.

    `model` and `data` may be given instead of being made by the recipe's names. `folder`: the run's, shared by all
    ranks; checkpoints are in it, and training goes on from the newest; without, there are none. torch.distributed must
    be initialised (`netfold train` does it, and starts ranks where it must).
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: Model | None = None,
        data: Data | None = None,
        folder: Path | None = None,
        callbacks: Sequence[said.Callback] = (),
    ) -> None:
        if told := constraints.rewind(recipe):
            raise RecipeError(told)
        if recipe.fault_tolerance.non_finite == "rewind" and folder is None:
            raise ValueError(
                "fault_tolerance.non_finite is 'rewind', and no checkpoints are kept without a folder: give one"
            )
        self.recipe = recipe
        self._callbacks = callbacks
        self.mesh = Mesh(recipe.parallel)
        self.data = data or make_data(recipe.data)
        torch.manual_seed(recipe.training.seed)
        made = model or make_model(recipe.model)
        parts = (recipe.parallel.microbatches or 2) if recipe.parallel.pipeline > 1 else recipe.training.accumulate
        # Nothing is averaged where nothing is shared out.
        loss = EqualWeights(made.loss) if self.mesh.data.size * parts > 1 else None
        self.model = made if loss is None else replace(made, loss=loss)
        self._parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        alone = undecayed(self.model.module)
        self.replica = parallelise(self.model, recipe, self.mesh, self.data.train)
        if loss is not None:
            loss.on = True  # it was timed until now
        self.optimizer = make_optimizer(self.replica, recipe, self.mesh, alone)
        self._island = self.mesh.island() if recipe.diloco is not None else None
        self.update = OptimizerStep(self.replica, self.optimizer, recipe, self.mesh, self._island)
        self._round: list[StepVote] = []
        self._spoilt: list[str] = []
        """Under [diloco]: what was told of this round's steps, and of those that were left out, on this island."""
        self.batch = recipe.training.batch * (self.mesh.data.size if recipe.training.scaling == "weak" else 1)
        self.step = 0
        self.samples = 0
        """Taken from the data so far: its position, whatever the batch was in earlier runs."""
        self._batch: Batch | None = None
        self._notes: list[tuple[str, str]] = []
        self._started = False
        self._replacing: BadExampleReplacer | None = None
        if recipe.fault_tolerance.missing_data == "skip":
            # The stages of a pipeline and the parts of a layer are given the same samples.
            shared = self.mesh.pipeline.size * self.mesh.tensor.size > 1
            self._replacing = BadExampleReplacer(self.data.train, self.mesh.island() if shared else None)
        self._non_finite = NonFinite(recipe.fault_tolerance)
        self._buffers = Buffers(self.replica.modules) if recipe.fault_tolerance.non_finite == "skip" else None
        self._straggler: Straggler | None = None
        if self.mesh.data.size > 1:
            self._straggler = Straggler(self.replica.modules, recipe.fault_tolerance, self.mesh)
        elif dist.get_world_size() > 1:
            self._note("info", "no two ranks have the same work (parallel.data is 1): none can be named as a straggler")
        self.stop = StopRequest(recipe.fault_tolerance.grace_s)
        self.recovery: Recovery | None = None
        if folder is not None:
            self.recovery = Recovery(folder, recipe, self.mesh, self.replica, self.optimizer, self.update, self._note)

    @property
    def steps(self) -> int:
        """The last step's number. With epochs it follows from the samples that are left."""
        training = self.recipe.training
        if training.steps is not None:
            return training.steps
        assert training.epochs is not None
        left = training.epochs * len(self.data.train) - self.samples
        return self.step + max(0, -(-left // self.batch))

    def fit(self) -> Outcome:
        """Train to the last step, from the newest checkpoint in the run's folder. Collective over the world.

        Raises what made it fail: NonFiniteError, StragglerError and CheckpointError on all ranks alike; DeviceError and
        BadExampleError on the rank that met them, while the others hear of it as PeerLost.
        """
        began_s = time.perf_counter()
        try:
            with self.stop:
                outcome = self._train()
        except Exception as error:
            better = explain_device_error(error, self.step + 1, self._batch)
            if better is not None:
                abort_groups(self.mesh, better)
            if self._started:
                self._note("error", error_text(better or error).partition("\n")[0])
                self._tell(said.Ended(self.step, error_kind(better or error), time.perf_counter() - began_s))
            if better is not None:
                raise better from error
            raise
        finally:
            if self.recovery is not None:
                self.recovery.leave()
        self._tell(said.Ended(self.step, outcome.reason, time.perf_counter() - began_s))
        return outcome

    def _train(self) -> Outcome:
        training, data = self.recipe.training, self.mesh.data
        losses: list[float] = []
        self._begin()
        values: dict[str, float] = {}
        reason = "done"
        replacing = self._replacing
        agree = None if replacing is None else replacing.agree
        with Prefetcher(replacing or self.data.train, training.seed, self.batch, data.rank, data.size, agree) as feed:
            while self.step < self.steps:
                heard = self._heard(self._one_step(feed))
                if not heard:
                    continue
                losses += [word.loss for word in heard]
                word = heard[-1]
                if word.stop:
                    reason = "SIGTERM"
                    break
                if word.checkpoint_failed and self.recovery is not None:
                    self.recovery.settle()
                if _due(self.step, training.evaluate_every) and self.step < self.steps:
                    self._evaluate()
                if _due(self.step, self.recipe.checkpoint_every(self.steps)):
                    self._save()
            # Checkpoints and looks at held-out examples are of one model: an outer round ends early.
            self.update.settle()
            if reason == "done":
                values = self._evaluate()
        self._save()
        if self.recovery is not None:
            self.recovery.settle()
            self.recovery.end()
        return Outcome(self.step, tuple(losses), values.get(self.data.metric.name, math.nan), reason)

    def _begin(self) -> None:
        position = self.recovery.begin() if self.recovery is not None else None
        if position is not None:
            self.step, self.samples = position.step, position.samples
        if self.recovery is not None:
            self._say_checkpoints()
        self._tell(
            said.Started(
                self.recipe, self.model, dist.get_world_size(), dist.get_rank(), self.step, self.steps, self.batch,
                self._parameters, self.data.metric,
            )
        )  # fmt: skip
        self._started = True
        for level, text in self._notes:
            self._note(level, text)
        self._pass_on()

    def _say_checkpoints(self) -> None:
        every, asked = self.recipe.checkpoint_every(self.steps), self.recipe.checkpoint.every
        if every is None:
            self._note("info", "no checkpoint before the end (checkpoint.every): a restart begins at step 0")
        elif asked == "auto" and every < self.steps:
            self._note("info", f"a checkpoint every {every} steps (checkpoint.every)")

    def _one_step(self, feed: Prefetcher) -> StepVote:
        began_s = time.perf_counter()
        batch = self._batch = feed.get(self.samples)
        data_s = time.perf_counter() - began_s
        # What a model draws (dropout) is a function of the seed, the step and the share of the data: nothing to save.
        # torch.manual_seed would do it for every kind of accelerator that is not there as well, sixty times as dear.
        torch.default_generator.manual_seed(
            sample_seed(self.recipe.training.seed, self.step * self.mesh.data.size + self.mesh.data.rank)
        )
        lr = learning_rate(self.recipe.optimizer.lr, self.recipe.schedule, self.step, self.steps, self.batch)
        self.optimizer.zero_grad()
        if self._buffers is not None:
            self._buffers.save()
        loss = self.replica.gradients(batch, self.update.loss_scale)
        gradients_s = time.perf_counter()
        # f16 scales its losses until gradients overflow: that is the update's to see.
        bad = bad_gradients(self.replica) if self.recipe.training.precision != "f16" else []
        word = vote(
            loss,
            not_finite=bool(bad) or (loss is not None and not math.isfinite(loss)),
            stop=self.stop.asked,
            checkpoint_failed=self.recovery is not None and self.recovery.failed(),
            group=self._island,
        )
        norm: float | None = None
        if word.not_finite:
            what = what_is_bad(self.step + 1, loss, bad, self._island)
            if self._island is not None:
                # Other islands do not know, and wait for nobody before the end of the round.
                self._spoilt.append(what)
                if self._buffers is not None:
                    self._buffers.restore()
                skipped = True
            else:
                skipped = self._left_out(what)
            if not skipped:
                return word
        else:
            norm = self.update.step(lr)
            skipped = self.update.skipped
        self.step += 1
        self.update.end_step(self.step)
        self.samples += self.batch
        if not skipped and self._island is None:
            self._non_finite.fine(self.step)
        seconds = time.perf_counter() - began_s
        self._tell(said.Stepped(self.step, word.loss, lr, norm, seconds, data_s, self.samples, skipped))
        self._pass_on()
        if self.recovery is not None:
            self.recovery.stepped(self.step)
        for text in self._replacing.new_messages() if self._replacing is not None else ():
            self._note("warning", f"{text}; another example is taken instead (fault_tolerance.missing_data)")
        if self._straggler is not None:
            slow = self._straggler.stepped(began_s, data_s, gradients_s, may_compare=self._is_agreed())
            if slow is not None:
                self._slow(slow)
        return word

    def _is_agreed(self) -> bool:
        """All ranks agree after this step: after every one, and under [diloco] at the end of a round, or of
        training.
        """
        return self.recipe.diloco is None or self.step % self.recipe.diloco.every == 0 or self.step >= self.steps

    def _heard(self, word: StepVote) -> list[StepVote]:
        """The words of all ranks on the steps since they last agreed; none where they do not agree yet."""
        if self._island is None:
            return [word]
        self._round.append(word)
        if not self._is_agreed():
            return []
        words, self._round = merge_votes(self._round), []
        if words[-1].not_finite:
            found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(found, self._spoilt)
            self._spoilt = []
            self.update.settle()
            self._left_out("; ".join(dict.fromkeys(text for texts in found for text in texts)))
        else:
            self._non_finite.fine(self.step)
        return words

    def _left_out(self, what: str) -> bool:
        """A step whose numbers are bad. True: it counts as done; False: training is back at the last checkpoint."""
        # Under [diloco] the round is over, and its steps are counted.
        over = self._island is not None
        if self._non_finite.bad(self.step + (0 if over else 1), what) == "skip":
            if self._buffers is not None and not over:
                self._buffers.restore()
            self._note("warning", f"{what}; the step is left out (fault_tolerance.non_finite)")
            return True
        position = self.recovery.back() if self.recovery is not None else None
        if position is None:
            raise NonFiniteError(f"{what}; there is no checkpoint yet to go back to (checkpoint.every)")
        # Weights go back and the data goes on, past the batch that did it (as in PaLM, Chowdhery 2022, section 5.1):
        # the same batch again would do it again.
        self.samples += 0 if over else self.batch
        self._note(
            "warning", f"{what}; back to the weights of step {position.step}, on with sample {self.samples} of the data"
        )
        self.step = position.step
        return False

    def _slow(self, text: str) -> None:
        if self.recipe.fault_tolerance.straggler == "stop":
            self._save()
            raise StragglerError(f"step {self.step}: {text}; fault_tolerance.straggler is 'stop'")
        self._note("warning", text)

    def _save(self) -> None:
        if self.recovery is not None:
            self.recovery.save(self.step, self.samples)

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

    def _pass_on(self) -> None:
        """What the replica chose."""
        for text in self.replica.notes:
            self._note("info", text)
        self.replica.notes.clear()

    def _note(self, level: str, text: str) -> None:
        if self._started:
            self._tell(said.Noted(self.step, level, text))
        else:
            # Listeners hear of the start first.
            self._notes.append((level, text))

    def _tell(self, event: said.Started | said.Stepped | said.Evaluated | said.Noted | said.Ended) -> None:
        for callback in self._callbacks:
            getattr(callback, said.HANDLERS[type(event)])(event)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
