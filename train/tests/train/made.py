"""Small data of each kind in a test's folder, and comparisons of batches."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from skimage.io import imsave

from netfold_train import Batch, Data
from netfold_train.data import make_data
from netfold_train.recipe import Factory
from netfold_train.zoo.data import text

# No supported file format begins with these bytes.
GARBAGE = b"this is no picture, no table and no archive"

FASHION = Path("/usr/share/datasets/fashion-mnist")
needs_fashion_mnist = pytest.mark.skipif(
    not FASHION.is_dir(), reason="no Fashion-MNIST here (Debian: apt-get install dataset-fashion-mnist)"
)


def data(name: str, **options: object) -> Data:
    return make_data(Factory.model_validate({"name": name, **options}))


def equal(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(left, right)
        for left, right in zip((*one.inputs, one.target), (*other.inputs, other.target), strict=True)
    )


def joined(batches: Sequence[Batch]) -> Batch:
    inputs = tuple(torch.cat(column) for column in zip(*(batch.inputs for batch in batches), strict=True))
    return Batch(inputs, torch.cat([batch.target for batch in batches]))


def hashes(batch: Batch) -> set[bytes]:
    return {hashlib.sha256(row.numpy().tobytes()).digest() for row in batch.inputs[0].contiguous()}


def everything(examples: object) -> Batch:
    count = len(examples)  # type: ignore[arg-type]
    found: Batch = examples.batch(range(count), range(count))  # type: ignore[attr-defined]
    return found


def pictures(folder: Path, names: Sequence[str], height: int, width: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        draw = np.random.default_rng(
            int.from_bytes(hashlib.sha256(f"{folder.name}{name}".encode()).digest()[:4], "big")
        )
        imsave(folder / name, draw.integers(256, size=(height, width, 3), dtype=np.uint8), check_contrast=False)


def div2k(root: Path) -> Path:
    pictures(root / "DIV2K_train_HR", ["0001.png", "0002.png", "0003.png"], 41, 50)
    pictures(root / "DIV2K_valid_HR", ["0801.png", "0802.png"], 48, 40)
    return root


def class_folders(root: Path) -> Path:
    for part, kind, count in (("train", "boot", 3), ("train", "coat", 2), ("valid", "boot", 1), ("valid", "coat", 3)):
        pictures(root / part / kind, [f"{part}{kind}{number}.png" for number in range(count)], 20, 24)
    return root


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes())


def fashion(root: Path) -> Path:
    """Pictures of class c have values of about 80 c, so the nearest mean is right, except for one wrong label."""
    draw = np.random.default_rng(5)
    root.mkdir()
    for part, count in (("train", 30), ("t10k", 10)):
        classes = np.arange(count, dtype=np.uint8) % 3
        noise = draw.integers(20, size=(count, 28, 28))
        grey = (classes[:, None, None] * 80 + noise).astype(np.uint8)
        if part == "t10k":
            classes[0] = 2
        (root / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(grey))
        (root / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(classes))
    return root


def python(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a standard library of 40 files, a copy of one of them, and a test, which is left out."""
    (root / "json").mkdir(parents=True)
    (root / "test").mkdir()
    for number in range(40):
        place = root / ("json" if number % 2 else ".") / f"m{number}.py"
        place.write_text("".join(f"value_{number}_{line} = {number * line}\n" for line in range(30)))
    (root / "copy.py").write_text((root / "m0.py").read_text())
    (root / "test" / "test_m.py").write_text("never = 0\n" * 99)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(root))
    return root


def table(path: Path, rows: pandas.DataFrame) -> str:
    if path.suffix == ".parquet":
        rows.to_parquet(path)
    else:
        rows.to_csv(path, index=False)
    return str(path)


ROWS = pandas.DataFrame(
    {
        "age": [10.0, 20.0, None, 30.0] * 5,
        "shop": ["b", "a", "b", None] * 5,
        "size": [3, 1, 3, 3] * 5,
        "bought": [1, 0, 1, 0] * 5,
        "unread": ["x"] * 20,
    }
)
COLUMNS = {"dense": ["age"], "categorical": ["shop", "size"], "target": "bought"}
