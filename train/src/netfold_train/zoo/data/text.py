"""Windows of tokens, to continue or with masked tokens: the bytes of Python's standard library, and files of tokens."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional

from netfold.extras import command
from netfold_train.data.examples import BadExampleError, Data, Examples, InMemory, Metric, OneByOne
from netfold_train.models.model import IGNORED, real_items

MASK = 256
BYTES = 256
MOST_TOKENS = 1 << 16
"""A token is kept in 16 bits."""
# Installed packages, tables of characters, and tests.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "test", "tests", "idle_test"}
PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "unittest", "urllib", "xml")
"""The classes of `source_classes`: packages of every supported version of Python with five files or more."""
_HELD_OUT_EVERY_FILES = 5
_TOKENIZER_BYTES = 2_000_000
"""Training text that a tokenizer is made from: more takes longer, and gives nearly the same tokens."""
_TEXTS_AT_A_TIME = 32
_COUNTED_TOKENS = 1 << 22
"""The largest number of training tokens that the baseline counts, from the start: files may have billions."""


def source(context: int = 128, held_out: float = 0.01) -> Data:
    """Each example: `context` bytes [context] int64, and the bytes one place later. About 10 MB, in memory.

    held_out: the share of files to hold out; files with equal content count as one. Metric: bits per byte. Baseline:
    the frequency of each byte after the byte before it, in the training files.
    """
    train, held = _two_parts(held_out)
    # Each count plus 0.1, so that no pair of bytes has probability 0.
    follows = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=256**2).reshape(256, 256) + 0.1
    cost = -np.log2(follows / follows.sum(1, keepdims=True))
    examples = _adjacent(held, context)
    scored = held[: len(examples) * context + 1]
    baseline = float(cost[scored[:-1], scored[1:]].mean())
    metric = Metric("bits per byte", "bit", "lower", bits, baseline, "how often a byte follows the one before it")
    return Data(_adjacent(train, context), examples, metric)


def source_tokens(context: int = 128, vocabulary: int = 2048, held_out: float = 0.01) -> Data:
    """Each example: `context` tokens [context] int64, and the tokens one place later. About 10 MB of text, in memory.

    The text is that of `source`. A token is one to some tens of bytes: byte pair encoding (Sennrich et al. 2016), made
    from 2 MB of the training files by the package tokenizers, and lossless. vocabulary: of tokens, 256 or more.
    Metric: bits per byte, so that it compares with `source`. Baseline: how often each token comes in training.
    """
    if not BYTES <= vocabulary <= MOST_TOKENS:
        raise ValueError(f"data.vocabulary is {vocabulary}; it must be {BYTES} to {MOST_TOKENS}")
    root = sysconfig.get_path("stdlib")
    train, ids, lengths = _source_tokens(root, vocabulary, held_out)
    held_examples = _adjacent(ids, context)
    scored = slice(1, len(held_examples) * context + 1)
    window_bytes = float(lengths[scored].sum()) / len(held_examples)
    counts = 1.0 + np.bincount(train, minlength=vocabulary)
    cost = -np.log2(counts / counts.sum())
    baseline = float(cost[ids[scored]].sum() / lengths[scored].sum())

    def bits_per_byte(logits: Tensor, target: Tensor) -> Tensor:
        # The mean over all windows is then all bits divided by all bytes.
        return bits(logits, target) * (context / window_bytes)

    metric = Metric("bits per byte", "bit", "lower", bits_per_byte, baseline, "how often each token comes")
    return Data(_adjacent(train, context), held_examples, metric)


def source_classes(context: int = 128) -> Data:
    """Each example: `context` bytes [context] int64 of a file of Python's standard library, and its package's number.

    The packages are those in PACKAGES, in this order. Of each package every fifth file is held out, in the order of the
    files' hashes, with all its windows. Windows do not overlap. About 2 MB, in memory.
    Metric: accuracy. Baseline: the package with the most training windows.
    """
    root = Path(sysconfig.get_path("stdlib"))
    windows: list[list[Tensor]] = [[], []]
    labels: list[list[int]] = [[], []]
    for label, package in enumerate(PACKAGES):
        texts = _texts(str(root / package))
        if len(texts) < _HELD_OUT_EVERY_FILES:
            raise BadExampleError(f"{root / package}: {len(texts)} Python files; {_HELD_OUT_EVERY_FILES} are needed")
        for number, text in enumerate(texts):
            part = int(number % _HELD_OUT_EVERY_FILES == 0)  # 1: held out.
            cut = torch.tensor(list(text[: len(text) // context * context]), dtype=torch.int64).view(-1, context)
            windows[part].append(cut)
            labels[part] += [label] * len(cut)
    if not all(labels):
        raise ValueError(f"data.context is {context}: one part of the files has no window of so many bytes")
    of_train, of_held = (torch.tensor(classes) for classes in labels)
    train, held = InMemory(torch.cat(windows[0]), target=of_train), InMemory(torch.cat(windows[1]), target=of_held)
    share = float((of_held == of_train.bincount().argmax()).double().mean())
    metric = Metric("accuracy", "", "higher", _right, share, "the most frequent package")
    return Data(train, held, metric)


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
    examples = _adjacent(held, context, count)
    # [256, 256, 256]: how often a byte (last) is between two others. Needs 128 MB.
    around = (train[:-2].astype(np.int64) * 256 + train[2:]) * 256 + train[1:-1]
    guess = np.bincount(around, minlength=256**3).reshape(256, 256, 256).argmax(2)
    # `evaluate` uses a held-out example's number as its seed. The text's first byte has only one neighbour.
    asked = np.concatenate([number * context + _places(number, context, count) for number in range(len(examples))])
    asked = asked[asked > 0]
    baseline = float((guess[held[asked - 1], held[asked + 1]] == held[asked]).mean())
    said = "the byte most often between its two neighbours"
    metric = Metric("masked accuracy", "", "higher", _found, baseline, said, real_items)
    return Data(_adjacent(train, context, count), examples, metric)


def tokens(
    train: str,
    vocabulary: int,
    held_out: str | None = None,
    context: int = 128,
    dtype: Literal["uint16", "uint32"] = "uint16",
    windows: PositiveInt = 1024,
) -> Data:
    """Each example: `context` adjacent tokens [context] int64, and the tokens one place later.

    train, held_out: files; without held_out, the last hundredth of train. vocabulary: the model's; all tokens must be
    smaller. windows: held-out windows to evaluate, evenly chosen. Each batch reads its windows from the file.
    Metric: bits per token. Baseline: the frequency of each token in the training part.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    file = TokenFile(Path(train), stored, vocabulary)
    if held_out is None:
        held_file, held_first = file, len(file) - len(file) // 100
        end = held_first
    else:
        held_file, held_first = TokenFile(Path(held_out), stored, vocabulary), 0
        end = len(file)
    examples = _windows(file.read, range(0, end - context, context), context, train)
    every = range(held_first, len(held_file) - context, context)
    starts = every[:: max(1, len(every) // windows)][:windows]
    held = _windows(held_file.read, starts, context, held_out or train)
    counts = 1.0 + np.bincount(file.read(0, min(end, _COUNTED_TOKENS)), minlength=vocabulary)
    cost = -np.log2(counts / counts.sum())
    baseline = float(np.mean([cost[held_file.read(first + 1, context)].mean() for first in starts]))
    return Data(examples, held, Metric("bits per token", "bit", "lower", bits, baseline, "how often each token comes"))


def _windows(
    read: Callable[[int, int], NDArray[Any]], starts: Sequence[int], context: int, name: str, masks: int = 0
) -> Examples:
    """Examples of adjacent tokens. Without masks, the target is the input shifted by one place.

    read: (first, count) -> tokens first..first+count-1.
    masks: tokens of each example that are replaced by MASK, and are the target.
    """
    if not starts:
        raise ValueError(f"data.context is {context}; {name} has fewer than {context + 1} tokens")

    def example(number: int, seed: int) -> tuple[Tensor, Tensor]:
        found = torch.from_numpy(read(starts[number], context + 1).astype(np.int64))
        inputs, target = found[:-1], found[1:]
        if masks:
            places = _places(seed, context, masks)
            target = torch.full_like(inputs, IGNORED)
            target[places] = inputs[places]
            inputs[places] = MASK
        return inputs, target

    return OneByOne(len(starts), example)


def _places(seed: int, context: int, masks: int) -> NDArray[np.int64]:
    """The masked places [masks] of an example with this seed."""
    return np.random.default_rng(seed).permutation(context)[:masks]


class TokenFile:
    """A file of tokens. It is read, not mapped: if a mapped file shrinks, the process is killed."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger], vocabulary: int) -> None:
        self.path, self._dtype, self._vocabulary = path, dtype, vocabulary
        try:
            size = path.stat().st_size
        except OSError as error:
            raise BadExampleError(f"{path}: {error.strerror or error}") from error
        if size % dtype.itemsize:
            raise BadExampleError(f"{path}: {size} bytes do not divide into {dtype} tokens; see data.dtype")
        self._tokens = size // dtype.itemsize

    def __len__(self) -> int:
        return self._tokens

    def read(self, first: int, count: int) -> NDArray[np.unsignedinteger]:
        """Tokens first..first+count-1. Raises BadExampleError."""
        try:
            found = np.fromfile(self.path, self._dtype, count, offset=first * self._dtype.itemsize)
        except OSError as error:
            raise BadExampleError(f"{self.path}: {error.strerror or error}, at token {first}") from error
        if len(found) < count:
            raise BadExampleError(f"{self.path}: {len(found)} of {count} tokens at token {first}; it has shrunk")
        if found.max(initial=0) >= self._vocabulary:
            place = int((found >= self._vocabulary).argmax())
            raise BadExampleError(
                f"{self.path}: token {first + place} is {found[place]}; data.vocabulary is {self._vocabulary}"
            )
        return found


def bits(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy per token of each sample, in bits [n]. Logits [n, s, vocabulary], target [n, s]."""
    losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return losses.view_as(target).mean(1) / math.log(2)


def _right(logits: Tensor, target: Tensor) -> Tensor:
    return logits.argmax(1) == target


def _found(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(-1) == target) & (target != IGNORED)


def _adjacent(text: NDArray[Any], context: int, masks: int = 0) -> Examples:
    """Windows that overlap by one byte or token."""
    starts = range(0, len(text) - context, context)
    return _windows(lambda first, count: text[first : first + count], starts, context, "one part of the text", masks)


def source_parts(held_out: float) -> tuple[list[bytes], list[bytes]]:
    """The contents of the training files, and of the held-out files."""
    root = sysconfig.get_path("stdlib")
    texts = _texts(root)
    first = max(1, round(len(texts) * held_out))
    if first >= len(texts):
        raise ValueError(f"data.held_out is {held_out}: it leaves none of {len(texts)} files in {root} to train on")
    return texts[first:], texts[:first]


def _two_parts(held_out: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes of the training files, and of the held-out files."""
    train, held = (np.frombuffer(b"".join(part), np.uint8) for part in source_parts(held_out))
    return train, held


# One: recipes of one process have the same tokens.
@functools.lru_cache(maxsize=1)
def _source_tokens(
    root: str, vocabulary: int, held_out: float
) -> tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.int64]]:
    """The tokens of the training files, those of the held-out files, and how many bytes each of these is."""
    train_texts, held_texts = source_parts(held_out)
    chosen, size = [], 0
    for text in train_texts:
        if size < _TOKENIZER_BYTES:
            chosen.append(text)
            size += len(text)
    tokenizer = _byte_pairs(chosen, vocabulary)
    return _encoded(train_texts, tokenizer), _encoded(held_texts, tokenizer), _token_bytes(held_texts, tokenizer)


def _byte_pairs(texts: Sequence[bytes], vocabulary: int) -> Any:
    """A tokenizers.Tokenizer of `vocabulary` tokens, made from these texts."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise BadExampleError(
            f"data.name is source-tokens: the package tokenizers is not installed: {command('tokenizers')}"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(map(_characters, texts), trainer)
    return tokenizer


def _encoded(texts: Sequence[bytes], tokenizer: Any) -> NDArray[np.uint16]:
    """The tokens of all texts."""
    ids: list[NDArray[np.uint16]] = []
    # Some texts at a time: the package returns about 150 bytes a token.
    for start in range(0, len(texts), _TEXTS_AT_A_TIME):
        some = tokenizer.encode_batch(list(map(_characters, texts[start : start + _TEXTS_AT_A_TIME])))
        ids += [np.array(encoded.ids, np.uint16) for encoded in some]
    return np.concatenate(ids)


def _token_bytes(texts: Sequence[bytes], tokenizer: Any) -> NDArray[np.int64]:
    """The number of bytes of each token of these texts."""
    lengths = []
    for encoded in map(tokenizer.encode, map(_characters, texts)):
        first, end = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        # A byte above 127 is two letters of the tokenizer, perhaps in two tokens: the second one counts nothing.
        lengths.append(end - np.maximum(first, np.r_[0, end[:-1]]))
    return np.concatenate(lengths)


def _characters(text: bytes) -> str:
    # One character a byte, whatever the file's encoding.
    return text.decode("latin-1")


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
