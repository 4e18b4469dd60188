"""The page of the demo: complete without a network, with the numbers of the experiment."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from netfold_lab.demo import figures, report
from netfold_lab.demo.agreement import compare
from netfold_lab.demo.experiment import Experiment, HeldOut, Outcome
from netfold_lab.demo.settings import SCALE, Run, Training, straight
from netfold_train.zoo.data.resolution import bicubic, psnr, smaller, to_8_bits
from netfold_train.zoo.data.super_resolution import Pair

pytestmark = pytest.mark.torch

STEPS = 40


def _outcome(backend: str, losses: np.ndarray, **changes: object) -> Outcome:
    facts = {
        "run": Run(backend, backend, straight(4), STEPS),
        "losses": losses.tolist(),
        "images_per_s": 123.0,
        "wire_bytes_per_step": 2.25 * 2**20,
        "collective_s_per_step": 0.031,
        "step_s": 0.107,
        "replicas_equal": True,
    }
    return Outcome(**{**facts, **changes})  # type: ignore[arg-type]


def _photograph(error: float, name: str = "a <tree>") -> HeldOut:
    """A photograph with noise in one place, and a network that errs by `error` times as much as bicubic."""
    truth = torch.full((3, 160, 240), 0.5)
    truth[:, 64:128, 160:224] = torch.rand((3, 64, 64), generator=torch.Generator().manual_seed(1))
    pair = Pair(smaller(truth, SCALE), truth)
    by_bicubic = bicubic(pair.low, SCALE)
    by_network = to_8_bits(truth + error * (by_bicubic - truth))
    made = {"bicubic": by_bicubic, "netfold": by_network, "gloo": by_network}
    decibels = {row: float(psnr(picture, truth)) for row, picture in made.items()}
    return HeldOut(name, pair, to_8_bits(by_bicubic), by_network, decibels)


def _story(*, error: float = 0.5, offset: float = 0.0, replicas_equal: bool = True) -> Experiment:
    gloo = np.linspace(0.03, 0.02, STEPS)
    permuted = [(gloo[:30] + scale * 1e-8).tolist() for scale in (1, 2, 3)]
    return Experiment(
        training=Training(steps=STEPS),
        parameters=269955,
        netfold=_outcome("netfold", gloo + 1e-8 + offset, replicas_equal=replicas_equal),
        gloo=_outcome("gloo", gloo),
        agreement=compare((gloo + 1e-8 + offset).tolist(), gloo.tolist(), permuted),
        bicubic_losses=(gloo + 0.002).tolist(),
        held_out=[_photograph(error)],
    )


def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = report.write(_story(), tmp_path / "new" / "folder", seconds=77.0).read_text()
    page = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"https?:|//", re.sub(r'"data:image/png;base64,[^"]*"', "", page))
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not re.search(r"@import|url\((?!#)|<script|<link", page)


def test_the_page_shows_both_curves_every_row_and_four_pictures_a_photograph(tmp_path: Path) -> None:
    page = report.render(_story(), seconds=77.0)
    assert page.count("<svg") == 2
    assert page.count('class="crop"') == 4
    for words in ("bicubic", "EDSR, netfold", "EDSR, gloo", "2.25 MB", "31 of 107 ms", "123"):
        assert words in page
    assert "a &lt;tree&gt;" in page


def test_a_successful_demo_has_no_failures() -> None:
    assert _story().failures() == []
    assert 'class="failed"' not in report.render(_story(), seconds=1.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"error": 1.5}, "EDSR trained over netfold is .* dB worse than bicubic"),
        ({"offset": 1e-5}, "losses over netfold differ from gloo's by more than rounding"),
        ({"replicas_equal": False}, "workers of netfold ended with different weights"),
    ],
)
def test_a_failure_is_a_sentence_and_is_on_the_page(changes: dict[str, float], sentence: str) -> None:
    story = _story(**changes)  # type: ignore[arg-type]
    assert any(re.search(sentence, failure) for failure in story.failures())
    assert 'class="failed"' in report.render(story, seconds=1.0)


def test_the_crop_is_where_bicubic_errs_most() -> None:
    crop = figures.crop(_photograph(error=0.5))
    # All detail is in rows 64..127, columns 160..223.
    assert crop.top <= 64
    assert crop.top + figures.CROP_PIXELS >= 128
    assert crop.left <= 160
    assert crop.left + figures.CROP_PIXELS >= 224
    assert crop.netfold_psnr == pytest.approx(crop.bicubic_psnr + 20 * np.log10(2), abs=0.1)
