"""A GPT with experts learns the same with divided experts as with all experts on one rank."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from ranks import run_ranks, values
from training import Table, changed

pytestmark = pytest.mark.torch

STEPS, BATCH, CONTEXT = 3, 8, 8
# Fewer experts than ranks: one of four ranks has none.
GPT: Table = {
    "model": {
        "name": "gpt-moe",
        "vocabulary": 50,
        "width": 16,
        "heads": 2,
        "layers": 2,
        "context": CONTEXT,
        "mlp": 2,
        "experts": 3,
        "top": 2,
        "balance": 0.1,
    },
    "data": {"name": "given"},
    "training": {"steps": STEPS, "batch": BATCH},
    "optimizer": {"name": "sgd", "lr": 0.5},
}
SHARDED: Table = {"experts": "sharded"}
# parallel, training
CASES: dict[str, tuple[Table, Table]] = {
    "replicated, data 4": ({}, {}),
    "data 4": (SHARDED, {}),
    "data 4, two parts of a batch": (SHARDED, {"accumulate": 2}),
    "data 4, recomputed": (SHARDED, {"recompute": "selective"}),
    "data 4, zero 3": ({**SHARDED, "zero": 3}, {}),
    "data 2 x tensor 2": ({**SHARDED, "tensor": 2}, {}),
    "data 2 x pipeline 2": ({**SHARDED, "pipeline": 2}, {}),
}
# f64: sums of at most 64 terms in another order, about fifty of them in sequence.
BOUND = 64 * 50 * 10 * 2.0**-53


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each of four ranks."""
    return values(run_ranks(_world, 4, timeout_s=150))


@pytest.mark.parametrize("case", CASES)
def test_experts_learn_the_same_under_every_split(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        difference, moved = rank[case]
        assert difference <= BOUND
        assert moved > 1e-5  # what a lost gradient would amount to
    held = [rank["held"][case] for rank in found]
    if case == "data 4":
        assert held == [[], ["0"], ["1"], ["2"]]
    elif "replicated" in case:
        assert held == [["0", "1", "2"]] * 4


def test_tokens_and_their_gradients_are_all_that_is_exchanged(found: list[dict[str, Any]]) -> None:
    # For each of two blocks: the numbers of tokens, the tokens, the results; backward the gradients of the last two.
    for rank in found:
        assert rank["calls"] == [{"all_to_all_single": 3 * 2}, {"all_to_all_single": 2 * 2}]


@pytest.mark.parametrize("optimizer", ["lamb", "lars"])
def test_norms_and_losses_of_a_recipe_are_those_of_whole_experts(found: list[dict[str, Any]], optimizer: str) -> None:
    whole = found[0][optimizer]["replicated"]
    for rank in found:
        assert rank[optimizer]["sharded"] == pytest.approx(whole, rel=1e-11)
    assert len(set(whole)) == STEPS + 1


def test_experts_compute_in_the_type_of_the_recipe(found: list[dict[str, Any]]) -> None:
    whole, *others = found[0]["bf16"]
    for each in others:
        assert each == pytest.approx(whole, abs=4 * 2.0**-8 * math.log(50))
    assert all(rank["router"] == ["torch.float32"] * 2 for rank in found)


def test_a_token_is_computed_by_its_experts_in_proportion() -> None:
    import torch

    from netfold_train.zoo.models.moe import MoeBlock

    torch.manual_seed(0)
    block = MoeBlock(8, 2, 16, experts=3, top=2).double()
    x, penalty = torch.randn(2, 5, 8, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    output, after = block(x, penalty)
    seen = x + block.attention(block.attention_norm(x))
    asked = block.mlp_norm(seen)
    probabilities = block.router.scores(asked).softmax(-1)
    for sequence in range(2):
        used = torch.zeros(3, dtype=torch.float64)
        for place in range(5):
            best = probabilities[sequence, place].argsort(descending=True)[:2]
            share = probabilities[sequence, place, best]
            results = torch.stack([block.mlp.experts[str(int(each))](asked[sequence, place]) for each in best])
            expected = seen[sequence, place] + (share / share.sum()) @ results
            torch.testing.assert_close(output[sequence, place], expected)
            used[best] += 0.1
        expected = penalty[sequence] + 3 * used @ probabilities[sequence].mean(0)
        torch.testing.assert_close(after[sequence], expected)


def test_the_loss_has_the_penalty_and_a_cross_entropy_does_not() -> None:
    import torch
    from torch.nn import functional

    from netfold_train.models import make_model
    from netfold_train.recipe import Recipe

    target = torch.arange(16).view(2, 8)

    def output(balance: float) -> Any:
        torch.manual_seed(0)
        model = make_model(Recipe.model_validate(changed(GPT, model={"balance": balance})).model)
        found = model.module(target)
        return found, model.losses(found, target)

    (without, plain), (found, losses) = output(0.0), output(0.5)
    # Of two blocks; 1 each if all experts were used alike, and 1.5 at most if only two of three are.
    penalties = (losses - plain).mean(1)
    assert (penalties > 0.99).all() and (penalties < 1.6).all()
    torch.testing.assert_close(losses - plain, penalties[:, None].expand(2, 8), rtol=0, atol=1e-5)
    for each in (without, found):
        torch.testing.assert_close(functional.cross_entropy(each.mT, target, reduction="none"), plain)


def test_the_penalty_spreads_tokens_over_experts() -> None:
    import torch

    from netfold_train.zoo.models.moe import Router

    torch.manual_seed(0)
    router, x = Router(8, 4, 1), torch.randn(1, 256, 8) + 2.0
    torch.nn.init.normal_(router.scores.weight, std=0.5)

    def largest() -> float:
        return float(router(x)[1].flatten().bincount(minlength=4).max() / 256)

    before = largest()
    optimizer = torch.optim.SGD(router.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        router(x)[2].sum().backward()
        optimizer.step()
    assert before > 0.6 and largest() < 0.4


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"model": {"top": 4}}, "model.top is 4, but there are 3 experts"),
        ({"parallel": {"tensor": 2, "sequence": True}}, "parallel.sequence: a router needs whole sequences"),
        (
            {"model": {"name": "linear-stack", "widths": [8, 8]}, "parallel": SHARDED},
            'parallel.experts = "sharded": the model has no experts',
        ),
        ({"parallel": SHARDED, "diloco": {"every": 1}}, 'parallel.experts = "sharded" does not go with diloco.every'),
        (
            {"parallel": {**SHARDED, "pipeline": 2, "schedule": "zero-bubble"}},
            'parallel.schedule = "zero-bubble" does not go with parallel.experts = "sharded"',
        ),
    ],
)
def test_recipes_that_cannot_divide_experts_are_an_error(keys: Table, said: str) -> None:
    from netfold_train.models import make_model
    from netfold_train.parallel.owned import owned_modules
    from netfold_train.parallel.tensor import styles_of
    from netfold_train.recipe import Recipe

    table = {**GPT, **{name: keys[name] for name in keys if name != "model"}}
    table["model"] = keys["model"] if "name" in keys.get("model", {}) else {**GPT["model"], **keys.get("model", {})}
    with pytest.raises(ValueError) as caught:
        recipe = Recipe.model_validate(table)
        model = make_model(recipe.model)
        owned_modules(model, recipe)
        styles_of(model, recipe.parallel)
    assert said in str(caught.value)


def _world(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        found = _learnt() | _counted() | _by_recipe()
        torch.set_default_dtype(torch.float32)
        return found | _lowered()
    finally:
        dist.destroy_process_group()


def _recipe(parallel: Table, training: Table, **others: Any) -> Any:
    from netfold_train import Recipe

    return Recipe.model_validate(changed(GPT, parallel=parallel, training=training, **others))


class _Tokens:
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any, seeds: Any) -> Any:
        import torch

        from netfold_train import Batch

        starts = torch.tensor(list(indices))[:, None]
        rows = (37 * starts + torch.arange(CONTEXT + 1) * (1 + starts % 7)) % 50
        return Batch((rows[:, :-1],), rows[:, 1:])


def _learnt() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from netfold_train.models import make_model
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    tokens = _Tokens(STEPS * BATCH)
    batches = [tokens.batch(range(step * BATCH, (step + 1) * BATCH), ()) for step in range(STEPS)]
    torch.manual_seed(3)
    start = make_model(_recipe({}, {}).model)
    alone = copy.deepcopy(start)
    optimizer = torch.optim.SGD(alone.module.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        alone.losses(alone.module(*batch.inputs), batch.target).mean().backward()
        optimizer.step()
    expected, before = (
        {name: weight.detach() for name, weight in model.module.named_parameters()} for model in (alone, start)
    )
    found: dict[str, Any] = {"held": {}}
    for case, (parallel, training) in CASES.items():
        recipe = _recipe(parallel, training)
        mesh = Mesh(recipe.parallel)
        replica = parallelise(copy.deepcopy(start), recipe, mesh, tokens)
        optimizer = torch.optim.SGD([each for _, each in replica.named_parameters()], 0.5, 0.9, foreach=False)
        for batch in batches:
            optimizer.zero_grad()
            replica.gradients(batch.parts(mesh.data.size)[mesh.data.rank])
            optimizer.step()
        weights = {}
        for name, parameter in replica.named_parameters():
            part = parameter.detach()
            weights[name] = part.full_tensor() if isinstance(part, DTensor) else part
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, weights)
        assert set().union(*everywhere) == set(expected)
        pairs = [(name, weight) for each in everywhere for name, weight in each.items()]
        # Attention does not depend on the keys' bias: it has no gradient but rounding.
        changes = [float((weight - before[name]).abs().max()) for name, weight in pairs if "key.bias" not in name]
        found[case] = max(float((weight - expected[name]).abs().max()) for name, weight in pairs), min(changes)
        found["held"][case] = sorted({name.split(".")[4] for name in weights if ".block0.mlp." in name})
    return found


def _counted() -> dict[str, Any]:
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from netfold_train.models import make_model
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.owned import divide_owned

    recipe = _recipe(SHARDED, {})
    model = make_model(recipe.model)
    divide_owned(model, recipe, Mesh(recipe.parallel))
    with CommDebugMode() as forward:
        loss = model.module(torch.zeros(1, CONTEXT, dtype=torch.long)).sum()
    with CommDebugMode() as backward:
        loss.backward()
    counts = [mode.get_comm_counts() for mode in (forward, backward)]
    return {"calls": [{str(op).rsplit(".", 1)[-1]: count for op, count in each.items()} for each in counts]}


def _data() -> Any:
    from netfold_train import Data, Metric

    metric = Metric("sum", "", "lower", lambda output, target: output.sum(-1), 1.0, "none")
    return Data(_Tokens(STEPS * BATCH), _Tokens(8), metric)


def _by_recipe() -> dict[str, Any]:
    """Losses and metric, with clipped gradients, so that a wrong norm shows in the losses."""
    from netfold_train import Trainer

    found: dict[str, Any] = {}
    for name in ("lamb", "lars"):
        optimizer = {"name": name, "lr": {"lamb": 0.05, "lars": 1.0}[name], "trust": 0.1, "weight_decay": 0.1}
        for kind in ("replicated", "sharded"):
            recipe = _recipe({"experts": kind}, {"clip": 0.01}, optimizer=optimizer)
            outcome = Trainer(recipe, data=_data()).fit()
            found.setdefault(name, {})[kind] = (*outcome.losses, outcome.metric)
    return found


def _lowered() -> dict[str, Any]:
    from netfold_train import Trainer
    from netfold_train.zoo.models.moe import Router

    losses, kinds = [], []
    for parallel in ({}, SHARDED, {**SHARDED, "zero": 2}):
        trainer = Trainer(_recipe(parallel, {"precision": "bf16"}), data=_data())
        routers = [part for part in trainer.model.module.modules() if isinstance(part, Router)]
        if "zero" in parallel:
            for each in routers:
                each.register_forward_hook(lambda module, _inputs, given: kinds.append(str(given[0].dtype)))
        losses.append(trainer.fit().losses)
    return {"bf16": losses, "router": kinds[:2]}
