"""Pictures: held-out photographs, folders of pairs and classes, IDX files, and errors of damaged files."""

from __future__ import annotations

import gzip
import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from made import GARBAGE, class_folders, data, div2k, everything, fashion, idx, needs_fashion_mnist, pictures
from skimage.io import imsave

from netfold_train import BadExampleError
from netfold_train.zoo.data import super_resolution
from netfold_train.zoo.data.classes import read_idx
from netfold_train.zoo.data.super_resolution import HELD_OUT, TRAINING, Pair, photograph


@pytest.fixture(scope="module")
def photographs() -> dict[str, Pair]:
    return {name: photograph(name, 2) for name in (*TRAINING, *HELD_OUT)}


def test_no_held_out_photograph_is_a_training_photograph() -> None:
    folder = Path(super_resolution.skimage.__file__).parent / "data"
    train, held = (
        {hashlib.sha256((folder / name).read_bytes()).digest() for name in names} for names in (TRAINING, HELD_OUT)
    )
    assert len(train) == len(TRAINING) and len(held) == len(HELD_OUT) and not train & held
    assert not set(TRAINING) & set(HELD_OUT)


def test_both_views_of_the_motorcycle_are_in_the_same_part() -> None:
    views = {"motorcycle_left.png", "motorcycle_right.png"}
    assert views <= set(TRAINING) or views <= set(HELD_OUT)


def test_every_photograph_has_three_channels_and_scale_times_the_sides_of_its_low_resolution(
    photographs: dict[str, Pair],
) -> None:
    for name, (low, truth) in photographs.items():
        assert truth.shape[0] == 3 and truth.shape[1:] == tuple(2 * side for side in low.shape[1:]), name
        assert 0 <= truth.min() < truth.max() <= 1, name
    # 500 rows are cut to 498, a multiple of 3.
    low, truth = photograph("motorcycle_left.png", 3)
    assert truth.shape[1:] == (498, 741) and low.shape[1:] == (166, 247)


def test_no_training_photograph_is_similar_to_a_held_out_photograph(photographs: dict[str, Pair]) -> None:
    def thumbnail(name: str) -> torch.Tensor:
        small = torch.nn.functional.interpolate(photographs[name].truth[None], size=(16, 16), mode="area").flatten()
        return small - small.mean()

    thumbnails = {name: thumbnail(name) for name in photographs}
    for trained, held_out in itertools.product(TRAINING, HELD_OUT):
        likeness = torch.nn.functional.cosine_similarity(thumbnails[trained], thumbnails[held_out], dim=0)
        assert likeness < 0.9, (trained, held_out)


def test_the_baseline_is_the_psnr_of_bicubic_enlargement(tmp_path: Path) -> None:
    found = data("div2k", root=str(div2k(tmp_path)), patch=12, tiles=4)
    held = everything(found.held_out)
    enlarged = torch.nn.functional.interpolate(held.inputs[0], scale_factor=2, mode="bicubic", antialias=True)
    assert found.metric.baseline == pytest.approx(float(found.metric.score(enlarged, held.target).mean()))
    assert found.metric.score(held.target, held.target).min() > 90
    # One pixel of the 16 x 16 inside the border differs.
    off = held.target[:1].clone()
    off[0, :, 9, 9] = (held.target[0, :, 9, 9] + 0.2) if (held.target[0, :, 9, 9] < 0.8).all() else 0.0
    expected = -10 * torch.log10(((off - held.target[:1]) ** 2).sum() / (3 * 16 * 16))
    assert float(found.metric.score(off, held.target[:1])) == pytest.approx(float(expected), abs=1e-3)


def test_low_resolution_files_are_used_and_missing_ones_are_made(tmp_path: Path) -> None:
    made = data("div2k", root=str(div2k(tmp_path)), patch=20, repeat=1, tiles=2)
    assert len(made.train) == 3 and len(made.held_out) == 2
    low, truth = (tensor[0] for tensor in (made.train.batch([0], [7]).inputs[0], made.train.batch([0], [7]).target))
    assert low.shape == (3, 20, 20) and truth.shape == (3, 40, 40)
    black = tmp_path / "DIV2K_train_LR_bicubic" / "X2"
    black.mkdir(parents=True)
    imsave(black / "0001x2.png", np.zeros((20, 25, 3), np.uint8), check_contrast=False)
    given = made.train.batch([0, 1], [7, 8])
    assert given.inputs[0][0].max() == 0 and given.inputs[0][1].max() > 0 and torch.equal(given.target[0], truth)
    imsave(black / "0002x2.png", np.zeros((20, 24, 3), np.uint8), check_contrast=False)
    with pytest.raises(BadExampleError, match=r"0002x2.png: 24 x 20 pixels; 0002.png made 2 times smaller has 25 x 20"):
        made.train.batch([1], [8])


@pytest.mark.parametrize("layout", ["train/HR", "train"])
def test_other_folder_layouts_are_found(layout: str, tmp_path: Path) -> None:
    for part in ("train", "valid"):
        pictures(tmp_path / layout.replace("train", part), ["a.png", "b.png"], 30, 30)
    assert len(data("div2k", root=str(tmp_path), patch=12, repeat=3, tiles=2).train) == 6


def test_held_out_pictures_are_middle_squares_and_classes_are_numbered_by_name(tmp_path: Path) -> None:
    found = data("class-folders", root=str(class_folders(tmp_path)), size=20)
    held = everything(found.held_out)
    assert held.target.tolist() == [0, 1, 1, 1] and everything(found.train).target.tolist() == [0, 0, 0, 1, 1]
    first = super_resolution.read_picture(tmp_path / "valid" / "boot" / "validboot0.png")
    assert torch.allclose(held.inputs[0][0], first[:, :, 2:22] * 2 - 1, atol=1e-5)
    # Boots are the most frequent class in training, and a quarter of the held-out pictures.
    assert found.metric.baseline == 0.25
    assert found.metric.score(torch.eye(2)[[0, 1, 0, 1]], held.target).tolist() == [True, True, False, True]


def test_the_baseline_of_fashion_mnist_is_measured_on_held_out_pictures(tmp_path: Path) -> None:
    assert data("fashion-mnist", root=str(fashion(tmp_path / "f"))).metric.baseline == 0.9
    found = data("fashion-mnist", root=str(tmp_path / "f"), held_out=5)
    assert len(found.held_out) == 5 and found.metric.baseline == 0.8
    assert float(everything(found.train).inputs[0].mean()) == pytest.approx(0, abs=1e-5)


@needs_fashion_mnist
def test_installed_fashion_mnist_has_its_published_sizes() -> None:
    found = data("fashion-mnist")
    assert (len(found.train), len(found.held_out)) == (60000, 10000)
    assert torch.bincount(everything(found.held_out).target).tolist() == [1000] * 10
    assert found.metric.baseline == pytest.approx(0.677, abs=0.002)


def test_an_error_of_a_missing_damaged_or_small_picture_names_it(tmp_path: Path) -> None:
    found = data("div2k", root=str(div2k(tmp_path / "pairs")), patch=12, tiles=2)
    kinds = data("class-folders", root=str(class_folders(tmp_path / "kinds")), size=8)
    (tmp_path / "pairs/DIV2K_train_HR/0002.png").unlink()
    (tmp_path / "pairs/DIV2K_train_HR/0003.png").write_bytes(GARBAGE)
    picture = tmp_path / "kinds/train/coat/traincoat1.png"
    picture.write_bytes(picture.read_bytes()[:300])
    for examples, number, name in (
        (found.train, 1, "0002.png"),
        (found.train, 2, "0003.png"),
        (kinds.train, 4, "coat1.png"),
    ):
        with pytest.raises(BadExampleError, match=rf"{name}: cannot be read as a picture"):
            examples.batch([number], [0])
    assert len(found.train.batch([0], [0])) == 1
    pictures(tmp_path / "pairs/DIV2K_train_HR", ["0001.png"], 20, 60)
    with pytest.raises(BadExampleError, match=r"0001.png: 30 x 10 pixels when made smaller; data.patch is 12"):
        found.train.batch([0], [0])


def test_an_error_of_an_idx_file_names_it_and_the_reason(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.gz", idx(np.arange(6, dtype=np.uint8).reshape(2, 3))
    path.write_bytes(whole)
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    cut = gzip.compress(gzip.decompress(whole)[:-1])
    other = gzip.compress(bytes((0, 0, 13, 1)) + bytes(8))
    for raw, said in (
        (whole[:-9], "ended before"),
        (cut, r"cannot reshape array of size 5 into shape \(2,3\)"),
        (other, "begins with 00000d01"),
        (GARBAGE, "x.gz: "),
    ):
        path.write_bytes(raw)
        with pytest.raises(BadExampleError, match=said):
            read_idx(path)
