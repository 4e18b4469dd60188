"""[diloco] sites wait for each other only at the end of a round, whatever fails before it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch

OUTER = {"every": 4, "lr": 1.0, "momentum": 0.0}
# Sent after steps 2 and 3 of a round, merged after steps 3 and 4.
STREAMING = {"every": 4, "fragments": 2, "overlap": 1}


def calls(rank: int, folder: Path, world: World) -> Any:
    """Collectives of the world and of the data axis so far, after each step; and the losses."""
    from surviving import Recorder, toy_data, toy_model, toy_recipe

    import netfold.torch
    from netfold_train import Trainer

    counted: list[int] = []

    def count(step: int) -> None:
        groups = [here.group.WORLD, trainer.mesh.data.group]
        counted.append(sum(len(netfold.torch.events(group)) for group in groups))

    recorder = Recorder(count)
    with world(2) as here:
        if here is None:
            return None
        recipe = toy_recipe(diloco=OUTER, training={"steps": 10, "clip": 1.0}, fault_tolerance={"missing_data": "stop"})
        trainer = Trainer(recipe, model=toy_model(noisy=False), data=toy_data(), callbacks=[recorder])
        losses = trainer.fit().losses
    return counted, losses, [step.loss for step in recorder.steps]


def sites(rank: int, folder: Path, world: World) -> Any:
    """The results of `_site_run` on two sites of two ranks, and on two of one."""
    found = {}
    for ranks in (4, 2):
        with world(ranks) as here:
            if here is not None:
                found[ranks] = _site_run(here)
    return found


def _site_run(dist: Any) -> dict[str, Any]:
    """After each step: collectives so far across sites and inside the site, and the weights. The run's results."""
    import torch
    from surviving import Recorder, toy_data, toy_model, toy_recipe

    import netfold.torch
    from netfold_train import Trainer

    counted: list[tuple[int, int]] = []
    weights: list[Any] = []

    def look(step: int) -> None:
        mesh = trainer.mesh
        assert mesh.between is not None
        inside = {mesh.site.group} - {mesh.data.group} if mesh.site.size > 1 else set()
        across = {dist.group.WORLD, mesh.data.group, mesh.between.group}
        counted.append((_calls(across), _calls(inside)))
        weights.append([w.detach().clone().numpy() for _, w in trainer.replica.named_parameters()])

    def _calls(groups: Any) -> int:
        return sum(len(netfold.torch.events(group)) for group in groups)

    recorder = Recorder(look)
    recipe = toy_recipe(diloco={**STREAMING, "sites": 2}, training={"steps": 10, "clip": 1.0})
    torch.manual_seed(5)
    trainer = Trainer(recipe, model=toy_model(noisy=False), data=toy_data(), callbacks=[recorder])
    outcome = trainer.fit()
    last = [w.detach().clone().numpy() for _, w in trainer.replica.named_parameters()]
    norms = [step.gradient_norm for step in recorder.steps]
    return {"calls": counted, "weights": [*weights, last], "losses": outcome.losses, "norms": norms}


def resumed(rank: int, folder: Path, world: World) -> Any:
    """A run; one that fails while a fragment is under way, and one that is asked to stop, each with its sequel."""
    import torch
    from surviving import Recorder, interrupt_at, run, toy_data, toy_model, toy_recipe

    from netfold_train import Trainer

    training: dict[str, Any] = {"steps": 14, "evaluate_every": 8}
    plain: dict[str, Any] = {"training": training, "checkpoint": {"every": 8}}
    sections = {**plain, "diloco": STREAMING}
    with world(2) as here:
        if here is None:
            return None
        whole = run(folder / "whole", noisy=False, **sections)
        run(folder / "failed", noisy=False, recorder=Recorder(interrupt_at(10)), **sections)
        after_failure = run(folder / "failed", noisy=False, **sections)

        def ask(step: int) -> None:
            if step == 6 and rank == 1:
                trainer.stop.asked = True

        torch.manual_seed(5)
        trainer = Trainer(
            toy_recipe(**sections),
            model=toy_model(noisy=False),
            data=toy_data(),
            folder=folder / "asked",
            callbacks=[Recorder(ask)],
        )
        stopped = trainer.fit()
        after_stop = run(folder / "asked", noisy=False, **sections)
        more: dict[str, Any] = {"training": {**training, "steps": 16}, "run": {"resume": "changed"}}
        without = run(folder / "failed", noisy=False, **{**plain, **more})
    return whole, after_failure, stopped, after_stop, without


def failed(rank: int, folder: Path, world: World) -> tuple[str, str]:
    """Rank 3, of the second site, runs out of memory in step 3."""
    import torch
    from surviving import run

    passes = itertools.count(1)

    def ask(numbers: list[int]) -> None:
        if next(passes) == 3 and rank == 3:
            torch.empty(1 << 50)

    with world(4):
        try:
            run(None, noisy=False, forward=ask, diloco={**STREAMING, "sites": 2})
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def not_finite(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """A sample of step 6 on rank 1 is NaN, in the middle of the second round."""
    from surviving import Recorder, run

    from netfold_train.data.sampler import Sampler
    from netfold_train.fault_tolerance.policies import NonFiniteError

    poisoned = Sampler(96, 0).indices(0, 96)[46]

    def change(indices: Any, features: Any) -> None:
        features[[index == poisoned for index in indices]] = float("nan")

    found: dict[str, Any] = {}
    with world(2) as here:
        if here is None:
            return found
        for policy, diloco in (("stop", OUTER), ("skip", OUTER), ("rewind", OUTER), ("rewind", STREAMING)):
            name = policy if diloco is OUTER else f"{policy}, streaming"
            recorder = Recorder()
            try:
                ended = run(
                    folder / name,
                    recorder=recorder,
                    change=change,
                    diloco=diloco,
                    checkpoint={"every": 4},
                    fault_tolerance={"non_finite": policy},
                )
                found[name] = ended.step, ended.metric, recorder.notes, [step.step for step in recorder.steps]
            except NonFiniteError as error:
                found[name] = str(error), len(recorder.steps)
    return found


FOUND = Cases(4, 100, [calls, sites, resumed, not_finite, failed])


def test_within_a_round_no_rank_waits_for_another_copy_of_the_model() -> None:
    for counted, _, _ in FOUND[calls][:2]:
        assert len(counted) == 10
        for first in (0, 4):
            assert len(set(counted[first : first + 3])) == 1, counted
        assert counted[4] > counted[2], "at the end of the round"


def test_within_a_round_no_rank_waits_for_another_site() -> None:
    for found in FOUND[sites]:
        across, inside = zip(*found[4]["calls"], strict=True)
        for first in (0, 4):
            assert across[first + 3] == across[first] + 2, "two fragments, and nothing else"
        assert all(a < b for a, b in itertools.pairwise(inside)), "DDP averages in every step"


def test_a_site_of_two_ranks_learns_the_same_as_a_site_of_one() -> None:
    import numpy as np

    found = FOUND[sites]
    for rank in range(4):
        two, one = found[rank][4], found[rank // 2][2]
        # f32: sums in another order.
        assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert two["norms"] == pytest.approx(one["norms"], rel=1e-4)
        for ours, theirs in zip(two["weights"], one["weights"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    for step in range(11):
        held = [[each.tobytes() for each in rank[4]["weights"][step]] for rank in found]
        assert held[0] == held[1] and held[2] == held[3], "a site's ranks hold the same weights"
        assert (held[0] == held[2]) is (step == 10), "sites differ until the run ends"


def test_a_streaming_run_resumes_with_the_same_bits() -> None:
    for found in FOUND[resumed][:2]:
        whole, after_failure, stopped, after_stop, without = found
        assert after_failure.losses == whole.losses[8:] and after_failure.metric == whole.metric
        assert (stopped.step, stopped.reason, stopped.losses) == (8, "SIGTERM", whole.losses[:8])
        assert after_stop.losses == whole.losses[8:] and after_stop.metric == whole.metric
        assert without.step == 16 and math.isfinite(without.metric)
        assert len(set(whole.losses)) == 14


def test_the_losses_of_an_outcome_are_means_over_all_ranks() -> None:
    (_, losses, first), (_, others, second) = FOUND[calls][:2]
    assert losses == others and len(losses) == 10 and first != second
    assert losses == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])


def test_all_ranks_react_to_bad_numbers_of_one_copy_at_the_end_of_the_round() -> None:
    for found in FOUND[not_finite][:2]:
        text, steps = found["stop"]
        assert text.startswith("step 6: not finite: rank 1 (") and steps == 8
        step, metric, notes, _ = found["skip"]
        assert step == 8 and math.isfinite(metric) and "the step is left out" in notes[0]
        step, metric, notes, numbers = found["rewind"]
        assert step == 8 and math.isfinite(metric) and numbers == [*range(1, 9), *range(5, 9)]
        assert "back to the weights of step 4, and continues with sample 64" in notes[0]
        step, metric, _, numbers = found["rewind, streaming"]
        assert step == 8 and math.isfinite(metric) and numbers == [*range(1, 9), *range(5, 9)]
    assert FOUND[not_finite][0]["skip"][1] == FOUND[not_finite][1]["skip"][1]


def test_the_failure_of_a_rank_ends_its_site_and_the_other_one_with_its_reason() -> None:
    *others, (kind, text) = FOUND[failed]
    assert kind == "DeviceError" and "step 3" in text and "out of memory" in text
    for other, reported in others:
        assert other in ("PeerLost", "RuntimeError"), (other, reported)
    # Rank 2 averages gradients with the failed rank, and rank 1 exchanges weights with it.
    assert all("out of memory" in reported for _, reported in others[1:])
