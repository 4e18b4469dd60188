"""`training.initial`: a run starts from the weights of another run, or of safetensors, under any split."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch

SPLITS: dict[str, dict[str, Any]] = {
    "data": {"data": 2}, "pipeline": {"pipeline": 2}, "zero 1": {"zero": 1}, "zero 3": {"zero": 3}
}  # fmt: skip


def held(trainer: Any) -> dict[str, Any]:
    """This rank's weights, buffers and averages, each made whole."""
    from torch.distributed.tensor import DTensor

    from netfold_train.checkpoint.state import collect_state

    averages = {kind: state for kind, state in trainer.update.states().items() if kind == "ema"}
    tensors = collect_state(trainer.replica, dict(trainer.replica.named_parameters()), averages, buffers=True)
    whole = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in tensors.items()}
    return {key: each.flatten().tolist() for key, each in whole.items()}


def trained(folder: Path | None, *, noisy: bool = True, seed: int = 5, **sections: Any) -> tuple[Any, Any, list[str]]:
    """The tensors of this rank at the start and at the end of a toy run, and its notes."""
    import torch
    from surviving import Recorder, toy_data, toy_model, toy_recipe

    from netfold_train import Trainer

    begun: list[Any] = []

    class Starts(Recorder):
        def on_start(self, event: Any) -> None:
            begun.append(held(trainer))

    torch.manual_seed(seed)
    recorder = Starts()
    recipe = toy_recipe(**{**sections, "training": {"steps": 2, **sections.get("training", {})}})
    trainer = Trainer(recipe, model=toy_model(noisy), data=toy_data(), folder=folder, callbacks=[recorder])
    trainer.fit()
    return begun[0], held(trainer), recorder.notes


def other_splits(rank: int, folder: Path, world: World) -> Any:
    """The weights at the end of a run, and at the start of runs that begin with them."""
    from netfold_train.checkpoint.export import export

    found: dict[str, Any] = {}
    with world(2) as here:
        _, found["end"], _ = trained(folder / "first", parallel={"zero": 3})
        if rank == 0:
            export(folder / "first", folder / "out")
        here.barrier()
        for source in (folder / "first", folder / "out", folder / "out" / "model.safetensors"):
            for name, parallel in SPLITS.items():
                begun, _, notes = trained(None, seed=9, parallel=parallel, training={"initial": source})
                found[f"{source.name} {name}"] = begun, notes
    return found


def told(**arguments: Any) -> str:
    try:
        trained(None, **arguments)
    except ValueError as error:
        return str(error)
    return ""


def unlike(rank: int, folder: Path, world: World) -> Any:
    """Errors for a source that does not fit; then parts of the model are left out."""
    found: dict[str, Any] = {}
    with world(2) as here:
        _, found["end"], _ = trained(folder / "first", noisy=True)
        first = {"initial": folder / "first"}
        norm = {**first, "initial_except": ["layers.first.norm."]}
        found["more"] = told(noisy=False, training=first)
        trained(folder / "bare", noisy=False)
        found["less"] = told(noisy=True, training={"initial": folder / "bare"}, parallel={"pipeline": 2})
        found["none"] = told(training={"initial": folder / "none"})
        found["left out"], _, found["notes"] = trained(None, noisy=False, seed=9, training=norm)
        found["random"], _, _ = trained(None, noisy=True, seed=9)
        last = {**first, "initial_except": ["layers.last."]}
        found["new head"], _, _ = trained(None, noisy=True, seed=9, training=last, parallel={"zero": 3})
        here.barrier()
        if rank == 0:
            (folder / "first" / "checkpoints" / "step-000002" / "__1_0.distcp").unlink()
        here.barrier()
        found["damaged"] = told(training=first)
    return found


def gone_on(rank: int, folder: Path, world: World) -> Any:
    """A run with initial weights continues from its own checkpoint after these are gone; then a DiLoCo run."""
    found: dict[str, Any] = {}
    with world(2) as here:
        _, found["end"], _ = trained(folder / "first")
        training = {"initial": folder / "first"}
        apart = {"diloco": {"every": 2}, "optimizer": {"lr": 1e-12}}
        _, found["diloco"], _ = trained(None, seed=9, training=training, **apart)
        found["averages"], _, _ = trained(None, seed=9, training={**training, "ema": 0.5}, parallel={"zero": 1})
        trained(folder / "second", training=training)
        here.barrier()
        if rank == 0:
            shutil.rmtree(folder / "first")
        here.barrier()
        longer = {**training, "steps": 4}
        _, _, found["notes"] = trained(folder / "second", training=longer, run={"resume": "changed"})
    return found


FOUND = Cases(2, 100, [other_splits, unlike, gone_on])


def test_a_run_starts_with_the_weights_of_another_under_every_split() -> None:
    end = FOUND[other_splits][0]["end"]
    assert {"model.layers.last.weight", "buffer.layers.first.norm.running_mean"} <= end.keys()
    for found in FOUND[other_splits]:
        assert len(found) == 1 + 3 * len(SPLITS)
        for case, starts in found.items():
            if case != "end":
                begun, notes = starts
                assert begun and all(begun[key] == end[key] for key in begun), case
                assert any("starts with the weights of" in note for note in notes)
    pipeline = [found["first pipeline"][0].keys() for found in FOUND[other_splits]]
    assert pipeline[0] | pipeline[1] == end.keys() and not pipeline[0] & pipeline[1]


def test_weights_that_do_not_fit_are_listed_on_all_ranks() -> None:
    for found in FOUND[unlike]:
        assert "the model lacks" in found["more"] and "buffer.layers.first.norm.running_mean" in found["more"]
        assert "it lacks model.layers.first.norm.weight, model.layers.first.norm.bias" in found["less"]
        assert "none does not exist; give a run's folder, or safetensors" in found["none"]
        assert "step-000002 is damaged: __1_0.distcp cannot be read" in found["damaged"]
        assert all(text.startswith("training.initial: ") for key, text in found.items() if key in ("more", "less"))


def test_names_that_are_left_out_keep_the_models_own_weights() -> None:
    for found in FOUND[unlike]:
        assert all(found["left out"][key] == found["end"][key] for key in found["left out"])
        assert "except layers.first.norm. (training.initial)" in found["notes"][-1]
        for key, values in found["new head"].items():
            assert values == (found["random"] if "layers.last" in key else found["end"])[key], key


def test_a_run_that_continues_does_not_read_its_first_weights_again() -> None:
    for found in FOUND[gone_on]:
        assert any("continues from the checkpoint of step 2" in note for note in found["notes"])
        assert not any("starts with" in note for note in found["notes"])


def test_averages_and_diloco_rounds_begin_with_the_first_weights() -> None:
    for found in FOUND[gone_on]:
        averages = {key: values for key, values in found["averages"].items() if key.startswith("ema.")}
        assert averages
        for key, values in averages.items():
            name = key.removeprefix("ema.").removesuffix(".average")
            assert values == found["end"][f"model.{name}"], key
        for key, values in found["diloco"].items():
            if key.startswith("model."):
                assert values == pytest.approx(found["end"][key], abs=1e-9), key
