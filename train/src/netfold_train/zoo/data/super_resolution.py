"""Pictures in two sizes, for super-resolution: the photographs in the scikit-image wheel, and folders such as DIV2K.

Training examples are random crops, held-out examples are tiles. Metric: PSNR. Baseline: bicubic enlargement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import skimage
import torch
from pydantic import Field, PositiveInt
from skimage.io import imread
from torch import Tensor
from torch.nn import functional

from netfold_train.data.examples import BadExampleError, Data, Examples, InMemory, Metric, OneByOne, Panel, Pictures
from netfold_train.zoo.data.resolution import PSNR_BORDER_PIXELS, bicubic, psnr, smaller

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
Scale = Annotated[int, Field(ge=2)]


class Pair(NamedTuple):
    """A picture, or tiles of equal size, in two sizes: f32, 0..1."""

    low: Tensor
    """[..., 3, h, w]"""
    truth: Tensor
    """[..., 3, scale h, scale w]"""


def photos(scale: Scale = 2, patch: int = 24, patches: PositiveInt = 4096, tiles: PositiveInt | None = None) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch is `patches` random ones.

    tiles: held-out tiles to evaluate, evenly chosen; without it all.
    """
    _check(scale, patch)
    train = [photograph(name, scale, patch) for name in TRAINING]
    held = _joined(_tiles(photograph(name, scale, patch), scale, patch, patch) for name in HELD_OUT)
    examples = crops(train.__getitem__, len(train), scale, patch, patches)
    shown = mosaic(photograph(_SHOWN, scale, patch), scale, patch)
    return _data(examples, _some(held, tiles or len(held.low)), scale, shown)


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
    chosen, kept = _evenly(len(valid), tiles), []
    for place, number in enumerate(chosen):
        share = tiles * (place + 1) // len(chosen) - tiles * place // len(chosen)
        kept.append(_some(_tiles(read_pair(*valid[number], scale, patch), scale, patch, patch), share))

    def pair(number: int) -> Pair:
        return read_pair(*train[number], scale, patch)

    return _data(crops(pair, len(train), scale, patch, repeat * len(train)), _joined(kept), scale)


def crops(pair: Callable[[int], Pair], pictures: int, scale: int, patch: int, count: int) -> Examples:
    """`count` patches: the number selects the picture, the seed the place, rotation and mirroring.

    pair: the picture of a number below `pictures`, from memory or a file.
    """

    def crop(number: int, seed: int) -> Pair:
        picture, draw = pair(number % pictures), np.random.default_rng(seed)
        top, left = (int(draw.integers(extent - patch + 1)) for extent in picture.low.shape[-2:])
        low, truth = _cut(picture, top, left, patch, patch, scale)
        if draw.integers(2):
            low, truth = low.flip(2), truth.flip(2)
        if draw.integers(2):
            low, truth = low.mT, truth.mT
        return Pair(low, truth)

    return OneByOne(count, crop)


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
    tiles = _tiles(middle, scale, patch, step)

    def panels(outputs: Tensor) -> list[Panel]:
        repeated = functional.interpolate(middle.low[None], scale_factor=scale, mode="nearest")[0]
        low, enlarged, truth, network = (
            functional.pad(each, [-margin * scale] * 4)  # without the edges
            for each in (repeated, bicubic(middle.low, scale), middle.truth, outputs)
        )
        network = network.reshape(rows, columns, *network.shape[1:]).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
        shown = {"low resolution": low, "bicubic": enlarged, "network": network, "truth": truth}
        said = {name: f"{float(psnr(picture, truth)):.2f} dB" for name, picture in shown.items()} | {"truth": ""}
        return [Panel(name, said[name], each.clamp(0, 1).mul(255).round().byte()) for name, each in shown.items()]

    return Pictures(InMemory(tiles.low, target=tiles.truth), panels)


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


def _data(train: Examples, kept: Pair, scale: int, shown: Pictures | None = None) -> Data:
    """The metric's baseline is the bicubic enlargement of the held-out tiles `kept`."""
    baseline = float(psnr(bicubic(kept.low, scale), kept.truth).mean())
    metric = Metric("psnr", "dB", "higher", psnr, baseline, "bicubic")
    return Data(train, InMemory(kept.low, target=kept.truth), metric, shown)


def _tiles(pair: Pair, scale: int, side: int, step: int) -> Pair:
    """Tiles [n, ...] of a picture, every `step` pixels, without the rest at the right and at the bottom."""

    def tiles(picture: Tensor, by: int) -> Tensor:
        windows = picture.unfold(1, side * by, step * by).unfold(2, side * by, step * by)
        return windows.permute(1, 2, 0, 3, 4).flatten(0, 1)

    return Pair(tiles(pair.low, 1), tiles(pair.truth, scale))


def _cut(pair: Pair, top: int, left: int, height: int, width: int, scale: int) -> Pair:
    low = pair.low[:, top : top + height, left : left + width]
    top, left, height, width = (pixels * scale for pixels in (top, left, height, width))
    return Pair(low, pair.truth[:, top : top + height, left : left + width])


def _joined(tiles: Iterable[Pair]) -> Pair:
    return Pair(*map(torch.cat, zip(*tiles, strict=True)))


def _some(tiles: Pair, count: int) -> Pair:
    """A copy of `count` tiles, evenly spaced."""
    chosen = _evenly(len(tiles.low), count)
    return Pair(tiles.low[chosen], tiles.truth[chosen])


def _evenly(total: int, count: int) -> list[int]:
    """`count` of the numbers below `total`, evenly spaced; all of them if `count` is larger."""
    return [number * total // min(count, total) for number in range(min(count, total))]
