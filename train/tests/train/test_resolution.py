"""Down, up and PSNR on cases with a known answer."""

import math

import numpy as np
import pytest
import torch

from netfold_train.zoo.data.resolution import PSNR_BORDER_PIXELS, bicubic, psnr, smaller


def _ramp(height: int, width: int) -> torch.Tensor:
    """A distinct value in every pixel."""
    return torch.linspace(0.1, 0.9, 3 * height * width).reshape(3, height, width)


def test_psnr_of_one_grey_level_off_everywhere_is_48_13_db() -> None:
    truth = torch.full((3, 20, 30), 100 / 255)
    assert float(psnr(truth + 1 / 255, truth)) == pytest.approx(20 * math.log10(255), abs=1e-4)


def test_psnr_is_one_number_per_picture() -> None:
    truth = torch.full((2, 3, 20, 30), 100 / 255)
    made = truth + torch.tensor([1 / 255, 5 / 255]).view(2, 1, 1, 1)
    assert psnr(made, truth).tolist() == [float(psnr(made[0], truth[0])), float(psnr(made[1], truth[1]))]
    assert psnr(made, truth)[1] == pytest.approx(20 * math.log10(255 / 5), abs=1e-4)


def test_psnr_of_equal_pictures_is_100_db_so_that_a_mean_stays_finite() -> None:
    assert psnr(_ramp(16, 16), _ramp(16, 16)) == 100.0


def test_psnr_leaves_out_the_border() -> None:
    truth = torch.full((3, 20, 30), 100 / 255)
    wrong = truth + 1 / 255
    wrong[:, :PSNR_BORDER_PIXELS] = wrong[:, -PSNR_BORDER_PIXELS:] = 0.0
    wrong[:, :, :PSNR_BORDER_PIXELS] = wrong[:, :, -PSNR_BORDER_PIXELS:] = 1.0
    assert float(psnr(wrong, truth)) == pytest.approx(20 * math.log10(255), abs=1e-4)
    assert psnr(wrong, truth, border_pixels=0) < 20


def test_psnr_clamps_values_outside_0_to_1() -> None:
    assert psnr(torch.full((3, 16, 16), 1.7), torch.ones(3, 16, 16)) == 100.0


@pytest.mark.parametrize(("scale", "height", "width"), [(2, 6, 10), (3, 4, 7), (4, 3, 5)])
def test_a_smaller_picture_has_both_sides_divided_and_keeps_8_bits(scale: int, height: int, width: int) -> None:
    low = smaller(_ramp(height * scale, width * scale), scale)
    assert low.shape == (3, height, width)
    assert torch.equal((low * 255).round() / 255, low)


def test_a_picture_with_an_odd_side_is_an_error() -> None:
    with pytest.raises(ValueError, match="13 x 20 pixels cannot be made 2 times smaller"):
        smaller(_ramp(13, 20), 2)


def test_bicubic_is_the_filter_of_pillow() -> None:
    from PIL import Image

    plane = _ramp(10, 14)[0]
    theirs = Image.fromarray(plane.numpy()).resize((28, 20), Image.Resampling.BICUBIC)
    ours = bicubic(plane.expand(3, -1, -1), 2)[0]
    assert torch.allclose(ours, torch.tensor(np.array(theirs)), atol=1e-5)
