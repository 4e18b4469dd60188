"""Memory and operations that a plan counts with recomputation, against torch's own counters of a real step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from netfold_train import Batch
from netfold_train.dry_run.explain import recomputed_bytes
from netfold_train.dry_run.layers import Layer, measure
from netfold_train.models import make_model
from netfold_train.models.model import Model, blocks_of
from netfold_train.parallel.blocks import recompute
from netfold_train.recipe import Factory

SAMPLES, TOKENS = 32, 64
IDS = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
GPT = {"name": "gpt", "width": 64, "heads": 4, "layers": 6, "context": TOKENS, "vocabulary": 100}
# torch's formulas, which it does not apply to its kernel for CPUs.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *shapes, **_: sdpa_backward_flop_count(
        *shapes[:4]
    ),
}


@pytest.fixture(params=["gpt", "llama"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Model]:
    """A chain of blocks, or one module with blocks inside."""
    if request.param == "gpt":
        return lambda: make_model(Factory.model_validate(GPT))
    transformers = pytest.importorskip("transformers", reason="no transformers here (pip install 'netfold[hf]')")
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=100, **size).save_pretrained(tmp_path)
    return lambda: make_model(Factory.model_validate({"name": f"hf:{tmp_path}", "pretrained": False}))


@pytest.mark.parametrize("how", ["none", "all", "selective"])
def test_a_plan_counts_what_torch_does(make: Callable[[], Model], how: Any) -> None:
    model = make()
    named = not hasattr(model.module, "layers")
    batch = Batch((), IDS, {"input_ids": IDS}) if named else Batch((IDS,), IDS)
    layers = planned(make, batch, how)
    saved, again = sum(layer.saved_bytes or 0 for layer in layers), sum(layer.again for layer in layers)
    if how != "none":
        recompute(blocks_of(model).values(), "nothing" if how == "all" else "products")
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        loss(model, batch).backward()
    assert sum(layer.operations for layer in layers) + again == counter.get_total_flops()
    model.module.zero_grad(set_to_none=True)
    tracker = Most()
    tracker.track_external(model.module, *batch.tensors)
    with tracker:
        end = loss(model, batch)
        kept = tracker.activations
        end.backward()
    # A plan counts the tokens too. torch's attention on fake tensors has another layout, which a Llama copies.
    assert saved == pytest.approx(kept, rel=0.06 if named and how == "none" else 0.01)
    # torch stops a recomputation at the last tensor that is needed, and frees some before.
    assert saved + recomputed_bytes(layers) == pytest.approx(tracker.most, rel=0.1)
    assert how != "all" or tracker.most > 2 * kept


class Most(MemTracker):
    """The bytes of activations now, and the most so far, without gradients of activations."""

    most = activations = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__torch_dispatch__(*args, **kwargs)
        found = self.get_tracker_snapshot("current")[torch.device("cpu")]
        self.activations = sum(size for kind, size in found.items() if str(kind).endswith("ACT"))
        self.most = max(self.most, self.activations)
        return result


def test_recomputation_keeps_less_and_computes_more(make: Callable[[], Model]) -> None:
    batch = Batch((), IDS, {"input_ids": IDS}) if not hasattr(make().module, "layers") else Batch((IDS,), IDS)
    none, every, some = (planned(make, batch, how) for how in ("none", "all", "selective"))
    kept = [sum(layer.saved_bytes or 0 for layer in layers) for layers in (every, some, none)]
    assert kept == sorted(kept) and 3 * kept[0] < kept[1] < 0.9 * kept[2]
    again = [sum(layer.again for layer in layers) for layers in (none, some, every)]
    assert again[0] == again[1] == 0 < again[2]
    # Costs of layers, by which stages are cut, do not depend on it.
    assert [layer.operations for layer in none] == [layer.operations for layer in every]


def planned(make: Callable[[], Model], batch: Batch, how: Any) -> list[Layer]:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = make()
    example = batch.like([each[:2] for each in batch.tensors])
    layers, why = measure(model, fake, example, samples=SAMPLES, recomputes=how)
    assert not why
    return layers


def loss(model: Model, batch: Batch) -> torch.Tensor:
    return model.losses(model.module(*batch.inputs, **batch.named), batch.target).mean()
