"""Pictures in two sizes, for super-resolution: the photographs in the scikit-image wheel, and folders such as DIV2K.

Training examples are random crops, held-out examples are tiles. Metric: PSNR. Baseline: bicubic enlargement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import numpy as np
import skimage
import torch
from pydantic import Field, PositiveInt
from skimage.io import imread
from torch import Tensor
from torch.nn import functional

from netfold.train.examples import BadExampleError, Batch, Data, InMemory, Metric, Panel, Pictures
from netfold.train.resolution import PSNR_BORDER_PIXELS, bicubic, psnr, smaller

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
"""Of files that are read as pictures."""
TRAINING = (
    "brick.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "ihc.png",
    # Two views of one scene: they stay on the same side of the split.
    "motorcycle_left.png",
    "motorcycle_right.png",
    "page.png",
    "rocket.jpg",
)
HELD_OUT = ("astronaut.png", "camera.png", "chelsea.png", "coffee.png")
_SHOWN = "chelsea.png"
# The largest number of patches in each direction: a picture of this size is cheap compared with an evaluation.
_SHOWN_PATCHES = 6
T = TypeVar("T")
Scale = Annotated[int, Field(ge=2)]


class Pair(NamedTuple):
    """A picture in two sizes, f32, 0..1."""

    low: Tensor
    """[3, h, w]"""
    truth: Tensor
    """[3, scale h, scale w]"""


def photos(scale: Scale = 2, patch: int = 24, patches: PositiveInt = 4096, tiles: PositiveInt | None = None) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch is `patches` random ones.

    tiles: held-out tiles to evaluate, evenly chosen; without it all.
    """
    _check(scale, patch)
    train, held = ([photograph(name, scale, patch) for name in names] for names in (TRAINING, HELD_OUT))
    found = [tile for pair in held for tile in _tiles(pair, scale, patch, patch)]
    kept = _evenly(found, len(found) if tiles is None else tiles)
    crops = Crops(train.__getitem__, len(train), scale, patch, patches)
    return _data(crops, kept, scale, mosaic(held[HELD_OUT.index(_SHOWN)], scale, patch))


@functools.cache
def photograph(name: str, scale: int, patch: int = 1) -> Pair:
    """A photograph of the installed package in two sizes, read once; nothing is downloaded."""
    return read_pair(Path(skimage.__file__).parent / "data" / name, None, scale, patch)


def div2k(root: str, scale: Scale = 2, patch: int = 48, repeat: PositiveInt = 20, tiles: PositiveInt = 256) -> Data:
    """Pictures in a folder with the layout of DIV2K (Agustsson and Timofte, CVPRW 2017).

        root/DIV2K_train_HR/0001.png     root/DIV2K_train_LR_bicubic/X2/0001x2.png
        root/DIV2K_valid_HR/0801.png     root/DIV2K_valid_LR_bicubic/X2/0801x2.png

    root/train/HR with root/train/LR_bicubic/X2, or pictures in root/train itself, are accepted too. A picture without a
    low-resolution file is reduced when it is read; nothing is written.

    Patches of `patch` x `patch` low-resolution pixels; an epoch takes `repeat` of each picture. Each training example
    reads its whole picture: about 120 ms for 2K, and 30 ms more to reduce it. `tiles` tiles of the valid part, equally
    many of each picture, are kept in memory.
    """
    _check(scale, patch)
    train, valid = _files(Path(root), "train", scale), _files(Path(root), "valid", scale)

    def pair(number: int) -> Pair:
        return read_pair(*train[number], scale, patch)

    kept: list[Pair] = []
    chosen = _evenly(valid, tiles)
    for place, files in enumerate(chosen):
        share = tiles * (place + 1) // len(chosen) - tiles * place // len(chosen)
        found = _tiles(read_pair(*files, scale, patch), scale, patch, patch)
        # Copies, because a view would keep the whole picture in memory.
        kept += [Pair(low.clone(), truth.clone()) for low, truth in _evenly(found, share)]
    return _data(Crops(pair, len(train), scale, patch, repeat * len(train)), kept, scale)


@dataclass(frozen=True)
class Crops:
    """Examples of patches: the number selects the picture, the seed the place, rotation and mirroring."""

    pair: Callable[[int], Pair]
    """The picture of a number below `pictures`, from memory or a file."""
    pictures: int
    scale: int
    patch: int
    length: int
    """The number of examples."""

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        crops = [self._one(self.pair(index % self.pictures), seed) for index, seed in zip(indices, seeds, strict=True)]
        return Batch((torch.stack([low for low, _ in crops]),), torch.stack([truth for _, truth in crops]))

    def _one(self, pair: Pair, seed: int) -> Pair:
        draw = np.random.default_rng(seed)
        top, left = (int(draw.integers(extent - self.patch + 1)) for extent in pair.low.shape[-2:])
        low, truth = _cut(pair, top, left, self.patch, self.patch, self.scale)
        if draw.integers(2):
            low, truth = low.flip(2), truth.flip(2)
        if draw.integers(2):
            low, truth = low.transpose(1, 2), truth.transpose(1, 2)
        return Pair(low, truth)


def mosaic(pair: Pair, scale: int, patch: int) -> Pictures:
    """The middle of a picture: repeated pixels, bicubic, the network's output, the truth.

    The network computes patches of the training size. They overlap, and the edges of its outputs, which have no
    neighbours, are left out.
    """
    margin = patch // 6
    step = patch - 2 * margin
    rows, columns = (min(_SHOWN_PATCHES, (side - 2 * margin) // step) for side in pair.low.shape[1:])
    height, width = (count * step + 2 * margin for count in (rows, columns))
    top, left = (pair.low.shape[1] - height) // 2, (pair.low.shape[2] - width) // 2
    middle = _cut(pair, top, left, height, width, scale)

    def inside(picture: Tensor) -> Tensor:
        edge = margin * scale
        return picture[..., edge : picture.shape[-2] - edge, edge : picture.shape[-1] - edge]

    def panels(outputs: Tensor) -> list[Panel]:
        network = inside(outputs).reshape(rows, columns, 3, step * scale, step * scale).permute(2, 0, 3, 1, 4)
        shown = {
            "low resolution": inside(functional.interpolate(middle.low[None], scale_factor=scale, mode="nearest")[0]),
            "bicubic": inside(bicubic(middle.low, scale)),
            "network": network.reshape(3, rows * step * scale, columns * step * scale),
            "truth": inside(middle.truth),
        }
        truth = shown["truth"]
        said = {
            name: f"{float(psnr(picture, truth)):.2f} dB" for name, picture in shown.items() if picture is not truth
        }
        pixels = {name: picture.clamp(0, 1).mul(255).round().to(torch.uint8) for name, picture in shown.items()}
        return [Panel(name, said.get(name, ""), pixels[name]) for name in shown]

    return Pictures(_stacked(_tiles(middle, scale, patch, step)), panels)


def read_picture(path: Path) -> Tensor:
    """Read a picture: [3, h, w] f32, 0..1; a grey one has three equal channels. Raises BadExampleError."""
    try:
        pixels = np.asarray(imread(path))
    except Exception as error:  # Decoders raise many types of errors for damaged files.
        raise BadExampleError(f"{path}: cannot be read as a picture: {type(error).__name__}: {error}") from error
    if pixels.ndim == 2:
        pixels = np.stack([pixels] * 3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4) or pixels.dtype not in (np.uint8, np.uint16):
        raise BadExampleError(
            f"{path}: a picture of shape {pixels.shape} and {pixels.dtype}; it must be grey or colour, of 8 or 16 bits"
        )
    largest = float(np.iinfo(pixels.dtype).max)
    return torch.from_numpy(pixels[:, :, :3].astype(np.float32)).permute(2, 0, 1).contiguous().div(largest)


def read_pair(path: Path, small: Path | None, scale: int, patch: int) -> Pair:
    """Read a picture, cut to a multiple of `scale`, and the picture in the file `small`.

    If there is no such file, the picture is reduced by bicubic and rounded to 8 bits. Raises BadExampleError, also if
    no patch of `patch` x `patch` low-resolution pixels fits into the picture.
    """
    truth = read_picture(path)
    height, width = (side // scale for side in truth.shape[1:])
    truth = truth[:, : height * scale, : width * scale]
    low = read_picture(small) if small is not None and small.exists() else smaller(truth, scale)
    if low.shape[1:] != (height, width):
        raise BadExampleError(
            f"{small}: {low.shape[2]} x {low.shape[1]} pixels; {path.name} made {scale} times smaller has "
            f"{width} x {height}"
        )
    if min(height, width) < patch:
        raise BadExampleError(f"{path}: {width} x {height} pixels when made smaller; data.patch is {patch}")
    return Pair(low, truth)


def _check(scale: int, patch: int) -> None:
    """Raise ValueError if PSNR leaves out whole tiles."""
    border = 2 * PSNR_BORDER_PIXELS
    if patch * scale <= border:
        raise ValueError(
            f"data.patch is {patch}: of {patch * scale} pixels on a side {border} are border, which PSNR leaves out; "
            f"set {border // scale + 1} or more"
        )


def _files(root: Path, part: str, scale: int) -> list[tuple[Path, Path]]:
    """Every picture of a part, and the file of its low resolution, which may be missing."""
    places = {
        root / f"DIV2K_{part}_HR": root / f"DIV2K_{part}_LR_bicubic",
        root / part / "HR": root / part / "LR_bicubic",
        root / part: root / part / "LR_bicubic",
    }
    for high, low in places.items():
        if paths := sorted(path for path in high.glob("*") if path.suffix.lower() in SUFFIXES):
            return [(path, low / f"X{scale}" / f"{path.stem}x{scale}{path.suffix}") for path in paths]
    raise BadExampleError(f"{root}: no {part} pictures; they may be in {', '.join(map(str, places))}")


def _data(train: Crops, kept: Sequence[Pair], scale: int, shown: Pictures | None = None) -> Data:
    """The metric's baseline is the bicubic enlargement of the held-out tiles `kept`."""
    baseline = torch.stack([psnr(bicubic(low, scale), truth) for low, truth in kept]).mean()
    return Data(train, _stacked(kept), Metric("psnr", "dB", "higher", psnr, float(baseline), "bicubic"), shown)


def _stacked(pairs: Sequence[Pair]) -> InMemory:
    """Examples of pairs of equal size; copies them."""
    return InMemory(torch.stack([low for low, _ in pairs]), target=torch.stack([truth for _, truth in pairs]))


def _tiles(pair: Pair, scale: int, side: int, step: int) -> list[Pair]:
    """Tiles of a picture, every `step` pixels, without the rest at the right and at the bottom."""
    height, width = pair.low.shape[1:]
    return [
        _cut(pair, top, left, side, side, scale)
        for top in range(0, height - side + 1, step)
        for left in range(0, width - side + 1, step)
    ]


def _cut(pair: Pair, top: int, left: int, height: int, width: int, scale: int) -> Pair:
    low, truth = (
        picture[:, top * by : (top + height) * by, left * by : (left + width) * by]
        for picture, by in zip(pair, (1, scale), strict=True)
    )
    return Pair(low, truth)


def _evenly(found: Sequence[T], count: int) -> list[T]:
    """`count` of these, evenly spaced; all of them if `count` is larger."""
    return [found[number * len(found) // count] for number in range(count)] if count < len(found) else list(found)
