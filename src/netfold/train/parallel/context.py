"""Context parallelism: data-parallel ranks in runs share samples, and each has an equal part of every sequence.

All layers but attention act on single tokens. Attention exchanges by all_to_all: each rank gets all tokens of some
heads, and sends their results back (DeepSpeed-Ulysses: Jacobs et al. 2023). For gradients the ranks of a run are
data-parallel ranks as any others. torch's own context parallelism has no kernel for CPUs: it takes CUDA's three.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.nn import functional

from netfold.train.data.examples import Batch
from netfold.train.models.model import Model
from netfold.train.parallel.mesh import Axis, Mesh
from netfold.train.recipe import Recipe


class ContextModule(nn.Module):
    """A layer that depends on a token's place in its sequence, or on other tokens."""

    context: Axis | None = None
    """The ranks that have this rank's sequences; `cut_sequences` sets it."""

    def first_position(self, tokens: int) -> int:
        """The place of this rank's first token, of `tokens` on each rank."""
        return 0 if self.context is None else self.context.rank * tokens

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        """Scaled dot product attention over whole sequences: this rank's tokens [n, heads, s, width] -> the same.

        Collective over `context`: an all_to_all of all three, and one of the results; backward the same.
        """
        if self.context is None:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        ranks, group = self.context.size, self.context.group
        heads = query.shape[1]
        if heads % ranks:
            raise ValueError(f"parallel.context is {ranks}, but each rank has {heads} heads, which it must divide")
        # [ranks, 3, n, heads of a rank, tokens of a rank, width]: sent by heads, received by parts of the sequence.
        sent = torch.stack([torch.stack(each.chunk(ranks, 1)) for each in (query, key, value)], 1)
        parts = all_to_all_single(sent, None, None, group).view_as(sent)
        q, k, v = (torch.cat(each.unbind(), -2) for each in parts.unbind(1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
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
        raise ValueError(
            f"parallel.context is {recipe.parallel.context}, but the model's layers need whole sequences "
            "(Model.cuts_sequences); use context = 1"
        )


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
    if mesh.context is None:
        return output
    parts = [torch.empty_like(output) for _ in range(mesh.context.size)]
    dist.all_gather(parts, output.contiguous(), group=mesh.context.group)
    return torch.cat(parts, 1)
