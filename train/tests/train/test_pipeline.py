"""Pipelines of four ranks and of two times two, under every schedule, against a plain loop in one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from own_parts import squares
from ranks import run_ranks, values
from training import TINY_GPT, changed

pytestmark = pytest.mark.xdist_group("train_pipeline")  # the world is made once

RANKS = 4
STEPS = 4
GPT = changed(
    TINY_GPT,
    data={"held_out": 0.01},
    model={"layers": 6},  # eight with the ends: two stages each for four ranks
    training={"steps": STEPS},
    optimizer={"lr": 0.1, "momentum": 0.0},
    schedule={"shape": "constant"},
)
HELD_OUT = 37  # which no batch divides
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")
# Trained for some steps, in f32.
TRAINED = {
    f"{schedule}, {ranks} ranks": {"pipeline": ranks, "schedule": schedule, "microbatches": microbatches}
    for schedule, (ranks, microbatches) in itertools.product(SCHEDULES, ((4, 8), (2, 4)))
}
# One step in f64: which model, over which mesh.
COMPARED = {
    "edsr, 4 stages": ("edsr", {"pipeline": 4}),
    "edsr, 4 stages, zero-bubble": ("edsr", {"pipeline": 4, "schedule": "zero-bubble", "interleave": 1}),
    "edsr, 2 stages": ("edsr", {"pipeline": 2, "microbatches": 4}),
    "edsr, 8 stages, interleaved": ("edsr", {"pipeline": 4, "schedule": "interleaved"}),
    "edsr, 8 stages, v": ("edsr", {"pipeline": 4, "schedule": "zero-bubble-v"}),
    "gpt, 4 stages": ("gpt", {"pipeline": 4, "schedule": "gpipe"}),
    "gpt, 4 stages, zero-bubble": ("gpt", {"pipeline": 2, "schedule": "zero-bubble"}),
    "tensor, 1f1b": ("mlp", {"pipeline": 2, "tensor": 2}),
    "tensor, zero-bubble": ("mlp", {"pipeline": 2, "tensor": 2, "schedule": "zero-bubble", "interleave": 1}),
    # Tensors of one part each, which the test averages over data-parallel ranks.
    "tensor of 1, zero-bubble": ("mlp", {"pipeline": 2, "schedule": "zero-bubble", "interleave": 1}),
    "nothing to learn in the first stage": ("fixed", {"pipeline": 4}),
    "odd, 1f1b": ("odd", {"pipeline": 4}),
    "odd, gpipe": ("odd", {"pipeline": 4, "schedule": "gpipe", "microbatches": 2}),
    "odd, interleaved": ("odd", {"pipeline": 2, "schedule": "interleaved"}),
    "odd, zero-bubble-v": ("odd", {"pipeline": 2, "schedule": "zero-bubble-v"}),
    "odd, zero-bubble": ("odd", {"pipeline": 2, "schedule": "zero-bubble"}),
}
ROWS = 16


def model_and_examples(name: str) -> tuple[Any, Any]:
    """A model in f64, the same on every rank."""
    import torch
    from torch import nn
    from torch.nn import functional

    from netfold_train import Batch, Chain, Model
    from netfold_train.zoo.models.edsr import edsr
    from netfold_train.zoo.models.transformer import gpt

    class First(nn.Module):
        """Return a view that is not contiguous, and pass integers on."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5)

        def forward(self, ids: Any, x: Any) -> Any:
            return self.linear(x)[:, 1:], ids

    class Shift(nn.Module):
        """A layer without weights."""

        def forward(self, x: Any, ids: Any) -> Any:
            return functional.relu(x).t().t(), ids

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)

        def forward(self, x: Any, ids: Any) -> Any:
            return (x * self.table(ids).sum(1),)

    torch.manual_seed(5)
    if name == "gpt":
        model = gpt(width=16, heads=2, layers=2, context=12)
        model = Model(model.module, lambda out, target: functional.cross_entropy(out.mT, target, reduction="none"))
    elif name == "edsr":
        model = edsr(features=6, blocks=6)
        # The last convolution starts at 0, and would hide all others from the loss.
        nn.init.normal_(model.module.layers["tail"].last.weight)
    elif name == "mlp":
        blocks = [nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(3)]
        model = Model(Chain([(f"block{number}", block) for number, block in enumerate(blocks)]), squares)
    elif name == "fixed":
        layers = [("fixed", nn.Tanh()), *((f"linear{number}", nn.Linear(8, 8)) for number in range(3))]
        model = Model(Chain(layers), squares)
    else:
        layers = [("first", First()), ("shift", Shift()), ("look", Look()), ("head", nn.Linear(4, 3))]
        model = Model(Chain(layers), squares)

    class Drawn:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            draw = np.random.default_rng(indices[0])
            rows = len(indices)
            if name == "gpt":
                inputs, target = [draw.integers(256, size=(rows, 12))], draw.integers(256, size=(rows, 12))
            elif name == "edsr":
                inputs, target = [draw.random((rows, 3, 6, 6))], draw.random((rows, 3, 12, 12))
            elif name in ("mlp", "fixed"):
                inputs, target = [draw.random((rows, 8))], draw.random((rows, 8))
            else:
                inputs, target = [draw.integers(7, size=(rows, 5)), draw.random((rows, 6))], draw.random((rows, 3))
            return Batch(tuple(map(torch.from_numpy, inputs)), torch.from_numpy(target))

    model.module.double()
    return model, Drawn()


def data_of(recipe: Any) -> Any:
    """The recipe's data, with few held-out examples."""
    from netfold_train import Data
    from netfold_train.data import make_data

    class Few:
        def __init__(self, examples: Any) -> None:
            self.batch = examples.batch

        def __len__(self) -> int:
            return HELD_OUT

    made = make_data(recipe.data)
    return Data(made.train, Few(made.held_out), made.metric)


def arrays(named: Any) -> dict[str, Any]:
    return {name: tensor.detach().numpy().copy() for name, tensor in named}


def in_a_plain_loop(recipe: Any, data: Any) -> dict[str, Any]:
    """A plain training loop of a recipe, which takes only the initial weights and the order of samples of
    netfold_train."""
    import torch

    from netfold_train.data.sampler import Sampler
    from netfold_train.models import make_model
    from netfold_train.models.deferred import materialise, record

    model, deferred = record(lambda: make_model(recipe.model), recipe.training.seed)
    materialise(model.module, deferred)
    order, size = Sampler(len(data.train), recipe.training.seed), recipe.training.batch
    losses = []
    for step in range(STEPS):
        batch = data.train.batch(order.indices(step * size, size), order.seeds(step * size, size))
        loss = model.losses(model.module(*batch.inputs), batch.target).mean()
        losses.append(loss.item())
        model.module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.module.parameters():
                weight -= recipe.optimizer.lr * weight.grad
    held = data.held_out.batch(range(HELD_OUT), range(HELD_OUT))
    with torch.no_grad():
        metric = float(data.metric.score(model.module(*held.inputs), held.target).double().mean())
    return {"losses": losses, "metric": metric, "weights": arrays(model.module.named_parameters())}


def gradients_in_one_process(name: str) -> dict[str, Any]:
    """The gradients of the mean over a batch, sample by sample: their sums, and the sums of their magnitudes."""
    import torch

    model, examples = model_and_examples(name)
    total, magnitude = {}, {}
    batch = examples.batch(range(ROWS), range(ROWS))
    for part in batch.parts(ROWS):
        model.module.zero_grad()
        (model.losses(model.module(*part.inputs), part.target).mean() / ROWS).backward()
        for weight_name, weight in model.module.named_parameters():
            total[weight_name] = total.get(weight_name, 0) + weight.grad
            magnitude[weight_name] = magnitude.get(weight_name, 0) + weight.grad.abs()
    with torch.no_grad():
        output = model.module(*batch.inputs)
        loss = float(model.losses(output, batch.target).mean())
    return {
        "total": arrays(total.items()),
        "magnitude": arrays(magnitude.items()),
        "output": output.numpy(),
        "loss": loss,
    }


def gradients_in_stages(name: str, parallel: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """The gradients of this rank's part, computed twice. The evaluation between must not change them."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from netfold_train import Batch, Recipe
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    def whole(weight: Any) -> Any:
        part = weight.grad
        return part.full_tensor() if isinstance(part, DTensor) else part

    recipe = Recipe.model_validate(changed(GPT, parallel=parallel, training={"batch": ROWS}, **sections))
    mesh = Mesh(recipe.parallel, diloco=recipe.diloco)
    model, examples = model_and_examples(name)
    if name == "mlp":
        paths = [f"layers.{block}" for block in model.module.layers]
        plan = {f"{path}.0": ColwiseParallel() for path in paths} | {f"{path}.2": RowwiseParallel() for path in paths}
        model = dataclasses.replace(model, tensor_plan=lambda style, sequence: plan)
    before = torch.get_rng_state()
    replica = parallelise(model, recipe, mesh, examples)
    assert torch.equal(before, torch.get_rng_state())
    batch = examples.batch(range(ROWS), range(ROWS)).parts(mesh.data.size)[mesh.data.rank]
    found = []
    for _ in range(2):
        for _, weight in replica.named_parameters():
            weight.grad = None
        loss = replica.gradients(batch)
        output = replica.outputs(Batch(batch.inputs, batch.target))
        found.append(arrays((name, whole(weight)) for name, weight in replica.named_parameters()))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    return {
        "gradients": found[0],
        "loss": None if loss is None else float(loss),
        "output": None if output is None else output.numpy(),
        "data": mesh.data.rank,
        "tensor": mesh.tensor.rank,
        "choices": tuple(replica.notes),
    }


def kept_by_four_dropouts() -> list[float]:
    """Dropout in each stage keeps half: the share that all stages keep, for two seeds and the first one again."""
    import torch
    from torch import nn
    from torch.nn import functional

    from netfold_train import Batch, Chain, Model, Recipe
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, x: Any) -> Any:
            return functional.dropout(x * self.weight, training=self.training)

    class Ones:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            return Batch((torch.ones(len(indices), 1000),), torch.zeros(len(indices)))

    model = Model(
        Chain((f"half{number}", Half()) for number in range(4)),
        lambda out, _: (out != 0).float() + 0 * out,
    )
    recipe = Recipe.model_validate(changed(GPT, parallel={"pipeline": 4}))
    replica = parallelise(model, recipe, Mesh(recipe.parallel), Ones())
    losses = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        loss = replica.gradients(Ones().batch(range(ROWS), range(ROWS)))
        losses.append(0.0 if loss is None else float(loss))
    return losses


def refused_by_zero_bubble() -> str:
    """A chain whose third layer returns a tensor that depends only on its weights; the fourth layer adds it."""
    import torch
    from torch import nn

    from netfold_train import Batch, Chain, Model, Recipe
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return x, self.weight * 2

    class Sum(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return x + y

    class Ones:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            return Batch((torch.ones(len(indices), 4),), torch.zeros(len(indices), 4))

    layers = [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4)), ("both", Both()), ("sum", Sum())]
    recipe = Recipe.model_validate(changed(GPT, parallel={"pipeline": 4, "schedule": "zero-bubble", "interleave": 1}))
    try:
        parallelise(Model(Chain(layers), squares), recipe, Mesh(recipe.parallel), Ones())
    except ValueError as error:
        return str(error)
    return ""


def failed_to_be_measured() -> str:
    from netfold_train import BadExampleError, Recipe
    from netfold_train.models import make_model
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    class Gone:
        def __len__(self) -> int:
            return 64

        def batch(self, indices: Any, seeds: Any) -> Any:
            raise BadExampleError("photo 3 is gone")

    recipe = Recipe.model_validate(changed(GPT, parallel={"pipeline": 4}))
    try:
        parallelise(make_model(recipe.model), recipe, Mesh(recipe.parallel), Gone())
    except RuntimeError as error:
        return str(error)
    return ""


def failed_on_one_stage(rank: int) -> tuple[str, float]:
    """A layer of rank 2 raises in the second step: the error of each rank, and its delay."""
    import torch.distributed as dist
    from torch import nn

    from netfold_train import Chain, Model, Recipe, Trainer
    from netfold_train.zoo.models.linear import class_loss
    from netfold_train.zoo.models.transformer import gpt

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            if rank == 2 and self.calls == 6:
                raise FloatingPointError("this layer breaks here")
            return x

    layers = dict(gpt(width=32, layers=4, context=32).module.layers.items())
    # Each block gets a layer that fails on rank 2.
    named = [(key, nn.Sequential(layer, Breaks()) if "block" in key else layer) for key, layer in layers.items()]
    recipe = Recipe.model_validate(changed(GPT, parallel={"pipeline": 4}))
    data = data_of(recipe)
    trainer = Trainer(recipe, model=Model(Chain(named), class_loss), data=data)
    began = time.monotonic()
    try:
        trainer.fit()
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"
        took = time.monotonic() - began
        dist.destroy_process_group()
        return error_text, took
    return "", 0.0


def serve(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from netfold_train import Recipe, Trainer

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    data = data_of(Recipe.model_validate(GPT))
    found: dict[str, Any] = {}
    if rank == 0:
        found["plain"] = in_a_plain_loop(Recipe.model_validate(GPT), data)
        found["alone"] = {name: gradients_in_one_process(name) for name in {model for model, _ in COMPARED.values()}}
    for name, parallel in TRAINED.items():
        trainer = Trainer(Recipe.model_validate(changed(GPT, parallel=parallel)), data=data)
        outcome = trainer.fit()
        weights = arrays(trainer.replica.named_parameters())
        found[name] = {"losses": outcome.losses, "metric": outcome.metric, "weights": weights}
    for name, (model, parallel) in COMPARED.items():
        found[name] = gradients_in_stages(model, parallel)
    found["diloco"] = gradients_in_stages("gpt", {"pipeline": 2, "schedule": "zero-bubble"}, diloco={"every": 2})
    found["dropout"] = kept_by_four_dropouts()
    found["refused"] = refused_by_zero_bubble()
    found["unmeasured"] = failed_to_be_measured()
    found["failed"] = failed_on_one_stage(rank)
    return found


@functools.cache
def world() -> list[Any]:
    return values(run_ranks(serve, RANKS, timeout_s=200))


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's values from the ranks' values. Ranks with the same value must agree in every bit."""
    whole: dict[str, Any] = {}
    for part in parts:
        for name, array in part.items():
            assert np.array_equal(whole.setdefault(name, array), array), name
    return whole


@pytest.mark.parametrize("name", TRAINED)
def test_stages_learn_the_same_as_one_process(name: str) -> None:
    plain, found = world()[0]["plain"], [rank[name] for rank in world()]
    assert all(rank["losses"] == found[0]["losses"] and rank["metric"] == found[0]["metric"] for rank in found)
    # A few steps in f32: sums of the same gradients in another order.
    assert found[0]["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert found[0]["metric"] == pytest.approx(plain["metric"], rel=1e-5)
    weights = joined([rank["weights"] for rank in found])
    assert weights.keys() == plain["weights"].keys()
    for key, weight in weights.items():
        assert weight == pytest.approx(plain["weights"][key], abs=2e-6), key


@pytest.mark.parametrize("name", COMPARED)
def test_gradients_equal_those_of_the_whole_batch(name: str) -> None:
    alone, found = world()[0]["alone"][COMPARED[name][0]], [rank[name] for rank in world()]
    gradients = joined([rank["gradients"] for rank in found])
    assert gradients.keys() == alone["total"].keys()
    # Both sides add the same terms, in another order; the longest sum (GPT's, over rows, tokens and the vocabulary that
    # the softmax adds) has m = ROWS x 12 x 256. A sum of m is off by at most (m - 1) u of its terms' magnitudes (Higham
    # 2002, 4.2), on either side, in each of the four sums that follow one another within a layer.
    bound = 2 * 4 * ROWS * 12 * 256 * 2.0**-53
    for key, gradient in gradients.items():
        # A layer's weight and bias together: the terms of a key's bias cancel, since a softmax does not see it.
        layer = [other for other in gradients if other.rpartition(".")[0] == key.rpartition(".")[0]]
        allowed = bound * max(alone["magnitude"][other].max() for other in layer)
        assert np.abs(gradient - alone["total"][key]).max() <= allowed, key
        assert max(np.abs(alone["total"][other]).max() for other in layer) > 1e6 * allowed, "the bound says nothing"
    losses = [rank["loss"] for rank in found if rank["loss"] is not None]
    assert np.mean(losses) == pytest.approx(alone["loss"], rel=1e-12)
    # The last stage's ranks have the outputs, one share of the data each; ranks that share a tensor have the same.
    first = [rank for rank in found if rank["output"] is not None and rank["tensor"] == 0]
    outputs = [rank["output"] for rank in sorted(first, key=lambda rank: rank["data"])]
    assert np.concatenate(outputs) == pytest.approx(alone["output"], rel=1e-11, abs=1e-12)


def test_diloco_ranks_keep_their_own_gradients() -> None:
    first, second = (
        [rank["diloco"]["gradients"] for rank in world() if rank["diloco"]["data"] == data] for data in (0, 1)
    )
    (first, second), whole = (joined(first), joined(second)), world()[0]["alone"]["gpt"]["total"]
    for key, mean in whole.items():
        assert not np.array_equal(first[key], second[key])
        assert (first[key] + second[key]) / 2 == pytest.approx(mean, rel=1e-9, abs=1e-12)


def test_the_cut_is_noted_with_its_reason() -> None:
    choices = {rank["edsr, 4 stages"]["choices"] for rank in world()}
    assert len(choices) == 1
    ((told,),) = choices
    assert re.match(r"8 layers in 4 stages: head.*, .*tail \(\d+%\); in brackets", told), told


def test_random_numbers_depend_on_the_seed_and_differ_between_stages() -> None:
    first, again, other = world()[3]["dropout"]
    assert first == again != other
    # Of 16000 numbers; stages with equal numbers would keep a half. Four standard deviations.
    assert first == pytest.approx(1 / 16, abs=4 * (15 / 256 / 16000) ** 0.5)


def test_a_stage_whose_gradients_zero_bubble_would_lose_is_an_error() -> None:
    for rank in world():
        assert "a layer (both) returns a tensor that depends on its weights only" in rank["refused"]


def test_an_error_of_timing_layers_reaches_every_rank() -> None:
    said = "the layers could not be measured on rank 0: BadExampleError: photo 3 is gone"
    assert [rank["unmeasured"] for rank in world()] == [said] * RANKS


def test_a_failed_stage_ends_the_other_ranks_and_is_named() -> None:
    errors = [rank["failed"] for rank in world()]
    assert errors[2][0] == "FloatingPointError: this layer breaks here"
    for rank in (0, 1, 3):
        assert re.search(r"rank 2\b", errors[rank][0]), errors[rank][0]
    assert max(took for _, took in errors) < 20.0


@pytest.mark.parametrize(
    ("parallel", "training", "said"),
    [
        (
            {"pipeline": 4, "microbatches": 3},
            {},
            'parallel.microbatches = 3 does not go with parallel.schedule = "1f1b": it needs',
        ),
        (
            {"pipeline": 4, "microbatches": 6, "schedule": "gpipe"},
            {},
            "batch is 16, which does not divide by parallel.data 2 x parallel.microbatches 6",
        ),
        ({"pipeline": 4, "schedule": "interleaved", "microbatches": 9}, {}, "4 ranks cannot divide them; set 8 or 12"),
        (
            {"pipeline": 4, "schedule": "interleaved", "interleave": 3},
            {},
            "12 stages, but the model has 8 layers: make it 2 or",
        ),
        (
            {"pipeline": 16, "microbatches": 16},
            {"batch": 32},
            "16 stages, but the model has 8 layers: make it 8 or less",
        ),
        ({"pipeline": 4}, {"accumulate": 2}, "set parallel.microbatches = 8"),
        ({"pipeline": 4, "schedule": "zero-bubble", "zero": 1}, {}, "does not go with parallel.zero = 1"),
        ({"pipeline": 2, "schedule": "zero-bubble-v", "interleave": 3}, {}, "parallel.interleave = 3 does not go with"),
        ({"pipeline": 4}, {}, "was given no examples"),
    ],
)
def test_an_impossible_pipeline_is_an_error_in_one_sentence(parallel: Any, training: Any, said: str) -> None:
    from netfold_train import Recipe
    from netfold_train.models import make_model
    from netfold_train.parallel.pipeline_plan import Plan

    mesh: Any = SimpleNamespace(data=SimpleNamespace(size=2))
    with pytest.raises(ValueError, match=re.escape(said)):
        recipe = Recipe.model_validate(changed(GPT, parallel=parallel, training={"batch": 16, **training}))
        Plan(make_model(recipe.model), recipe, mesh, None)


def test_a_model_other_than_a_chain_cannot_be_cut() -> None:
    from torch import nn

    from netfold_train import Model, Recipe
    from netfold_train.parallel.pipeline_plan import Plan

    recipe = Recipe.model_validate(changed(GPT, parallel={"pipeline": 2}))
    with pytest.raises(ValueError, match=r"parallel.pipeline is 2, but the model is a Linear, which cannot be cut"):
        Plan(Model(nn.Linear(1, 1), nn.functional.mse_loss), recipe, SimpleNamespace(), None)  # type: ignore[arg-type]
