"""Weight decay acts on weights and not on norms, biases and embeddings, under every division of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World
from torch import nn

from netfold_train.optim import undecayed

pytestmark = pytest.mark.torch


def one_step(rank: int, folder: Path, world: World) -> Any:
    """The parameters that weight decay changes, after a step on two ranks."""
    import torch
    from surviving import toy_data, toy_model, toy_recipe
    from torch.distributed.tensor import DTensor

    from netfold_train import Trainer

    def weights(zero: int, **optimizer: Any) -> dict[str, Any]:
        recipe = toy_recipe(training={"steps": 1}, optimizer={"lr": 0.1, **optimizer}, parallel={"zero": zero})
        torch.manual_seed(5)
        model = toy_model()
        nn.init.normal_(model.module.layers["first"].norm.bias)
        trainer = Trainer(recipe, model=model, data=toy_data())
        trainer.fit()
        held = {name: each.detach() for name, each in trainer.replica.named_parameters()}
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in held.items()}

    found: dict[str, list[str]] = {}
    with world(2):
        for kind in ("sgd", "adamw", "lamb"):
            for zero in (0, 1, 3):
                plain = weights(zero, name=kind)
                for decay in ("weights", "all"):
                    decayed = weights(zero, name=kind, weight_decay=0.5, decay=decay)
                    moved = [name for name, each in plain.items() if not torch.equal(each, decayed[name])]
                    found[f"{kind} {zero} {decay}"] = sorted(moved)
    return found


FOUND = Cases(2, 150, [one_step])
MATRICES = ["layers.first.linear.weight", "layers.last.weight"]


def test_norms_and_biases_do_not_decay_by_default() -> None:
    for found in FOUND[one_step]:
        assert len(found) == 18
        for case, moved in found.items():
            if case.endswith("weights") or case.startswith("lamb"):
                assert moved == MATRICES, case
            else:
                assert set(MATRICES) < set(moved) and "layers.first.norm.weight" in moved, case


def test_embeddings_and_layers_that_share_their_weight_do_not_decay() -> None:
    module = nn.ModuleDict(
        {
            "words": nn.Embedding(5, 3),
            "norm": nn.LayerNorm((2, 3)),
            "linear": nn.Linear(3, 3),
            "head": nn.Linear(3, 5, bias=False),
            "free": nn.Linear(3, 5, bias=False),
        }
    )
    module["head"].weight = module["words"].weight
    assert undecayed(module) == {"words.weight", "head.weight", "norm.weight", "norm.bias", "linear.bias"}
