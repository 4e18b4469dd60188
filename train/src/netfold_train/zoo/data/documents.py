"""Text and pictures in the forms of Hugging Face's datasets: Parquet, JSON lines, CSV, text, and saved data sets.

Documents become tokens once per host, in the cache of `datasets`, and are read from there by memory map. An example is
a function of its number and seed, as everywhere in netfold, so any number of ranks reads the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from pydantic import PositiveInt
from torch import Tensor

from netfold.extras import need
from netfold_train.data.examples import BadExampleError, Batch, Data, Metric
from netfold_train.models.model import IGNORED, real_items
from netfold_train.zoo.data.text import bits

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
# Rows of a file that one call of a tokenizer takes; windows do not cross their end.
_ROWS = 1000
# The longest time that ranks of a host wait for the one that makes tokens.
_LOCK_S = 3600.0
_COUNTED = 1 << 22
"""The largest number of training tokens that a baseline counts."""


def documents(
    train: str,
    tokenizer: str,
    held_out: str | None = None,
    column: str = "text",
    context: PositiveInt = 128,
    windows: PositiveInt = 1024,
) -> Data:
    """Documents joined to one text, cut into windows: input_ids [context], and the tokens one place later.

    train, held_out: a file (.parquet, .jsonl, .json, .csv, .txt), a folder of them, or a folder of
    `datasets.Dataset.save_to_disk`. Without held_out, the last hundredth of the windows. column: of the text.
    tokenizer: a folder or a name on the hub. A token of end (eos) follows each document. windows: to evaluate, evenly
    chosen. Metric: bits per token. Baseline: the frequency of each token in the training part.
    """
    tokens = _tokenizer(tokenizer)
    rows = _windows(train, tokens, column, context)
    held = _windows(held_out, tokens, column, context) if held_out is not None else None
    first = len(rows) if held is not None else len(rows) - max(1, len(rows) // 100)
    held = held if held is not None else rows.select(range(first, len(rows)))
    if first == 0 or len(held) == 0:
        raise ValueError(f"data.context is {context}: {train} has too few tokens for two windows")
    examples, kept = _Shifted(rows.select(range(first))), _Shifted(held.select(_evenly(len(held), windows)))
    seen = np.asarray(rows[: min(first, _COUNTED // context)]["input_ids"]).ravel()
    counts = 1.0 + np.bincount(seen, minlength=len(tokens))
    cost = -np.log2(counts / counts.sum())
    every = kept.batch(range(len(kept)), range(len(kept))).target.numpy()
    baseline = float(cost[every].mean())
    return Data(examples, kept, Metric("bits per token", "bit", "lower", bits, baseline, "how often each token comes"))


def masked_documents(
    train: str,
    tokenizer: str,
    held_out: str | None = None,
    column: str = "text",
    context: PositiveInt = 128,
    masked: float = 0.15,
    windows: PositiveInt = 1024,
) -> Data:
    """Windows as of `documents`, in which a share `masked` of the tokens is to be found (Devlin et al. 2019).

    Of these, 80% are replaced by the tokenizer's mask, 10% by a random token, and 10% stay. The target is -100
    elsewhere. Metric: the share found. Baseline: the most frequent token.
    """
    data = documents(train, tokenizer, held_out, column, context, windows)
    tokens = _tokenizer(tokenizer)
    if tokens.mask_token_id is None:
        raise ValueError(f"data.tokenizer {tokenizer!r} has no mask token; take one of a masked language model")
    windows_of = (part.rows for part in (data.train, data.held_out) if isinstance(part, _Shifted))
    examples, kept = (_Masked(rows, masked, tokens.mask_token_id, len(tokens)) for rows in windows_of)
    target = kept.batch(range(len(kept)), range(len(kept))).target
    counts = torch.bincount(target[target != IGNORED])
    baseline = float(counts.max() / counts.sum())
    metric = Metric("masked accuracy", "", "higher", _found, baseline, "the most frequent token", real_items)
    return Data(examples, kept, metric)


def labelled_documents(
    train: str,
    tokenizer: str,
    held_out: str,
    column: str = "text",
    label: str = "label",
    context: PositiveInt = 128,
) -> Data:
    """One document an example: input_ids and attention_mask [context], padded or cut; its class, int64.

    Classes are numbered in the order of their names in the training part. Metric: accuracy. Baseline: the most frequent
    class.
    """
    tokens = _tokenizer(tokenizer)
    if tokens.pad_token_id is None:
        tokens.pad_token = tokens.eos_token
    parts = [_table(path, (column, label)) for path in (train, held_out)]
    classes = {name: number for number, name in enumerate(sorted(set(parts[0][label])))}
    if unknown := sorted(set(parts[1][label]) - set(classes)):
        raise BadExampleError(f"{held_out}: a class {unknown[0]!r} that {train} does not have")

    def encode(rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        found = tokens(list(rows[column]), truncation=True, max_length=context, padding="max_length")
        return {**found, "class": [classes[name] for name in rows[label]]}

    train_part, held_part = (_once(part, encode) for part in parts)
    examples, kept = (_Labelled(part, tuple(tokens.model_input_names)) for part in (train_part, held_part))
    frequent = np.bincount(train_part["class"]).argmax()
    baseline = float(np.mean(np.asarray(held_part["class"]) == frequent))
    metric = Metric("accuracy", "", "higher", _right, baseline, "the most frequent class")
    return Data(examples, kept, metric)


@dataclass(frozen=True)
class _Shifted:
    """Windows of tokens; the target is one place later."""

    rows: Any

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        tokens = torch.from_numpy(np.asarray(self.rows[list(indices)]["input_ids"], dtype=np.int64))
        return Batch((), tokens[:, 1:].contiguous(), {"input_ids": tokens[:, :-1].contiguous()})


@dataclass(frozen=True)
class _Masked:
    """Windows of tokens, of which some are masked by the example's seed."""

    rows: Any
    share: float
    mask: int
    vocabulary: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        tokens = np.asarray(self.rows[list(indices)]["input_ids"], dtype=np.int64)[:, :-1].copy()
        target = np.full_like(tokens, IGNORED)
        for row, seed in enumerate(seeds):
            draw = np.random.default_rng(seed)
            places = draw.permutation(tokens.shape[1])[: max(1, round(self.share * tokens.shape[1]))]
            target[row, places] = tokens[row, places]
            how = draw.random(len(places))
            tokens[row, places[how < 0.8]] = self.mask
            drawn = places[how >= 0.9]
            tokens[row, drawn] = draw.integers(self.vocabulary, size=len(drawn))
        inputs = torch.from_numpy(tokens)
        return Batch((), torch.from_numpy(target), {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)})


@dataclass(frozen=True)
class _Labelled:
    rows: Any
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], seeds: Sequence[int]) -> Batch:
        found = self.rows[list(indices)]
        named = {name: torch.tensor(found[name]) for name in self.names if name in found}
        return Batch((), torch.tensor(found["class"]), named)


def _tokenizer(path: str) -> Any:
    need("these data", ("transformers", "datasets"), "hf")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.tokenizer is {path!r}: {str(error).splitlines()[0]}") from error


def _table(path: str, columns: Sequence[str]) -> Any:
    """The rows of files, memory-mapped. Raises BadExampleError."""
    import datasets

    datasets.disable_progress_bars()
    place = Path(path)
    try:
        if (place / "dataset_info.json").exists():
            rows = datasets.load_from_disk(path)
        else:
            files = sorted(each for each in place.iterdir() if each.suffix in _FORMATS) if place.is_dir() else [place]
            if not files or files[0].suffix not in _FORMATS or not files[0].exists():
                raise BadExampleError(f"{path}: no file {', '.join(_FORMATS)}, and no folder of a saved data set")
            kind = _FORMATS[files[0].suffix]
            with _lock():
                rows = datasets.load_dataset(kind, data_files=[str(each) for each in files], split="train")
    except BadExampleError:
        raise
    except Exception as error:  # pyarrow, json and datasets raise many types for damaged files.
        cause = error.__cause__ or error
        raise BadExampleError(f"{path}: {type(cause).__name__}: {str(cause).splitlines()[0]}") from error
    if missing := [name for name in columns if name not in rows.column_names]:
        raise BadExampleError(f"{path}: no column {missing[0]!r}; its columns are {', '.join(rows.column_names)}")
    return rows.select_columns(list(columns))


def _windows(path: str, tokens: Any, column: str, context: int) -> Any:
    """Rows of `context` + 1 tokens, adjacent windows overlapping by one token."""

    def cut(rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        end = [] if tokens.eos_token_id is None else [tokens.eos_token_id]
        texts = [text for text in rows[column] if text]
        encoded = tokens(texts, add_special_tokens=False)["input_ids"] if texts else []
        joined = [token for each in encoded for token in (*each, *end)]
        starts = range(0, len(joined) - context, context)
        return {"input_ids": [joined[first : first + context + 1] for first in starts]}

    return _once(_table(path, (column,)), cut)


def _once(rows: Any, change: Any) -> Any:
    """Apply `change` to batches of rows. One rank of a host computes; the other ranks read its cache."""
    with _lock():
        return rows.map(
            change, batched=True, batch_size=_ROWS, remove_columns=rows.column_names, load_from_cache_file=True
        )


def _lock() -> FileLock:
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / "netfold.lock", timeout=_LOCK_S)


def _evenly(total: int, count: int) -> list[int]:
    return [number * total // min(count, total) for number in range(min(count, total))]


def _found(logits: Tensor, target: Tensor) -> Tensor:
    return (logits.argmax(-1) == target) & (target != IGNORED)


def _right(logits: Tensor, target: Tensor) -> Tensor:
    return logits.argmax(-1) == target
