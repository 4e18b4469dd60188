"""A folder of pictures for super-resolution, with the layout of DIV2K (Agustsson and Timofte, CVPRW 2017).

    root/DIV2K_train_HR/0001.png     root/DIV2K_train_LR_bicubic/X2/0001x2.png
    root/DIV2K_valid_HR/0801.png     root/DIV2K_valid_LR_bicubic/X2/0801x2.png

root/train/HR with root/train/LR_bicubic/X2, or pictures in root/train itself, are accepted too. A picture without a
low-resolution file is reduced when it is read; nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netfold.train.datasets import pairs
from netfold.train.datasets.pairs import Pair
from netfold.train.examples import BadExampleError, Data


def div2k(root: str, scale: int = 2, patch: int = 48, repeat: int = 20, tiles: int = 256) -> Data:
    """Patches of `patch` x `patch` low-resolution pixels; an epoch takes `repeat` of each picture.

    Each training example reads its whole picture: about 120 ms for 2K, and 30 ms more to reduce it. `tiles` tiles of
    the valid part, equally many of each picture, are kept in memory.
    Metric: PSNR. Baseline: bicubic enlargement.
    """
    pairs.check(scale, patch, tiles)
    train, valid = _Folder.found(Path(root), "train", scale), _Folder.found(Path(root), "valid", scale)
    kept = _tiles(valid, scale, patch, tiles)
    crops = pairs.Crops(
        lambda number: _large_enough(train, number, patch), len(train.names), scale, patch, repeat * len(train.names)
    )
    return Data(crops, pairs.tiles(kept), pairs.metric(kept, scale))


@dataclass(frozen=True)
class _Folder:
    """The pictures of one part by number."""

    high: Path
    low: Path
    """May be missing."""
    names: Sequence[str]
    scale: int

    @classmethod
    def found(cls, root: Path, part: str, scale: int) -> _Folder:
        places = [
            (root / f"DIV2K_{part}_HR", root / f"DIV2K_{part}_LR_bicubic"),
            (root / part / "HR", root / part / "LR_bicubic"),
            (root / part, root / part / "LR_bicubic"),
        ]
        for high, low in places:
            names = sorted(path.name for path in high.glob("*") if path.suffix.lower() in pairs.SUFFIXES)
            if names:
                return cls(high, low / f"X{scale}", names, scale)
        raise BadExampleError(
            f"{root}: no {part} pictures; they may be in " + ", ".join(str(high) for high, _ in places)
        )

    def pair(self, number: int) -> Pair:
        """Read one or two files. Raises BadExampleError."""
        path = self.high / self.names[number]
        small = self.low / f"{path.stem}x{self.scale}{path.suffix}"
        if not small.exists():
            return pairs.shrunk(pairs.read_picture(path), self.scale)
        low, high = pairs.read_picture(small), pairs.read_picture(path)
        height, width = low.shape[1] * self.scale, low.shape[2] * self.scale
        if not (0 <= high.shape[1] - height < self.scale and 0 <= high.shape[2] - width < self.scale):
            raise BadExampleError(
                f"{small}: {low.shape[2]} x {low.shape[1]} pixels, which {self.scale} times enlarged are not "
                f"{path.name}'s {high.shape[2]} x {high.shape[1]}"
            )
        return Pair(low, high[:, :height, :width])


def _large_enough(folder: _Folder, number: int, patch: int) -> Pair:
    pair = folder.pair(number)
    height, width = pair.low.shape[1:]
    if min(height, width) < patch:
        raise BadExampleError(
            f"{folder.high / folder.names[number]}: {width} x {height} pixels when made smaller; data.patch is {patch}"
        )
    return pair


def _tiles(folder: _Folder, scale: int, patch: int, count: int) -> list[Pair]:
    kept: list[Pair] = []
    for place, number in enumerate(numbers := pairs.evenly(count, len(folder.names))):
        found = pairs.tiles_of(_large_enough(folder, number, patch), scale, patch)
        share = count * (place + 1) // len(numbers) - count * place // len(numbers)
        # Copies, because a view would keep the whole picture in memory.
        kept += [Pair(low.clone(), truth.clone()) for low, truth in (found[i] for i in pairs.evenly(share, len(found)))]
    return kept
