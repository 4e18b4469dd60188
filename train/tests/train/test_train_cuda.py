"""Training on GPUs, skipped where torch finds none: `make test-cuda` lists the tests that ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks, values

RECIPE: dict[str, Any] = {
    "model": {"name": "gpt", "width": 32, "heads": 4, "layers": 2, "context": 32},
    "data": {"name": "source", "context": 32},
    "training": {"steps": 4, "batch": 8},
    "optimizer": {"lr": 1e-3},
}


def losses(rank: int, size: int, folder: str, kind: str, parallel: dict[str, Any]) -> tuple[tuple[float, ...], str]:
    """The losses of a run, and the device of its weights."""
    import torch.distributed as dist

    from netfold_train import Recipe, Trainer

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    trainer = Trainer(Recipe.model_validate({**RECIPE, "parallel": parallel, "device": {"kind": kind}}))
    outcome = trainer.fit()
    devices = {parameter.device.type for _, parameter in trainer.replica.named_parameters()}
    dist.destroy_process_group()
    return outcome.losses, "".join(devices)


def test_the_recipe_trains_on_the_cpu() -> None:
    for found, device in values(run_ranks(losses, 2, "cpu", {"data": 2})):
        assert device == "cpu" and len(found) == 4 and found[-1] < found[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch finds no CUDA device here")
@pytest.mark.parametrize(
    "parallel",
    [{"data": 2}, {"data": 2, "zero": 3}, {"pipeline": 2, "microbatches": 2}, {"tensor": 2}],
    ids=["data", "ZeRO 3", "pipeline", "tensor"],
)
def test_a_gpu_learns_what_the_cpu_learns(parallel: dict[str, Any]) -> None:
    """Two ranks, on one GPU where there is only one. Matmuls in f32 (torch's default) differ by rounding alone."""
    (expected, _), _ = values(run_ranks(losses, 2, "cpu", parallel))
    for found, device in values(run_ranks(losses, 2, "cuda", parallel)):
        assert device == "cuda" and found == pytest.approx(expected, rel=1e-4)
