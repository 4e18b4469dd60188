"""A small model and its data, for tests of failures. Every sample contains its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from own_parts import squares
from torch import Tensor, nn

from netfold_train import Batch, Chain, Data, Metric, Model, Outcome, Recipe, Trainer
from netfold_train.callbacks import events as said

EXAMPLES = 96


class Numbers:
    """Example i: [i, features of i] -> a function of the features. `change` may change a batch, or raise an error."""

    def __init__(self, change: Callable[[Sequence[int], Tensor], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(7)
        self._features = torch.randn(EXAMPLES, 7, generator=generator)
        self._change = change

    def __len__(self) -> int:
        return EXAMPLES

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        features = self._features[list(indices)].clone()
        target = features.sum(1, keepdim=True).sin()
        if self._change is not None:
            self._change(indices, features)
        return Batch((torch.cat([torch.tensor(indices).float()[:, None], features], 1),), target)


class First(nn.Module):
    """Pass the numbers of the samples to `forward`. Has dropout and running means, which a run could lose."""

    def __init__(self, noisy: bool, forward: Callable[[list[int]], None] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 12)
        self.norm = nn.BatchNorm1d(12) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.2 if noisy else 0.0)
        self._forward = forward

    def forward(self, rows: Tensor) -> Tensor:
        if self._forward is not None and self.training:
            self._forward([int(number) for number in rows[:, 0]])
        hidden: Tensor = self.drop(self.norm(self.linear(rows[:, 1:])).tanh())
        return hidden


def toy_model(noisy: bool = True, forward: Callable[[list[int]], None] | None = None) -> Model:
    return Model(Chain([("first", First(noisy, forward)), ("last", nn.Linear(12, 1))]), squares)


def toy_data(change: Callable[[Sequence[int], Tensor], None] | None = None) -> Data:
    return Data(
        Numbers(change),
        Numbers(),
        Metric("error", "", "lower", lambda output, target: (output - target).square().mean(1), 1.0, "zero"),
    )


def toy_recipe(**sections: dict[str, Any]) -> Recipe:
    table: dict[str, Any] = {
        "model": {"name": "toy"},
        "data": {"name": "toy"},
        "training": {"steps": 8, "batch": 8},
        "optimizer": {"name": "adam", "lr": 0.01},
        # Without a note about a choice, which a torch with CUDA makes.
        "device": {"kind": "cpu"},
        "schedule": {"shape": "linear"},
    }
    for name, keys in sections.items():
        table[name] = {**table.get(name, {}), **keys}
    return Recipe.model_validate(table)


@dataclass
class Recorder(said.Callback):
    """A callback that records events, and calls `after` after each step."""

    after: Callable[[int], None] | None = None
    notes: list[str] = field(default_factory=list)
    steps: list[said.Stepped] = field(default_factory=list)
    reason: str = ""

    def on_step(self, event: said.Stepped) -> None:
        self.steps.append(event)
        if self.after is not None:
            self.after(event.step)

    def on_note(self, event: said.Noted) -> None:
        self.notes.append(f"{event.level}: {event.text}")

    def on_end(self, event: said.Ended) -> None:
        self.reason = event.reason


class InterruptedRunError(Exception):
    """The error by which a test ends a run, on every rank after the same step."""


def interrupt_at(step: int) -> Callable[[int], None]:
    def after(done: int) -> None:
        if done == step:
            raise InterruptedRunError(f"after step {step}")

    return after


def run(
    folder: Path | None,
    *,
    noisy: bool = True,
    recorder: Recorder | None = None,
    change: Callable[[Sequence[int], Tensor], None] | None = None,
    forward: Callable[[list[int]], None] | None = None,
    others: Sequence[said.Callback] = (),
    **sections: dict[str, Any],
) -> Outcome:
    """Run a toy job once, in the current world. InterruptedRunError ends the run, and is not raised."""
    torch.manual_seed(5)  # of the weights
    trainer = Trainer(
        toy_recipe(**sections),
        model=toy_model(noisy, forward),
        data=toy_data(change),
        folder=folder,
        callbacks=[*others, recorder or Recorder()],
    )
    try:
        return trainer.fit()
    except InterruptedRunError:
        return Outcome(trainer.step, (), float("nan"), "interrupted")
