"""Context parallelism: data-parallel ranks in runs share samples, and each has an equal part of every sequence.

All layers but attention act on single tokens. Attention exchanges by all_to_all: each rank gets all tokens of some
heads, and sends their results back (DeepSpeed-Ulysses: Jacobs et al. 2023). For gradients the ranks of a run are
data-parallel ranks as any others. torch's own context parallelism has no kernel for CPUs: it takes CUDA's three.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn import functional

from netfold_train.data.examples import Batch
from netfold_train.models.model import Model
from netfold_train.parallel.mesh import Axis, Mesh
from netfold_train.recipe import Recipe

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""queries, keys, values -> results, each [n, heads, s, width]."""


class ContextModule(nn.Module):
    """A layer that depends on a token's place in its sequence, or on other tokens."""

    context: Axis | None = None
    """The ranks that have this rank's sequences; `cut_sequences` sets it."""

    def first_position(self, tokens: int) -> int:
        """The place of this rank's first token, of `tokens` on each rank."""
        return 0 if self.context is None else self.context.rank * tokens

    def whole(self, values: Tensor) -> Tensor:
        """All tokens' values [n, s, ...] from this rank's, without a gradient. Collective over `context`."""
        return values if self.context is None else gather_tokens(values, self.context)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Scaled dot product attention over whole sequences: this rank's tokens [n, heads, s, width] -> the same.

        Collective over `context`, as `exchange_heads`.
        """

        def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)

        return self.exchange_heads(query, key, value, kernel)

    def exchange_heads(self, query: Tensor, key: Tensor, value: Tensor, kernel: Kernel) -> Tensor:
        """Compute attention by `kernel`, which gets all tokens of some heads: this rank's tokens in, and out.

        All are [n, heads, s, width]; keys and values may have fewer heads, each of a run of queries (Ainslie et al.
        2023), and values another width. Collective over `context`: an all_to_all of all three, and one of the results;
        backward the same.
        """
        if self.context is None:
            return kernel(query, key, value)
        ranks, group = self.context.size, self.context.group
        heads = query.shape[1]
        if heads % ranks:
            raise ValueError(f"parallel.context is {ranks}, but each rank has {heads} heads, which it must divide")
        # A rank needs the keys of its queries: with too few heads, each is sent to several ranks.
        times = ranks // math.gcd(key.shape[1], ranks)
        if times > 1:
            key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        # [ranks, elements]: sent by heads, received by parts of the sequence.
        parts = [torch.stack(each.chunk(ranks, 1)) for each in (query, key, value)]
        sent = torch.cat([each.flatten(1) for each in parts], 1)
        received = all_to_all_single(sent, None, None, group).view_as(sent)
        sizes = [each[0].numel() for each in parts]
        q, k, v = (
            torch.cat(each.view_as(part).unbind(), -2)
            for each, part in zip(received.split_with_sizes(sizes, 1), parts, strict=True)
        )
        mixed = kernel(q, k, v)
        back = torch.stack(mixed.chunk(ranks, -2))
        return torch.cat(all_to_all_single(back, None, None, group).view_as(back).unbind(), 1)


def cut_sequences(model: Model, recipe: Recipe, mesh: Mesh) -> None:
    """Have the model's layers work on parts of sequences, as `parallel.context` says. Raises ValueError."""
    check_context(model, recipe)
    if mesh.context is not None:
        for part in model.module.modules():
            if isinstance(part, ContextModule):
                part.context = mesh.context


def check_context(model: Model, recipe: Recipe) -> None:
    """Raise ValueError if `parallel.context` cannot cut the model's sequences."""
    if recipe.parallel.context > 1 and not model.cuts_sequences:
        raise ValueError(f"parallel.context is {recipe.parallel.context}, but {model.needs_sequences}; use context = 1")


def own_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """This rank's part of its share of a batch: of each tensor [n, s, ...] a run of the s tokens, in order of ranks."""
    if mesh.context is None:
        return batch
    ranks = mesh.context.size
    check_tokens(batch, ranks)
    return batch.like([each.chunk(ranks, 1)[mesh.context.rank].contiguous() for each in batch.tensors])


def check_tokens(batch: Batch, ranks: int) -> None:
    """Raise ValueError unless `ranks` divides the tokens of every tensor of a batch of sequences."""
    wrong = next((list(each.shape) for each in batch.tensors if each.ndim < 2 or each.shape[1] % ranks), None)
    if ranks > 1 and wrong is not None:
        raise ValueError(f"parallel.context is {ranks}, which does not divide the tokens of a tensor of shape {wrong}")


def all_tokens(output: Tensor, mesh: Mesh) -> Tensor:
    """The outputs [n, s, ...] of whole sequences from those of this rank's tokens. Collective over the context."""
    return output if mesh.context is None else gather_tokens(output, mesh.context)


def gather_tokens(values: Tensor, context: Axis) -> Tensor:
    """[n, s, ...] of each rank, in the order of ranks -> of whole sequences, without a gradient. Collective."""
    parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(context.size)]
    dist.all_gather(parts, values.contiguous(), group=context.group)
    return torch.cat(parts, 1)
