"""LARS, LAMB and the schedule, against the papers' algorithms in NumPy and against numbers computed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from netfold_train.optim import kind_of, learning_rate
from netfold_train.optim.layerwise import LAMB, LARS
from netfold_train.recipe import Optimizer as Asked
from netfold_train.recipe import Recipe, Schedule
from netfold_train.recipe.errors import RecipeError
from netfold_train.recipe.split import split

Floats = NDArray[np.float64]
RNG = np.random.default_rng(5)
# A layer, a bias, and a layer that starts at 0, as a last layer does.
WEIGHTS = [RNG.normal(size=(5, 3)), RNG.normal(size=4), np.zeros((2, 3))]
GRADIENTS = [[RNG.normal(size=w.shape) for w in WEIGHTS] for _ in range(4)]


def lars(w: Floats, gradients: list[Floats], lr: float, momentum: float, decay: float, trust: float) -> Floats:
    """You, Gitman, Ginsburg 2017, algorithm 1; one dimension: SGD."""
    velocity = np.zeros_like(w)
    for g in gradients:
        beta = decay if w.ndim > 1 else 0.0
        norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
        rate = trust * norm_w / (norm_g + beta * norm_w) if w.ndim > 1 and norm_w and norm_g else 1.0
        velocity = momentum * velocity + lr * rate * (g + beta * w)
        w = w - velocity
    return w


def lamb(
    w: Floats, gradients: list[Floats], lr: float, first: float, second: float, eps: float, decay: float
) -> Floats:
    """You et al. 2020, algorithm 2; one dimension: Adam."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        m, v = first * m + (1 - first) * g, second * v + (1 - second) * g * g
        r = (m / (1 - first**t)) / (np.sqrt(v / (1 - second**t)) + eps)
        r = r + decay * w if w.ndim > 1 else r
        norm_w, norm_r = np.linalg.norm(w), np.linalg.norm(r)
        w = w - lr * (norm_w / norm_r if w.ndim > 1 and norm_w and norm_r else 1.0) * r
    return w


def learned(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> list[Floats]:
    parameters = [torch.tensor(w, requires_grad=True) for w in WEIGHTS]
    optimizer = make(parameters)
    for gradients in GRADIENTS:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def test_lars_is_the_papers_algorithm() -> None:
    found = learned(lambda w: LARS(w, lr=0.7, momentum=0.8, weight_decay=0.05, trust=0.02))
    for index, w in enumerate(WEIGHTS):
        told = lars(w, [g[index] for g in GRADIENTS], 0.7, 0.8, 0.05, 0.02)
        np.testing.assert_allclose(found[index], told, rtol=1e-12)


def test_lamb_is_the_papers_algorithm() -> None:
    found = learned(lambda w: LAMB(w, lr=0.03, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.1))
    for index, w in enumerate(WEIGHTS):
        told = lamb(w, [g[index] for g in GRADIENTS], 0.03, 0.8, 0.95, 1e-5, 0.1)
        np.testing.assert_allclose(found[index], told, rtol=1e-12)


def test_lamb_treats_a_bias_as_adam_does() -> None:
    by_lamb = learned(lambda w: LAMB(w, lr=0.03, eps=1e-8, weight_decay=0.1))
    by_adam = learned(lambda w: torch.optim.Adam(w, lr=0.03, eps=1e-8))
    np.testing.assert_allclose(by_lamb[1], by_adam[1], rtol=1e-12)


def test_the_state_of_an_optimizer_is_restored() -> None:
    """Save and load a state as torch does."""
    for kind in LARS, LAMB:
        w = torch.ones(2, 2, requires_grad=True)
        optimizer = kind([w], lr=0.1)
        w.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        optimizer.step()
        other = w.detach().clone().requires_grad_()
        again = kind([other], lr=0.1)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.grad = w.grad
        optimizer.step()
        again.step()
        assert torch.equal(w, other)
        assert not torch.equal(w, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-5}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-5}),
        ("lars", LARS, {"momentum": 0.7, "trust": 0.02}),
        ("lamb", LAMB, {"betas": (0.8, 0.9), "eps": 1e-5}),
    ],
)
def test_each_optimizer_gets_its_keys(name: Any, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    asked = Asked(name=name, lr=0.3, momentum=0.7, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.01, trust=0.02)
    assert kind_of(asked) == (kind, {"lr": 0.3, "weight_decay": 0.01, **options})
    made = kind([torch.ones(2, 2, requires_grad=True)], **kind_of(asked)[1])
    assert {key: made.param_groups[0][key] for key in options} == options


def test_invalid_settings_of_an_optimizer_are_errors() -> None:
    w = [torch.ones(2, 2, requires_grad=True)]
    with pytest.raises(ValueError, match="trust=0"):
        LARS(w, trust=0)
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\)"):
        LAMB(w, betas=(0.9, 1.0))


def test_the_rate_rises_linearly_and_then_falls_by_its_shape() -> None:
    cosine = Schedule(shape="cosine", warmup=4, final=0.1)
    # 4 steps up; then of 8 steps: half a wave from 1 to 0.1, whose middle is 0.55.
    assert [learning_rate(2.0, cosine, step, 12, 32) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert learning_rate(2.0, cosine, 8, 12, 32) == pytest.approx(2.0 * 0.55)
    # (1 + cos(pi / 4)) / 2 = 0.8535534 of the way between
    assert learning_rate(2.0, cosine, 6, 12, 32) == pytest.approx(2.0 * (0.1 + 0.9 * 0.8535534), rel=1e-6)
    assert learning_rate(2.0, cosine, 12, 12, 32) == pytest.approx(0.2)
    linear = Schedule(shape="linear", warmup=0, final=0.5)
    assert [learning_rate(1.0, linear, step, 4, 32) for step in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]
    constant = Schedule(shape="constant", warmup=2)
    assert [learning_rate(1.0, constant, step, 4, 32) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    stable = Schedule(shape="wsd", warmup=2, final=0.5, decay=0.4)
    assert [learning_rate(1.0, stable, step, 10, 32) for step in range(11)] == [
        *(0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), *(0.875, 0.75, 0.625, 0.5),
    ]  # fmt: skip


def test_the_rate_grows_with_the_batch_it_was_found_for() -> None:
    """Goyal et al. 2017: 0.1 for 256 samples is 3.2 for 8192, reached from below."""
    schedule = Schedule(shape="constant", warmup=5, reference_batch=256)
    assert learning_rate(0.1, schedule, 5, 90, 8192) == pytest.approx(3.2)
    assert learning_rate(0.1, schedule, 0, 90, 8192) == pytest.approx(3.2 / 5)
    assert learning_rate(0.1, schedule, 5, 90, 128) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"parallel": {"zero": 1}}, "parallel.zero = 1 does not go with diloco.every.* set 0"),
        ({"parallel": {"batch_norm": 2}}, "parallel.batch_norm = 2 does not .* set 1"),
        ({"parallel": {"embeddings": "row_wise"}}, 'parallel.embeddings = "row_wise" does not .* set .replicated'),
        (
            {"training": {"steps": 8, "evaluate_every": 6}},
            "training.evaluate_every = 6 does not .* set a multiple of 4",
        ),
        ({"training": {"steps": 8, "precision": "bf16"}}, 'training.precision = "bf16" does not .* set .f32'),
        ({"checkpoint": {"every": 2}}, "checkpoint.every = 2 does not .* set a multiple of 4"),
        ({"diloco": {"overlap": 4}}, "diloco.overlap = 4 does not go with diloco.every = 4: .* set at most 3"),
        ({"diloco": {"fragments": 3, "overlap": 2}}, "diloco.fragments = 3 does not go with .* set at most 2"),
        ({"diloco": {"wire": "i8"}, "run": {"backend": "gloo"}}, 'diloco.wire = "i8" does not go with run.backend'),
    ],
)
def test_settings_that_exclude_diloco_are_errors(sections: dict[str, dict[str, object]], said: str) -> None:
    whole = {"model": {"name": "gpt"}, "data": {"name": "source"}, "training": {"steps": 8}, **sections}
    diloco = whole.pop("diloco", {})
    assert Recipe.model_validate(whole).diloco is None
    with pytest.raises(ValueError, match=said):
        Recipe.model_validate({**whole, "diloco": {"every": 4, **diloco}})


def test_sites_divide_the_data_parallel_ranks() -> None:
    def problems(ranks: int, **diloco: object) -> list[str]:
        whole = {"model": {"name": "gpt"}, "data": {"name": "source"}, "training": {"steps": 8, "batch": 192}}
        with pytest.raises(RecipeError) as error:
            split(Recipe.model_validate({**whole, "diloco": {"every": 4, **diloco}}), ranks)
        return error.value.problems

    (text,) = problems(6, sites=4)
    assert text == (
        "diloco.sites is 4, which does not divide the 6 data-parallel ranks (parallel.data); set one of 1, 2, 3, 6"
    )
    (text,) = problems(64, wire="i8")
    assert text.startswith("diloco.wire is 'i8', in which numbers of at most 32 sites can be added, and there are 64")
