"""Data: examples are functions of number and seed, held-out ones are never trained on, bad files are named."""

from __future__ import annotations

import gzip
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from skimage.io import imsave

from netfold.train import Batch, Data, UnreadableError
from netfold.train.datasets import flights, make_data, photos, text
from netfold.train.datasets.fashion import read_idx
from netfold.train.recipe import Factory

FASHION = Path("/usr/share/datasets/fashion-mnist")
# Nobody else's: an error that names them is about the file that was spoilt.
GARBAGE = b"this is no picture, no table and no archive"


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


# Each kind of data, small, in a folder of its own.


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
    """Pictures of class c are about 80 c everywhere: the nearest mean is right, but for one that is labelled wrong."""
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
    """A standard library of 40 files, of which one is there twice and one is no text of its own."""
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
        # Drawn from nothing: what is held out and what is trained on can be held against each other.
        assert not hashes(everything(one.train)) & hashes(held)


def test_photographs_that_are_held_out_are_no_others() -> None:
    folder = Path(photos.skimage.__file__).parent / "data"
    train, held = (
        {hashlib.sha256((folder / name).read_bytes()).digest() for name in names}
        for names in (photos.TRAINING, photos.HELD_OUT)
    )
    assert len(train) == len(photos.TRAINING) and len(held) == len(photos.HELD_OUT) and not train & held


def test_whole_files_of_source_are_held_out_and_none_that_is_there_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = python(tmp_path, monkeypatch)
    train, held = (part.tobytes().decode() for part in text._two_parts(0.2))
    contents = {path.read_text() for path in root.rglob("m*.py")}
    assert len(contents) == 40 and len(train) + len(held) == sum(map(len, contents))
    assert sum(content in held for content in contents) == 8
    assert all((content in held) != (content in train) for content in contents)
    assert "never" not in train + held
    with pytest.raises(ValueError, match=r"data.held_out is 1.0: of 40 files"):
        data("source", held_out=1.0)
    with pytest.raises(ValueError, match=r"data.context is 100000; of the text's two parts one has \d+ bytes"):
        data("source", context=100_000)


def test_every_example_has_exactly_as_many_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(tmp_path, monkeypatch)
    masked, plain = data("masked-source", context=20, masked=0.15), data("source", context=20)
    batch, whole = masked.train.batch(range(50), range(100, 150)), plain.train.batch(range(50), range(50))
    asked = batch.target != text.NOT_ASKED
    assert asked.sum(1).tolist() == [3] * 50 and torch.equal(asked, batch.inputs[0] == text.MASK)
    assert torch.equal(torch.where(asked, batch.target, batch.inputs[0]), whole.inputs[0])
    assert len({tuple(row.nonzero().flatten().tolist()) for row in asked}) > 40
    # A model that knows finds all; one that names the right byte only where nothing is asked finds nothing.
    logits = torch.nn.functional.one_hot(whole.inputs[0], 257).float()
    assert masked.metric.score(logits, batch.target).tolist() == [1.0] * 50
    wrong = torch.nn.functional.one_hot(torch.where(asked, (whole.inputs[0] + 1) % 256, whole.inputs[0]), 257)
    assert masked.metric.score(wrong, batch.target).tolist() == [0.0] * 50
    with pytest.raises(ValueError, match=r"data.masked is 0.01: that masks 0 of 20 bytes"):
        data("masked-source", context=20, masked=0.01)


def test_text_that_is_all_one_row_of_letters_costs_a_bigram_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / f"m{number}.py").write_text("abcd" * (50 + number))
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert data("source", context=16, held_out=0.1).metric.baseline < 0.2
    assert data("masked-source", context=16, held_out=0.1).metric.baseline == 1.0


def test_bicubic_is_the_baseline_and_the_truth_is_beyond_it(tmp_path: Path) -> None:
    found = data("div2k", root=str(div2k(tmp_path)), patch=12, tiles=4)
    held = everything(found.held_out)
    enlarged = torch.nn.functional.interpolate(held.inputs[0], scale_factor=2, mode="bicubic", antialias=True)
    assert found.metric.baseline == pytest.approx(float(found.metric.score(enlarged, held.target).mean()))
    assert found.metric.score(held.target, held.target).min() > 90
    # One pixel of 16 x 16 inside (24 less the border), three colours, off by 51/255: 10 log10(3 x 256 x 25 / 3).
    off = held.target[:1].clone()
    off[0, :, 9, 9] = (held.target[0, :, 9, 9] + 0.2) if (held.target[0, :, 9, 9] < 0.8).all() else 0.0
    expected = -10 * torch.log10(((off - held.target[:1]) ** 2).sum() / (3 * 16 * 16))
    assert float(found.metric.score(off, held.target[:1])) == pytest.approx(float(expected), abs=1e-3)


def test_small_pictures_that_are_there_are_taken_and_others_made(tmp_path: Path) -> None:
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
    with pytest.raises(UnreadableError, match=r"0002x2.png: 24 x 20 pixels.* not 0002.png's 50 x 41"):
        made.train.batch([1], [8])


@pytest.mark.parametrize("layout", ["train/HR", "train"])
def test_pictures_in_folders_of_other_names_are_found(layout: str, tmp_path: Path) -> None:
    for part in ("train", "valid"):
        pictures(tmp_path / layout.replace("train", part), ["a.png", "b.png"], 30, 30)
    assert len(data("div2k", root=str(tmp_path), patch=12, repeat=3, tiles=2).train) == 6


def test_held_out_squares_are_the_middle_and_classes_are_numbered_by_name(tmp_path: Path) -> None:
    found = data("class-folders", root=str(class_folders(tmp_path)), size=20)
    held = everything(found.held_out)
    assert held.target.tolist() == [0, 1, 1, 1] and everything(found.train).target.tolist() == [0, 0, 0, 1, 1]
    first = photos.pairs.read_picture(tmp_path / "valid" / "boot" / "validboot0.png")
    assert torch.allclose(held.inputs[0][0], first[:, :, 2:22] * 2 - 1, atol=1e-5)
    # Boots are the most frequent in training, and a quarter of what is held out.
    assert found.metric.baseline == 0.25
    assert found.metric.score(torch.eye(2)[[0, 1, 0, 1]], held.target).tolist() == [True, True, False, True]


def test_the_nearest_class_mean_is_counted_on_pictures_it_was_not_made_of(tmp_path: Path) -> None:
    assert data("fashion-mnist", root=str(fashion(tmp_path / "f"))).metric.baseline == 0.9
    found = data("fashion-mnist", root=str(tmp_path / "f"), held_out=5)
    assert len(found.held_out) == 5 and found.metric.baseline == 0.8
    assert float(everything(found.train).inputs[0].mean()) == pytest.approx(0, abs=1e-5)


@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_fashion_mnist_is_as_its_authors_made_it() -> None:
    found = data("fashion-mnist")
    assert (len(found.train), len(found.held_out)) == (60000, 10000)
    assert torch.bincount(everything(found.held_out).target).tolist() == [1000] * 10
    assert found.metric.baseline == pytest.approx(0.677, abs=0.002)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".parquet"])
def test_categories_that_training_has_not_seen_are_0(suffix: str, tmp_path: Path) -> None:
    seen = table(tmp_path / f"seen{suffix}", ROWS)
    new = pandas.DataFrame({"age": [20.0, 50.0], "shop": ["a", "never"], "size": [3, 2], "bought": [0, 1], "unread": 1})
    found = data("table", train=seen, held_out=table(tmp_path / f"new{suffix}", new), **COLUMNS)
    dense, categorical = everything(found.held_out).inputs
    assert categorical.tolist() == [[1, 2], [0, 0]]
    assert everything(found.train).inputs[1][:4].tolist() == [[2, 2], [1, 1], [2, 2], [0, 2]]
    # The training rows' mean and deviation: 10, 20, 30.
    assert dense.flatten().tolist() == pytest.approx([0.0, 30 / math.sqrt(200 / 3)])
    assert everything(found.train).inputs[0][:4, 0].tolist() == pytest.approx([-1.2247, 0, 0, 1.2247], abs=1e-4)
    assert found.metric.baseline == pytest.approx(math.log(2))


def test_the_rate_by_columns_is_a_tables_baseline(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", ROWS)
    found = data("table", train=path, baseline=["shop"], **COLUMNS)
    # 18 rows to train on, half of them bought: 5 of 5 of shop b's... and 0 of 5 of a's; held out: b, missing.
    b, missing = (9 + 0.5) / (9 + 1), (0 + 0.5) / (4 + 1)
    assert len(found.train) == 18 and everything(found.held_out).inputs[1][:, 0].tolist() == [2, 0]
    assert found.metric.baseline == pytest.approx(-(math.log(b) + math.log(1 - missing)) / 2)
    assert found.metric.baseline_is == "the rate by shop"
    with pytest.raises(ValueError, match=r"data.baseline has 'age'"):
        data("table", train=path, baseline=["age"], **COLUMNS)


def test_a_table_that_cannot_be_split_or_read_alike_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "rows.csv", ROWS)
    with pytest.raises(ValueError, match=r"column 'bought' is named twice"):
        data("table", train=path, dense=["age", "bought"], categorical=["shop"], target="bought")
    words = table(tmp_path / "words.csv", ROWS.assign(size="large"))
    with pytest.raises(UnreadableError, match=r"words.csv: column 'size' is .*; in .*rows.csv it is int64"):
        data("table", train=path, held_out=words, **COLUMNS)
    with pytest.raises(ValueError, match=r"a tenth of the 4 rows of .*few.csv is none"):
        data("table", train=table(tmp_path / "few.csv", ROWS[:4]), **COLUMNS)
    with pytest.raises(UnreadableError, match=r"empty.csv: no rows"):
        data("table", train=table(tmp_path / "empty.csv", ROWS[:0]), **COLUMNS)


def test_a_column_has_one_type_however_long_the_file_is(tmp_path: Path) -> None:
    # Numbers for longer than pandas reads in one piece, then a word: 7 and "7" would be two categories.
    length = 300_000
    rows = pandas.DataFrame({"shop": ["7"] * length + ["b", "7"], "bought": [0, 1] * (length // 2 + 1)})
    found = data(
        "table", train=table(tmp_path / "long.csv", rows), held_out=table(tmp_path / "end.csv", rows[-4:]), dense=[],
        categorical=["shop"], target="bought",
    )  # fmt: skip
    assert everything(found.train).inputs[1].unique().tolist() == [1, 2]
    assert everything(found.held_out).inputs[1][:, 0].tolist() == [1, 1, 2, 1]


def flights_folder(folder: Path) -> Path:
    folder.mkdir()
    days = pandas.DataFrame([(1, day) for day in range(1, 31)] * 4, columns=["month", "day"])
    number = np.arange(len(days))
    hour = (number + number // 30) % 5 + 6
    table(
        folder / "flights.csv.zip",
        days.assign(
            carrier=np.where(number % 2, "AA", "UA"),
            origin="EWR",
            dest=np.where(number % 3, "IAH", "ORD"),
            hour=hour,
            distance=1000.0 + number,
            time_hour=[f"2013-01-{day:02}T{hour:02}:00:00Z" for day, hour in zip(days["day"], hour, strict=True)],
            arr_delay=np.where(number == 7, np.nan, np.where(number % 2, 16.0, 15.0)),
            dep_delay=number,
        ),
    )
    hours = [(f"2013-01-{day:02}T{hour:02}:00:00Z", day * 24.0 + hour) for day in range(1, 31) for hour in range(6, 10)]
    weather = pandas.DataFrame({"time_hour": [at for at, _ in hours], "temp": [value for _, value in hours]})
    table(folder / "weather.csv", weather.assign(origin="EWR", **dict.fromkeys(flights.WEATHER[1:], 1.0)))
    return folder


def test_flights_are_held_out_by_whole_days_and_the_weather_is_their_hours(tmp_path: Path) -> None:
    found = flights.flights_in(flights_folder(tmp_path / "data"))
    # 30 days, 4 flights each; days 10, 20, 30 are held out; one flight was cancelled.
    assert (len(found.train), len(found.held_out)) == (27 * 4 - 1, 3 * 4)
    dense, categorical = everything(found.train).inputs
    assert dense.shape[1] == len(flights.DENSE) and categorical.shape[1] == len(flights.CATEGORICAL)
    carrier, hour = categorical[:, 0], categorical[:, 5]
    assert torch.equal(everything(found.train).target, (carrier == 1).float()), (
        "AA is late: 16 minutes, and UA is not: 15"
    )
    # No weather is known for the fifth hour: the mean stands there, 0. The rest rises with day and hour.
    temperature = dense[:, flights.DENSE.index("temp")]
    assert (temperature[hour == 5] == 0).all() and len(temperature[hour < 5].unique()) > 50
    assert float(temperature[:26].diff().mean()) > 0


def test_the_real_flights_are_a_years() -> None:
    found = data("flights")
    assert len(found.train) + len(found.held_out) == 327_346
    assert 0.45 < found.metric.baseline < 0.56
    categorical = everything(found.held_out).inputs[1]
    # Every month and weekday is on both sides; what training has not seen is rare.
    assert categorical[:, 3].unique().tolist() == list(range(1, 13)) and categorical[:, 4].unique().tolist() == [
        *range(1, 8)
    ]
    assert float((categorical == 0).double().mean()) < 0.001


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_read_where_they_lie(dtype: str, tmp_path: Path) -> None:
    np.arange(2000, dtype=dtype).tofile(tmp_path / "train.bin")
    found = data("tokens", train=str(tmp_path / "train.bin"), vocabulary=2000, context=4, dtype=dtype)
    batch = found.train.batch([0, 493], [1, 2])
    assert batch.inputs[0].tolist() == [[0, 1, 2, 3], [1972, 1973, 1974, 1975]] and batch.target[1, -1] == 1976
    # The last hundredth, 20 tokens: four windows and the token behind each.
    assert everything(found.held_out).inputs[0][:, 0].tolist() == [1980, 1984, 1988, 1992]
    # Each of 1980 tokens came once and counts twice; those held out did not come.
    assert found.metric.baseline == pytest.approx(math.log2(1980 * 2 + 20))
    np.full(50, 3, dtype).tofile(tmp_path / "val.bin")
    held = data(
        "tokens", train=str(tmp_path / "train.bin"), held_out=str(tmp_path / "val.bin"), vocabulary=2000, context=4,
        dtype=dtype, windows=5,
    ).held_out  # fmt: skip
    assert len(held) == 5 and everything(held).inputs[0].unique().tolist() == [3]


def test_a_token_file_that_shrinks_or_lies_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(2000, dtype="<u2").tofile(path)
    found = data("tokens", train=str(path), vocabulary=2000, context=4)
    os.truncate(path, 600)
    with pytest.raises(UnreadableError, match=r"train.bin: 0 of 5 tokens at token 400; it has shrunk"):
        found.train.batch([100], [0])
    np.array([7] * 1000, "<u2").tofile(path)
    with pytest.raises(UnreadableError, match=r"train.bin: token 0 is 7; data.vocabulary is 5"):
        data("tokens", train=str(path), vocabulary=5, context=4)
    path.write_bytes(b"odd")
    with pytest.raises(UnreadableError, match=r"train.bin: 3 bytes are no whole number of uint16 tokens"):
        data("tokens", train=str(path), vocabulary=5)
    path.write_bytes(b"even")
    with pytest.raises(UnreadableError, match=r"train.bin: 2 tokens, which is no window"):
        data("tokens", train=str(path), vocabulary=1 << 16)


def test_a_picture_that_vanishes_or_is_garbage_is_named(tmp_path: Path) -> None:
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
        with pytest.raises(UnreadableError, match=rf"{name}: no picture can be read there"):
            examples.batch([number], [0])
    assert len(found.train.batch([0], [0])) == 1
    pictures(tmp_path / "pairs/DIV2K_train_HR", ["0001.png"], 20, 60)
    with pytest.raises(UnreadableError, match=r"0001.png: 30 x 10 pixels when made smaller; data.patch is 12"):
        found.train.batch([0], [0])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "fashion-mnist", "root": "{}/none"}, "none: there is no such folder; install Debian's"),
        ({"name": "fashion-mnist", "root": "{}"}, "train-images-idx3-ubyte.gz: No such file"),
        ({"name": "div2k", "root": "{}"}, "no pictures to train with; they may lie in .*DIV2K_train_HR"),
        ({"name": "class-folders", "root": "{}"}, "no folder valid, val or test with held-out pictures"),
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
def test_what_cannot_be_read_is_said_with_its_path(asked: dict[str, object], said: str, tmp_path: Path) -> None:
    for name in ("bad.parquet", "bad.csv"):
        (tmp_path / name).write_bytes(GARBAGE)
    table(tmp_path / "words.csv", ROWS.assign(age="old"))
    table(tmp_path / "inf.csv", ROWS.assign(age=[1.0, 2.0, 3.0, math.inf] * 5))
    table(tmp_path / "none_yet.csv", ROWS.assign(bought=[0, None] * 10))
    table(tmp_path / "twos.csv", ROWS.assign(bought=[0, 2] * 10))
    options = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in asked.items()}
    with pytest.raises(UnreadableError, match=said):
        make_data(Factory.model_validate(options))


def test_an_idx_file_that_is_cut_or_of_another_type_is_named(tmp_path: Path) -> None:
    path, whole = tmp_path / "x.gz", idx(np.arange(6, dtype=np.uint8).reshape(2, 3))
    path.write_bytes(whole)
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    cut = gzip.compress(gzip.decompress(whole)[:-1])
    other = gzip.compress(bytes((0, 0, 13, 1)) + bytes(8))
    for raw, said in (
        (whole[:-9], "ended before"),
        (cut, "5 bytes behind"),
        (other, "begins with 00000d01"),
        (GARBAGE, "x.gz: "),
    ):
        path.write_bytes(raw)
        with pytest.raises(UnreadableError, match=said):
            read_idx(path)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"name": "photos", "scale": 1}, "data.scale is 1"),
        ({"name": "photos", "patch": 4}, "data.patch is 4: of 8 pixels .* 5 or more"),
        ({"name": "tokens", "train": "x", "vocabulary": 9, "dtype": "int8"}, "data.dtype is 'int8'"),
        ({"name": "photos", "patch": 400}, "data.patch is 400; the smallest side of a photograph has 95 pixels at"),
        ({"name": "photos", "tiles": 0}, "data.tiles is 0"),
        ({"name": "fashion-mnist", "held_out": 0}, "data.held_out is 0"),
        ({"name": "tokens", "train": "x", "vocabulary": 9, "windows": 0}, "data.windows is 0"),
        ({"name": "photo"}, "there is class-folders, "),
    ],
)
def test_an_option_of_the_data_that_cannot_be_is_named(asked: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_data(Factory.model_validate(asked))
