"""A rank's device: its choice, and that training makes no tensor anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from netfold_train.data.examples import Batch
from netfold_train.models import make_model
from netfold_train.parallel import parallelise
from netfold_train.parallel.device import choose_device, seed
from netfold_train.parallel.mesh import Mesh
from netfold_train.recipe import Device, Recipe

# Stands for a GPU: an operation on tensors of two devices raises, and no GPU is needed.
ELSEWHERE = torch.device("meta")
WORDS = torch.zeros(4, 8, dtype=torch.int64)
CASES: list[tuple[dict[str, Any], Batch]] = [
    ({"name": "gpt", "width": 16, "heads": 2, "layers": 1, "context": 8}, Batch((WORDS,), WORDS)),
    ({"name": "bert", "width": 16, "heads": 2, "layers": 1, "context": 8}, Batch((WORDS,), WORDS)),
    ({"name": "edsr", "features": 8, "blocks": 1}, Batch((torch.rand(4, 3, 8, 8),), torch.rand(4, 3, 16, 16))),
    ({"name": "resnet18"}, Batch((torch.rand(4, 3, 32, 32),), WORDS[:, 0])),
    (
        {"name": "dlrm", "numbers": 2, "rows": [16, 3], "width": 8},
        Batch((torch.rand(4, 2), WORDS[:, :2]), torch.rand(4)),
    ),
    ({"name": "linear-stack", "widths": [8, 4]}, Batch((torch.rand(4, 8),), WORDS[:, 0])),
]


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_auto_takes_the_cpu_where_torch_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device(Device()) == choose_device(Device(kind="cpu")) == (torch.device("cpu"), "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device(Device()) == (torch.device("cpu"), "device: cpu (this torch has CUDA, but finds no GPU)")
    assert choose_device(Device(kind="cpu")) == (torch.device("cpu"), "")
    with pytest.raises(ValueError, match="torch finds no GPU on this host: install"):
        choose_device(Device(kind="cuda"))


def test_ranks_of_a_host_take_its_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    chosen = []
    for local in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        chosen.append(choose_device(Device()))
    assert [device.index for device, _ in chosen] == [0, 1, 0] and current == [device for device, _ in chosen]
    assert chosen[2][1] == "device: cuda:0, GPU 0 (GPU 1 of 2 for local rank 2)"


def test_seed_of_the_cpu_is_that_of_manual_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    seed(torch.device("cpu"), 5)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("model", "batch"), CASES, ids=[model["name"] for model, _ in CASES])
def test_passes_make_no_tensor_off_the_models_device(alone: None, model: dict[str, Any], batch: Batch) -> None:
    training = {"steps": 1, "batch": 4}
    recipe = Recipe.model_validate({"model": model, "data": {"name": "photos"}, "training": training})
    mesh = Mesh(recipe.parallel)
    mesh.device = ELSEWHERE
    made = make_model(recipe.model)
    made.module.to(ELSEWHERE)
    replica = parallelise(made, recipe, mesh)
    moved = batch.to(ELSEWHERE)
    loss = replica.gradients(moved)
    assert loss is not None and loss.device == ELSEWHERE
    gradients = [parameter.grad for _, parameter in replica.named_parameters()]
    assert gradients and all(each is not None and each.device == ELSEWHERE for each in gradients)
    output = replica.outputs(moved)
    assert output is not None and output.device == ELSEWHERE
