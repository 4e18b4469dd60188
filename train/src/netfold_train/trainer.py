"""The training loop: a batch, gradients, the step vote, an optimizer step, and events for callbacks.

All ranks make each common decision from one small all_reduce per step (`vote`), under [diloco] from one per round:
within a round only the ranks of one site wait for each other. `fault_tolerance` holds the reactions to failures; this
module decides when to call them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from netfold.profile.live import LiveOverlap
from netfold_train.callbacks.events import HANDLERS, Callback, Ended, Evaluated, Event, Noted, Started, Stepped
from netfold_train.checkpoint.initial import load_initial
from netfold_train.checkpoint.recovery import Recovery
from netfold_train.checkpoint.state import allocate_state
from netfold_train.data import make_data
from netfold_train.data.examples import Batch, Data, Panel, Pooled
from netfold_train.data.sampler import Prefetcher, sample_seed
from netfold_train.evaluate import evaluate, predict, render
from netfold_train.fault_tolerance.bad_examples import BadExampleReplacer
from netfold_train.fault_tolerance.policies import (
    NonFinite,
    NonFiniteError,
    abort_groups,
    bad_gradients,
    explain_device_error,
    what_is_bad,
)
from netfold_train.fault_tolerance.step_vote import StepVote, merge_votes, vote
from netfold_train.fault_tolerance.stop import StopRequest
from netfold_train.fault_tolerance.straggler import Straggler, StragglerError
from netfold_train.models import make_model
from netfold_train.models.deferred import record
from netfold_train.models.model import Model
from netfold_train.optim import learning_rate, make_optimizer, undecayed
from netfold_train.optim.step import OptimizerStep
from netfold_train.parallel import parallelise
from netfold_train.parallel.context import own_tokens
from netfold_train.parallel.device import choose_device, seed
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.recipe import Recipe
from netfold_train.recipe.errors import error_kind, error_text

# The shortest time that an estimate of exposed communication is of.
_OVERLAP_EVERY_S = 2.0

Then = Callable[[], None]
Part = Callable[[], Then | None]
"""A part of training, collective over the world. It changes the position, and returns what follows on this rank alone.

In an elastic job it may run several times, each time from the same position; what follows runs once.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a run, the same on every rank."""

    step: int
    losses: tuple[float, ...]
    """The mean over the global batch, for each step that this process has run."""
    metric: float
    """On the held-out examples, after the last step; NaN if the run was stopped before it."""
    reason: str
    """ "done", or "SIGTERM": the run was asked to stop, and has written a checkpoint."""


class Trainer:
    """Train a recipe on the ranks of torch.distributed, which must be initialised (`netfold train` does it).

    model, data: instead of those that the recipe names. folder: the run's, shared by all ranks. It holds checkpoints,
    and training continues from the newest; without a folder there are none.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        model: Model | None = None,
        data: Data | None = None,
        folder: Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if recipe.fault_tolerance.non_finite == "rewind" and folder is None:
            raise ValueError(
                "fault_tolerance.non_finite is 'rewind', but without a folder there are no checkpoints: give a folder"
            )
        self.recipe = recipe
        self._callbacks = callbacks
        device, device_reason = choose_device(recipe.device)
        self.mesh = Mesh(recipe.parallel, device, recipe.diloco)
        self.data = data or make_data(recipe.data)
        torch.manual_seed(recipe.training.seed)
        deferred, creation = None, ""
        if model is None:
            model, deferred = record(lambda: make_model(recipe.model), recipe.training.seed)
            creation = deferred.note
        self.model = model
        if deferred is None or creation:
            model.module.to(device)
        self._parameters = sum(parameter.numel() for parameter in self.model.module.parameters())
        without_decay = undecayed(self.model.module)
        self.replica = parallelise(model, recipe, self.mesh, self.data.train, deferred)
        self._held = dict(self.replica.named_parameters())
        self.optimizer = make_optimizer(self.replica, recipe, without_decay)
        self.update = OptimizerStep(self.replica, self.optimizer, recipe, self.mesh)
        self._island = self.update.island
        self._losses: list[float] = []
        self._round: list[StepVote] = []
        self._round_problems: list[str] = []
        """Under [diloco]: this island's votes of the round's steps, and the reasons of steps that were left out."""
        self.batch = recipe.training.batch * (self.mesh.shares if recipe.training.scaling == "weak" else 1)
        self.step = 0
        self.samples = 0
        """The position in the data: samples taken so far, whatever the batch was in earlier runs."""
        self.begun = self.stopping = self.finished = False
        self.write_failed = False
        """The checkpoint being written has failed on a rank."""
        self.goes_back = ""
        """The reason for which the newest checkpoint is to be loaded next; "": it is not."""
        self.evaluated = self.saved = 0
        """The newest steps that were evaluated, and of which a checkpoint is written or being written."""
        self.values: dict[str, float] = {}
        """Of the last evaluation."""
        self._batches: Prefetcher | None = None
        self._batch: Batch | None = None
        # Observes the thread that makes it, which must be the training thread.
        self._overlap = LiveOverlap()
        self._early_notes = [("info", text) for text in (device_reason, creation, *self.replica.notes) if text]
        self._started = False
        loaders = recipe.run.loaders
        self._examples = self.data.train if loaders == 1 else Pooled(self.data.train, loaders)
        self._replacer: BadExampleReplacer | None = None
        if recipe.fault_tolerance.missing_data == "skip":
            shared = self.mesh.shares < dist.get_world_size()
            self._replacer = BadExampleReplacer(self._examples, self.mesh.same_samples() if shared else None)
        self._non_finite = NonFinite(recipe.fault_tolerance)
        skips = recipe.fault_tolerance.non_finite == "skip"
        self._buffers = [buffer for each in self.replica.modules for buffer in each.buffers() if skips]
        self._buffers_before: list[Tensor] = []
        """Running means, and their values before the step, which are restored if the step is left out."""
        self.stop = StopRequest(recipe.fault_tolerance.grace_s)
        self._folder = folder
        self._meet()

    def _meet(self) -> None:
        """Make the parts whose ranks meet at times of their own. Collective over the world."""
        self._straggler: Straggler | None = None
        if self.mesh.data.size > 1:
            self._straggler = Straggler(self.replica.modules, self.recipe.fault_tolerance, self.mesh)
        elif dist.get_world_size() > 1:
            self._note("info", "parallel.data is 1: no two ranks have the same work, so no straggler can be named")
        self.recovery: Recovery | None = None
        if self._folder is not None:
            self.recovery = Recovery(self._folder, self.recipe, self.mesh, self.replica, self.update, self._note)

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

        Raises NonFiniteError, StragglerError and CheckpointError on all ranks alike. DeviceError and BadExampleError
        are raised on the failing rank; other ranks raise PeerLost with its reason.
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
                self._notify(Ended(self.step, error_kind(better or error), time.perf_counter() - began_s))
            if better is not None:
                raise better from error
            raise
        finally:
            if self.recovery is not None:
                self.recovery.leave()
        self._notify(Ended(self.step, outcome.reason, time.perf_counter() - began_s))
        return outcome

    def evaluate(self, predictions: Path | None = None) -> dict[str, float]:
        """The metric and the loss of the newest checkpoint in the run's folder, on the held-out examples.

        predictions: an existing folder that gets the model's outputs (`predict`). Collective over the world. Raises
        ValueError without a checkpoint.
        """
        if self.recovery is None or self.recovery.begin() is None:
            raise ValueError("there is no checkpoint to evaluate in the run's folder")
        share = self.batch // self.mesh.shares
        with self.update.common(), self.update.averages_in_place():
            if predictions is not None:
                predict(self.replica, self.data, self.mesh, share, predictions)
            return evaluate(self.replica, self.model, self.data, self.mesh, share)

    def _train(self) -> Outcome:
        try:
            while not self.finished:
                self._do(self._next())
        finally:
            self._close_batches()
        reason = "SIGTERM" if self.stopping else "done"
        metric = math.nan if self.stopping else self.values.get(self.data.metric.name, math.nan)
        return Outcome(self.step, tuple(self._losses), metric, reason)

    def _do(self, part: Part) -> None:
        then = part()
        if then is not None:
            then()

    def _next(self) -> Part:
        """The part of training that comes next. It follows from the position, and so is the same on all ranks."""
        if not self.begun:
            return self._begin
        if not self._started:
            self._announce()
        if self._straggler is not None and self._straggler.is_due and self._all_ranks_vote():
            return self._compare
        if self.goes_back:
            return self._go_back
        if self.write_failed:
            return self._settle
        ends = self.stopping or self.step >= self.steps
        evaluates = not self.stopping if ends else is_due(self.step, self.recipe.training.evaluate_every)
        if evaluates and self.evaluated < self.step:
            return self._evaluate
        if (ends or is_due(self.step, self.recipe.checkpoint_every(self.steps))) and self.saved < self.step:
            return self._save
        return self._finish if ends else self._take_step

    # --- the parts of training ---

    def _begin(self) -> None:
        self._load()
        # A run that has ended already is evaluated again.
        self.evaluated = self.step if self.step < self.steps else -1
        self.saved, self.begun = self.step, True

    def _take_step(self) -> Then:
        if self._batches is None:
            self._batches = self._make_batches()
        votes = self._common_votes(self._one_step(self._batches))
        if votes:
            # After the vote: this is not undone.
            self.stopping, self.write_failed = bool(votes[-1].stop), bool(votes[-1].checkpoint_failed)
            if self.step >= self.steps:
                self.update.finish()
        return functools.partial(self._losses.extend, [each.loss for each in votes])

    def _compare(self) -> Then | None:
        assert self._straggler is not None
        slow = self._straggler.compare()
        return functools.partial(self._react_to_straggler, slow) if slow is not None else None

    def _go_back(self) -> Then:
        """Continue with the weights of the newest checkpoint."""
        problem = self.goes_back
        position = self.recovery.back() if self.recovery is not None else None
        if position is None:
            raise NonFiniteError(f"{problem}; there is no checkpoint yet to go back to (checkpoint.every)")
        self.step = self.saved = position.step
        self.goes_back, self.evaluated = "", min(self.evaluated, self.step)
        text = (
            f"{problem}; training goes back to the weights of step {self.step}, and continues with sample "
            f"{self.samples} of the data"
        )
        return functools.partial(self._note, "warning", text)

    def _evaluate(self) -> Then:
        began_s = time.perf_counter()
        share = self.batch // self.mesh.shares
        panels: Sequence[Panel] = ()
        with self.update.common(), self.update.averages_in_place():
            self.values = evaluate(self.replica, self.model, self.data, self.mesh, share)
            seconds = time.perf_counter() - began_s
            if self.step == self.steps and self.data.pictures is not None:
                panels = render(self.replica, self.data.pictures, self.mesh, share)
        self.evaluated = self.step
        return functools.partial(self._notify, Evaluated(self.step, self.values, seconds, panels))

    def _save(self) -> None:
        if self.recovery is not None:
            with self.update.common():
                self.recovery.save(self.step, self.samples)
        self.saved = self.step

    def _settle(self) -> None:
        # In an elastic job the loss of a rank may be the reason. Then this part is repeated, without what was written.
        if self.recovery is not None:
            self.recovery.settle()
        self.write_failed = False

    def _finish(self) -> None:
        self._settle()
        self.finished = True

    # --- a step ---

    def _make_batches(self) -> Prefetcher:
        agree = None if self._replacer is None else self._replacer.agree
        examples, mesh = self._replacer or self._examples, self.mesh
        pin = mesh.device.type == "cuda"
        return Prefetcher(examples, self.recipe.training.seed, self.batch, mesh.share, mesh.shares, agree, pin=pin)

    def _close_batches(self) -> None:
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def _load(self) -> None:
        """Begin with the newest checkpoint, or the first weights. Collective over the world."""
        position = self.recovery.begin() if self.recovery is not None else None
        initial = self.recipe.training.initial
        weights = self.model.weights if initial is None else None
        if position is None and (initial or weights) is not None:
            # Averages of the first weights, and DiLoCo's copies, begin with the weights that are read.
            tensors = allocate_state({}, self.replica, self._held, self.update.states())
            self._note("info", load_initial(self.recipe.training, tensors, weights))
            self.update.load_state_dict({})
        if self.recovery is not None:
            if position is not None:
                self.step, self.samples = position.step, position.samples
            every = self.recipe.checkpoint_every(self.steps)
            if every is None:
                self._note("info", "no checkpoint before the end (checkpoint.every): a restart begins at step 0")
            elif self.recipe.checkpoint.every == "auto" and every < self.steps:
                self._note("info", f"a checkpoint every {every} steps (checkpoint.every)")

    def _announce(self, *, goes_on: bool = False) -> None:
        """Tell the callbacks of the start. goes_on: as of `Started`."""
        self._notify(
            Started(
                self.recipe, self.model, dist.get_world_size(), dist.get_rank(), self.step, self.steps, self.batch,
                self._parameters, self.data.metric, goes_on,
            )
        )  # fmt: skip
        self._started = True
        for level, text in self._early_notes:
            self._note(level, text)

    def _one_step(self, batches: Prefetcher) -> StepVote:
        began_s = time.perf_counter()
        batch = self._batch = own_tokens(batches.get(self.samples), self.mesh).to(self.mesh.device)
        data_s = time.perf_counter() - began_s
        # A model's random numbers (dropout) depend on the seed, the step and the share of the data: no state to save.
        seed(
            self.mesh.device,
            sample_seed(self.recipe.training.seed, self.step * self.mesh.data.size + self.mesh.data.rank),
        )
        lr = learning_rate(self.recipe.optimizer.lr, self.recipe.schedule, self.step, self.steps, self.batch)
        self.optimizer.zero_grad()
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        loss = self.replica.gradients(batch, self.update.loss_scale)
        gradients_s = time.perf_counter()
        # f16 scales its losses until gradients overflow: OptimizerStep handles that.
        bad = bad_gradients(self._held) if self.recipe.training.precision != "f16" else []
        result = vote(
            loss,
            not_finite=bool(bad) or (loss is not None and not math.isfinite(loss)),
            stop=self.stop.asked,
            checkpoint_failed=self.recovery is not None and self.recovery.failed(),
            group=self._island,
            add=self._add_votes,
        )
        norm, skipped = None, True
        if not result.not_finite:
            norm, skipped = self.update.step(lr), self.update.skipped
        elif not self._leave_out(self._what_is_bad(loss, bad)):
            return result  # Training goes back to a checkpoint.
        self.step += 1
        self.update.end_step(self.step)
        self.samples += self.batch
        if not skipped and self._island is None:
            self._non_finite.fine(self.step)
        seconds = time.perf_counter() - began_s
        rate, exposed = self.batch / seconds, self._overlap.exposed_share(data_s, every_s=_OVERLAP_EVERY_S)
        self._notify(Stepped(self.step, result.loss, lr, norm, seconds, data_s, self.samples, rate, exposed, skipped))
        for text in self._replacer.new_messages() if self._replacer is not None else ():
            self._note("warning", f"{text}; another example is taken instead (fault_tolerance.missing_data)")
        if self._straggler is not None:
            self._straggler.stepped(began_s, data_s, gradients_s)
        return result

    # The sum of the votes over all ranks; None: by an all_reduce.
    _add_votes: Callable[[list[float]], Sequence[float]] | None = None

    def _what_is_bad(self, loss: Tensor | None, gradients: list[str]) -> str:
        return what_is_bad(self.step + 1, loss, gradients, self._island)

    def _react_to_straggler(self, slow: str) -> None:
        if self.recipe.fault_tolerance.straggler == "stop":
            self._save()
            raise StragglerError(f"step {self.step}: {slow}; fault_tolerance.straggler is 'stop'")
        self._note("warning", slow)

    def _all_ranks_vote(self) -> bool:
        """Whether this step's vote is of all ranks: always, but under [diloco] only at the end of a round or run."""
        return self.recipe.diloco is None or self.step % self.recipe.diloco.every == 0 or self.step >= self.steps

    def _common_votes(self, result: StepVote) -> list[StepVote]:
        """The votes of all ranks on the steps since their last common vote; none within a round."""
        if self._island is None:
            return [result]
        self._round.append(result)
        if not self._all_ranks_vote():
            return []
        votes, self._round = merge_votes(self._round), []
        if votes[-1].not_finite:
            found, self._round_problems = gather(self._round_problems), []
            self.update.settle()
            # The round's steps are counted already.
            self._react("; ".join(dict.fromkeys(text for texts in found for text in texts)), self.step, samples=0)
        else:
            self._non_finite.fine(self.step)
        return votes

    def _leave_out(self, problem: str) -> bool:
        """Handle a step with bad numbers. True: it counts as done. False: training goes back to the last checkpoint."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._buffers_before)
        if self._island is not None:
            # Other islands do not know of it, and wait for no rank before the end of the round.
            self._round_problems.append(problem)
            return True
        return self._react(problem, self.step + 1, samples=self.batch)

    def _react(self, problem: str, step: int, *, samples: int) -> bool:
        """Follow fault_tolerance.non_finite, on all ranks alike; returns as `_leave_out`.

        samples: those of the bad step, if they are not counted yet.
        """
        if self._non_finite.bad(step, problem) == "skip":
            self._note("warning", f"{problem}; the step is left out (fault_tolerance.non_finite)")
            return True
        # Weights go back, but the data continues after the bad batch, which would cause the same again (as in PaLM,
        # Chowdhery 2022, section 5.1).
        self.samples += samples
        self.goes_back = problem
        return False

    def _note(self, level: str, text: str) -> None:
        if self._started:
            self._notify(Noted(self.step, level, text))
        else:
            # Callbacks receive Started first.
            self._early_notes.append((level, text))

    def _notify(self, event: Event) -> None:
        for callback in self._callbacks:
            getattr(callback, HANDLERS[type(event)])(event)


def is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
