"""Data parallel, ZeRO and precision: two ranks learn the same bits as one rank that accumulates two parts.

The parts of one rank are the shares of two ranks, and both compute a gradient as fl(g0/2 + g1/2). Halving is exact, a
sum of two terms has no order, and the optimizer works element by element under every division of the elements. Only
f16 has gradients here that are so small that halving rounds them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks, values
from training import TINY_GPT, Table, changed

from netfold.tuning import OPERATIONS

ZEROS = (0, 1, 2, 3)
GPT = changed(
    {**TINY_GPT, "data": {"name": f"{__name__}:source", "context": TINY_GPT["data"]["context"]}},
    model={"layers": 2, "width": 16},
    # Evaluated in mid-run: the next step must not compute with weights that ZeRO 2 gathered for the evaluation.
    training={"evaluate_every": 2, "accumulate": 2},
    optimizer={"name": "adamw", "lr": 0.01},
)
# Gradients of 1.6 MB: two sizes are tried, for 2 x (2 + 3) steps each.
LARGER = changed(
    GPT,
    model={"width": 96, "layers": 3},
    training={"batch": 2, "steps": 22, "accumulate": 1, "evaluate_every": 22},
    data={"context": 8},
)
TOO_LARGE = 2.0**20
# Not Adam, which makes a whole step of a gradient that is only rounding, such as that of a key's bias.
HALF = changed(GPT, training={"precision": "f16"}, optimizer={"name": "sgd", "lr": 0.1})
SCALED = changed(HALF, training={"steps": 6})


@dataclass
class Learnt:
    losses: tuple[float, ...]
    metric: float
    weights: dict[str, np.ndarray[Any, Any]]
    """Whole, in f32, rounded to the precision of computation."""
    notes: list[str]
    skipped: list[bool]
    changed: list[bool]
    """Whether a step changed a weight of this rank."""
    sums_a_step: float
    """The number of all_reduce and reduce_scatter calls over the data axis."""
    buffers: dict[str, np.ndarray[Any, Any]]
    loss_scale: float


@pytest.fixture(scope="module")
def alone() -> dict[str, Learnt]:
    cases = {"f32": GPT, "bf16": changed(GPT, training={"precision": "bf16"}), "f16": HALF}
    return learnt(
        {**cases, "whole": changed(GPT, training={"accumulate": 1}), "norm": batch_normed("f32", 0, accumulate=2)}, 1
    )[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, Learnt]]:
    cases = {
        f"{precision} zero {zero}": changed(
            HALF if precision == "f16" else GPT,
            training={"precision": precision, "accumulate": 1},
            parallel={"data": 2, "zero": zero},
        )
        for precision in ("f32", "bf16", "f16")
        for zero in ZEROS
    }
    cases |= {
        f"scaled zero {zero}": changed(SCALED, training={"accumulate": 1}, parallel={"data": 2, "zero": zero})
        for zero in (0, 1, 3)
    }
    cases |= {
        f"accumulated zero {zero}": changed(
            GPT, training={"accumulate": 2, "steps": 2}, parallel={"data": 2, "zero": zero}
        )
        for zero in (0, 2, 3)
    }
    cases |= {f"buckets {size}": changed(LARGER, parallel={"data": 2, "bucket_mb": size}) for size in (64.0, 0.25)}
    cases |= {f"norm {name} {zero}": batch_normed(name, zero) for name, zero in (("f32", 0), ("bf16", 1), ("bf16", 3))}
    return learnt(cases, 2)


@pytest.mark.parametrize("zero", ZEROS)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_two_ranks_learn_the_same_bits_as_one_rank_with_two_parts(
    precision: str, zero: int, alone: dict[str, Learnt], together: list[dict[str, Learnt]]
) -> None:
    expected = alone[precision]
    if precision != "f32" and zero:
        # FSDP2 computes more in the lower type than autocast, which alone rounds in another way: equal among ZeRO
        # levels.
        near, expected = expected.losses, together[0][f"{precision} zero 1"]
        assert expected.losses == pytest.approx(near, rel=2**-8)
    for rank in together:
        found = rank[f"{precision} zero {zero}"]
        for name, weight in expected.weights.items():
            np.testing.assert_array_equal(found.weights[name], weight, err_msg=name)
        assert found.weights.keys() == expected.weights.keys()
        # The mean of two losses is rounded once more here than there.
        assert found.losses == pytest.approx(expected.losses, rel=2**-23)
    assert len(set(expected.losses)) == len(expected.losses)


@pytest.mark.parametrize("zero", ZEROS)
def test_two_ranks_learn_the_same_as_one_rank_with_the_whole_batch(
    zero: int, alone: dict[str, Learnt], together: list[dict[str, Learnt]]
) -> None:
    expected = alone["whole"].losses
    for rank in together:
        found = rank[f"f32 zero {zero}"].losses
        # A mean of terms of one sign: each of n - 1 additions rounds by at most 2**-24 of the sum so far, up or down.
        terms = GPT["training"]["batch"] * GPT["data"]["context"]
        assert found[0] == pytest.approx(expected[0], rel=2 * terms * 2**-24)
        # Later the weights differ too, by the order of sums, as in one process that accumulates parts.
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("zero", ZEROS)
def test_in_f16_two_ranks_learn_the_same_except_for_the_smallest_numbers(
    zero: int, alone: dict[str, Learnt], together: list[dict[str, Learnt]]
) -> None:
    expected, plain = alone["f16"], together[0]["f16 zero 1" if zero else "f16 zero 0"]
    for rank in together:
        found = rank[f"f16 zero {zero}"]
        if zero:
            assert found.losses == pytest.approx(expected.losses, rel=2**-10)
            continue
        for name, weight in expected.weights.items():
            np.testing.assert_array_equal(found.weights[name], plain.weights[name], err_msg=name)
            # Two units in the last place of the weight, or a hundred-thousandth of the learning rate.
            np.testing.assert_allclose(found.weights[name], weight, rtol=2**-10, atol=1e-6, err_msg=name)
        assert found.losses == plain.losses
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_all_ranks_leave_out_and_note_a_step_that_overflows(together: list[dict[str, Learnt]]) -> None:
    expected = together[0]["scaled zero 1"]
    assert 0 < sum(expected.skipped) < len(expected.skipped), "the scale it began with overflows, a smaller one not"
    assert expected.loss_scale == TOO_LARGE / 2 ** sum(expected.skipped)
    for rank in together:
        for zero in (0, 1, 3):
            found = rank[f"scaled zero {zero}"]
            # FSDP2 rounds in other places than autocast.
            weights = (together[0]["scaled zero 0"] if zero == 0 else expected).weights
            assert found.changed == [not skipped for skipped in found.skipped]
            assert (found.skipped, found.loss_scale) == (expected.skipped, expected.loss_scale), zero
            for name, weight in weights.items():
                np.testing.assert_array_equal(found.weights[name], weight, err_msg=f"zero {zero}: {name}")


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_accumulated_gradients_are_sent_once_per_step(zero: int, together: list[dict[str, Learnt]]) -> None:
    for rank in together:
        once, twice = rank[f"f32 zero {zero}"], rank[f"accumulated zero {zero}"]
        assert twice.sums_a_step == once.sums_a_step > 0
        # The same gradients, added in another order: four parts instead of two.
        assert twice.losses == pytest.approx(once.losses[: len(twice.losses)], rel=1e-5)


def test_the_size_of_buckets_changes_no_bit(together: list[dict[str, Learnt]]) -> None:
    for rank in together:
        large, small = (rank[f"buckets {size}"] for size in (64.0, 0.25))
        assert small.sums_a_step > large.sums_a_step == 1
        assert small.losses == large.losses
        for name, weight in large.weights.items():
            np.testing.assert_array_equal(small.weights[name], weight, err_msg=name)


@pytest.mark.parametrize("case", ["f32 0", "bf16 1", "bf16 3"])
def test_batch_norm_is_measured_with_the_statistics_of_rank_0(
    case: str, alone: dict[str, Learnt], together: list[dict[str, Learnt]]
) -> None:
    first, second = (rank[f"norm {case}"] for rank in together)
    assert first.metric == second.metric
    for name, buffer in first.buffers.items():
        np.testing.assert_array_equal(second.buffers[name], buffer, err_msg=name)
    assert first.buffers["layers.norm.running_mean"].any()
    if case == "f32 0":
        for name, weight in alone["norm"].weights.items():
            np.testing.assert_array_equal(first.weights[name], weight, err_msg=name)


def begins(rank: int, size: int, folder: str) -> list[float]:
    """A buffer after the start and after a forward pass."""
    import types

    import torch
    import torch.distributed as dist
    from torch import nn

    from netfold_train.parallel import data_parallel

    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    module = nn.BatchNorm1d(1)
    module.running_mean.fill_(rank + 1.0)
    data = types.SimpleNamespace(group=dist.group.WORLD, size=size)
    ddp = data_parallel._wrap_ddp(module, types.SimpleNamespace(data=data, site=data), 64.0, sends=True)
    found = [module.running_mean.item()]
    for _ in range(2):
        ddp(torch.full((2, 1), 10.0 * rank)).sum().backward()
    found.append(round(module.running_mean.item(), 3))
    dist.destroy_process_group()
    return found


def test_buffers_start_as_those_of_rank_0_and_then_differ() -> None:
    assert values(run_ranks(begins, 2)) == [[1.0, 0.81], [1.0, 2.71]]


def learnt(cases: dict[str, Table], ranks: int) -> list[dict[str, Learnt]]:
    found = values(run_ranks(_learn, ranks, list(cases.values()), timeout_s=240))
    return [dict(zip(cases, rank, strict=True)) for rank in found]


def batch_normed(precision: str, zero: int, accumulate: int = 1) -> Table:
    return {
        "model": {"name": f"{__name__}:small_network"},
        "data": {"name": f"{__name__}:photos"},
        "training": {"steps": 2, "batch": 4, "precision": precision, "accumulate": accumulate},
        "optimizer": {"name": "adam", "lr": 0.01},
        "parallel": {"data": 1 if accumulate > 1 else 2, "zero": zero},
    }


def source(context: int) -> Any:
    from netfold_train.zoo.data import text

    return briefly(text.source(context))


def photos() -> Any:
    from netfold_train.zoo.data import super_resolution

    return briefly(super_resolution.photos(patch=12))


def briefly(data: Any) -> Any:
    """Evaluated on only some of the held-out examples, whose number no batch divides."""
    return dataclasses.replace(data, held_out=Few(data.held_out))


class Few:
    def __init__(self, examples: Any) -> None:
        self.batch = examples.batch

    def __len__(self) -> int:
        return 37


def small_network() -> Any:
    from torch import nn
    from torch.nn import functional

    from netfold_train import Chain, Model

    up = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2))
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    layers = {"stem": stem, "conv": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.BatchNorm2d(8), "up": up}
    return Model(
        Chain(list(layers.items())), lambda output, target: functional.l1_loss(output, target, reduction="none")
    )


def _learn(rank: int, size: int, folder: str, recipes: list[Table]) -> list[Learnt]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        return [_one(recipe) for recipe in recipes]
    finally:
        dist.destroy_process_group()


def _one(recipe: Table) -> Learnt:
    import torch
    from torch.distributed.tensor import DTensor

    import netfold.torch
    from netfold_train import Recipe, Trainer
    from netfold_train.parallel.precision import DTYPES

    recorder = Recorder()
    trainer = recorder.trainer = Trainer(Recipe.model_validate(recipe), callbacks=[recorder])
    if recipe["training"]["steps"] == SCALED["training"]["steps"]:
        trainer.update.load_state_dict({**trainer.update.state_dict(), "scale": TOO_LARGE})
    group = trainer.mesh.data.group
    # A group keeps only its newest records; their numbers continue.
    before = netfold.torch.events(group)["sequence"].max(initial=0)
    outcome = trainer.fit()
    events = netfold.torch.events(group)
    # The step vote uses the same group.
    events = events[(events["sequence"] > before) & (events["bytes"] > 100)]
    sums = int(np.isin(events["operation"], [OPERATIONS.index("all_reduce"), OPERATIONS.index("reduce_scatter")]).sum())

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    computed_in = DTYPES[trainer.recipe.training.precision]
    norms = ("layers.norm.", "layers.stem.1.")  # batch norm's stay f32
    weights = {
        name: whole(parameter.detach()).to(torch.float32 if name.startswith(norms) else computed_in).float().numpy()
        for name, parameter in trainer.replica.named_parameters()
    }
    return Learnt(
        losses=outcome.losses,
        metric=outcome.metric,
        weights=weights,
        notes=recorder.notes,
        skipped=recorder.skipped,
        changed=recorder.changed,
        sums_a_step=sums / outcome.step,
        buffers={name: buffer.numpy() for name, buffer in trainer.replica.modules[0].named_buffers()},
        loss_scale=trainer.update.loss_scale,
    )


class Recorder:
    """Record the trainer's notes, and whether each step changed a weight."""

    trainer: Any

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.skipped: list[bool] = []
        self.changed: list[bool] = []
        self._weights = b""

    def on_start(self, event: Any) -> None:
        self._weights = self._now()

    def on_step(self, event: Any) -> None:
        before, self._weights = self._weights, self._now()
        self.skipped.append(event.skipped)
        self.changed.append(self._weights != before)

    def on_evaluation(self, event: Any) -> None: ...

    def on_note(self, event: Any) -> None:
        self.notes.append(event.text)

    def on_end(self, event: Any) -> None: ...

    def _now(self) -> bytes:
        from torch.distributed.tensor import DTensor

        parameters = (parameter.detach() for _, parameter in self.trainer.replica.named_parameters())
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters)
        return b"".join(tensor.float().numpy().tobytes() for tensor in local)
