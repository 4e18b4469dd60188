"""A GPT with experts in place of its MLPs: tokens [n, s] -> log-probabilities [n, s, vocabulary], less a penalty.

A router sends each token to the `top` of its experts (Shazeer et al. 2017; Fedus, Zoph, Shazeer 2022, Switch
Transformers). Experts have no capacity: no token is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional

from netfold_train.models.model import Chain, Model, Style, at_least_f32
from netfold_train.parallel.experts import Experts
from netfold_train.zoo.models.linear import named
from netfold_train.zoo.models.transformer import Attention, Embedding, transformer_plan


def gpt_moe(
    vocabulary: int = 256,
    context: int = 128,
    width: int = 128,
    heads: int = 4,
    layers: int = 4,
    mlp: int = 4,
    experts: PositiveInt = 8,
    top: PositiveInt = 2,
    balance: Annotated[float, Field(ge=0)] = 0.01,
) -> Model:
    """experts: of each block. top: experts of a token. mlp: an expert's hidden width. Other options: as in `gpt`.

    balance: the weight of the penalty for unequal use of experts, which a loss of each token includes. The output is
    log-probabilities less the sequence's penalty. The loss of a token is the target's output, negated. A cross entropy
    of the output normalises it again, so metrics do not see the penalty.
    """
    if top > experts:
        raise ValueError(f"model.top is {top}, but there are {experts} experts; set {experts} or less")
    parts: list[tuple[str, nn.Module]] = [("embedding", _Start(vocabulary, context, width))]
    parts += [(f"block{number}", MoeBlock(width, heads, mlp * width, experts, top)) for number in range(layers)]
    parts += [("head", _Head(width, vocabulary, balance))]
    attention = transformer_plan(layers, width // heads)

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        """Attention is cut by heads; every rank has whole experts, and computes them for all tokens."""
        if sequence:
            raise ValueError("parallel.sequence: a router needs whole sequences; use sequence = false")
        return {path: cut for path, cut in attention(style, False).items() if ".mlp." not in path}

    return Model(Chain(parts), _loss, tensor_plan=plan)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    losses = functional.nll_loss(output.flatten(0, -2), target.flatten(), reduction="none")
    return losses.view_as(target)


class _Start(Embedding):
    """Tokens -> (features, the penalty so far [n], which is 0)."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(tokens)
        return x, x.new_zeros(len(x))


class MoeBlock(nn.Module):
    """Attention and experts, layer norm first: (x [n, s, width], penalty [n]) -> the same; penalties add up."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.router = Router(width, experts, top)
        self.mlp = Experts({str(number): _expert(width, hidden) for number in range(experts)})

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        asked: Tensor = self.mlp_norm(x)
        shares, chosen, more = self.router(asked)
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            # Tokens are sent in the type in which experts compute.
            asked = asked.to(torch.get_autocast_dtype(kind))
        # One row for each token and each of its experts.
        rows = asked.unsqueeze(2).expand(*chosen.shape, -1)
        found = self.mlp(rows.flatten(0, 2), chosen.flatten()).view(rows.shape)
        mixed = (shares.unsqueeze(-1) * found).sum(2)
        return x + mixed.to(x.dtype), penalty + more.to(penalty.dtype)


class Router(nn.Module):
    """x [n, s, width] -> (shares [n, s, top], experts int64 [n, s, top], penalty [n]), computed in f32 or more.

    shares: with top 1 the expert's probability, as in Switch; with more, their probabilities over their sum (GShard).
    penalty: experts x the sum over experts of (share of the sequence's tokens) x (mean probability), as Switch's
    equation 4: 1 if all are used alike. Switch takes both over a batch, and here they are over each sequence, as in
    DeepSeek-V3 (2024, section 2.1.2): so the loss of a sequence does not depend on the sequences beside it, and any
    split of a batch has one gradient.
    """

    in_f32 = True

    def __init__(self, width: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.scores = nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.scores.weight, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            probabilities = self.scores(at_least_f32(x)).softmax(-1)
        shares, chosen = probabilities.topk(self.top)
        if self.top > 1:
            shares = shares / shares.sum(-1, keepdim=True)
        experts = probabilities.shape[-1]
        used = functional.one_hot(chosen, experts).to(probabilities.dtype).mean((1, 2))
        return shares, chosen, experts * (used * probabilities.mean(1)).sum(-1)


class _Head(nn.Module):
    def __init__(self, width: int, vocabulary: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor, penalty: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        penalties = self.balance * at_least_f32(penalty)
        return at_least_f32(logits).log_softmax(-1) - penalties[:, None, None]


def _expert(width: int, hidden: int) -> nn.Sequential:
    return named(up=nn.Linear(width, hidden), gelu=nn.GELU(), down=nn.Linear(hidden, width))
