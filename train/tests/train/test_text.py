"""Text and token files: held-out files, masks, windows, and errors of damaged files."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from made import data, everything, python

from netfold_train import BadExampleError
from netfold_train.models.model import IGNORED
from netfold_train.zoo.data import text


def test_held_out_source_files_are_whole_and_in_no_training_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = python(tmp_path, monkeypatch)
    train, held = (part.tobytes().decode() for part in text._two_parts(0.2))
    contents = {path.read_text() for path in root.rglob("m*.py")}
    assert len(contents) == 40 and len(train) + len(held) == sum(map(len, contents))
    assert sum(content in held for content in contents) == 8
    assert all((content in held) != (content in train) for content in contents)
    assert "never" not in train + held
    with pytest.raises(ValueError, match=r"data.held_out is 1.0: it leaves none of 40 files"):
        data("source", held_out=1.0)
    with pytest.raises(ValueError, match=r"data.context is 100000; one part of the text has fewer than 100001 tokens"):
        data("source", context=100_000)


def test_tokens_of_the_source_are_all_its_bytes_and_the_metric_counts_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = python(tmp_path, monkeypatch)
    (root / "other.py").write_bytes("länger = 'größer'\n".encode() * 30 + b"\xff\xfe\n" * 9)
    train, held = text.source_parts(0.2)
    tokenizer = text._byte_pairs(train, 300)
    assert np.array_equal(text._source_tokens(str(root), 300, 0.2)[1], text._encoded(held, tokenizer))
    for part in (train, held):
        ids, lengths = text._encoded(part, tokenizer), text._token_bytes(part, tokenizer)
        letters = "".join(tokenizer.id_to_token(int(number)) for number in ids)
        alphabet = {character: byte for byte, character in text_of_bytes().items()}
        spelt = bytes(alphabet[letter] for letter in letters).decode().encode("latin-1")
        assert spelt == b"".join(part) and lengths.sum() == len(spelt) and len(ids) < 0.6 * len(spelt)
    made = data("source-tokens", context=16, vocabulary=300, held_out=0.2)
    examples = everything(made.held_out)
    assert torch.equal(examples.inputs[0].flatten()[1:], examples.target.flatten()[:-1])
    # All tokens equally likely: log2(300) bits a token, over the bytes that these tokens are.
    same = made.metric.score(torch.zeros(len(examples), 16, 300), examples.target)
    lengths = text._token_bytes(held, tokenizer)
    scored = examples.target.numel()
    assert float(same.mean()) == pytest.approx(math.log2(300) * scored / lengths[1 : scored + 1].sum())
    with pytest.raises(ValueError, match=r"data.vocabulary is 255; it must be 256 to 65536"):
        data("source-tokens", vocabulary=255)


def text_of_bytes() -> dict[int, str]:
    """GPT-2's letters of bytes: printable ones are themselves, the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def test_no_window_of_a_held_out_file_trains_the_classes_of_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for label, package in enumerate(text.PACKAGES):
        (tmp_path / package / "test").mkdir(parents=True)
        for number in range(label + 5):
            (tmp_path / package / f"m{number}.py").write_text(f"{label:04}{number:04}" * 10)
        (tmp_path / package / "test" / "m.py").write_text("never = 0" * 9)
    for label in range(4):  # Too short for a window; some are held out.
        (tmp_path / text.PACKAGES[label] / "short.py").write_text(f"# {label}")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    made = data("source-classes", context=8)
    train, held = everything(made.train), everything(made.held_out)
    files = [{bytes(row.tolist()).decode() for row in part.inputs[0]} for part in (train, held)]
    assert not files[0] & files[1] and len(files[0]) + len(files[1]) == sum(range(5, 13))
    assert train.target.bincount().min() > 0 and held.target.bincount().min() > 0
    for part in (train, held):
        assert part.inputs[0].dtype == torch.int64
        assert [int(bytes(row[:4].tolist())) for row in part.inputs[0]] == part.target.tolist()
    logits = torch.nn.functional.one_hot(held.target, 8).float()
    assert bool(made.metric.score(logits, held.target).all())
    assert made.metric.baseline == pytest.approx(30 / len(held))  # Of the 12 files of xml 9 train, the most.
    (tmp_path / "xml" / "m0.py").unlink()
    for number in range(5, 12):
        (tmp_path / "xml" / f"m{number}.py").unlink()
    text._texts.cache_clear()
    with pytest.raises(BadExampleError, match=r"xml: 4 Python files; 5 are needed"):
        data("source-classes", context=8)


def test_every_example_has_the_same_number_of_masks_at_random_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(tmp_path, monkeypatch)
    masked, plain = data("masked-source", context=20, masked=0.15), data("source", context=20)
    batch, whole = masked.train.batch(range(50), range(100, 150)), plain.train.batch(range(50), range(50))
    asked = batch.target != IGNORED
    assert asked.sum(1).tolist() == [3] * 50 and torch.equal(asked, batch.inputs[0] == text.MASK)
    assert torch.equal(torch.where(asked, batch.target, batch.inputs[0]), whole.inputs[0])
    assert len({tuple(row.nonzero().flatten().tolist()) for row in asked}) > 40
    # Right bytes everywhere score 1 at each mask. Right bytes only at places without a mask score 0.
    logits = torch.nn.functional.one_hot(whole.inputs[0], 257).float()
    assert masked.metric.score(logits, batch.target).sum(1).tolist() == [3] * 50
    assert masked.metric.items is not None and int(masked.metric.items(batch.target)) == 150
    wrong = torch.nn.functional.one_hot(torch.where(asked, (whole.inputs[0] + 1) % 256, whole.inputs[0]), 257)
    assert masked.metric.score(wrong, batch.target).sum() == 0
    with pytest.raises(ValueError, match=r"data.masked is 0.01: that masks 0 of 20 bytes"):
        data("masked-source", context=20, masked=0.01)


def test_the_baselines_of_a_text_that_repeats_itself_are_nearly_perfect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / f"m{number}.py").write_text("abcd" * (50 + number))
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert data("source", context=16, held_out=0.1).metric.baseline < 0.2
    assert data("masked-source", context=16, held_out=0.1).metric.baseline == 1.0


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_of_a_token_file_are_adjacent_and_the_last_hundredth_is_held_out(dtype: str, tmp_path: Path) -> None:
    np.arange(2000, dtype=dtype).tofile(tmp_path / "train.bin")
    found = data("tokens", train=str(tmp_path / "train.bin"), vocabulary=2000, context=4, dtype=dtype)
    batch = found.train.batch([0, 493], [1, 2])
    assert batch.inputs[0].tolist() == [[0, 1, 2, 3], [1972, 1973, 1974, 1975]] and batch.target[1, -1] == 1976
    # The last hundredth are 20 tokens: four windows, and the token after each.
    assert everything(found.held_out).inputs[0][:, 0].tolist() == [1980, 1984, 1988, 1992]
    # Each of 1980 training tokens occurs once and counts twice. The held-out tokens count once.
    assert found.metric.baseline == pytest.approx(math.log2(1980 * 2 + 20))
    np.full(50, 3, dtype).tofile(tmp_path / "val.bin")
    held = data(
        "tokens", train=str(tmp_path / "train.bin"), held_out=str(tmp_path / "val.bin"), vocabulary=2000, context=4,
        dtype=dtype, windows=5,
    ).held_out  # fmt: skip
    assert len(held) == 5 and everything(held).inputs[0].unique().tolist() == [3]


def test_an_error_of_a_token_file_names_the_file_and_the_token(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    np.arange(2000, dtype="<u2").tofile(path)
    found = data("tokens", train=str(path), vocabulary=2000, context=4)
    os.truncate(path, 600)
    with pytest.raises(BadExampleError, match=r"train.bin: 0 of 5 tokens at token 400; it has shrunk"):
        found.train.batch([100], [0])
    np.array([7] * 1000, "<u2").tofile(path)
    with pytest.raises(BadExampleError, match=r"train.bin: token 0 is 7; data.vocabulary is 5"):
        data("tokens", train=str(path), vocabulary=5, context=4)
    path.write_bytes(b"odd")
    with pytest.raises(BadExampleError, match=r"train.bin: 3 bytes do not divide into uint16 tokens"):
        data("tokens", train=str(path), vocabulary=5)
    path.write_bytes(b"even")
    with pytest.raises(ValueError, match=r"data.context is 128; .*train.bin has fewer than 129 tokens"):
        data("tokens", train=str(path), vocabulary=1 << 16)
