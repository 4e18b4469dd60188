"""Models of Hugging Face's transformers: from a folder with config.json and safetensors, or a name on its hub.

The module keeps its names, so its weights can be read by transformers again. The batch's inputs are its arguments by
name (input_ids, attention_mask, pixel_values), and its output is the logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from netfold.extras import need
from netfold_train.models.model import Model, Style, TensorPlan, Weights, real_items
from netfold_train.parallel.tensor import in_units
from netfold_train.zoo.models.hf_attention import share_sequences
from netfold_train.zoo.models.linear import class_loss

Task = Literal["causal-lm", "masked-lm", "sequence-classification", "image-classification"]
_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
}


class Lora(BaseModel):
    """Low-rank adapters beside frozen weights (Hu et al. 2021), by peft."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rank: PositiveInt = 8
    alpha: PositiveInt = 16
    dropout: float = Field(default=0.0, ge=0, lt=1)
    targets: list[str] | None = None
    """Names of the layers that get adapters. Without it: peft's choice for the model."""
    trained: list[str] | None = None
    """Names of other modules that are trained whole, such as a new head."""


def hf(
    path: str,
    task: Task = "causal-lm",
    pretrained: bool = True,
    labels: PositiveInt | None = None,
    lora: Lora | None = None,
    config: dict[str, Any] | None = None,
) -> Model:
    """The logits of the model at `path`: [n, s, vocabulary] of a language model, [n, labels] of a classifier.

    path: a folder, or a name on the hub, which transformers downloads or has in its cache. pretrained: with its
    weights; otherwise random ones. labels: of a classifier. config: keys of its configuration to change, such as
    `{num_hidden_layers = 2}`. Targets: int64, -100 where none counts. Raises ValueError if there is no such model.
    """
    need("model hf", ("transformers", *(("peft",) if lora else ())), "hf")
    import transformers

    kind = getattr(transformers, _CLASSES[task])
    changes = {"use_cache": False, **(config or {}), **({} if labels is None else {"num_labels": labels})}
    try:
        asked = transformers.AutoConfig.from_pretrained(path)
        unknown = [name for name in config or {} if not hasattr(asked, name)]
        for name, value in changes.items():
            setattr(asked, name, value)
        module: Any = None
        saved: dict[int, str] = {}
        if not pretrained or labels is None:
            module = kind.from_config(asked)
            saved = _saved_names(path, module) if pretrained else {}
        if pretrained and not saved:
            # A head for another number of labels starts anew; transformers names such weights.
            module = kind.from_pretrained(
                path, config=asked, dtype="float32", ignore_mismatched_sizes=labels is not None
            )
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path is {path!r}: {str(error).splitlines()[0]}") from error
    if unknown:
        raise ValueError(f"model.config has {unknown[0]!r}, which the configuration of {path} lacks")
    blocks, plan = tuple(module._no_split_modules or ()), tensor_plan(module, asked)
    uncut = f"the model's task is {task!r}, not 'causal-lm'"
    if task == "causal-lm":
        uncut = share_sequences(module, module.config)
    shared = None if uncut else module.shared_sequences
    if lora is not None:
        module, plan = _with_adapters(module, lora, task), None
    module.train()
    if shared is not None:
        module.register_forward_pre_hook(shared.place, with_kwargs=True)
    module.register_forward_hook(lambda *given: given[-1].logits)
    weights = Weights(Path(path), _sources(module, saved)) if saved else None
    return Model(
        module, class_loss, real_items, plan, weights,
        cuts_sequences=not uncut, needs_sequences=uncut, blocks=blocks,
    )  # fmt: skip


def _saved_names(path: str, module: nn.Module) -> dict[int, str]:
    """id of each parameter and persistent buffer -> its name, if the folder's safetensors have these names; else {}.

    transformers renames the weights of some models, and makes others of several: such a model is read whole.
    """
    from safetensors import safe_open

    saved: set[str] = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            saved.update(opened.keys())
    persistent = module.state_dict()
    names = {id(each): name for name, each in module.named_parameters()}
    names |= {id(each): name for name, each in module.named_buffers() if name in persistent}
    return names if set(names.values()) == saved else {}


def _sources(module: nn.Module, saved: Mapping[int, str]) -> dict[str, str]:
    """The name of each tensor, adapters beside it or not, -> its name before. peft trains copies of whole modules."""
    held = dict((*module.named_parameters(), *module.named_buffers()))
    found = {}
    for name, each in held.items():
        original = held.get(name.replace(".modules_to_save.default.", ".original_module."), each)
        if id(original) in saved:
            found[name] = saved[id(original)]
    return found


def _with_adapters(module: nn.Module, lora: Lora, task: Task) -> nn.Module:
    import peft

    kinds = {"causal-lm": "CAUSAL_LM", "sequence-classification": "SEQ_CLS"}
    try:
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.targets,
            modules_to_save=lora.trained,
            task_type=kinds.get(task),
        )
        return peft.get_peft_model(module, config)
    except ValueError as error:
        raise ValueError(f"model.lora: {str(error).splitlines()[0]}") from error


def tensor_plan(module: nn.Module, config: Any) -> TensorPlan | None:
    """The cuts that transformers' configuration has for the model; None if it has none."""
    found: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    if not set(styles).issuperset(found.values()) or not found:
        return None
    prefix = f"{module.base_model_prefix}."
    rules = [(re.compile(re.escape(prefix + path).replace(r"\*", r"\d+")), how) for path, how in found.items()]
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def plan(style: Style, sequence: bool) -> Mapping[str, Any]:
        if style != "alternating" or sequence:
            raise ValueError(
                "parallel.style, parallel.sequence: a model of transformers is cut by its own plan; leave both out"
            )
        chosen: dict[str, Any] = {}
        for path, _ in module.named_modules():
            for rule, how in rules:
                if rule.fullmatch(path):
                    cut = styles[how]()
                    by_head = re.search(r"\b[qkv]_proj$", path) is not None
                    chosen[path] = in_units(cut, heads, "heads") if by_head else cut
        return chosen

    return plan
