"""Text as bytes of Python's own standard library, to continue or with masked bytes; and files of tokens."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from netfold.train.examples import BadExampleError, Batch, Data, Metric

MASK = 256
IGNORE_INDEX = -100
"""In a target: a place that the loss ignores (torch's cross entropy)."""

# Installed packages, tables of characters, and tests.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "test", "tests", "idle_test"}
_COUNTED_TOKENS = 1 << 24
"""The largest number of training tokens that the baseline counts, from the start: files may have billions."""


def source(context: int = 128, held_out: float = 0.01) -> Data:
    """Each example: `context` bytes [context] int64, and the bytes one place later. About 10 MB, in memory.

    held_out: the share of files to hold out; files with equal content count as one. Metric: bits per byte. Baseline:
    the frequency of each byte after the byte before it, in the training files.
    """
    train, held = _two_parts(held_out)
    follows = _pairs(train[:-1], train[1:])
    asked = -np.log2(follows / follows.sum(1, keepdims=True))
    # The targets are all bytes but a window's first.
    windows = _windows(held, context)
    baseline = float(asked[windows[:, :-1], windows[:, 1:]].mean())
    return Data(
        CausalWindows(_windows(train, context)),
        CausalWindows(windows),
        Metric("bits per byte", "bit", "lower", bits, baseline, "how often a byte follows the one before it"),
    )


def masked_source(context: int = 128, masked: float = 0.15, held_out: float = 0.01) -> Data:
    """Each example: `context` bytes of which a share `masked` is replaced by the token 256.

    The target has these bytes, and -100 elsewhere. Every example has equally many, chosen by its seed. All of them are
    masked (Devlin et al. 2019 keep or replace a fifth, for later tasks without masks).
    Metric: the share of masked bytes found. Baseline: the most frequent byte between its two neighbours in the training
    files, with both neighbours visible.
    """
    count = round(masked * context)
    if not 0 < count < context:
        raise ValueError(
            f"data.masked is {masked}: that masks {count} of {context} bytes; it must mask 1 to {context - 1}"
        )
    train, held = _two_parts(held_out)
    examples = MaskedWindows(_windows(held, context), count)
    # `evaluate` uses a held-out example's number as its seed. The text's first byte has only one neighbour.
    asked = np.concatenate([number * context + examples.places(number) for number in range(len(examples))])
    asked = asked[asked > 0]
    guess = _most_often_between(train)[held[asked - 1], held[asked + 1]]
    return Data(
        MaskedWindows(_windows(train, context), count),
        examples,
        Metric(
            "masked accuracy",
            "",
            "higher",
            _found,
            float((guess == held[asked]).mean()),
            "the byte most often between its two neighbours",
        ),
    )


class CausalWindows:
    """Windows [n, context + 1] of bytes: the target is the input shifted by one place."""

    def __init__(self, windows: NDArray[np.uint8]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        return _next_tokens(torch.from_numpy(self.windows[list(indices)]).long())


class MaskedWindows:
    """Windows [n, context + 1] of bytes without their last: `count` bytes of each are masked, and are the target."""

    def __init__(self, windows: NDArray[np.uint8], count: int) -> None:
        self.windows, self.count = windows[:, :-1], count

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self.windows[list(indices)]).long()
        target = torch.full_like(tokens, IGNORE_INDEX)
        for row, seed in enumerate(seeds):
            places = self.places(seed)
            target[row, places] = tokens[row, places]
            tokens[row, places] = MASK
        return Batch((tokens,), target)

    def places(self, seed: int) -> NDArray[np.int64]:
        """The masked places [count] of an example with this seed."""
        return np.random.default_rng(seed).permutation(self.windows.shape[1])[: self.count]


def _next_tokens(rows: Tensor) -> Batch:
    """[n, context + 1] -> the input, and as target the input shifted by one place."""
    return Batch((rows[:, :-1].contiguous(),), rows[:, 1:].contiguous())


def bits(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy per token of each sample, in bits [n]. Logits [n, s, vocabulary], target [n, s]."""
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
    return losses.view_as(target).mean(1) / math.log(2)


def _found(logits: Tensor, target: Tensor) -> Tensor:
    asked = target != IGNORE_INDEX
    return ((logits.argmax(-1) == target) & asked).sum(1) / asked.sum(1)


def _two_parts(held_out: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    root = sysconfig.get_path("stdlib")
    texts = _texts(root)
    first = max(1, round(len(texts) * held_out))
    if first >= len(texts):
        raise ValueError(f"data.held_out is {held_out}: it leaves none of {len(texts)} files in {root} to train on")
    held, train = (np.frombuffer(b"".join(part), np.uint8) for part in (texts[:first], texts[first:]))
    return train, held


@functools.cache
def _texts(root: str) -> list[bytes]:
    """The files' contents in the order of their hashes: random, but equal for equal versions of Python. Read once."""
    texts: dict[bytes, bytes] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            try:
                text = path.read_bytes()
            except OSError as error:
                raise BadExampleError(f"{path}: {error.strerror or error}") from error
            texts[hashlib.sha256(text).digest()] = text
    return [text for _, text in sorted(texts.items())]


def _windows(text: NDArray[np.uint8], context: int) -> NDArray[np.uint8]:
    """Windows [n, context + 1] that overlap by one byte."""
    if context >= len(text):
        raise ValueError(f"data.context is {context}; one part of the text has only {len(text)} bytes")
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]


def _pairs(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[256, 256]: how often `second` occurs with `first`, plus 0.1, so that no pair has probability 0."""
    counts = np.bincount(first.astype(np.int64) * 256 + second, minlength=256 * 256)
    return counts.reshape(256, 256).astype(np.float64) + 0.1


def _most_often_between(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The most frequent byte by the bytes before and after it, [256, 256]. Needs 128 MB."""
    around = text[:-2].astype(np.int64) * 256 + text[2:]
    counts = np.bincount(around * 256 + text[1:-1], minlength=256**3)
    found: NDArray[np.int64] = counts.reshape(256, 256, 256).argmax(2)
    return found


def tokens(
    train: str,
    vocabulary: int,
    held_out: str | None = None,
    context: int = 128,
    dtype: str = "uint16",
    windows: int = 1024,
) -> Data:
    """Each example: `context` adjacent tokens [context] int64, and the tokens one place later.

    train, held_out: files; without held_out, the last hundredth of train. vocabulary: the model's; all tokens must be
    smaller. windows: held-out windows to evaluate, evenly chosen. Each batch reads its windows from the file.
    Metric: bits per token. Baseline: the frequency of each token in the training part.
    """
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f'data.dtype is {dtype!r}; tokens are read as "uint16" or "uint32"')
    if windows < 1:
        raise ValueError(f"data.windows is {windows}; at least one must be held out")
    stored = np.dtype(dtype).newbyteorder("<")
    whole = TokenFile(Path(train), stored, vocabulary)
    behind = len(whole) if held_out is not None else len(whole) - len(whole) // 100
    held_file = TokenFile(Path(held_out), stored, vocabulary) if held_out is not None else whole
    held_first = 0 if held_out is not None else behind
    train_windows = Windows(whole, range(0, behind - context, context), context)
    every = range(held_first, len(held_file) - context, context)
    held_windows = Windows(held_file, every[:: max(1, len(every) // windows)][:windows], context)
    for part, file in ((train_windows, whole), (held_windows, held_file)):
        if not len(part):
            raise BadExampleError(f"{file.path}: {len(file)} tokens are less than a window of data.context = {context}")
    return Data(train_windows, held_windows, _metric(whole, behind, held_windows, vocabulary))


class TokenFile:
    """Reads by pread. A memory map of a file that shrinks would end the process; pread allows a BadExampleError."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], vocabulary: int) -> None:
        self.path, self._dtype, self._vocabulary = path, dtype, vocabulary
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise BadExampleError(f"{path}: {error.strerror or error}") from error
        self._bytes = os.fstat(self._file.fileno()).st_size
        if self._bytes % dtype.itemsize:
            raise BadExampleError(f"{path}: {self._bytes} bytes do not divide into {dtype} tokens; see data.dtype")

    def __len__(self) -> int:
        return self._bytes // self._dtype.itemsize

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """Tokens first..first+count-1. Raises BadExampleError."""
        size = self._dtype.itemsize
        try:
            raw = os.pread(self._file.fileno(), count * size, first * size)
        except OSError as error:
            raise BadExampleError(f"{self.path}: {error.strerror or error}, at token {first}") from error
        if len(raw) != count * size:
            raise BadExampleError(f"{self.path}: {len(raw) // size} of {count} tokens at token {first}; it has shrunk")
        found = np.frombuffer(raw, self._dtype).astype(np.int64)
        if found.max(initial=0) >= self._vocabulary:
            place = int((found >= self._vocabulary).argmax())
            raise BadExampleError(
                f"{self.path}: token {first + place} is {found[place]}; data.vocabulary is {self._vocabulary}"
            )
        return found


class Windows:
    """Each example: `context` tokens from a start, and the tokens one place later."""

    def __init__(self, file: TokenFile, starts: Sequence[int], context: int) -> None:
        self.file, self.starts, self.context = file, starts, context

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        rows = np.stack([self.file.read(self.starts[index], self.context + 1) for index in indices])
        return _next_tokens(torch.from_numpy(rows))


def _metric(file: TokenFile, tokens: int, held: Windows, vocabulary: int) -> Metric:
    """tokens: the number of training tokens, from the file's start."""
    counts = np.ones(vocabulary)
    counted = min(tokens, _COUNTED_TOKENS)
    for first in range(0, counted, 1 << 20):
        counts += np.bincount(file.read(first, min(1 << 20, counted - first)), minlength=vocabulary)
    asked = -np.log2(counts / counts.sum())
    baseline = np.mean([asked[held.file.read(start + 1, held.context)].mean() for start in held.starts])
    return Metric("bits per token", "bit", "lower", bits, float(baseline), "how often each token comes")
