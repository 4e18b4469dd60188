"""Text as bytes: Python's own standard library, which is wherever Python is."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from netfold.train.examples import Batch, Data, Metric


def source(context: int = 128, held_out: float = 0.05) -> Data:
    """Windows of `context` bytes of the standard library's modules; the last `held_out` of the files is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    kept = files[: int(len(files) * (1 - held_out))]
    train, held = (Windows(_joined(part), context) for part in (kept, files[len(kept) :]))
    counts = np.bincount(train.tokens, minlength=256) + 1
    bits = -np.log2(counts / counts.sum())
    # Of the bytes that are predicted: all but a window's first.
    predicted = np.concatenate([held.tokens[first + 1 : first + context + 1] for first in held.starts])
    return Data(
        train,
        held,
        Metric("bits per byte", "bit", "lower", _bits, float(bits[predicted].mean()), "how often each byte comes"),
    )


class Windows:
    """Each example: `context` tokens from one place on, and those one further."""

    def __init__(self, tokens: np.ndarray[tuple[int], np.dtype[np.uint8]], context: int) -> None:
        self.tokens, self.context = tokens, context
        self.starts = range(0, len(tokens) - context - 1, context)

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        rows = np.stack([self.tokens[self.starts[i] : self.starts[i] + self.context + 1] for i in indices])
        tokens = torch.from_numpy(rows).long()
        return Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous())


def _bits(logits: Tensor, target: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
    return losses.view_as(target).mean(1) / math.log(2)


def _joined(files: Sequence[Path]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)
