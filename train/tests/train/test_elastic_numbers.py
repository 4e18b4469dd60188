"""An elastic job whose losses are scaled, or that goes back after a bad batch, loses a rank and gets one back.

Its weights and the steps that it leaves out are those of one process that nothing disturbs.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from load import settles
from ranks import run_ranks, values

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FIRST = 3
# Of the 96 examples, each comes once.
STEPS, BATCH = 14, 6
COMES_AT = 9
"""In the forward pass of this step rank 0 waits for the new rank."""


def spoilt(places: tuple[int, ...], factor: float) -> Any:
    """The targets of the samples at these places of the order are multiplied by the factor."""
    from surviving import Numbers, toy_data

    from netfold_train import Batch
    from netfold_train.data.sampler import Sampler

    order = Sampler(96, 0).indices(0, 96)
    chosen = {order[place] for place in places}

    class Spoilt(Numbers):
        def batch(self, indices: Any, seeds: Any) -> Batch:
            made = super().batch(indices, seeds)
            made.target[[index in chosen for index in indices]] *= factor
            return made

    return dataclasses.replace(toy_data(), train=Spoilt())


def small_losses(forward: Any = None) -> Any:
    """Their gradients fit f16 at the first scale, on any number of ranks, unless a target is spoilt."""
    import torch
    from surviving import toy_model

    torch.manual_seed(5)
    made = toy_model(False, forward)
    return dataclasses.replace(made, loss=lambda output, target: 0.01 * (output - target).square())


def recipe_of(precision: str, policy: str, *, elastic: bool) -> Any:
    from surviving import toy_recipe

    return toy_recipe(
        training={"steps": STEPS, "batch": BATCH, "precision": precision},
        optimizer={"name": "sgd", "lr": 1.0},
        # One that is being written when a rank is lost is dropped.
        checkpoint={"every": 3, "asynchronous": False},
        fault_tolerance={"non_finite": policy, "non_finite_limit": 2, "elastic": elastic},
    )


def outcome_of(trainer: Any, outcome: Any, recorder: Any) -> dict[str, Any]:
    return {
        "weights": [value for each in trainer.model.module.parameters() for value in each.detach().flatten().tolist()],
        "scale": trainer.update.loss_scale,
        "step": outcome.step,
        "samples": trainer.samples,
        # A new rank 0 tells its last step again where the metrics lack it.
        "skipped": sorted({each.step for each in recorder.steps if each.skipped}),
        "notes": [each for each in recorder.notes if "goes back" in each],
    }


def undisturbed(rank: int, size: int, folder: str, precision: str, policy: str, bad: tuple[Any, ...]) -> dict[str, Any]:
    import torch.distributed as dist
    from surviving import Recorder

    from netfold_train import Trainer

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    recorder = Recorder()
    trainer = Trainer(
        recipe_of(precision, policy, elastic=False),
        model=small_losses(), data=spoilt(*bad), folder=Path(folder, "run"), callbacks=[recorder],
    )  # fmt: skip
    found = outcome_of(trainer, trainer.fit(), recorder)
    dist.destroy_process_group()
    return found


def disturbed(
    rank: int, size: int, folder: str, precision: str, policy: str, bad: tuple[Any, ...], victim: int, moment: Any
) -> dict[str, Any]:
    """The victim ends at (step, place), where a load begins a step anew. The last process is the new rank."""
    import torch
    from surviving import Recorder

    from netfold import Communicator, FileStore, Options
    from netfold.elastic import Members
    from netfold_train.elastic import ElasticTrainer, fit_elastic

    torch.set_num_threads(1)
    store, options = FileStore(folder), Options(probe="off")
    goes = Path(folder, "the new rank may ask")
    if rank >= FIRST:
        assert settles(goes.exists, 60)
        members = Members.newcomer(store, options=options, timeout_s=20, join_timeout_s=20)
    else:
        communicator = Communicator(store, rank, FIRST, options=options, timeout_s=20, join_timeout_s=20)
        members = Members.of(communicator, store=store, join_timeout_s=20)
    recorder = Recorder()
    trainer: Any = None

    def die_at(place: str) -> None:
        if rank == victim and moment == (trainer.step + 1, place):
            os.kill(os.getpid(), signal.SIGKILL)

    def forward(_: list[int]) -> None:
        die_at("forward")
        if trainer.step + 1 == COMES_AT and trainer.world.rank == 0 and trainer.world.size < FIRST:
            goes.touch()
            assert settles(lambda: bool(members._standing._waiting), 60)

    def make(world: Any, _: Path | None) -> ElasticTrainer:
        nonlocal trainer
        trainer = ElasticTrainer(
            recipe_of(precision, policy, elastic=True), world, folder=Path(folder, "run"),
            model=small_losses(forward), data=spoilt(*bad), callbacks=lambda _: [recorder],
        )  # fmt: skip
        step, load = trainer.update.step, trainer._go_back

        def stepping(lr: float) -> Any:
            die_at("step")
            return step(lr)

        def loading() -> Any:
            die_at("before the load")
            then = load()
            die_at("after the load")
            return then

        trainer.update.step, trainer._go_back = stepping, loading
        return trainer

    _, outcome = fit_elastic(recipe_of(precision, policy, elastic=True), make, lambda: None, members)
    return outcome_of(trainer, outcome, recorder) | {"generation": members.generation}


def compare(precision: str, policy: str, bad: tuple[Any, ...], victim: int, moment: Any, **close: float) -> Any:
    (alone,) = values(run_ranks(undisturbed, 1, precision, policy, bad))
    outcomes = run_ranks(disturbed, FIRST + 1, precision, policy, bad, victim, moment, dies=[victim])
    found = values([each for rank, each in enumerate(outcomes) if rank != victim])
    for each in found:
        assert each["weights"] == found[0]["weights"]  # to the bit
        assert each["weights"] == pytest.approx(alone["weights"], **close)
        assert {name: each[name] for name in ("scale", "step", "samples")} == {
            name: alone[name] for name in ("scale", "step", "samples")
        }
        assert each["generation"] == 3
    return alone, found


@pytest.mark.parametrize("victim, moment", [(1, (5, "forward")), (0, (4, "step")), (2, (7, "step"))])
def test_ranks_agree_on_the_scale_of_losses_and_on_the_steps_that_are_left_out(victim: int, moment: Any) -> None:
    # A sample of step 4 and one of step 12, whose gradients overflow f16.
    bad = (3 * BATCH + 1, 11 * BATCH + 4), 1e6
    alone, found = compare("f16", "stop", bad, victim, moment, rel=1e-3, abs=1e-4)
    assert alone["skipped"] == [4, 12] and alone["scale"] == 65536 / 4
    for each in found[:-1]:
        assert each["skipped"] == [4, 12]
    assert found[-1]["skipped"] == [12]  # of the new rank


@pytest.mark.parametrize(
    "victim, moment",
    [(1, (8, "forward")), (1, (8, "before the load")), (0, (7, "after the load")), (2, (7, "forward"))],
)
def test_ranks_go_back_to_one_checkpoint_and_go_on_with_the_same_data(victim: int, moment: Any) -> None:
    bad = (7 * BATCH + 4,), float("nan")
    alone, found = compare("f32", "rewind", bad, victim, moment, rel=1e-5, abs=1e-6)
    assert len(alone["notes"]) == 1 and "to the weights of step 6, and continues with sample 48" in alone["notes"][0]
    for each in found[:-1]:
        assert len(each["notes"]) == 1 and "the weights of step 6, and continues with sample 48" in each["notes"][0]


def test_a_new_rank_counts_the_bad_steps_before_it_came() -> None:
    bad = (8 * BATCH + 1, 9 * BATCH + 4), float("nan")
    outcomes = run_ranks(disturbed, FIRST + 1, "f32", "skip", bad, 1, (5, "forward"), dies=[1])
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "NonFiniteError", outcomes[rank]
        assert "step 10: " in outcomes[rank].text and "2 in a row" in outcomes[rank].text
