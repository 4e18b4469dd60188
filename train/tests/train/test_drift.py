"""Weights that all ranks of a tensor group hold whole are compared before a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch


def drifting(rank: int, folder: Path, world: World) -> dict[str, Any]:
    """A GPT on tensor 2 x data 2; on rank 1 a norm's weight moves by its last bit after step 4."""
    import torch
    from surviving import Recorder
    from training import TINY_GPT, changed

    from netfold_train import Recipe, Trainer
    from netfold_train.checkpoint.drift import DriftError
    from netfold_train.data import make_data

    recipe = changed(
        TINY_GPT, training={"steps": 4}, checkpoint={"every": 2, "asynchronous": False}, parallel={"tensor": 2}
    )
    data = make_data(Recipe.model_validate(recipe).data)
    found: dict[str, Any] = {}
    running: list[Any] = []
    # One world: torch keeps the names of groups in caches, and a new world may have other groups under them.
    with world(4):
        for name, zero, drifts in (("alike", 0, False), ("zero 0", 0, True), ("zero 3", 3, True)):

            def after(step: int, drifts: bool = drifts) -> None:
                if drifts and step == 4 and rank == 1:
                    for key, parameter in running[-1].replica.named_parameters():
                        if key == WEIGHT:
                            local = parameter.detach()
                            local = local.to_local() if hasattr(local, "to_local") else local
                            local.copy_(torch.nextafter(local, torch.full_like(local, 9.0)))

            asked = Recipe.model_validate(changed(recipe, parallel={"tensor": 2, "data": 2, "zero": zero}))
            trainer = Trainer(asked, data=data, folder=folder / name, callbacks=[Recorder(after)])
            running.append(trainer)
            try:
                trainer.fit()
                found[name] = "trained"
            except DriftError as error:
                found[name] = str(error)
            left = sorted(path.name for path in (folder / name / "checkpoints").iterdir())
            found[f"{name} left"] = left
    return found


WEIGHT = "layers.block0.attention_norm.weight"
FOUND = Cases(4, 150, [drifting])


def test_a_drifted_replicated_weight_is_an_error_on_all_ranks_and_not_saved() -> None:
    for found in FOUND[drifting]:
        assert found["alike"] == "trained" and found["alike left"] == ["step-000002", "step-000004"]
        for kind in ("zero 0", "zero 3"):
            assert f"{WEIGHT} on ranks 0 (" in found[kind] and ", 1 (" in found[kind], found[kind]
            assert "ranks 2" not in found[kind] and found[kind].startswith("step 4: ")
            assert found[f"{kind} left"] == ["step-000002"]
