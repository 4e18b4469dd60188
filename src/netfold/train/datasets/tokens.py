"""A file of tokens: u16 or u32, one after the other and nothing else (nanoGPT's train.bin and val.bin)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from netfold.train.datasets.text import bits
from netfold.train.examples import BadExampleError, Batch, Data, Metric

_COUNTED_TOKENS = 1 << 24
"""The baseline counts at most so many, from the start of the training tokens: files may have billions."""


def tokens(
    train: str,
    vocabulary: int,
    held_out: str | None = None,
    context: int = 128,
    dtype: str = "uint16",
    windows: int = 1024,
) -> Data:
    """Each example: `context` tokens [context] int64, and those one further; side by side in the file.

    train, held_out: files; without the second, the last hundredth of the first is held out. vocabulary: the model's;
    all tokens are below it. windows: so many of the held-out part's are looked at, spread over it. Each is read when it
    is asked for: nothing but the system's cache of the file is kept in memory.
    The metric: bits to a token; the baseline: how often each token comes in the training part.
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
            raise BadExampleError(f"{file.path}: {len(file)} tokens, which is no window of data.context = {context}")
    return Data(train_windows, held_windows, _metric(whole, behind, held_windows, vocabulary))


class TokenFile:
    """Reads, and maps nothing: a file that has shrunk is then an BadExampleError, not the end of the process."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], vocabulary: int) -> None:
        self.path, self._dtype, self._vocabulary = path, dtype, vocabulary
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise BadExampleError(f"{path}: {error.strerror or error}") from error
        self._bytes = os.fstat(self._file.fileno()).st_size
        if self._bytes % dtype.itemsize:
            raise BadExampleError(f"{path}: {self._bytes} bytes are no whole number of {dtype} tokens; see data.dtype")

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
    """Each example: `context` tokens from one place on, and those one further."""

    def __init__(self, file: TokenFile, starts: Sequence[int], context: int) -> None:
        self.file, self.starts, self.context = file, starts, context

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        rows = np.stack([self.file.read(self.starts[index], self.context + 1) for index in indices])
        found = torch.from_numpy(rows)
        return Batch((found[:, :-1].contiguous(),), found[:, 1:].contiguous())


def _metric(file: TokenFile, tokens: int, held: Windows, vocabulary: int) -> Metric:
    """tokens: of the training part, from the file's start."""
    counts = np.ones(vocabulary)
    counted = min(tokens, _COUNTED_TOKENS)
    for first in range(0, counted, 1 << 20):
        counts += np.bincount(file.read(first, min(1 << 20, counted - first)), minlength=vocabulary)
    asked = -np.log2(counts / counts.sum())
    baseline = np.mean([asked[held.file.read(start + 1, held.context)].mean() for start in held.starts])
    return Metric("bits per token", "bit", "lower", bits, float(baseline), "how often each token comes")
