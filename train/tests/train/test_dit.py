"""Noisy pictures, their best linear filter, the diffusion transformer, and its sampler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made import data, equal, fashion
from torch import Tensor
from training import Table, changed, trained

from netfold_train.models import make_model
from netfold_train.recipe import Factory
from netfold_train.zoo.data.diffusion import Noisy, Wiener, kept, remove_noise, sheet, squared_error
from netfold_train.zoo.models.dit import sample

TINY: Table = {"name": "dit", "patch": 14, "width": 16, "heads": 2, "layers": 2, "mlp": 2}


def tiny() -> torch.nn.Module:
    torch.manual_seed(0)
    return make_model(Factory.model_validate(TINY)).module


def perturbed() -> torch.nn.Module:
    """Without the zeros that hide layers from each other."""
    module = tiny()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return module


def test_an_example_is_a_function_of_its_seed(tmp_path: Path) -> None:
    found = data("diffusion", root=str(fashion(tmp_path / "root")))
    assert len(found.train) == 30 and len(found.held_out) == 10
    pair = found.train.batch([3, 4], [5, 6])
    assert equal(found.train.batch([4], [6]), pair.parts(2)[1])
    assert not equal(found.train.batch([4], [7]), pair.parts(2)[1])
    noisy, step, label = pair.inputs
    assert noisy.shape == pair.target.shape == (2, 1, 28, 28) and label.tolist() == [0, 1]
    assert isinstance(found.train, Noisy)
    share = kept()[step].view(2, 1, 1, 1)
    torch.testing.assert_close(noisy, share**0.5 * found.train.pictures[[3, 4]] + (1 - share) ** 0.5 * pair.target)


def test_time_steps_are_uniform_and_the_noise_is_standard() -> None:
    examples = Noisy(torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.long))
    drawn = examples.batch([0] * 2000, range(2000))
    assert drawn.inputs[1].double().mean() == pytest.approx(499.5, abs=5 * 1000 / (12 * 2000) ** 0.5)
    assert drawn.target.mean() == pytest.approx(0, abs=5 / (64 * 2000) ** 0.5)
    assert drawn.target.std() == pytest.approx(1, abs=5 / (2 * 64 * 2000) ** 0.5)
    # Ho et al. 2020: almost no noise at first, almost nothing else at last.
    assert kept()[0] == pytest.approx(0.9999) and kept()[-1] == pytest.approx(4.04e-5, rel=0.01)


def test_the_linear_filter_has_the_least_error_on_gaussian_pictures() -> None:
    torch.manual_seed(0)
    spread = torch.linspace(0.1, 2.0, 16).view(1, 4, 4)
    pictures = torch.randn(20_000, 1, 4, 4) * spread + 0.5
    wiener = Wiener.fit(pictures)
    noise, step = torch.randn_like(pictures), torch.full((len(pictures),), 300)
    share = float(kept()[300])
    noisy = share**0.5 * pictures + (1 - share) ** 0.5 * noise
    least = (share * spread**2 / (share * spread**2 + 1 - share)).mean()
    error = squared_error(wiener(noisy, step), noise).mean()
    # 320 000 squares, each with a deviation of at most 2.
    assert error == pytest.approx(float(least), abs=5 * 2 / 320_000**0.5)


def test_the_baseline_is_the_filter_on_the_held_out_examples(tmp_path: Path) -> None:
    found = data("diffusion", root=str(fashion(tmp_path / "root")))
    assert 0.0 < found.metric.baseline < 1.0
    assert found.pictures is not None
    truth = found.pictures.examples.batch(range(10), range(10)).target
    panels = found.pictures.panels(truth)
    assert [panel.title for panel in panels] == ["noisy", "the best linear filter", "the network", "truth"]
    assert all(panel.pixels.shape == (3, 2 * 28, 8 * 28) and panel.pixels.dtype == torch.uint8 for panel in panels)
    assert panels[2].said == "root mean square error 0.000 of the range", "the true noise leaves the picture"


def test_pictures_are_laid_out_by_rows() -> None:
    shown = sheet(torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1).expand(3, 1, 2, 2), 2)
    assert shown[1].tolist() == [[0, 0, 128, 128]] * 2 + [[255, 255, 0, 0]] * 2


def test_the_untrained_network_predicts_0_and_blocks_are_the_identity() -> None:
    module, x, condition = tiny(), torch.randn(2, 4, 16), torch.randn(2, 16)
    assert not module(torch.randn(2, 1, 28, 28), torch.tensor([0, 999]), torch.tensor([3, 4])).any()
    assert torch.equal(module.get_submodule("layers.block0")(x, condition)[0], x)


def test_the_network_depends_on_every_input_of_its_own_sample_only() -> None:
    module = perturbed()
    noisy, step, label = torch.randn(3, 1, 28, 28), torch.tensor([1, 500, 2]), torch.tensor([3, 4, 5])
    output = module(noisy, step, label)
    for changed_inputs in ((noisy + 1, step, label), (noisy, step + 7, label), (noisy, step, label + 1)):
        mixed = tuple(torch.cat([a[:1], b[1:]]) for a, b in zip(changed_inputs, (noisy, step, label), strict=True))
        found = module(*mixed)
        torch.testing.assert_close(found[1:], output[1:])
        assert (found[0] - output[0]).abs().max() > 1e-4


def test_patches_are_put_back_where_they_were() -> None:
    module = perturbed()
    noisy, zero = torch.zeros(1, 1, 28, 28, requires_grad=True), torch.zeros(1, dtype=torch.long)
    for block in ("block0", "block1"):
        part = module.get_submodule(f"layers.{block}.modulation.linear")
        # Without attention and MLP a patch sees itself only.
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.zeros_(part.bias)
    module(noisy, zero, zero)[0, 0, 14:, :14].sum().backward()
    assert noisy.grad is not None
    seen = noisy.grad[0, 0] != 0
    assert seen[14:, :14].all() and not seen[:14].any() and not seen[:, 14:].any()


def test_the_sampler_draws_from_the_distribution_whose_noise_it_is_told() -> None:
    torch.manual_seed(0)
    mean, deviation = 0.2, 0.15

    def predict(noisy: Tensor, step: Tensor, _classes: Tensor) -> Tensor:
        share = kept()[step].view(-1, 1, 1, 1)
        return (1 - share).sqrt() * (noisy - share.sqrt() * mean) / (share * deviation**2 + 1 - share)

    found = sample(predict, torch.randn(500, 1, 4, 4), torch.zeros(500, dtype=torch.long), steps=300)
    assert found.mean() == pytest.approx(mean, abs=0.02)
    assert found.std() == pytest.approx(deviation, rel=0.06)


def test_the_noise_is_removed_within_the_range_of_pictures() -> None:
    step = torch.tensor([700])
    assert remove_noise(torch.full((1, 1, 2, 2), 9.0), torch.zeros(1, 1, 2, 2), step).unique().tolist() == [1.0]


@pytest.mark.torch
def test_a_recipe_trains_the_same_under_every_split(tmp_path: Path) -> None:
    recipe: Table = {
        "model": TINY,
        "data": {"name": "diffusion", "root": str(fashion(tmp_path / "root")), "held_out": 8},
        "training": {"steps": 5, "batch": 8},
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    splits = ({"data": 2}, {"tensor": 2}, {"pipeline": 2}, {"data": 2, "zero": 3})
    found = [of[0] for of in trained([changed(recipe, parallel=split) for split in splits], 2)]
    whole = found[0]
    assert whole.losses[-1] < whole.losses[0] < 1.2
    for other in found[1:]:
        assert (*other.losses, other.metric) == pytest.approx((*whole.losses, whole.metric), rel=1e-4)


@pytest.mark.parametrize(
    "options, said",
    [({"patch": 5}, "model.size 28 is not a multiple of model.patch 5"), ({"heads": 3}, "width 16 is not a multiple")],
)
def test_sizes_that_do_not_divide_are_an_error(options: Table, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_model(Factory.model_validate({**TINY, **options}))
