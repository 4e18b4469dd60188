"""Cut layers learn the same as one process, and communicate as published."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ranks import run_ranks, values
from training import TINY_GPT, changed

STYLES = ("colwise", "rowwise", "alternating")
LAYERS = 4
# Sums of the same terms in another order, in f64. A sum of k terms is off by at most k 2^-53 of their magnitudes
# (Higham 2002, section 4.2); no sum here has more than 256 terms, some twenty follow on each other in a step, and none
# is amplified by more than ten. A term lost, doubled or misplaced changes weights by the size of a step, about 1e-3.
BOUND = 256 * 20 * 10 * 2.0**-53
STEPS = 3


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """The results of four ranks, which are equal."""
    results = values(run_ranks(_world, 4, timeout_s=240))
    assert all(result == results[0] for result in results)
    yield results[0]


@pytest.mark.parametrize("style", STYLES)
def test_a_stack_of_linear_layers_communicates_as_published(found: dict[str, Any], style: str) -> None:
    forward, backward = {
        "colwise": ({"all_gather": LAYERS}, {"reduce_scatter": LAYERS}),
        "rowwise": ({"reduce_scatter": LAYERS}, {"all_gather": LAYERS}),
        "alternating": ({"all_reduce": LAYERS // 2}, {"all_reduce": LAYERS // 2}),
    }[style]
    assert found[f"counts of a stack, {style}"] == [forward, backward]


@pytest.mark.parametrize("style", STYLES)
def test_a_whole_model_saves_the_communication_of_its_ends(found: dict[str, Any], style: str) -> None:
    # Samples need no gradient, and every rank computes the loss of the whole output.
    forward, backward = {
        "colwise": ({"all_gather": LAYERS}, {"reduce_scatter": LAYERS - 1}),
        "rowwise": ({"reduce_scatter": LAYERS - 1, "all_reduce": 1}, {"all_gather": LAYERS - 1}),
        "alternating": ({"all_reduce": LAYERS // 2}, {"all_reduce": LAYERS // 2 - 1}),
    }[style]
    assert found[f"counts of a model, {style}"] == [forward, backward]


@pytest.mark.parametrize("style", STYLES)
def test_a_transformer_block_communicates_once_per_half_or_once_per_layer(found: dict[str, Any], style: str) -> None:
    forward, backward = {
        "colwise": ({"all_gather": 4}, {"reduce_scatter": 2, "all_reduce": 2}),
        "rowwise": ({"reduce_scatter": 4, "all_reduce": 2}, {"all_gather": 6}),
        "alternating": ({"all_reduce": 2}, {"all_reduce": 2}),
    }[style]
    assert found[f"counts of a block, {style}"] == [forward, backward]


def test_sequence_parallel_halves_an_all_reduce_into_two(found: dict[str, Any]) -> None:
    # Each rank's norms act on a part of the sequence: the gradients of two norms' weights and biases are summed.
    forward, backward = {"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4}
    assert found["counts of a block, sequence"] == [forward, backward]


def test_sequence_parallel_sends_as_many_bytes_as_without(found: dict[str, Any]) -> None:
    # An activation is 2 x 8 x 16 f64; without the gradients of the norms, which are 4 times 16.
    activation, norms = 2 * 8 * 16 * 8, 4 * 16 * 8
    assert found["bytes of a block, alternating"] == 4 * 2 * activation * 3 // 4
    assert found["bytes of a block, sequence"] == (4 * 2 * activation + 2 * norms) * 3 // 4


CASES = [
    f"{model}, {how}, {ranks}"
    for model, hows in (("stack", STYLES), ("gpt", (*STYLES, "sequence")))
    for how in hows
    for ranks in ("tensor 2 x data 2", "tensor 4")
]
# ZeRO 3 with one data-parallel rank.
CASES.append("gpt, sequence, tensor 4 x zero 3")
SHARDED = [f"gpt, {how}, tensor 2 x fully_shard 2" for how in ("alternating", "sequence")]


@pytest.mark.parametrize("case", CASES + SHARDED)
def test_tensor_ranks_learn_the_same_as_one_process(found: dict[str, Any], case: str) -> None:
    difference, moved = found[case]
    assert difference <= BOUND
    assert moved > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_the_whole_model(found: dict[str, Any], case: str) -> None:
    assert found[f"outputs, {case}"] <= BOUND


@pytest.mark.parametrize("case", CASES)
def test_replicated_weights_stay_equal_on_all_tensor_ranks(found: dict[str, Any], case: str) -> None:
    assert found[f"replicated, {case}"] == "same"


def test_parts_of_weights_and_optimizer_states_are_joined(found: dict[str, Any]) -> None:
    assert found["momentum as parts"] <= BOUND


def test_a_part_keeps_no_more_memory_than_it_has_elements(found: dict[str, Any]) -> None:
    assert found["memory"] == "its own"


@pytest.mark.parametrize(
    "asked, said",
    [
        ("heads", "layers.block0.attention.query has 2 heads, which 4 ranks cannot divide equally"),
        ("inputs", "layers.layer0.linear has 6 inputs, which 4 ranks cannot divide equally"),
        ("length", "a sequence of 6 cannot be cut into parallel.tensor = 4 equal parts"),
        ("no plan", "parallel.tensor = 4: this model has no plan to cut its layers"),
        ("sequence of features", "a stack of linear layers has no sequence"),
    ],
)
def test_a_model_that_cannot_be_cut_is_an_error_in_one_sentence(found: dict[str, Any], asked: str, said: str) -> None:
    assert said in found[f"refused, {asked}"]


def test_a_second_world_of_a_process_uses_its_own_groups() -> None:
    for first, second in values(run_ranks(_worlds, 4, timeout_s=150)):
        assert first == second


def _worlds(rank: int, size: int, folder: str) -> list[Any]:
    """Losses of two worlds with equal meshes, whose groups have different names."""
    import torch
    import torch.distributed as dist

    from netfold_train import Recipe, Trainer

    torch.set_num_threads(1)
    found = []
    for number in range(2):
        dist.init_process_group("netfold", init_method=f"file://{folder}/store{number}", rank=rank, world_size=size)
        try:
            for _ in range(number):
                dist.new_group()
            found.append(Trainer(Recipe.model_validate(changed(TINY_GPT, parallel={"tensor": 2}))).fit().losses)
        finally:
            dist.destroy_process_group()
    return found


def _world(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return _counts() | _learnt() | _refused()
    finally:
        dist.destroy_process_group()


def _counts() -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard

    from netfold_train.models.model import Chain, Model
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.tensor import cut
    from netfold_train.recipe import Parallel
    from netfold_train.zoo.models.linear import dense, linear_stack, stack_plan
    from netfold_train.zoo.models.transformer import gpt

    found: dict[str, Any] = {}
    mesh = Mesh(Parallel(tensor=4))

    def ready(model: Model, style: Any, sequence: bool = False) -> Any:
        cut(model, Parallel(tensor=4, style=style, sequence=sequence), mesh)
        return model.module

    for style in STYLES:
        # A stack between other layers: its input and output have its neighbours' placements, and gradients.
        ends = Replicate() if style == "alternating" else Shard(-1)
        paths = [f"layers.{number}.linear" for number in range(LAYERS)]
        layers: list[tuple[str, nn.Module]] = [(str(number), dense(8, 8)) for number in range(LAYERS)]
        plan = functools.partial(_plan_between, stack_plan, paths, ends)
        stack = ready(Model(Chain(layers), torch.sub, tensor_plan=plan), style)
        x = torch.ones(4, 8 if style == "alternating" else 2, requires_grad=True)
        found[f"counts of a stack, {style}"] = _counted(stack, x, mesh.tensor.group)
        model = ready(linear_stack([8] * (LAYERS + 1)), style)
        found[f"counts of a model, {style}"] = _counted(model, torch.ones(4, 8), mesh.tensor.group)
    for name in (*STYLES, "sequence"):
        sequence = name == "sequence"
        model = gpt(vocabulary=16, context=8, width=16, heads=4, layers=1)
        block = ready(model, "alternating" if sequence else name, sequence).layers["block0"]
        x = torch.ones(2, 2 if sequence else 8, 16, requires_grad=True)
        begun = len(_operations(mesh.tensor.group))
        found[f"counts of a block, {name}"] = _counted(block, x, mesh.tensor.group)
        found[f"bytes of a block, {name}"] = _sent_bytes(_operations(mesh.tensor.group)[begun:])
    held = [parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.module.parameters()]
    found["memory"] = "its own" if all(held) else "another's"
    return found


def _sent_bytes(records: list[tuple[str, int]], ranks: int = 4) -> int:
    """The bytes that a rank must send at least, which a ring achieves (Patarasuk & Yuan 2009)."""
    # The record of an all_gather or reduce_scatter has a rank's part, that of an all_reduce the whole.
    times = {"all_gather": ranks, "reduce_scatter": ranks, "all_reduce": 2}
    return sum(times[name] * size * (ranks - 1) // ranks for name, size in records)


def _plan_between(plan: Any, paths: Any, ends: Any, style: Any, _sequence: bool) -> Any:
    return plan(paths, style, ends, ends)


def _counted(module: Any, inputs: Any, group: Any) -> list[dict[str, int]]:
    """Collectives by kind, forward and backward: as torch dispatches them, and as the group executed them."""
    from torch.distributed.tensor.debug import CommDebugMode

    from netfold_train.parallel.shards import settle

    found, begun = [], len(_operations(group))
    with CommDebugMode() as forward:
        output = module(inputs).sum()
    between = len(_operations(group))
    with CommDebugMode() as backward:
        output.backward()
        settle(module.parameters())
    if inputs.requires_grad:
        assert inputs.grad.isfinite().all()  # waits for it
    carried_out = _operations(group)
    for mode, records in ((forward, carried_out[begun:between]), (backward, carried_out[between:])):
        operations = [name for name, _ in records]
        counts = {str(op).rsplit(".", 1)[-1]: count for op, count in mode.get_comm_counts().items()}
        counts = {name.replace("_into_tensor", "").replace("_tensor", ""): count for name, count in counts.items()}
        assert counts == Counter(operations)
        found.append(counts)
    return found


def _operations(group: Any) -> list[tuple[str, int]]:
    """The group's records: operations, and a rank's bytes of each."""
    import netfold.torch
    from netfold._native import engine

    names = {number: name for name, number in engine.KINDS.items()}
    return [(names[each["operation"]], int(each["bytes"])) for each in netfold.torch.events(group)]


@dataclass
class _Learnt:
    """Parameters by name, and the outputs of the last batch after the last step."""

    weights: dict[str, Any]
    momentum: dict[str, Any]
    outputs: Any = None
    same: str = "same"


def _learnt() -> dict[str, Any]:
    import torch

    from netfold_train import Batch, Recipe
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.zoo.models.linear import linear_stack
    from netfold_train.zoo.models.transformer import gpt

    torch.manual_seed(7)
    batches = {
        "stack": [Batch((torch.randn(8, 12),), torch.randint(8, (8,))) for _ in range(STEPS)],
        "gpt": [Batch((torch.randint(16, (8, 8)),), torch.randint(16, (8, 8))) for _ in range(STEPS)],
    }
    start = {"stack": linear_stack([12, 16, 8, 16, 8, 8]), "gpt": gpt(16, 8, 16, 4, 2)}
    alone = {name: _alone(copy.deepcopy(start[name]), batches[name]) for name in batches}
    meshes = {4: Mesh(Recipe.model_validate(_recipe(4)).parallel), 2: Mesh(Recipe.model_validate(_recipe(2)).parallel)}
    found: dict[str, Any] = {}
    for case in CASES + SHARDED:
        name, how, ranks = case.split(", ")
        size = 4 if "tensor 4" in ranks else 2
        recipe = Recipe.model_validate(_recipe(size, how, zero=3 if "zero 3" in ranks else 0))
        mine = [batch.parts(meshes[size].data.size)[meshes[size].data.rank] for batch in batches[name]]
        train = _sharded if case in SHARDED else _parallel
        learnt = train(copy.deepcopy(start[name]), recipe, meshes[size], mine)
        before = dict(start[name].module.named_parameters())
        found[case] = _difference(learnt.weights, alone[name].weights), _difference(before, learnt.weights)
        momentum = _difference(learnt.momentum, alone[name].momentum)
        found["momentum as parts"] = max(found.get("momentum as parts", 0), momentum)
        if train is _parallel:
            found[f"replicated, {case}"] = learnt.same
            found[f"outputs, {case}"] = float((learnt.outputs - alone[name].outputs).abs().max())
    return found


def _recipe(tensor: int, how: str = "alternating", zero: int = 0) -> dict[str, Any]:
    sequence = how == "sequence"
    parallel = {"tensor": tensor, "style": "alternating" if sequence else how, "sequence": sequence, "zero": zero}
    return {"model": {"name": "given"}, "data": {"name": "given"}, "training": {"steps": STEPS}, "parallel": parallel}


def _alone(model: Any, batches: Any) -> _Learnt:
    optimizer = _optimizer(model.module.parameters())
    for batch in batches:
        optimizer.zero_grad()
        model.losses(model.module(*batch.inputs), batch.target).mean().backward()
        optimizer.step()
    named = dict(model.module.named_parameters())
    momentum = {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in named.items()}
    return _Learnt(named, momentum, model.module(*batches[-1].inputs))


def _optimizer(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _parallel(model: Any, recipe: Any, mesh: Any, batches: Any) -> _Learnt:
    """Weights and momentum joined from all ranks' parts, and whether uncut tensors are equal on all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from netfold_train.parallel import parallelise
    from netfold_train.parallel.shards import axes, local

    replica = parallelise(model, recipe, mesh)
    optimizer = _optimizer([parameter for _, parameter in replica.named_parameters()])
    for batch in batches:
        optimizer.zero_grad()
        replica.gradients(batch)
        optimizer.step()
    weights, momentum, same = {}, {}, "same"
    for name, parameter in replica.named_parameters():
        for into, tensor in ((weights, parameter.detach()), (momentum, optimizer.state[parameter]["momentum_buffer"])):
            into[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not axes(parameter):
                everywhere: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everywhere, local(tensor))
                if not all(local(tensor).equal(other) for other in everywhere):
                    same = f"{name} differs"
    outputs = [torch.empty(0) for _ in range(mesh.data.size)]
    dist.all_gather_object(outputs, replica.outputs(batches[-1]) + 0.0, group=mesh.data.group)
    return _Learnt(weights, momentum, torch.cat(outputs), same)


def _sharded(model: Any, recipe: Any, mesh: Any, batches: Any) -> _Learnt:
    """The same with fully_shard over the data-parallel ranks, on layers that are already cut."""
    from torch.distributed.fsdp import fully_shard

    from netfold_train.parallel.tensor import cut

    cut(model, recipe.parallel, mesh)
    for layer in (*model.module.layers.values(), model.module):
        fully_shard(layer, mesh=mesh.fsdp_mesh)
    learnt = _alone(model, batches)
    return _Learnt(_whole(learnt.weights), _whole(learnt.momentum))


def _whole(parts: dict[str, Any]) -> dict[str, Any]:
    return {name: part.full_tensor() for name, part in parts.items()}


def _difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of an element; f64 weights of about 1."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def _refused() -> dict[str, str]:
    import torch

    from netfold_train.models.model import Model
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.tensor import cut
    from netfold_train.recipe import Parallel
    from netfold_train.zoo.models.linear import linear_stack
    from netfold_train.zoo.models.transformer import gpt

    mesh = Mesh(Parallel(tensor=4))

    def refused(model: Model, mesh: Mesh = mesh, inputs: Any = None, **parallel: Any) -> str:
        with pytest.raises(ValueError) as caught:
            cut(model, Parallel(**parallel), mesh)
            model.module(inputs)
        return str(caught.value)

    whole = gpt(16, 8, 16, 4, 1)
    return {
        "refused, heads": refused(gpt(16, 8, 16, 2, 1), tensor=4),
        "refused, inputs": refused(linear_stack([6, 8, 8]), tensor=4, style="rowwise"),
        "refused, length": refused(whole, inputs=torch.zeros(2, 6, dtype=torch.long), tensor=4, sequence=True),
        "refused, no plan": refused(Model(whole.module, whole.loss), tensor=4),
        "refused, sequence of features": refused(linear_stack([8, 8, 8]), tensor=4, sequence=True),
    }
