"""Transformers: GPT (Radford et al. 2019) and BERT (Devlin et al. 2019): tokens [n, s] -> logits [n, s, vocabulary].

Both are the same blocks, layer norm first (Xiong et al. 2020: no long warm-up is needed), and differ in whether a token
sees those after it. Logits have weights of their own: tied to the embedding's, they would tie the first stage of a
pipeline to its last.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from netfold.train.model import Chain, Model
from netfold.train.models.transformer_plan import transformer_plan


def gpt(
    vocabulary: int = 256, context: int = 128, width: int = 128, heads: int = 4, layers: int = 4, mlp: int = 4
) -> Model:
    """width: features of a token, a multiple of heads; mlp: how many times wider the hidden layer is."""
    parts: list[tuple[str, nn.Module]] = [("embedding", Embedding(vocabulary, context, width))]
    parts += [(f"block{number}", Block(width, heads, mlp * width, causal=True)) for number in range(layers)]
    parts += [("head", Head(vocabulary, width))]
    return Model(Chain(parts), token_loss, transformer_plan(layers, width // heads))


def bert(
    vocabulary: int = 257, context: int = 128, width: int = 128, heads: int = 4, layers: int = 4, mlp: int = 4
) -> Model:
    """Every token sees all. `vocabulary` counts the mask; the rest is as in `gpt`. The target is -100 where no token is
    asked for, and asks for equally many in every sequence: so the mean over a batch is that over its equal parts."""
    parts: list[tuple[str, nn.Module]] = [("embedding", Embedding(vocabulary, context, width))]
    parts += [(f"block{number}", Block(width, heads, mlp * width, causal=False)) for number in range(layers)]
    parts += [("head", Head(vocabulary, width))]
    return Model(Chain(parts), token_loss, transformer_plan(layers, width // heads))


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy, the mean over all tokens that the target [n, s] asks for (-100: none), in nats."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), target.flatten())


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.head_width, self.causal = width // heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # As many heads as came out: under tensor parallelism a rank has only some.
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        mixed_out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return mixed_out


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(x)))
        return down


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        after: Tensor = x + self.mlp(self.mlp_norm(x))
        return after


class Head(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.logits.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(x))
        return logits
