"""Down, up and PSNR on cases with a known answer."""

import math

import numpy as np
import pytest
import torch

from netfold.demo.edsr import Edsr
from netfold.demo.resolution import PSNR_BORDER_PIXELS, bicubic, low_resolution, psnr

pytestmark = pytest.mark.torch


def _ramp(height: int, width: int) -> torch.Tensor:
    """A distinct value in every pixel."""
    return torch.linspace(0.1, 0.9, 3 * height * width).reshape(3, height, width)


def test_psnr_of_one_grey_level_off_everywhere_is_48_13_db() -> None:
    truth = torch.full((3, 20, 30), 100 / 255)
    assert psnr(truth + 1 / 255, truth) == pytest.approx(20 * math.log10(255), abs=1e-4)


def test_psnr_of_equal_pictures_is_infinite() -> None:
    assert psnr(_ramp(16, 16), _ramp(16, 16)) == math.inf


def test_psnr_does_not_look_at_the_border() -> None:
    truth = torch.full((3, 20, 30), 100 / 255)
    wrong = truth + 1 / 255
    wrong[:, :PSNR_BORDER_PIXELS] = wrong[:, -PSNR_BORDER_PIXELS:] = 0.0
    wrong[:, :, :PSNR_BORDER_PIXELS] = wrong[:, :, -PSNR_BORDER_PIXELS:] = 1.0
    assert psnr(wrong, truth) == pytest.approx(20 * math.log10(255), abs=1e-4)
    assert psnr(wrong, truth, border_pixels=0) < 20


def test_psnr_takes_values_outside_a_picture_as_its_ends() -> None:
    assert psnr(torch.full((3, 16, 16), 1.7), torch.ones(3, 16, 16)) == math.inf


def test_low_resolution_halves_both_sides_and_keeps_8_bits() -> None:
    low = low_resolution(_ramp(12, 20))
    assert low.shape == (3, 6, 10)
    assert torch.equal((low * 255).round() / 255, low)


def test_a_picture_with_an_odd_side_is_refused() -> None:
    with pytest.raises(ValueError, match="13 x 20 pixels cannot be halved"):
        low_resolution(_ramp(13, 20))


def test_bicubic_is_the_filter_of_pillow() -> None:
    from PIL import Image

    plane = _ramp(10, 14)[0]
    theirs = Image.fromarray(plane.numpy()).resize((28, 20), Image.Resampling.BICUBIC)
    ours = bicubic(plane.expand(3, -1, -1))[0]
    assert torch.allclose(ours, torch.tensor(np.array(theirs)), atol=1e-5)


def test_the_untrained_network_is_bicubic_to_the_bit() -> None:
    low = torch.stack([_ramp(9, 11), _ramp(9, 11).flip(2)])
    out = Edsr(features=8, blocks=2)(low)
    assert out.shape == (2, 3, 18, 22)
    assert torch.equal(out, bicubic(low))


def test_a_body_that_answers_nothing_still_passes_the_head_to_the_tail() -> None:
    """The global skip in feature space: with a silent body the picture depends on the input's features."""
    network = Edsr(features=8, blocks=2)
    torch.nn.init.ones_(network.tail.weight)
    for parameter in network.body[-1].parameters():
        torch.nn.init.zeros_(parameter)
    low = _ramp(9, 11)[None]
    assert not torch.allclose(network(low), bicubic(low))


def test_the_network_has_no_batch_norm() -> None:
    kinds = {type(module).__name__ for module in Edsr(features=8, blocks=2).modules()}
    assert not any("Norm" in kind for kind in kinds)
