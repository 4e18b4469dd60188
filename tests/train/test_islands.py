"""[diloco] ranks wait for each other only at the end of a round, whatever fails before it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch

OUTER = {"every": 4, "lr": 1.0, "momentum": 0.0}


def calls(rank: int, folder: Path, world: World) -> Any:
    """Collectives of the world and of the data axis so far, after each step; and the losses."""
    from surviving import Recorder, toy_data, toy_model, toy_recipe

    import netfold.torch
    from netfold.train import Trainer

    counted: list[int] = []

    def count(step: int) -> None:
        groups = [here.group.WORLD, trainer.mesh.data.group]
        counted.append(sum(len(netfold.torch.events(group)) for group in groups))

    recorder = Recorder(count)
    with world(2) as here:
        recipe = toy_recipe(diloco=OUTER, training={"steps": 10, "clip": 1.0}, fault_tolerance={"missing_data": "stop"})
        trainer = Trainer(recipe, model=toy_model(noisy=False), data=toy_data(), callbacks=[recorder])
        losses = trainer.fit().losses
    return counted, losses, [step.loss for step in recorder.steps]


def not_finite(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """A sample of step 6 on rank 1 is NaN, in the middle of the second round."""
    from surviving import Recorder, run

    from netfold.train.data.sampler import Sampler
    from netfold.train.fault_tolerance.policies import NonFiniteError

    poisoned = Sampler(96, 0).indices(0, 96)[46]

    def change(indices: Any, features: Any) -> None:
        features[[index == poisoned for index in indices]] = float("nan")

    found: dict[str, Any] = {}
    with world(2):
        for policy in ("stop", "skip", "rewind"):
            recorder = Recorder()
            try:
                ended = run(
                    folder / policy,
                    recorder=recorder,
                    change=change,
                    diloco=OUTER,
                    checkpoint={"every": 4},
                    fault_tolerance={"non_finite": policy},
                )
                found[policy] = ended.step, ended.metric, recorder.notes, [step.step for step in recorder.steps]
            except NonFiniteError as error:
                found[policy] = str(error), len(recorder.steps)
    return found


FOUND = Cases(2, 100, [calls, not_finite])


def test_within_a_round_no_rank_waits_for_another_copy_of_the_model() -> None:
    for counted, _, _ in FOUND[calls]:
        assert len(counted) == 10
        for first in (0, 4):
            assert len(set(counted[first : first + 3])) == 1, counted
        assert counted[4] > counted[2], "at the end of the round"


def test_the_losses_of_an_outcome_are_means_over_all_ranks() -> None:
    (_, losses, first), (_, others, second) = FOUND[calls]
    assert losses == others and len(losses) == 10 and first != second
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


def test_all_ranks_react_to_bad_numbers_of_one_copy_at_the_end_of_the_round() -> None:
    for found in FOUND[not_finite]:
        text, steps = found["stop"]
        assert text.startswith("step 6: not finite: rank 1 (") and steps == 8
        step, metric, notes, _ = found["skip"]
        assert step == 8 and math.isfinite(metric) and "the step is left out" in notes[0]
        step, metric, notes, numbers = found["rewind"]
        assert step == 8 and math.isfinite(metric) and numbers == [*range(1, 9), *range(5, 9)]
        assert "back to the weights of step 4, and continues with sample 64" in notes[0]
    assert FOUND[not_finite][0]["skip"][1] == FOUND[not_finite][1]["skip"][1]
