"""How a transformer's blocks are cut for `parallel.tensor`: attention by heads, the MLP by hidden features.

Embedding and head are on every rank, whole. Collectives of a block, forward / backward:
alternating: 2 all_reduce / 2 all_reduce (Shoeybi et al. 2019, section 3);
  along the sequence between them: 2 all_gather and 2 reduce_scatter / the same, as many bytes (Korthikanti et al.
  2022), and a small all_reduce backward for each weight and bias of a norm;
colwise: 4 all_gather / 2 reduce_scatter and 2 all_reduce: query, key and value are one layer here, for heads are not
  gathered before attention; what enters a half of the block is whole on every rank, so its gradient is all-reduced;
rowwise: 4 reduce_scatter and 2 all_reduce / 6 all_gather: what leaves a half of the block is made whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel

from netfold.train.model import Style, TensorPlan
from netfold.train.parallel.tensor import ColwiseLinear, RowwiseLinear, ShardSequence


def transformer_plan(layers: int, head_width: int) -> TensorPlan:
    """For a chain of `embedding`, block0 ... block<layers - 1> and `head` (models/transformer.py)."""

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for number in range(layers):
            block = _sequence_block(head_width) if sequence else _block(style, head_width)
            found.update({f"layers.block{number}.{path}": how for path, how in block.items()})
        if sequence:
            found["layers.embedding"] = ShardSequence()
            found["layers.head.norm"] = SequenceParallel(use_local_output=True)
            found["layers.head.logits"] = _taken(Shard(1), local=True)
        return found

    return plan


def _block(style: Style, head_width: int) -> dict[str, Any]:
    whole, cut = Replicate(), Shard(-1)
    heads: dict[str, Any] = {"unit": head_width, "units": "heads"}
    if style == "rowwise":
        return {
            "attention": _taken(whole, cut),
            **{f"attention.{name}": RowwiseLinear(cut, cut, **heads) for name in ("query", "key", "value")},
            "attention.out": RowwiseLinear(cut, whole),
            "mlp.up": RowwiseLinear(whole, cut),
            "mlp.down": RowwiseLinear(cut, whole),
        }
    second = ColwiseLinear if style == "colwise" else RowwiseLinear
    return {
        "attention": _taken(whole),
        **{f"attention.{name}": ColwiseLinear(whole, cut, **heads) for name in ("query", "key", "value")},
        "attention.out": second(cut, whole),
        "mlp.up": ColwiseLinear(whole, cut),
        "mlp.down": second(cut, whole),
    }


def _sequence_block(head_width: int) -> dict[str, Any]:
    block = _block("alternating", head_width)
    return block | {
        "attention_norm": SequenceParallel(use_local_output=True),
        "attention": _taken(Shard(1)),
        "attention.out": RowwiseLinear(Shard(-1), Shard(1)),
        "mlp_norm": SequenceParallel(use_local_output=True),
        "mlp": _taken(Shard(1)),
        "mlp.down": RowwiseLinear(Shard(-1), Shard(1)),
    }


def _taken(source: Any, taken: Any = None, *, local: bool = False) -> PrepareModuleInput:
    """An input made ready once for all layers that take it, so that its gradients are added up before they travel."""
    return PrepareModuleInput(input_layouts=source, desired_input_layouts=taken or Replicate(), use_local_output=local)
