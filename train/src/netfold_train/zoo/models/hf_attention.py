"""Attention of transformers' language models with sequences that ranks share (`parallel.context`).

transformers finds the attention and the mask of a model by a name in its registries. This module registers a name for
transformers' own "sdpa" attention and mask over whole sequences. Each rank computes a part of the heads, and receives
all tokens for these heads (`ContextModule.exchange_heads`). Every layer but attention acts on single tokens, and the
model is given the tokens' positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from netfold_train.parallel.context import ContextModule

NAME = "netfold_context"
CUT: tuple[str, ...] = (
    "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
"""`model_type` of the configurations of which train/tests/train/test_hf_context.py shows that sequences can be cut."""
# Rotary embeddings whose frequencies depend on the last place that a rank sees.
_ROPE_OF_LENGTH = ("dynamic", "longrope")
_INPUTS = {"input_ids", "attention_mask"}


class SharedSequences(ContextModule):
    """The ranks that share the sequences of a model of transformers. It has no weights, and computes nothing alone."""

    def place(self, module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        """A forward pre-hook: give the model its tokens' places, and the mask [n, s] of whole sequences."""
        if self.context is None:
            return None
        tokens, mask = given["input_ids"], given.get("attention_mask")
        others = sorted(set(given) - _INPUTS)
        if others or args:
            name = others[0] if others else "a positional input"
            raise ValueError(f"parallel.context is {self.context.size}, but the data give the model {name}, of whole "
                             "sequences; use context = 1")  # fmt: skip
        if mask is None:
            mask = tokens.new_ones(tokens.shape[0], tokens.shape[1] * self.context.size)
        else:
            mask = self.whole(mask)
        first = self.first_position(tokens.shape[1])
        places = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
        return args, {**given, "attention_mask": mask, "position_ids": places}


class _Heads:
    """The attributes that transformers' attention reads of a layer, of the heads that a rank has got."""

    def __init__(self, is_causal: Any, groups: int) -> None:
        self.is_causal, self.num_key_value_groups = is_causal, groups


def share_sequences(module: Any, config: Any) -> str:
    """Let ranks share the sequences of a causal language model; return the reason if they cannot, or "".

    Adds a `SharedSequences` without weights to the module, as its child `shared_sequences`.
    """
    if reason := _reason(config):
        return reason
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    module.set_attn_implementation(NAME)
    shared = SharedSequences()
    for part in module.modules():
        if hasattr(part, "is_causal"):
            # Not as a child of each layer.
            vars(part)["shared_sequences"] = shared
    module.shared_sequences = shared
    return ""


def _reason(config: Any) -> str:
    kind, attention = config.model_type, config._attn_implementation
    if kind not in CUT:
        return f"no test has shown that sequences of a {kind} can be cut; those of {', '.join(CUT)} can"
    if attention != "sdpa":
        return f"the model's attention is {attention!r}, and ranks can exchange heads of 'sdpa' only"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, Mapping)}
    if found := sorted(kinds.intersection(_ROPE_OF_LENGTH)):
        return f"the model's rotary embedding is {found[0]!r}, which depends on the length of whole sequences"
    return ""


def _mask(*, q_length: int, kv_length: int, **given: Any) -> Tensor | None:
    from transformers.masking_utils import sdpa_mask

    # The hidden states are of a rank's tokens, but the mask is of all.
    mask: Tensor | None = sdpa_mask(q_length=kv_length, kv_length=kv_length, **given)
    return mask


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = _Heads(module.is_causal, query.shape[1] // key.shape[1])
        mixed: Tensor = sdpa_attention_forward(heads, query, key, value, attention_mask, **options)[0]  # type: ignore[arg-type]
        return mixed.transpose(1, 2)

    shared: SharedSequences = module.shared_sequences  # type: ignore[assignment]
    return shared.exchange_heads(query, key, value, kernel).transpose(1, 2).contiguous(), None
