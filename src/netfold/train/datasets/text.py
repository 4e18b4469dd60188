"""Text as bytes: Python's own standard library, which is wherever Python is. To go on, or with bytes masked."""

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
"""In a target: no byte is asked for here (torch's cross entropy leaves it out)."""

# Not the library's own text: what pip brings. Not text that somebody wrote: tables of characters.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "test", "tests", "idle_test"}


def source(context: int = 128, held_out: float = 0.01) -> Data:
    """Each example: `context` bytes [context] int64, and those one further. About 10 MB, in memory.

    A share `held_out` of the files is held out, whole files; files with the same content are one file. The metric: bits
    to a byte; the baseline: how often each byte comes after the one before it, counted in the training files.
    """
    train, held = _two_parts(held_out)
    follows = _pairs(train[:-1], train[1:])
    asked = -np.log2(follows / follows.sum(1, keepdims=True))
    # Of the bytes that are asked for: all but a window's first.
    windows = _windows(held, context)
    baseline = float(asked[windows[:, :-1], windows[:, 1:]].mean())
    return Data(
        CausalWindows(_windows(train, context)),
        CausalWindows(windows),
        Metric("bits per byte", "bit", "lower", bits, baseline, "how often a byte follows the one before it"),
    )


def masked_source(context: int = 128, masked: float = 0.15, held_out: float = 0.01) -> Data:
    """Each example: `context` bytes of which a share `masked` is replaced by the token 256; the target is those bytes,
    -100 elsewhere. Exactly as many in every example, drawn from its seed.

    All that are asked for are masked, none is kept or replaced by another (Devlin et al. 2019 do so for a fifth, for
    the sake of tasks where no mask is seen). The metric: the share of masked bytes found; the baseline: the byte that
    is most often between the bytes before and behind it, as in the training files, and it may see both.
    """
    count = round(masked * context)
    if not 0 < count < context:
        raise ValueError(
            f"data.masked is {masked}: that masks {count} of {context} bytes; at least 1, at most {context - 1} will do"
        )
    train, held = _two_parts(held_out)
    examples = MaskedWindows(_windows(held, context), count)
    # As `evaluate` does: a held-out example's seed is its number. The text's first byte has no neighbour.
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
    """Windows [n, context + 1] of bytes: the target is the input moved on by one."""

    def __init__(self, windows: NDArray[np.uint8]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(self.windows[list(indices)]).long()
        return Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous())


class MaskedWindows:
    """Windows [n, context + 1] of bytes, the last one left away: `count` of them are masked, and are the target."""

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
        """[count]: those that are masked in an example with this seed."""
        return np.random.default_rng(seed).permutation(self.windows.shape[1])[: self.count]


def bits(logits: Tensor, target: Tensor) -> Tensor:
    """[n]: what a token of each sample costs, in bits. Logits [n, s, vocabulary], target [n, s]."""
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
        raise ValueError(f"data.held_out is {held_out}: of {len(texts)} files under {root} it leaves none to train on")
    held, train = (np.frombuffer(b"".join(part), np.uint8) for part in (texts[:first], texts[first:]))
    return train, held


@functools.cache
def _texts(root: str) -> list[bytes]:
    """In the order of their hashes: as good as drawn, and the same wherever the same Python is. 10 MB, read once."""
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
    """[n, context + 1], side by side but for one byte."""
    if context >= len(text):
        raise ValueError(f"data.context is {context}; of the text's two parts one has {len(text)} bytes")
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]


def _pairs(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[256, 256]: how often `second` is where `first` is, and a tenth: nothing is impossible."""
    counts = np.bincount(first.astype(np.int64) * 256 + second, minlength=256 * 256)
    return counts.reshape(256, 256).astype(np.float64) + 0.1


def _most_often_between(text: NDArray[np.uint8]) -> NDArray[np.int64]:
    """[256, 256]: by the bytes before and behind. 128 MB while it counts."""
    around = text[:-2].astype(np.int64) * 256 + text[2:]
    counts = np.bincount(around * 256 + text[1:-1], minlength=256**3)
    found: NDArray[np.int64] = counts.reshape(256, 256, 256).argmax(2)
    return found
