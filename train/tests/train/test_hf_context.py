"""Causal language models of transformers have one loss and one gradient, however many ranks share their sequences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="no transformers here (pip install 'netfold[hf]')")
import torch
import torch.distributed as dist
from ranks import run_ranks, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from netfold_train import Batch, Data, Recipe, Trainer
from netfold_train.data.examples import InMemory, Metric
from netfold_train.dry_run.layers import measure
from netfold_train.models import make_model
from netfold_train.models.model import IGNORED, Model, blocks_of
from netfold_train.parallel import parallelise
from netfold_train.parallel.context import check_context, own_tokens
from netfold_train.parallel.mesh import Axis, Mesh
from netfold_train.recipe import Factory
from netfold_train.zoo.data.text import bits
from netfold_train.zoo.models.hf_attention import CUT

TOKENS, SAMPLES, VOCABULARY = 16, 4, 50
SIZE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OWN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "gpt2": {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "mistral": {"sliding_window": 3},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, **WINDOW},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8, **EXPERTS},
    "smollm3": {"num_key_value_heads": 1, "no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": None},
}  # fmt: skip
# Of a Llama: keys of parallel, of training and of model.
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": ({}, {}, {}),
    "zero 3": ({"zero": 3}, {}, {}),
    "recomputed": ({}, {"recompute": "all"}, {}),
    "selective, two parts of a batch": ({}, {"recompute": "selective", "accumulate": 2}, {}),
}
ADAPTERS = "adapters"
CASES_HERE = CASES | {ADAPTERS: ({}, {}, {"lora": {"rank": 2}})}
TENSOR = "tensor 2"
# By the number of ranks: the results of each rank.
Found = dict[int, list[dict[Any, Any]]]
# f32 has 2^-24 = 6e-8 of each of some hundreds of terms in sequence; relative to the largest number of a gradient.
CLOSE = 5e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each kind of model, with its configuration; "llama" has weights too."""
    import transformers

    made = tmp_path_factory.mktemp("models")
    for kind in CUT:
        own = OWN.get(kind, {})
        config = transformers.AutoConfig.for_model(kind, **(own if kind == "gpt2" else SIZE | own))
        config.save_pretrained(made / kind)
    torch.manual_seed(1)
    llama = transformers.AutoConfig.from_pretrained(made / "llama")
    transformers.AutoModelForCausalLM.from_config(llama).save_pretrained(made / "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield made


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """By the number of ranks that share sequences: the results of each rank."""
    return {ranks: values(run_ranks(_world, ranks, str(folder), timeout_s=240)) for ranks in (1, 2, 4)}


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", CUT)
def test_loss_and_gradients_are_those_of_one_rank(found: Found, kind: str, padded: bool) -> None:
    compare(found, kind, "plain", padded)


@pytest.mark.parametrize("case", list(CASES)[1:])
def test_divided_weights_and_recomputation_change_neither(found: Found, case: str) -> None:
    compare(found, "llama", case, True)


def test_adapters_have_the_gradients_of_one_rank(found: Found) -> None:
    compare(found, "llama", ADAPTERS, True, ADAPTERS)


def test_heads_that_tensor_parallelism_has_cut_are_exchanged(found: Found) -> None:
    loss = found[1][0]["llama", "plain", True][0]
    assert [rank[TENSOR] for rank in found[4]] == pytest.approx([loss] * 4, rel=CLOSE)


def compare(found: Found, kind: str, case: str, padded: bool, expected: str = "plain") -> None:
    """expected: the case of one rank."""
    loss, gradients = found[1][0][kind, expected, padded]
    assert 2 < loss < 6 and len(gradients) > 5 and sum(gradient.any() for gradient in gradients.values()) > 3
    for ranks in (1, 2, 4):
        for rank in found[ranks]:
            here_loss, here = rank[kind, case, padded]
            assert here_loss == pytest.approx(loss, rel=CLOSE), ranks
            assert here.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert np.allclose(here[name], gradient, rtol=0, atol=CLOSE * np.abs(gradient).max()), (ranks, name)


@pytest.mark.parametrize("kind", CUT)
def test_one_rank_computes_what_transformers_does(folder: Path, kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder / kind)
    plain = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    made = model(folder, kind).module
    made.load_state_dict(plain.state_dict())
    for given in (batch(False).named, batch(True).named):
        with torch.no_grad():
            assert torch.equal(made(**given), plain.train()(**given).logits)


def test_its_blocks_compile_as_one_graph(folder: Path) -> None:
    made = model(folder, "llama")
    expected = made.module(**batch(True).named)
    for block in blocks_of(made).values():
        block.compile(backend="eager", fullgraph=True)
    assert torch.equal(made.module(**batch(True).named), expected)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_plan_counts_what_ranks_exchange(folder: Path, padded: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        made = model(folder, "llama")
    (layer,), why = measure(made, fake, batch(padded), samples=SAMPLES, context=2)
    assert not why
    # [samples, tokens, heads, width]: of 4 heads of queries, 2 of keys and 2 of values; then of the results.
    results = SAMPLES * (TOKENS // 2) * 4 * 8 * 4
    sent = {of: [each.size_bytes for each in layer.attended if each.of == of] for of in {e.of for e in layer.attended}}
    there = {"queries, keys and values": [2 * results] * 2, "results of attention": [results] * 2}
    assert sent == there | {f"gradients of {of}": sizes for of, sizes in there.items()}


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("llama", {"config": {"_attn_implementation": "eager"}}, "but the model's attention is 'eager', and ranks"),
        ("llama", {"config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}},
         "but the model's rotary embedding is 'dynamic', which depends on the length of whole sequences"),
        ("llama", {"task": "sequence-classification", "labels": 2},
         "but the model's task is 'sequence-classification', not 'causal-lm'"),
        ("bloom", {}, "but no test has shown that sequences of a bloom can be cut; those of gemma3_text, gpt2,"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_says_why(folder: Path, kind: str, options: dict[str, Any], said: str) -> None:
    import transformers

    if kind not in CUT:
        transformers.AutoConfig.for_model(
            kind, vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4
        ).save_pretrained(folder / kind)
    with pytest.raises(ValueError, match=re.escape(f"parallel.context is 2, {said}")) as caught:
        check_context(model(folder, kind, **options), recipe(str(folder), kind, parallel={"context": 2}))
    assert str(caught.value).endswith("; use context = 1")


def test_places_from_the_data_are_an_error(folder: Path) -> None:
    made = model(folder, "llama")
    made.module.shared_sequences.context = Axis("context", 0, 2, None)
    with pytest.raises(ValueError, match="the data give the model position_ids, of whole sequences; use context = 1"):
        made.module(**batch(False).named, position_ids=torch.arange(TOKENS)[None])


def test_a_run_of_saved_weights_learns_the_same(folder: Path, found: Found) -> None:
    whole = found[1][0]["run"]
    assert len(set(whole)) == 3
    for ranks in (2, 4):
        for rank in found[ranks]:
            assert rank["run"] == pytest.approx(whole, rel=CLOSE)


def model(folder: Path, kind: str, **options: Any) -> Model:
    return make_model(Factory.model_validate({"name": f"hf:{folder}/{kind}", "pretrained": False, **options}))


def batch(padded: bool) -> Batch:
    """Samples of random tokens; padded: to the right, to the left, and so much that ranks have only padding."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, TOKENS + 1), generator=draw)
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    if not padded:
        return Batch((), target, {"input_ids": inputs})
    mask = torch.ones_like(inputs)
    mask[0, 13:] = 0
    mask[1, :2] = 0
    mask[2, 3:] = 0
    target[mask == 0] = IGNORED
    return Batch((), target, {"input_ids": inputs.where(mask > 0, 0), "attention_mask": mask})


def recipe(folder: str, kind: str, **sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": f"hf:{folder}/{kind}", "pretrained": False, **sections.pop("model", {})},
            "data": {"name": "source"},
            "training": {"steps": 2, "batch": SAMPLES, **sections.pop("training", {})},
            "optimizer": {"name": "sgd", "lr": 0.1},
            **sections,
        }
    )


def _world(rank: int, size: int, store: str, folder: str) -> dict[Any, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{store}/store", rank=rank, world_size=size)
    try:
        found: dict[Any, Any] = {
            (kind, "plain", padded): _computed(folder, kind, padded) for kind in CUT for padded in (False, True)
        }
        found |= {("llama", case, True): _computed(folder, "llama", True, case) for case in CASES_HERE}
        if size == 4:
            found[TENSOR] = _computed(folder, "llama", True, tensor=2)[0]
        return found | {"run": _run(folder)}
    finally:
        dist.destroy_process_group()


def _computed(
    folder: str, kind: str, padded: bool, case: str = "plain", tensor: int = 1
) -> tuple[float, dict[str, Any]]:
    """The loss, and each gradient, of a batch whose sequences all ranks share, or all of a tensor group."""
    parallel, training, options = CASES_HERE[case]
    context = {"context": dist.get_world_size() // tensor, "tensor": tensor}
    asked = recipe(folder, kind, parallel={**context, **parallel}, training=training, model=options)
    mesh = Mesh(asked.parallel)
    torch.manual_seed(0)
    replica = parallelise(make_model(asked.model), asked, mesh)
    loss = replica.gradients(own_tokens(batch(padded), mesh))
    assert loss is not None
    dist.all_reduce(loss)
    gradients: dict[str, Any] = {}
    for name, parameter in replica.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            gradients[name] = whole.numpy().copy()
    return float(loss) / dist.get_world_size(), gradients


def _run(folder: str) -> list[float]:
    """The losses of two steps from saved weights, and the metric."""
    data = InMemory(target=batch(True).target, **batch(True).named)
    metric = Metric("bits per token", "bit", "lower", bits, 1.0, "nothing")
    options = {"parallel": {"context": dist.get_world_size()}, "model": {"pretrained": True}}
    outcome = Trainer(recipe(folder, "llama", **options), data=Data(data, data, metric)).fit()
    return [*outcome.losses, outcome.metric]
