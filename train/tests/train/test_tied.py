"""Shared weights under every split: copies on several stages learn the same as one weight in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Cases, World
from own_parts import squares
from torch import Tensor, nn

pytestmark = pytest.mark.torch

CLIP = {"training": {"clip": 0.5, "steps": 6, "batch": 16}}
SPLITS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # layers, ranks, parallel
    "pipeline": (2, 2, {"pipeline": 2}),
    "pipeline x data": (2, 4, {"pipeline": 2, "data": 2}),
    "zero 2": (2, 2, {"data": 2, "zero": 2}),
    "pipeline x zero 1": (2, 4, {"pipeline": 2, "data": 2, "zero": 1}),
    "pipeline x zero 3": (2, 4, {"pipeline": 2, "data": 2, "zero": 3}),
    "interleaved": (4, 2, {"pipeline": 2, "schedule": "interleaved"}),
    "zero-bubble": (4, 4, {"pipeline": 2, "data": 2, "schedule": "zero-bubble"}),
    # The first and last stage are on one rank.
    "zero-bubble-v": (4, 4, {"pipeline": 2, "data": 2, "schedule": "zero-bubble-v", "microbatches": 4}),
}


class Layer(nn.Module):
    def __init__(self, number: int, last: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self._is_first, self._is_last = number == 0, number == last

    def forward(self, rows: Tensor) -> Tensor:
        if self._is_first:
            # A hundredth of the sample's number, so that tanh has distinct values.
            rows = torch.cat([rows[:, :1] / 100, rows[:, 1:]], 1)
        rows = self.linear(rows).tanh()
        return rows.sum(1, keepdim=True) if self._is_last else rows


def tied_model(layers: int) -> Any:
    """The first and the last layer share a weight. With 3 layers, one more follows without it."""
    from netfold_train import Chain, Model

    torch.manual_seed(3)
    count = 4 if layers == 3 else layers
    made = [Layer(number, count - 1) for number in range(count)]
    made[layers - 1].linear.weight = made[0].linear.weight
    chain = Chain([(f"layer{number}", each) for number, each in enumerate(made)])

    def plan(style: str, sequence: bool) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {"layers.layer0.linear": ColwiseParallel()}

    return Model(chain, squares, tensor_plan=plan)


def learnt(layers: int, parallel: dict[str, Any], folder: Path | None = None, steps: int = 6) -> Any:
    """The losses, and this rank's copies of the shared weight at the end."""
    from surviving import toy_data, toy_recipe
    from torch.distributed.tensor import DTensor

    from netfold_train import Trainer

    recipe = toy_recipe(
        training={**CLIP["training"], "steps": steps}, parallel=parallel, schedule={"shape": "constant"}
    )
    trainer = Trainer(recipe, model=tied_model(layers), data=toy_data(), folder=folder)
    losses = trainer.fit().losses
    held = {name: each.detach() for name, each in trainer.replica.named_parameters()}
    shared = held.get("layers.layer0.linear.weight")
    shared = shared.full_tensor() if isinstance(shared, DTensor) else shared
    return losses, None if shared is None else shared.tolist(), sorted(held)


def every_split(rank: int, folder: Path, world: World) -> Any:
    found: dict[str, Any] = {}
    for layers in (2, 4):
        with world(1) as here:
            if here:
                found[f"alone {layers}"] = learnt(layers, {})
    for name, (layers, ranks, parallel) in SPLITS.items():
        with world(ranks) as here:
            if here:
                found[name] = learnt(layers, parallel)
    # A checkpoint of a pipeline, from which one process resumes.
    with world(2) as here:
        if here:
            learnt(2, {"pipeline": 2}, folder, steps=3)
    with world(1) as here:
        if here:
            found["gone on"] = learnt(2, {}, folder)
    return found


def refused(rank: int, folder: Path, world: World) -> list[str]:
    found = []
    for ranks, layers, parallel in (
        (2, 2, {"tensor": 2}),
        # The first and the third of four stages.
        (4, 3, {"pipeline": 2, "data": 2, "schedule": "interleaved"}),
    ):
        with world(ranks) as here:
            if not here:
                continue
            try:
                learnt(layers, parallel)
                found.append("not refused")
            except ValueError as error:
                found.append(str(error))
    return found


FOUND = Cases(4, 200, [every_split, refused])


def test_a_weight_shared_across_stages_learns_the_same_as_in_one_process() -> None:
    alone = {layers: FOUND[every_split][0][f"alone {layers}"] for layers in (2, 4)}
    for rank, found in enumerate(FOUND[every_split]):
        for name, (layers, ranks, _) in SPLITS.items():
            if rank >= ranks:
                continue
            losses, shared, held = found[name]
            expected, weight, _ = alone[layers]
            assert losses == pytest.approx(expected, rel=1e-4), (name, rank)
            if shared is not None:
                for row, other in zip(shared, weight, strict=True):
                    assert row == pytest.approx(other, abs=1e-4), (name, rank)
            assert f"layers.layer{layers - 1}.linear.weight" not in held, "copies go by the first layer's name"


def test_copies_of_a_shared_weight_have_the_same_bits() -> None:
    for name, (_, ranks, _) in SPLITS.items():
        copies = [found[name][1] for found in FOUND[every_split][:ranks] if found[name][1] is not None]
        assert len(copies) >= 2 and all(copy == copies[0] for copy in copies), name


def test_one_process_resumes_from_a_pipelines_checkpoint_of_a_shared_weight() -> None:
    losses, _, _ = FOUND[every_split][0]["gone on"]
    assert losses == pytest.approx(FOUND[every_split][0]["alone 2"][0][3:], rel=1e-4)


def test_shared_weights_that_would_differ_are_an_error() -> None:
    tensor, interleaved = FOUND[refused][0]
    assert "layers.layer0.linear.weight and layers.layer1.linear.weight are one weight" in tensor
    assert "one weight, in two stages of one rank" in interleaved and "'1f1b'" in interleaved
