"""Transformers: GPT (Radford et al. 2019) and BERT (Devlin et al. 2019): tokens [n, s] -> logits [n, s, vocabulary].

Both have the same blocks, layer norm first (Xiong et al. 2020: no long warm-up is needed). In GPT a token does not see
later tokens. The head has its own weights: weights tied to the embedding's would connect the first and last stage of a
pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from netfold_train.models.model import Chain, Model, Style, TensorPlan, real_items
from netfold_train.parallel.context import ContextModule
from netfold_train.parallel.tensor import in_units
from netfold_train.zoo.models.linear import class_loss, named


def gpt(
    vocabulary: int = 256, context: int = 128, width: int = 128, heads: int = 4, layers: int = 4, mlp: int = 4
) -> Model:
    """width: features of a token, a multiple of heads. mlp: the hidden layer's width as a multiple of `width`."""
    return _transformer(vocabulary, context, width, heads, layers, mlp, causal=True)


def bert(
    vocabulary: int = 257, context: int = 128, width: int = 128, heads: int = 4, layers: int = 4, mlp: int = 4
) -> Model:
    """Every token sees all tokens. vocabulary: with the mask. Other options: as in `gpt`.

    The target is -100 at places that do not count.
    """
    return _transformer(vocabulary, context, width, heads, layers, mlp, causal=False)


def bert_classes(
    classes: int,
    vocabulary: int = 257,
    context: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    mlp: int = 4,
) -> Model:
    """`bert` as a classifier: tokens [n, s] -> logits [n, classes] of the mean over all tokens; targets int64 [n].

    Other options: as in `bert`, whose embedding and blocks have the same names.
    """
    whole = _transformer(vocabulary, context, width, heads, layers, mlp, causal=False)
    chain = cast(Chain, whole.module)
    head = named(norm=nn.LayerNorm(width), mean=TokenMean(), classes=nn.Linear(width, classes))
    layers_plan = transformer_plan(layers, width // heads)

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        if sequence:
            raise ValueError("parallel.sequence: bert-classes takes the mean over the sequence; use sequence = false")
        return layers_plan(style, sequence)

    return Model(Chain([*list(chain.layers.items())[:-1], ("head", head)]), class_loss, tensor_plan=plan)


class TokenMean(nn.Module):
    """[n, s, width] -> [n, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _transformer(
    vocabulary: int, context: int, width: int, heads: int, layers: int, mlp: int, *, causal: bool
) -> Model:
    parts: list[tuple[str, nn.Module]] = [("embedding", Embedding(vocabulary, context, width))]
    parts += [(f"block{number}", Block(width, heads, mlp * width, causal)) for number in range(layers)]
    logits = nn.Linear(width, vocabulary, bias=False)
    nn.init.normal_(logits.weight, std=0.02)
    parts += [("head", named(norm=nn.LayerNorm(width), logits=logits))]
    plan = transformer_plan(layers, width // heads)
    return Model(Chain(parts), class_loss, None if causal else real_items, plan, cuts_sequences=True)


class Embedding(ContextModule):
    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.first_position(tokens.shape[1])
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.token(tokens) + self.position(places)
        return embedded


class Attention(ContextModule):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.head_width, self.causal = width // heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads follows from the output: under tensor parallelism a rank has only some.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = self.attend(query, key, value, causal=self.causal)
        mixed_out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return mixed_out


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = named(up=nn.Linear(width, hidden), gelu=nn.GELU(), down=nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        after: Tensor = x + self.mlp(self.mlp_norm(x))
        return after


def transformer_plan(layers: int, head_width: int) -> TensorPlan:
    """The plan for `parallel.tensor`: attention is cut by heads, the MLP by hidden features.

    Every rank has the whole embedding and head. Collectives of a block, forward / backward:
    alternating: 2 all_reduce / 2 all_reduce (Shoeybi et al. 2019, section 3);
      with `sequence`: 2 all_gather and 2 reduce_scatter / the same, as many bytes (Korthikanti et al. 2022), and a
      small all_reduce backward for each weight and bias of a norm;
    colwise: 4 all_gather / 2 reduce_scatter and 2 all_reduce. query, key and value count as one layer, because heads
      are not gathered before attention. The input of each half block is whole, so its gradient is all-reduced;
    rowwise: 4 reduce_scatter and 2 all_reduce / 6 all_gather. The output of each half block is made whole.
    """
    whole, cut = Replicate(), Shard(-1)

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        first = RowwiseParallel if style == "rowwise" else ColwiseParallel
        second = ColwiseParallel if style == "colwise" else RowwiseParallel
        between = Shard(1) if sequence else whole
        # Query, key and value take one input, prepared once, so that its gradients are added up before communication.
        taken = cut if style == "rowwise" else whole
        block = {
            "attention": _prepared(between, taken),
            **{
                f"attention.{name}": in_units(first(input_layouts=taken, output_layouts=cut), head_width, "heads")
                for name in ("query", "key", "value")
            },
            "attention.out": second(input_layouts=cut, output_layouts=between),
            "mlp.up": first(input_layouts=whole, output_layouts=cut),
            "mlp.down": second(input_layouts=cut, output_layouts=between),
        }
        outside: dict[str, Any] = {}
        if sequence:
            block |= {"mlp": _prepared(between, whole), "attention_norm": _norm(), "mlp_norm": _norm()}
            # From the embedding on, operations on single tokens (norms, skips) are not repeated on every rank
            # (Korthikanti et al. 2022, section 4.2). The cut needs no communication; its gradient is gathered.
            outside = {
                "embedding": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=between),
                "head.norm": _norm(),
                "head.logits": _prepared(between, whole, local=True),
            }
        blocks = {f"block{number}.{path}": how for number in range(layers) for path, how in block.items()}
        return {f"layers.{path}": how for path, how in (blocks | outside).items()}

    return plan


def _prepared(source: Placement, taken: Placement, *, local: bool = False) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=source, desired_input_layouts=taken, use_local_output=local)


def _norm() -> SequenceParallel:
    return SequenceParallel(use_local_output=True)
