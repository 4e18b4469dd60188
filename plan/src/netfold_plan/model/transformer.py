"""Transformers by their dimensions, split as Megatron-LM splits them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from netfold_plan.model.layer_cost import Collective, Layer, Matmul, Pass, ShardSpec, backward_matmuls

# Megatron-LM pads a vocabulary so that each tensor rank's part is a multiple of 128 (arguments.py).
_PAD = 128
# Bytes per element of the logits: the cast to f32 (6), one read for the maximum, softmax read and written; backward one
# read less.
_LOSS_FORWARD, _LOSS_BACKWARD = 14.0, 12.0


@dataclass(frozen=True)
class Transformer:
    """Word and position embeddings, and equal blocks of attention and a perceptron of four times the width.

    sequence: tokens of a sample. vocabulary: before padding. pads: whether a single tensor rank pads it, too.
    flash: attention is one kernel that keeps no scores, recomputes them in its backward pass, and leaves out scores of
    later tokens (Dao et al. 2022).
    """

    name: str
    hidden: int
    heads: int
    depth: int
    sequence: int
    vocabulary: int = 51200
    pads: bool = True
    flash: bool = False

    @property
    def parameters(self) -> float:
        block = 12 * self.hidden**2 + 13 * self.hidden
        return self.depth * block + (self.vocabulary + self.sequence) * self.hidden + 2 * self.hidden

    @property
    def flops(self) -> float:
        """Narayanan et al. 2021, section 5.1, without recomputation: 72 s l h^2 (1 + s/6h + V/12lh)."""
        h, s = self.hidden, self.sequence
        return 72.0 * s * self.depth * h * h * (1 + s / (6 * h) + self.vocabulary / (12 * self.depth * h))

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        return _layers(self, share)

    def padded(self, tensor: int) -> int:
        """The padded vocabulary, which tensor ranks can split."""
        multiple = _PAD * tensor if self.pads or tensor > 1 else 1
        return -(-self.vocabulary // multiple) * multiple


@lru_cache(maxsize=4096)
def _layers(model: Transformer, share: ShardSpec) -> tuple[Layer, ...]:
    if model.heads % share.tensor:
        raise ValueError(f"{model.name}: {model.heads} heads cannot be split over {share.tensor} tensor ranks")
    return (_embedding(model, share), _block(model, share), _head(model, share))


def _tokens_bytes(model: Transformer, share: ShardSpec) -> float:
    return float(model.sequence * share.micro_batch * model.hidden * share.item_bytes)


def _embedding(model: Transformer, share: ShardSpec) -> Layer:
    """Look-up of words, positions, dropout; an all_reduce brings the rows of other tensor ranks."""
    whole = _tokens_bytes(model, share)
    return Layer(
        name="embedding",
        forward=Pass((), 6.5 * whole, 6, _shared(share, whole)),
        backward=Pass((), 5.5 * whole, 6),
        again=Pass(),
        parameters=(model.padded(share.tensor) / share.tensor + model.sequence) * model.hidden,
        # The dropout's mask, one byte per element.
        kept_bytes=whole / share.item_bytes / (share.tensor if share.sequence else 1),
        input_bytes=0.0,
    )


def _block(model: Transformer, share: ShardSpec) -> Layer:
    h, s, b, t = model.hidden, model.sequence, share.micro_batch, share.tensor
    rows, heads = s * b, b * model.heads // t
    whole = _tokens_bytes(model, share)
    # Norms, dropouts and additions process a whole activation, or a rank's tokens of it.
    between = whole / (t if share.sequence else 1)
    scores = float(heads * s * s * share.item_bytes)
    width = h // model.heads
    attention = (Matmul(s, s, width, heads), Matmul(s, width, s, heads))
    linear = (
        Matmul(rows, 3 * h // t, h),
        Matmul(rows, h, h // t),
        Matmul(rows, 4 * h // t, h),
        Matmul(rows, h, 4 * h // t),
    )
    parameters = (12 * h * h + 7 * h) / t + 6 * h
    # Read and written by each other kernel, as Megatron-LM fuses them. Of an activation: norms 2 and 2, bias + dropout
    # + addition 3.5 and 3.5, biases and GELU 13. Of the scores: softmax 2, dropout 2.5.
    moved = 11 * between + 13 * whole / t
    # The same for gradients of activations; a microbatch's gradients of weights are added to the earlier ones.
    moved_back = 23 * between + 27 * whole / t + 3 * share.item_bytes * parameters
    shared = _shared(share, whole, 2)
    if model.flash:
        forward = Pass((*linear, _fused(attention, 2)), moved, 17, shared)
        backward = Pass((*backward_matmuls(linear), _fused(attention, 5)), moved_back, 36, shared)
    else:
        forward = Pass((*linear, *attention), moved + 4.5 * scores, 20, shared)
        backward = Pass(backward_matmuls((*linear, *attention)), moved_back + 5.5 * scores, 42, shared)
    # Korthikanti et al. 2022, table 2.
    kept = whole / 2 * (10 / (t if share.sequence else 1) + 24 / t)
    kept_scores = 0.0 if model.flash else whole / 2 * 5 * model.heads * s / (h * t)
    again, live = Pass(), 0.0
    if share.recomputation == "none":
        kept += kept_scores
    elif share.recomputation == "selective" and not model.flash:
        again, live = Pass(attention, 4.5 * scores, 4), kept_scores
    elif share.recomputation == "full":
        # The input of the block is kept, and not recomputed.
        again, live, kept = forward, kept + kept_scores - between, between
    return Layer(
        name="block",
        forward=forward,
        backward=backward,
        again=again,
        parameters=parameters,
        kept_bytes=kept,
        input_bytes=between,
        count=model.depth,
        live_bytes=live,
    )


def _fused(attention: tuple[Matmul, ...], products: int) -> Matmul:
    """So many products of the scores' size in one kernel, half of them left out; the kernel moves no scores."""
    scores = attention[0]
    return Matmul(scores.m, scores.n, scores.k, scores.count, products / 2)


def _head(model: Transformer, share: ShardSpec) -> Layer:
    """The last norm, logits by the word embedding, and the loss, which casts logits to 4 bytes."""
    t, rows = share.tensor, model.sequence * share.micro_batch
    words = model.padded(t) // t
    whole, logits = _tokens_bytes(model, share), float(rows * words)
    matmul = (Matmul(rows, words, model.hidden),)
    return Layer(
        name="head",
        forward=Pass(matmul, 2 * whole + _LOSS_FORWARD * logits, 14, _shared(share, 4.0 * rows, 3)),
        backward=Pass(backward_matmuls(matmul), 6 * whole + _LOSS_BACKWARD * logits, 8, _shared(share, whole)),
        again=Pass(),
        parameters=2.0 * model.hidden,
        kept_bytes=2 * whole + 4 * logits,
        input_bytes=whole / (t if share.sequence else 1),
    )


def _shared(share: ShardSpec, size_bytes: float, count: int = 1) -> tuple[Collective, ...]:
    """The collectives of tensor ranks: all_reduces, or with sequence parallelism all_gathers and reduce_scatters."""
    if share.tensor == 1:
        return ()
    if share.sequence:
        return (Collective("all_gather", size_bytes), Collective("reduce_scatter", size_bytes)) * count
    return (Collective("all_reduce", size_bytes),) * count
