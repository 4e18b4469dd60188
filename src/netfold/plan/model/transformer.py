"""Transformers by their dimensions, split as Megatron-LM splits them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from netfold.plan.model.work import Collective, Layer, Matmul, Pass, Share

# Megatron-LM pads a vocabulary so that each tensor rank's part is a multiple of this (arguments.py).
_PAD = 128


@dataclass(frozen=True)
class Transformer:
    """A stack of equal blocks: attention, then a perceptron of four times the width; word and position embeddings.

    sequence: tokens of a sample. vocabulary: words, before padding.
    """

    name: str
    hidden: int
    heads: int
    depth: int
    sequence: int
    vocabulary: int = 51200

    @property
    def parameters(self) -> float:
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.depth * block + (self.vocabulary + self.sequence) * self.hidden + 2 * self.hidden

    @property
    def flops(self) -> float:
        """Narayanan et al. 2021, section 5.1, without recomputation: 72 s l h^2 (1 + s/6h + V/12lh)."""
        h, s = self.hidden, self.sequence
        return 72.0 * s * self.depth * h * h * (1 + s / (6 * h) + self.vocabulary / (12 * self.depth * h))

    def layers(self, share: Share) -> tuple[Layer, ...]:
        return _layers(self, share)

    def padded(self, tensor: int) -> int:
        """Words of the embedding, a multiple that tensor ranks can split."""
        multiple = _PAD * tensor
        return -(-self.vocabulary // multiple) * multiple


@lru_cache(maxsize=4096)
def _layers(model: Transformer, share: Share) -> tuple[Layer, ...]:
    if model.heads % share.tensor:
        raise ValueError(f"{model.name}: {model.heads} heads cannot be split over {share.tensor} tensor ranks")
    return (_embedding(model, share), _block(model, share), _head(model, share))


def _tokens_bytes(model: Transformer, share: Share) -> float:
    return float(model.sequence * share.micro_batch * model.hidden * share.item_bytes)


def _embedding(model: Transformer, share: Share) -> Layer:
    whole = _tokens_bytes(model, share)
    parameters = (model.padded(share.tensor) / share.tensor + model.sequence) * model.hidden
    shared = () if share.tensor == 1 else (Collective("all_reduce", whole),)
    return Layer(
        name="embedding",
        forward=Pass((), 6 * whole, 5, shared),
        backward=Pass((), 4 * whole, 4),
        again=Pass(),
        parameters=parameters,
        kept_bytes=whole / 2,
        input_bytes=0.0,
    )


def _block(model: Transformer, share: Share) -> Layer:
    h, s, b, t = model.hidden, model.sequence, share.micro_batch, share.tensor
    rows, heads = s * b, b * model.heads // t
    whole = _tokens_bytes(model, share)
    matmuls = (
        Matmul(rows, 3 * h // t, h),
        Matmul(s, s, h // model.heads, heads),
        Matmul(s, h // model.heads, s, heads),
        Matmul(rows, h, h // t),
        Matmul(rows, 4 * h // t, h),
        Matmul(rows, h, 4 * h // t),
    )
    scores = float(heads * s * s * share.item_bytes)
    moved = whole * (10 + 15 / t) + 7 * scores
    shared = () if t == 1 else (Collective("all_reduce", whole),) * 2
    forward = Pass(matmuls, moved, 20, shared)
    backward = Pass(matmuls * 2, 2 * moved, 36, shared)
    # Korthikanti et al. 2022, table 2, at 2 bytes an activation.
    between = 10 / (t if share.sequence else 1)
    kept = whole / 2 * (between + 24 / t + 5 * model.heads * s / (h * t))
    again = Pass()
    if share.recomputation == "full":
        kept, again = whole, forward
    elif share.recomputation == "selective":
        kept = whole / 2 * (between + 24 / t)
        again = Pass(matmuls[1:3], 7 * scores, 5)
    return Layer(
        name="block",
        forward=forward,
        backward=backward,
        again=again,
        parameters=(12 * h * h + 7 * h) / t + 6 * h,
        kept_bytes=kept,
        input_bytes=whole,
        count=model.depth,
    )


def _head(model: Transformer, share: Share) -> Layer:
    h, t = model.hidden, share.tensor
    rows = model.sequence * share.micro_batch
    words = model.padded(t) // t
    whole = _tokens_bytes(model, share)
    matmul = Matmul(rows, words, h)
    shared = () if t == 1 else (Collective("all_reduce", 4.0 * rows),) * 3
    # Logits are kept in 4 bytes for the loss, whatever the activations have.
    return Layer(
        name="head",
        forward=Pass((matmul,), 4 * whole + rows * words * 16.0, 12, shared),
        backward=Pass(
            (matmul, matmul), 4 * whole + rows * words * 8.0, 6, () if t == 1 else (Collective("all_reduce", whole),)
        ),
        again=Pass(),
        parameters=2 * h,
        kept_bytes=2 * whole + 4.0 * rows * words,
        input_bytes=whole,
    )
