"""All data: examples are functions of number and seed; errors name the file or the option."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made import (
    COLUMNS,
    GARBAGE,
    ROWS,
    class_folders,
    data,
    div2k,
    equal,
    everything,
    fashion,
    hashes,
    joined,
    python,
    table,
)

from netfold_train import BadExampleError, Data
from netfold_train.data import make_data
from netfold_train.recipe import Factory


@pytest.mark.parametrize(
    "kind", ["photos", "div2k", "class-folders", "fashion-mnist", "source", "masked-source", "tokens"]
)
def test_an_example_is_a_function_of_its_number_and_its_seed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Data:
        match kind:
            case "photos":
                return data(kind, patch=12, tiles=5)
            case "div2k":
                return data(kind, root=str(tmp_path), patch=12, tiles=5)
            case "class-folders":
                return data(kind, root=str(tmp_path), size=8)
            case "fashion-mnist":
                return data(kind, root=str(tmp_path / "fashion"))
            case "tokens":
                return data(kind, train=str(tmp_path / "train.bin"), vocabulary=2000, context=4)
            case _:
                return data(kind, context=16, held_out=0.1)

    if kind == "div2k":
        div2k(tmp_path)
    elif kind == "class-folders":
        class_folders(tmp_path)
    elif kind == "fashion-mnist":
        fashion(tmp_path / "fashion")
    elif kind == "tokens":
        np.arange(1000, dtype="<u2").tofile(tmp_path / "train.bin")
    elif "source" in kind:
        python(tmp_path / "lib", monkeypatch)
    one, other = made(), made()
    together = one.train.batch([3, 0, 1], [11, 12, 13])
    alone = [other.train.batch([index], [seed]) for index, seed in ((3, 11), (0, 12), (1, 13))]
    assert equal(together, joined(alone))
    assert one.metric.baseline == other.metric.baseline and math.isfinite(one.metric.baseline)
    held = everything(one.held_out)
    assert held.target.shape[1:] == together.target.shape[1:] and len(held) == len(one.held_out)
    assert [tensor.shape[1:] for tensor in held.inputs] == [tensor.shape[1:] for tensor in together.inputs]
    if kind in ("photos", "div2k", "class-folders", "masked-source"):
        assert not equal(one.train.batch([3], [11]), one.train.batch([3], [12]))
    if kind not in ("photos", "div2k", "class-folders", "masked-source"):
        # These examples have no random choices, so held-out and training examples can be compared.
        assert not hashes(everything(one.train)) & hashes(held)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "fashion-mnist", "root": "{}/none"}, "none: there is no such folder; install Debian's"),
        ({"name": "fashion-mnist", "root": "{}"}, "train-images-idx3-ubyte.gz: No such file"),
        ({"name": "div2k", "root": "{}"}, "no train pictures; they may be in .*DIV2K_train_HR"),
        ({"name": "class-folders", "root": "{}"}, "no folder valid, val or test with held-out pictures"),
        ({"name": "photos", "patch": 400}, "brick.png: .* pixels when made smaller; data.patch is 400"),
        ({"name": "tokens", "train": "{}/none.bin", "vocabulary": 9}, "none.bin: No such file"),
        ({"name": "table", "train": "{}/none.csv", **COLUMNS}, "none.csv: FileNotFoundError"),
        ({"name": "table", "train": "{}/none.parquet", **COLUMNS}, "none.parquet: FileNotFoundError"),
        ({"name": "table", "train": "{}/bad.parquet", **COLUMNS}, "bad.parquet: ArrowInvalid"),
        ({"name": "table", "train": "{}/bad.csv", **COLUMNS}, "bad.csv: .* asked for are age, shop, size, bought"),
        ({"name": "table", "train": "{}/words.csv", **COLUMNS}, "words.csv: column 'age' is "),
        ({"name": "table", "train": "{}/inf.csv", **COLUMNS}, "inf.csv: column 'age', row 3"),
        ({"name": "table", "train": "{}/none_yet.csv", **COLUMNS}, "none_yet.csv: column 'bought', row 1: nan"),
        ({"name": "table", "train": "{}/twos.csv", **COLUMNS}, "twos.csv: column 'bought', row 1: 2"),
    ],
)  # fmt: skip
def test_an_error_of_a_file_names_its_path(asked: dict[str, object], said: str, tmp_path: Path) -> None:
    for name in ("bad.parquet", "bad.csv"):
        (tmp_path / name).write_bytes(GARBAGE)
    table(tmp_path / "words.csv", ROWS.assign(age="old"))
    table(tmp_path / "inf.csv", ROWS.assign(age=[1.0, 2.0, 3.0, math.inf] * 5))
    table(tmp_path / "none_yet.csv", ROWS.assign(bought=[0, None] * 10))
    table(tmp_path / "twos.csv", ROWS.assign(bought=[0, 2] * 10))
    options = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in asked.items()}
    with pytest.raises(BadExampleError, match=said):
        make_data(Factory.model_validate(options))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "photos", "scale": 1}, "data.scale is 1; it must be greater than or equal to 2"),
        ({"name": "photos", "patch": 4}, "data.patch is 4: of 8 pixels .* 5 or more"),
        (
            {"name": "tokens", "train": "x", "vocabulary": 9, "dtype": "int8"},
            "data.dtype is 'int8'; it must be 'uint16' or 'uint32'",
        ),
        ({"name": "photos", "tiles": 0}, "data.tiles is 0; it must be greater than 0"),
        ({"name": "fashion-mnist", "held_out": 0}, "data.held_out is 0; it must be greater than 0"),
        (
            {"name": "tokens", "train": "x", "vocabulary": 9, "windows": 0},
            "data.windows is 0; it must be greater than 0",
        ),
        ({"name": "photo"}, "did you mean photos?"),
    ],
)
def test_an_error_of_an_option_names_it(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_data(Factory.model_validate(asked))
