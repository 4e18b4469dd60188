"""Train although ranks are lost and join: `[fault_tolerance] elastic = true`, over `netfold.elastic`.

Each part of training (`Trainer._next`) is an attempt of `World`. Which part comes next follows from the position
(`_Position`), which is sent to a new rank with the weights. So all ranks agree on it, whatever was repeated.

A step's samples stay those of a job that lost no rank (`training.scaling` = "strong"): the ranks that are left divide
them. With "weak" every rank keeps its number of samples, and `schedule.reference_batch` lets the learning rate follow.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from netfold.bootstrap.launchers import placement
from netfold.bootstrap.store import PrefixStore, Store
from netfold.bootstrap.tcp_store import outliving_store
from netfold.elastic import Members
from netfold.elastic.members import STORE_VARIABLE, meeting_at_store
from netfold.elastic.torch import State, World
from netfold.elastic.torch.world import agent_store
from netfold_train.callbacks.events import Callback, Event, Stepped
from netfold_train.checkpoint.atomic import CHECKPOINTS, complete_checkpoints, step_of
from netfold_train.fault_tolerance.policies import what_is_bad
from netfold_train.fault_tolerance.step_vote import VOTE_NUMBERS
from netfold_train.parallel import Unpipelined
from netfold_train.parallel.mesh import Mesh, gather
from netfold_train.recipe import Recipe
from netfold_train.runs.metrics import read_metrics
from netfold_train.trainer import Outcome, Part, Trainer

_FOLDER = "train/folder"


class ElasticTrainer(Trainer):
    """A `Trainer` whose ranks come and go. Made, and told of changes, by `fit_elastic`."""

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        *,
        folder: Path | None = None,
        callbacks: Callable[[int], Sequence[Callback]] = lambda rank: (),
        **parts: Any,
    ) -> None:
        """callbacks: those of a rank; rank 0's are made again where rank 0 is lost. parts: as `Trainer`'s."""
        self._last_step: Stepped | None = None
        self._callbacks_of, self._place = callbacks, world.rank
        # The number of ranks changes.
        anywhere = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"data": None})})
        super().__init__(anywhere, folder=folder, callbacks=callbacks(world.rank), **parts)
        self.world = world
        self._add_votes = world.vote
        self.position = _Position(self)
        others: dict[str, Any] = {}
        if self.update.scaler is not None:
            others["scaler"] = self.update.scaler
        if self.update.ema is not None:
            # As parameters: a buffer would be copied in every step.
            kept = [each["average"] for each in self.update.ema.state.values()]
            others["ema"] = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in kept])
        self.state = State(
            model=self.model.module, optimizer=self.optimizer, position=self.position, non_finite=self._non_finite,
            **others,
        )  # fmt: skip

    def regroup(self) -> None:
        """Make the groups of the present generation, as the constructor has. Collective, also with constructors."""
        self.mesh = Mesh(self.recipe.parallel, self.mesh.device)
        self.replica = Unpipelined(self.model, self.recipe, self.mesh)
        self.update.regroup(self.replica)
        if self._straggler is not None:
            self._straggler.close()
        if self.recovery is not None:
            # Its group has ended, and so has what it was writing.
            self.recovery.leave()
        self._meet()

    def changed(self, world: World) -> None:
        """Go on in the present generation; the state is whole. Collective."""
        if self.recovery is not None and self._folder is not None:
            # A checkpoint that was being written when a rank was lost may be complete or gone.
            newest = [step_of(path) for path in gather(complete_checkpoints(self._folder / CHECKPOINTS))[0]]
            self.saved = max(newest, default=0)
        self.batch = self.recipe.training.batch * (self.mesh.shares if self.recipe.training.scaling == "weak" else 1)
        self._close_batches()
        if world.rank != self._place:
            if 0 in (world.rank, self._place):
                self._callbacks = self._callbacks_of(world.rank)
                if self._started:
                    self._announce(goes_on=True)
                    self._write_last_step()
            self._place = world.rank
        if world.last_change:
            self._note("warning", f"{world.last_change}; a step takes {self.batch} samples")

    def _write_last_step(self) -> None:
        """On a new rank 0: the former one may have been lost between a step's vote and its line in the metrics."""
        if self.world.rank == 0 and self._folder is not None and self._last_step is not None:
            written = max((line["step"] for line in read_metrics(self._folder).steps), default=0)
            if self._last_step.step > written:
                self._notify(self._last_step)

    def _notify(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._last_step = event
        super()._notify(event)

    def _do(self, part: Part) -> None:
        before, then = self.world.step, None
        with self.world.attempt():
            then = part()
        if then is not None and self.world.step > before:
            then()

    def _what_is_bad(self, loss: Tensor | None, gradients: list[str]) -> str:
        # After the vote ranks must not wait for each other.
        return what_is_bad(self.step + 1, loss, gradients, alone=True)


class _Position:
    """The progress of a job: a part of each rank's state."""

    _NAMES = (
        "step", "samples", "begun", "stopping", "finished", "write_failed", "goes_back", "evaluated", "saved", "values",
    )  # fmt: skip

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in self._NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._NAMES:
            setattr(self._trainer, name, state[name])


def fit_elastic(
    recipe: Recipe,
    make: Callable[[World, Path | None], ElasticTrainer],
    choose_folder: Callable[[], Path | None],
    members: Members | None = None,
) -> tuple[ElasticTrainer, Outcome]:
    """Join the job, train to the end, and leave. The trainer and its outcome are those of this rank.

    make: (world, folder) -> the trainer; collective. choose_folder: the run's folder, collective over the first ranks.
    members: instead of the launcher's job.
    """
    trainer: ElasticTrainer | None = None
    store = _store() if members is None else None
    if members is None:
        members = Members.from_environment(
            store=store,
            min_size=recipe.fault_tolerance.min_ranks,
            max_size=placement(meeting_at_store(os.environ)).size,
            timeout_s=recipe.run.timeout_s,
            join_timeout_s=min(60.0, recipe.run.timeout_s),
        )

    def state(world: World) -> State:
        nonlocal trainer
        if trainer is not None:
            trainer.regroup()
            return trainer.state
        trainer = make(world, _folder(world, store, choose_folder, recipe.run.timeout_s))
        return trainer.state

    level = logging.INFO  # rank 0's callbacks print a note
    with World(
        state, numbers=VOTE_NUMBERS, backend=recipe.run.backend, timeout_s=recipe.run.timeout_s, members=members,
        log_level=level,
    ) as world:  # fmt: skip
        assert trainer is not None
        world.on_change(trainer.changed)
        outcome = trainer.fit()
        return trainer, outcome


def _folder(world: World, store: Store | None, choose: Callable[[], Path | None], timeout_s: float) -> Path | None:
    """The run's folder. The first ranks choose it; a new rank reads it in the store."""
    if world.generation == 1:
        chosen = choose()
        if store is not None and chosen is not None and world.rank == 0:
            store.set(_FOLDER, str(chosen).encode())
        return chosen
    return None if store is None else Path(store.get(_FOLDER, timeout_s).decode())


def _store() -> Store | None:
    """The store that outlives ranks; None: there is none, and `Members` uses rank 0's."""
    if STORE_VARIABLE in os.environ:
        return outliving_store(os.environ[STORE_VARIABLE], 60.0)
    agents = agent_store()
    return None if agents is None else PrefixStore(agents, "netfold train/")
