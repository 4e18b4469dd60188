"""Strong baselines of the recipes' metrics, each from the recipe's own training examples, scored on its held-out ones:

    pip install --target build/sklearn scikit-learn        # netfold does not need it otherwise
    PYTHONPATH=build/sklearn .venv/bin/python lab/bench/baselines.py [RECIPE ...]      # about ten minutes for all

Data sets that several recipes share are computed once. The values go to lab/bench/results/baselines.json, from which
this page and lab/bench/recipes.py's are made.
"""

from __future__ import annotations

import functools
import json
import lzma
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import driver
import numpy as np
import torch
import typer
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from netfold_train import Recipe
from netfold_train.data import make_data
from netfold_train.data.examples import Data, Examples
from netfold_train.models.model import IGNORED
from netfold_train.recipe.load import load
from netfold_train.zoo.data.resolution import psnr
from netfold_train.zoo.data.text import MASK, source_parts

RECIPES = sorted((Path(__file__).parents[2] / "train/src/netfold_train/recipes").glob("*.toml"))
KEPT = driver.RESULTS / "baselines.json"
BYTES = 256
NGRAM = 5
LONG_NGRAM = 8  # A byte of a u64 each.
HELD_OUT = 0.01  # Of source-tokens.
PICTURE_ROUNDS = 100
WINDOW = 7  # Of the linear filter, in low-resolution pixels.
Value = dict[str, float]


def read(examples: Examples) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The inputs and targets of all examples in order, 512 at a time; an example's number is its seed, as in
    `evaluate`."""
    for first in range(0, len(examples), 512):
        numbers = list(range(first, min(first + 512, len(examples))))
        batch = examples.batch(numbers, numbers)
        yield list(batch.tensors[:-1]), batch.target


def whole(examples: Examples) -> tuple[list[NDArray[Any]], NDArray[Any]]:
    """The inputs and targets of all examples, one array each."""
    inputs, targets = zip(*read(examples), strict=True)
    return [torch.cat(column).numpy() for column in zip(*inputs, strict=True)], torch.cat(targets).numpy()


def text(examples: Examples) -> NDArray[np.uint8]:
    """The text of windows that overlap by one byte."""
    windows = [(inputs[0], target[-1:, -1]) for inputs, target in read(examples)]
    parts = [inputs.flatten() for inputs, _ in windows]
    return torch.cat([*parts, windows[-1][1]]).numpy().astype(np.uint8)


# Pictures and rows


def pictures(data: Data) -> Value:
    held, target = whole(data.held_out)
    flat = held[0].reshape(len(target), -1)
    return {name: float(each.score(flat, target)) for name, each in classifiers(data.train).items()}


@functools.cache
def _classifiers(pictures: bytes, targets: bytes) -> dict[str, Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    target = np.frombuffer(targets, np.int64)
    flat = np.frombuffer(pictures, np.float32).reshape(len(target), -1)
    return {
        "logistic regression": LogisticRegression(C=0.01, max_iter=300).fit(flat, target),
        f"gradient boosting, {PICTURE_ROUNDS} rounds": HistGradientBoostingClassifier(
            max_iter=PICTURE_ROUNDS, learning_rate=0.1, max_bins=63, early_stopping=False, random_state=0
        ).fit(flat, target),
    }


def classifiers(train: Examples) -> dict[str, Any]:
    """Fitted once: recipes differ in the number of held-out pictures."""
    inputs, target = whole(train)
    return _classifiers(inputs[0].tobytes(), target.tobytes())


def rows(data: Data) -> Value:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss
    from sklearn.preprocessing import OneHotEncoder

    (train, target), (held, held_target) = whole(data.train), whole(data.held_out)
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32).fit(train[1])
    columns = [np.concatenate([part[0], encoder.transform(part[1])], 1) for part in (train, held)]
    linear = LogisticRegression(max_iter=300).fit(columns[0], target)
    joined, held_joined = (np.concatenate(part, 1) for part in (train, held))
    categories = [train[0].shape[1] + number for number in range(train[1].shape[1])]
    boosted = HistGradientBoostingClassifier(
        max_iter=500, learning_rate=0.1, categorical_features=categories, random_state=0
    )
    boosted.fit(joined, target)
    return {
        "logistic regression": float(log_loss(held_target, linear.predict_proba(columns[1]))),
        "gradient boosting, 500 rounds": float(log_loss(held_target, boosted.predict_proba(held_joined))),
    }


# Text


class KneserNey:
    """Interpolated modified Kneser-Ney over bytes (Chen and Goodman 1999): the probability of a byte after up to
    `order` - 1 bytes.

    The longest context counts occurrences; shorter ones count the different bytes before them.
    """

    def __init__(self, train: NDArray[np.uint8], order: int) -> None:
        self.order = order
        seen: list[tuple[NDArray[np.uint64], NDArray[np.int64]]] = []
        for size in range(1, order + 1):
            seen.append(np.unique(grams(train, size), return_counts=True))
        # Level n - 1: of grams of n bytes; in `occurrences` of the text, in `continuations` of different longer grams.
        self.occurrences = [Level(*each) for each in seen]
        self.continuations = []
        for size, (longer, _) in enumerate(seen[1:], 1):
            without_first = longer & np.uint64((1 << 8 * size) - 1)
            self.continuations.append(Level(*np.unique(without_first, return_counts=True)))

    def probability(self, keys: NDArray[np.uint64], order: int) -> NDArray[np.float64]:
        """[n] of the last byte of each key of `order` bytes."""
        found = np.full(len(keys), 1.0 / BYTES)
        for size in range(1, order + 1):
            level = self.occurrences[size - 1] if size == order else self.continuations[size - 1]
            found = level.interpolate(keys & np.uint64((1 << 8 * size) - 1), found)
        return found


class Level:
    """Counts of grams of one length, with their contexts' sums."""

    def __init__(self, keys: NDArray[np.uint64], counts: NDArray[np.int64]) -> None:
        self.keys, self.counts = keys, counts
        once = [int((counts == number).sum()) for number in (1, 2, 3, 4)]
        share = once[0] / (once[0] + 2 * once[1]) if once[0] else 0.0
        # Chen and Goodman's estimates; a text without rare grams has none.
        self.discounts = np.zeros(4)
        for number in (1, 2, 3):
            if once[number - 1]:
                self.discounts[number] = max(0.0, number - (number + 1) * share * once[number] / once[number - 1])
        contexts = keys >> np.uint64(8)
        first = np.flatnonzero(np.r_[True, contexts[1:] != contexts[:-1]])
        self.contexts = contexts[first]
        self.sums = np.add.reduceat(counts, first)
        self.left = np.add.reduceat(self.discounts[np.minimum(counts, 3)], first)

    def interpolate(self, keys: NDArray[np.uint64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
        counts = find(self.keys, keys, self.counts)
        contexts = keys >> np.uint64(8)
        sums, left = find(self.contexts, contexts, self.sums), find(self.contexts, contexts, self.left)
        kept = np.maximum(counts - self.discounts[np.minimum(counts, 3)], 0.0)
        return np.where(sums > 0, (kept + left * shorter) / np.maximum(sums, 1), shorter)


def find(keys: NDArray[np.uint64], asked: NDArray[np.uint64], values: NDArray[Any]) -> NDArray[Any]:
    """The value of each asked key; 0 where it is not among the sorted keys."""
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)


def grams(of: NDArray[np.uint8], size: int) -> NDArray[np.uint64]:
    """Each run of `size` adjacent bytes as one number, the last byte lowest."""
    keys = np.zeros(len(of) - size + 1, np.uint64)
    for offset in range(size):
        keys = keys << np.uint64(8) | of[offset : offset + len(keys)].astype(np.uint64)
    return keys


def continued(data: Data) -> Value:
    return compressed(text(data.train), text(data.held_out))


def tokens(_: Data) -> Value:
    """As `continued`: the tokens are those of the same bytes."""
    train, held = (np.frombuffer(b"".join(part), np.uint8) for part in source_parts(HELD_OUT))
    return compressed(train, held)


def compressed(train: NDArray[np.uint8], held: NDArray[np.uint8]) -> Value:
    found: Value = {}
    for order in (NGRAM, LONG_NGRAM):
        model = KneserNey(train, order)
        # The first byte is not scored; the next ones have fewer bytes before them.
        first = [model.probability(grams(held[: size + 1], size + 1), size + 1) for size in range(1, order - 1)]
        probabilities = np.concatenate([*first, model.probability(grams(held, order), order)])
        assert len(probabilities) == len(held) - 1
        found[f"{order}-gram, Kneser-Ney"] = float(-np.log2(probabilities).mean())
    sizes = [
        len(lzma.compress(part.tobytes(), preset=9 | lzma.PRESET_EXTREME))
        for part in (train, np.concatenate([train, held]))
    ]
    found["xz -9e after the training text"] = (sizes[1] - sizes[0]) * 8 / len(held)
    return found


def filled_in(data: Data) -> Value:
    """Bytes before and after a mask, as far as they are visible: P(byte | before) P(byte | after) / P(byte)."""
    # A training window is whole without its masks: each masked byte is in its target.
    train = []
    for inputs, target in read(data.train):
        train.append(torch.where(inputs[0] == MASK, target, inputs[0]).flatten())
    known = torch.cat(train).numpy().astype(np.uint8)
    forward, backward = KneserNey(known, NGRAM), KneserNey(known[::-1].copy(), NGRAM)
    candidates = np.arange(BYTES, dtype=np.uint64)
    alone = np.log(forward.probability(candidates, 1))
    shares = []
    for inputs, target in read(data.held_out):
        for window, due in zip(inputs[0].numpy(), target.numpy(), strict=True):
            places = np.flatnonzero(due != IGNORED)
            right = 0
            for place in places:
                score = -alone
                for model, beside in ((forward, window[:place][::-1]), (backward, window[place + 1 :])):
                    near = beside[: NGRAM - 1]
                    visible = int(np.argmax(near == MASK)) if (near == MASK).any() else len(near)
                    context = 0
                    for byte in near[:visible][::-1]:
                        context = context << 8 | int(byte)
                    keys = np.uint64(context << 8) | candidates
                    score = score + np.log(model.probability(keys, visible + 1))
                right += int(score.argmax() == due[place])
            shares.append(right / len(places))
    return {f"{NGRAM}-grams before and after, Kneser-Ney": float(np.mean(shares))}


def classes(data: Data) -> Value:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    (train, target), (held, held_target) = whole(data.train), whole(data.held_out)
    texts, held_texts = ([bytes(row).decode("latin-1") for row in each[0].astype(np.uint8)] for each in (train, held))
    found = {"the most frequent class": float((held_target == np.bincount(target).argmax()).mean())}
    kinds: dict[str, dict[str, Any]] = {
        "words": {"token_pattern": r"[A-Za-z_]+", "ngram_range": (1, 2)},
        "1 to 5 bytes": {"analyzer": "char", "ngram_range": (1, 5), "max_features": 300_000, "lowercase": False},
    }
    for kind, options in kinds.items():
        vectors = TfidfVectorizer(sublinear_tf=True, **options)
        linear = LogisticRegression(C=10.0, max_iter=300).fit(vectors.fit_transform(texts), target)
        found[f"TF-IDF of {kind}, logistic regression"] = float(
            linear.score(vectors.transform(held_texts), held_target)
        )
    return found


# Super-resolution


def enlarged(data: Data) -> Value:
    """Least squares from a window of low-resolution pixels, all colours, to the pixels that replace its middle one."""
    squares = products = torch.zeros((), dtype=torch.float64)
    scale = 1
    for (low,), truth in read(data.train):
        scale = truth.shape[-1] // low.shape[-1]
        window, pixels = windows(low), functional.pixel_unshuffle(truth, scale).flatten(2).mT.flatten(0, 1).double()
        squares, products = squares + window.mT @ window, products + window.mT @ pixels
    weights = torch.linalg.solve(squares + 1e-6 * torch.eye(len(squares)), products)
    scores = []
    for (low,), truth in read(data.held_out):
        pixels = (windows(low) @ weights).view(len(low), -1, 3 * scale**2).mT.float()
        scores.append(psnr(functional.pixel_shuffle(pixels.unflatten(2, low.shape[2:]), scale), truth))
    return {f"linear filter of {WINDOW} x {WINDOW}, fitted": float(torch.cat(scores).double().mean())}


def windows(low: Tensor) -> Tensor:
    """[n, 3, h, w] -> the window around each pixel and a 1, [n h w, 3 WINDOW^2 + 1] f64; edges are repeated."""
    padded = functional.pad(low, [WINDOW // 2] * 4, mode="replicate")
    found = functional.unfold(padded, WINDOW).mT.flatten(0, 1).double()
    return torch.cat([found, found.new_ones(len(found), 1)], 1)


OF_DATA: dict[str, Callable[[Data], Value]] = {
    "fashion-mnist": pictures,
    "flights": rows,
    "masked-source": filled_in,
    "photos": enlarged,
    "source": continued,
    "source-classes": classes,
    "source-tokens": tokens,
}


def key(recipe: Recipe) -> str:
    """The data of a recipe as text."""
    return json.dumps(recipe.data.model_dump(), sort_keys=True)


def kept() -> dict[str, Any]:
    """The values of earlier runs, by `key`."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def baselines(names: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...")] = None) -> str:
    """Strong baselines of the recipes"""
    uses: dict[str, list[str]] = {}
    for path in RECIPES:
        recipe, _ = load(path)
        uses.setdefault(key(recipe), []).append(path.stem)
        if (not names or path.stem in names) and (names or key(recipe) not in kept()):
            began_s = time.perf_counter()
            data = make_data(recipe.data)
            values = OF_DATA[recipe.data.name](data)
            assert all(map(math.isfinite, values.values())), values
            metric = data.metric
            found = {
                "metric": metric.name + (f", {metric.unit}" if metric.unit else ""),
                "better": metric.better,
                "weak": {metric.baseline_is: metric.baseline},
                "strong": values,
                "train": len(data.train),
                "held_out": len(data.held_out),
                "seconds": time.perf_counter() - began_s,
            }
            print(f"{path.stem}: {values} in {found['seconds']:.0f} s", file=sys.stderr)
            driver.keep(KEPT, {key(recipe): found})
    lines = []
    for data_key, found in kept().items():
        if data_key in uses:
            of = {**found["weak"], **found["strong"]}
            shown = "; ".join(f"{name}: {value:.4g}" for name, value in of.items())
            lines.append(
                [", ".join(uses[data_key]), data_key, found["metric"], f"{found['train']}, {found['held_out']}"]
            )
            lines[-1] += [shown, f"{found['seconds']:.0f}"]
    return driver.table("recipes | data | metric | examples: train, held out | baselines | seconds", lines)


if __name__ == "__main__":
    driver.run(baselines)
