"""Evaluation: one model's statistics on all ranks, and a loss that weights all samples equally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World

pytestmark = pytest.mark.torch


def statistics(rank: int, folder: Path, world: World) -> Any:
    """Batch norm's buffers after a run, which ends with an evaluation."""
    from surviving import toy_data, toy_model, toy_recipe

    from netfold_train import Trainer

    found: dict[str, Any] = {}
    for ranks, parallel in ((4, {"pipeline": 2, "data": 2}), (2, {"data": 2})):
        with world(ranks) as here:
            if here:
                trainer = Trainer(toy_recipe(parallel=parallel), model=toy_model(), data=toy_data())
                trainer.fit()
                buffers = {
                    name: each.tolist() for module in trainer.replica.modules for name, each in module.named_buffers()
                }
                found[f"{parallel}"] = trainer.mesh.pipeline.rank, buffers
    return found


def unequal(rank: int, folder: Path, world: World) -> Any:
    """Losses where every third sample has only one number that counts, as in a mean over tokens without padding."""
    import torch
    from surviving import First, Recorder, toy_recipe
    from torch import nn

    from netfold_train import Batch, Chain, Data, Metric, Model, Trainer

    class Padded:
        def __len__(self) -> int:
            return 32

        def batch(self, indices: Any, seeds: Any) -> Batch:
            numbers = torch.tensor(indices).float()[:, None]
            target = (numbers * torch.tensor([1.0, 2.0, 3.0])).sin()
            target[numbers[:, 0] % 3 == 0, 1:] = torch.nan
            return Batch((numbers / 32 * torch.ones(8),), target)

    def by_item(output: Any, target: Any) -> Any:
        return (output - target.nan_to_num()).square() * ~target.isnan()

    def by_sample(output: Any, target: Any) -> Any:
        return by_item(output, target).sum(1) / (~target.isnan()).sum(1)

    def items(target: Any) -> Any:
        return (~target.isnan()).sum()

    metric = Metric("none", "", "lower", lambda output, target: output.sum(1), 1.0, "none")
    found: dict[str, Any] = {}
    for name, ranks, sections in (
        ("alone", 1, {}),
        ("accumulated", 1, {"training": {"accumulate": 4}}),
        ("one sample per part", 1, {"training": {"accumulate": 8}}),
        ("data", 2, {"parallel": {"data": 2}}),
        ("pipeline", 2, {"parallel": {"pipeline": 2}}),
    ):
        for kind, loss, count in (("by item", by_item, items), ("by sample", by_sample, None)):
            with world(ranks) as here:
                if not here:
                    continue
                torch.manual_seed(2)
                model = Model(Chain([("first", First(False, None)), ("last", nn.Linear(12, 3))]), loss, count)
                data = Data(Padded(), Padded(), metric)
                try:
                    trainer = Trainer(toy_recipe(**sections), model=model, data=data, callbacks=[Recorder()])
                    found[f"{name} {kind}"] = trainer.fit().losses
                except Exception as error:
                    found[f"{name} {kind}"] = f"{type(error).__name__}: {error}"
    return found


FOUND = Cases(4, 100, [statistics, unequal])


def test_batch_norm_is_evaluated_with_the_same_statistics_on_every_data_parallel_rank() -> None:
    for split in FOUND[statistics][0]:
        held: dict[int, Any] = {}
        for found in FOUND[statistics]:
            if split in found:
                pipeline_rank, buffers = found[split]
                assert held.setdefault(pipeline_rank, buffers) == buffers, split
        assert any(held.values())


def test_items_have_equal_weights_under_any_split_of_a_batch() -> None:
    by_rank = FOUND[unequal]
    for kind in ("by item", "by sample"):
        whole = by_rank[0][f"alone {kind}"]
        assert len(whole) == 8
        for name, ranks in (("accumulated", 1), ("one sample per part", 1), ("data", 2), ("pipeline", 2)):
            for rank in range(ranks):
                assert by_rank[rank][f"{name} {kind}"] == pytest.approx(whole, rel=1e-4), (name, kind)
    assert by_rank[0]["alone by item"] != pytest.approx(by_rank[0]["alone by sample"], rel=1e-2)
