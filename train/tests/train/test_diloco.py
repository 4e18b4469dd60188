"""DiLoCo over a switch: two data-parallel ranks train independently and average their changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, running_switch, values
from training import TINY_GPT, changed

SHAPES = {"first": (3, 4), "second": (5,), "third": (2, 2, 2)}
STEPS, EVERY = 6, 3
# Rounds of 5 steps: each parameter is a fragment, sent after step 2, 3 or 4, and merged one step later.
STREAMED_STEPS, STREAMED = 13, {"every": 5, "lr": 0.7, "momentum": 0.9, "fragments": 3, "overlap": 1}
SENT_AFTER = {"first": 2, "second": 3, "third": 4}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each rank."""
    with running_switch() as switch:
        env = {"NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": "in_network"}
        return values(run_ranks(_rank, 2, env=env, timeout_s=150))


def test_averaging_models_in_every_step_equals_plain_data_parallel(found: list[dict[str, Any]]) -> None:
    """SGD with momentum is linear in gradients: the mean of steps is the step of the mean. f32, losses about 5."""
    for rank in found:
        plain, averaged = rank["plain"], rank["every 1"]
        assert averaged["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert len(set(plain["losses"])) == 8
        assert averaged["norm"] == pytest.approx(plain["norm"], rel=1e-6)


def test_a_round_communicates_once(found: list[dict[str, Any]]) -> None:
    for rank in found:
        plain, one, four = rank["plain"], rank["every 1"], rank["every 4"]
        # 8 steps: each of the model's f32 gradients, or 8 rounds of one call, or 2.
        assert plain["bytes"] == one["bytes"] == 8 * rank["model_bytes"]
        assert four["bytes"] == 2 * rank["model_bytes"]
        assert (one["calls"], four["calls"]) == (8, 2)
        assert four["wire_bytes"] < plain["wire_bytes"] / 3.5
        assert {algorithm for kind in (plain, one, four) for algorithm in kind["algorithms"]} == {"in_network"}


def test_diloco_ranks_learn_and_end_with_one_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        losses = rank["every 4"]["losses"]
        assert losses[-1] < losses[0]
        assert losses[:1] == pytest.approx(rank["plain"]["losses"][:1], rel=1e-6)
        assert losses != pytest.approx(rank["plain"]["losses"], rel=1e-5)
    assert found[0]["every 4"]["norm"] == found[1]["every 4"]["norm"]


def test_a_short_last_round_ends_with_an_average(found: list[dict[str, Any]]) -> None:
    assert found[0]["short"]["norm"] == found[1]["short"]["norm"]
    for rank in found:
        # 5 steps of rounds of 4: two all_reduces.
        assert rank["short"]["calls"] == 2


def test_the_clipped_norm_is_reported_and_is_each_ranks_own(found: list[dict[str, Any]]) -> None:
    first, second = (rank["short"]["gradient norms"] for rank in found)
    assert len(first) == len(second) == 5
    assert all(a > 0 and b > 0 and a != b for a, b in zip(first, second, strict=True))
    assert found[0]["plain"]["gradient norms"] == [None] * 8


def test_a_weak_scaling_batch_grows_with_the_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["short"]["batch"] == 2 * TINY_GPT["training"]["batch"]
        # The rate was found for 16 samples; the batch is 32.
        assert rank["short"]["rates"] == pytest.approx([0.2] * 5)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0)])
def test_the_outer_step_is_nesterov_momentum(found: list[dict[str, Any]], lr: float, momentum: float) -> None:
    """Against Douillard et al. 2023, algorithm 1, in NumPy, for two rounds of given inner steps."""
    for name, shape in SHAPES.items():
        start, velocity = _start(name, 0), np.zeros(shape)
        for round_ in range(STEPS // EVERY):
            moved = [
                start + sum(_moved(name, rank, step) for step in range(round_ * EVERY, round_ * EVERY + EVERY))
                for rank in range(2)
            ]
            gradient = np.mean([start - w for w in moved], axis=0)
            velocity = momentum * velocity + gradient
            start = start - lr * (gradient + momentum * velocity)
        for rank in found:
            np.testing.assert_allclose(rank["twin"][lr, momentum][name], start, rtol=0, atol=1e-6)


def test_fragments_are_cut_by_bytes() -> None:
    import torch

    from netfold_train.parallel.diloco import in_fragments

    weights = [torch.empty(size) for size in (4, 4, 8, 0, 15, 1)]
    assert [[len(each) for each in part] for part in in_fragments(weights, 2)] == [[4, 4, 8, 0], [15, 1]]
    assert [[len(each) for each in part] for part in in_fragments(weights[2:3], 3)] == [[], [8], []]


@pytest.mark.parametrize("wire", ["f32", "bf16", "i8"])
def test_a_fragment_is_merged_after_its_overlap_and_keeps_the_steps_since(
    found: list[dict[str, Any]], wire: str
) -> None:
    """Against NumPy: two rounds of 5 steps, and one of 3 that the end of the run cuts short."""
    for name, shape in SHAPES.items():
        outer, velocity, waiting = _start(name, 0), np.zeros(shape), None
        weights = [outer.copy() for _ in range(2)]
        outers = []
        # The end of the run merges what is under way.
        for step in range(STREAMED_STEPS + 1):
            place = step % 5 + 1
            if step < STREAMED_STEPS:
                weights = [w + _moved(name, rank, step) for rank, w in enumerate(weights)]
            if waiting is not None:
                gradient, sent = waiting
                velocity = 0.9 * velocity + gradient
                outer = outer - 0.7 * (gradient + 0.9 * velocity)
                weights, waiting = [w + outer - at for w, at in zip(weights, sent, strict=True)], None
            if place == SENT_AFTER[name]:
                waiting = outer - np.mean(weights, axis=0), weights
            if place == 5:
                outers.append(outer)
        mean = np.mean(weights, axis=0)
        for rank in found:
            seen = rank["streamed"][wire]
            # A change is a sum of up to 5 normal numbers, at most 10 here. bf16 is exact to 2^-8 of it. i8 is exact to
            # 10/63 a rank, enters twice with momentum (0.7 x 1.9), and again in later rounds.
            allowed = {"f32": 1e-5, "bf16": 0.2, "i8": 1.0}[wire] if name != "second" else 1e-5
            for ours, due in zip(seen["common"][name], outers, strict=True):
                np.testing.assert_allclose(ours, due, rtol=0, atol=allowed)
            np.testing.assert_allclose(seen["last"][name], mean, rtol=0, atol=allowed)
            # "second" is f64, which no wire format changes.
            if wire != "f32" and name != "second":
                assert np.abs(seen["last"][name] - mean).max() > 1e-5, "no number was rounded"
    first, second = (rank["streamed"][wire] for rank in found)
    assert first["between"] == second["between"] == [False] * 4 + [True] + [False] * 4 + [True] + [False] * 3
    for name in SHAPES:
        assert np.array_equal(first["common"][name], second["common"][name])
        assert np.array_equal(first["last"][name], second["last"][name])
        assert not np.array_equal(first["own"][name], second["own"][name]), "sites are ahead by their own steps"


def test_what_i8_rounds_off_is_sent_in_the_next_round(found: list[dict[str, Any]]) -> None:
    """The sum of the changes of 40 rounds is right to one unit. Rounded alone, they would drift."""
    for rank in found:
        sums, unit = rank["fed back"]
        assert np.abs(sums).max() <= 2 * unit


def test_checkpoints_are_written_only_at_ends_of_rounds(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["between rounds"] == [False, False, True] * 2


def test_running_statistics_become_their_mean(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["buffers"] == {"mean": [1.5, 15.0], "count": 7}


def test_a_job_resumed_at_the_end_of_a_round_equals_an_uninterrupted_one(found: list[dict[str, Any]]) -> None:
    """All bits are equal. Each rank's Adam has its own state, and the checkpoint's common part is rank 0's."""
    assert found[0]["resumed"]["states_differ"]
    for rank in found:
        assert rank["resumed"]["same"]
        assert rank["resumed"]["in turn"], "a rank beyond those of the checkpoint takes another's state"


class Held:
    """A replica of given parameters."""

    def __init__(self, parameters: dict[str, Any], modules: tuple[Any, ...] = ()) -> None:
        self.parameters, self.modules = parameters, modules

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return iter(self.parameters.items())


def _start(name: str, rank: int) -> Any:
    """Only rank 0's values count."""
    return np.random.default_rng([rank, 1000, len(name)]).normal(size=SHAPES[name])


def _moved(name: str, rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step, len(name)]).normal(size=SHAPES[name])


def _rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from netfold_train.parallel.mesh import Mesh
    from netfold_train.recipe import DiLoCo, Parallel

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        recipe = changed(TINY_GPT, training={"steps": 8}, parallel={"data": 2})
        mesh = Mesh(Parallel(data=2), diloco=DiLoCo(every=EVERY))
        return {
            "plain": _fitted(recipe),
            "every 1": _fitted({**recipe, "diloco": {"every": 1, "lr": 1.0, "momentum": 0.0}}),
            "every 4": _fitted({**recipe, "diloco": {"every": 4}}),
            "short": _fitted(
                {
                    **changed(
                        recipe,
                        training={"steps": 5, "scaling": "weak", "clip": 0.5},
                        schedule={"shape": "constant", "reference_batch": 16},
                    ),
                    "diloco": {"every": 4},
                }
            ),
            "model_bytes": _model_bytes(recipe),
            "twin": {(lr, momentum): _twin(mesh, lr, momentum) for lr, momentum in ((0.7, 0.9), (1.0, 0.0))},
            "streamed": {wire: _streamed(mesh, wire) for wire in ("f32", "bf16", "i8")},
            "fed back": _fed_back(mesh),
            "between rounds": _between_rounds(mesh),
            "buffers": _buffers(mesh),
            "resumed": _resumed(mesh),
        }
    finally:
        dist.destroy_process_group()


def _fitted(recipe: dict[str, Any]) -> dict[str, Any]:
    import torch

    import netfold.torch
    from netfold._native import engine
    from netfold_train import Recipe, Trainer

    class Steps:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_step(self, event: Any) -> None:
            self.seen.append(event)

        def on_start(self, event: Any) -> None: ...
        def on_evaluation(self, event: Any) -> None: ...
        def on_note(self, event: Any) -> None: ...
        def on_end(self, event: Any) -> None: ...

    steps = Steps()
    trainer = Trainer(Recipe.model_validate(recipe), callbacks=[steps])
    made = len(netfold.torch.events(trainer.mesh.data.group))
    outcome = trainer.fit()
    events = netfold.torch.events(trainer.mesh.data.group)[made:]
    # Only of weights or gradients: the step votes, 16 bytes per step, are f64.
    events = events[(events["operation"] == engine.KINDS["all_reduce"]) & (events["dtype"] == engine.DTYPES["f32"])]
    names = {number: name for name, number in engine.ALGORITHMS.items()}
    return {
        "losses": list(outcome.losses),
        "batch": trainer.batch,
        "rates": [step.lr for step in steps.seen],
        "gradient norms": [step.gradient_norm for step in steps.seen],
        "norm": float(torch.cat([w.detach().flatten() for _, w in trainer.replica.named_parameters()]).double().norm()),
        "calls": len(events),
        "bytes": int(events["bytes"].sum()),
        "wire_bytes": int(events["wire_bytes"].sum()),
        "algorithms": sorted({names[int(number)] for number in events["algorithm"]}),
    }


def _model_bytes(recipe: dict[str, Any]) -> int:
    from netfold_train.models import make_model
    from netfold_train.recipe import Factory

    module = make_model(Factory(**recipe["model"])).module
    return sum(parameter.nbytes for parameter in module.parameters())


def _parameters(mesh: Any) -> dict[str, Any]:
    """Parameters, one of f64 and one a DTensor, with other initial values on other ranks."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    held = {name: torch.tensor(_start(name, mesh.data.rank)).float() for name in SHAPES}
    held["second"] = held["second"].double()
    held["third"] = DTensor.from_local(held["third"], mesh.device_mesh["tensor"], [Replicate()])
    return {name: torch.nn.Parameter(w) for name, w in held.items()}


def _twin(mesh: Any, lr: float, momentum: float) -> dict[str, Any]:
    import torch

    from netfold_train.parallel import diloco
    from netfold_train.parallel.shards import local
    from netfold_train.recipe import DiLoCo

    held = _parameters(mesh)
    whole, diloco.BUFFER_BYTES = diloco.BUFFER_BYTES, 40
    rounds = diloco.DiLoCoRounds(
        Held(held),
        DiLoCo(every=EVERY, lr=lr, momentum=momentum),
        mesh,
    )
    with torch.no_grad():
        for step in range(STEPS):
            for name, w in held.items():
                local(w).add_(torch.tensor(_moved(name, mesh.data.rank, step)))
            rounds.end_step(step + 1)
    diloco.BUFFER_BYTES = whole
    return {name: local(w).detach().numpy() for name, w in held.items()}


def _streamed(mesh: Any, wire: str) -> dict[str, Any]:
    """The outer weights after each round, a site's own weights before the last step, and all weights at the end."""
    import torch

    from netfold_train.parallel.diloco import DiLoCoRounds
    from netfold_train.parallel.shards import local
    from netfold_train.recipe import DiLoCo

    held = _parameters(mesh)
    rounds = DiLoCoRounds(Held(held), DiLoCo(**STREAMED, wire=wire), mesh)

    def seen() -> dict[str, Any]:
        return {name: local(w).detach().clone().numpy() for name, w in held.items()}

    common, between, own = [], [], {}
    for step in range(STREAMED_STEPS):
        with torch.no_grad():
            for name, w in held.items():
                local(w).add_(torch.tensor(_moved(name, mesh.data.rank, step)))
        own = seen()
        rounds.end_step(step + 1)
        between.append(rounds.between)
        if rounds.between:
            before = seen()
            with rounds.common():
                common.append(seen())
            assert all(np.array_equal(before[name], each) for name, each in seen().items())
    rounds.finish()
    return {
        "common": {name: [each[name] for each in common] for name in held},
        "between": between,
        "own": own,
        "last": seen(),
    }


def _fed_back(mesh: Any) -> tuple[Any, float]:
    """The error of weights after 40 rounds of models averaged in i8, and a unit of the last place of a round."""
    import torch

    from netfold_train.parallel.diloco import DiLoCoRounds
    from netfold_train.recipe import DiLoCo

    w = torch.nn.Parameter(torch.zeros(128))
    rounds = DiLoCoRounds(Held({"w": w}), DiLoCo(every=1, lr=1.0, momentum=0.0, wire="i8"), mesh)
    change = torch.linspace(0.1, 1.0, 128)
    for number in range(40):
        with torch.no_grad():
            w += change
        rounds.end_step(number + 1)
    # Two ranks: 63 levels to either side; with what is left of the round before, a change is below 1 + 2/63.
    return (w.detach() - 40 * change).numpy(), 1.04 / 63


def _update(mesh: Any) -> tuple[Any, Any, dict[str, Any]]:
    """An OptimizerStep with rounds of 3 and Adam, and its weights."""
    import torch

    from netfold_train.optim.step import OptimizerStep
    from netfold_train.recipe import Recipe

    recipe = Recipe.model_validate(
        {"model": {"name": "m"}, "data": {"name": "d"}, "training": {"steps": 6}, "diloco": {"every": EVERY}}
    )
    held = _parameters(mesh)
    del held["third"]
    optimizer = torch.optim.Adam(held.values())
    return OptimizerStep(Held(held), optimizer, recipe, mesh), optimizer, held


def _steps(update: Any, held: dict[str, Any], mesh: Any, steps: range) -> None:
    import torch

    for step in steps:
        for name, w in held.items():
            w.grad = torch.tensor(_moved(name, mesh.data.rank, step), dtype=w.dtype)
        update.step(0.1)
        update.end_step(step + 1)


def _between_rounds(mesh: Any) -> list[bool]:
    """The weights after every step; the third step's update is left out."""
    update, _, held = _update(mesh)
    said = []
    for step in range(STEPS):
        if step != EVERY - 1:
            _steps(update, held, mesh, range(step, step + 1))
        else:
            update.end_step(step + 1)
        said.append(update._rounds.between)
    return said


def _buffers(mesh: Any) -> dict[str, Any]:
    import torch

    from netfold_train.parallel.diloco import DiLoCoRounds
    from netfold_train.recipe import DiLoCo

    norm = torch.nn.BatchNorm1d(2)
    rounds = DiLoCoRounds(Held(dict(norm.named_parameters()), (norm,)), DiLoCo(every=1), mesh)
    assert norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.copy_(torch.tensor([1.0, 10.0]) * (mesh.data.rank + 1))
    norm.num_batches_tracked.fill_(7)
    rounds.end_step(1)
    return {"mean": norm.running_mean.tolist(), "count": int(norm.num_batches_tracked)}


def _resumed(mesh: Any) -> dict[str, bool]:
    import copy

    import torch
    import torch.distributed as dist

    update, _, held = _update(mesh)
    _steps(update, held, mesh, range(EVERY))
    # As in a checkpoint: every rank contributes its tensors, and each name occurs once.
    given: list[Any] = [None] * mesh.data.size
    own = {kind: [state[w] for w in held.values()] for kind, state in update.states().items()}
    dist.all_gather_object(given, (own, {name: w.detach() for name, w in held.items()}))
    saved = {kind: states for own, _ in reversed(given) for kind, states in own.items()}
    weights = given[0][1]

    def again(saved: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        new, new_optimizer, new_held = _update(mesh)
        with torch.no_grad():
            for name, w in new_held.items():
                w.copy_(weights[name])
        for kind, state in new.states(saved).items():
            for w, of_w in zip(new_held.values(), saved[kind], strict=True):
                state[w].update(copy.deepcopy(of_w))
        new.load_state_dict(update.state_dict())
        return new, new_optimizer, new_held

    _steps(update, held, mesh, range(EVERY, STEPS))
    new, _, new_held = again(saved)
    _steps(new, new_held, mesh, range(EVERY, STEPS))
    _, fewer, fewer_held = again({kind: states for kind, states in saved.items() if kind != "inner1"})
    first = saved["inner0"][0]["exp_avg"]
    return {
        "same": all(torch.equal(w, new_held[name]) for name, w in held.items()),
        "states_differ": not torch.equal(first, saved["inner1"][0]["exp_avg"]),
        "in turn": torch.equal(fewer.state[fewer_held["first"]]["exp_avg"], first),
    }
