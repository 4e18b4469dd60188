"""A job is resumed under another split: one world of four ranks runs all cases.

A case is a function of (rank, folder, world), as in `test_fault_tolerance`. An attempt trains a few steps and ends
with a checkpoint; the next attempt goes on from it.
"""

from __future__ import annotations

import math
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import Cases, World
from training import Table, changed

pytestmark = pytest.mark.torch

Split = tuple[int, Table]  # ranks, [parallel]

SAVED_AT = 2
ADAM: Table = {"optimizer": {"name": "adamw", "lr": 3e-3, "eps": 1e-4}, "schedule": {"shape": "constant"}}
CONTEXT = 16
GPT: Table = {
    "model": {"name": "gpt", "width": 32, "heads": 4, "layers": 2, "context": CONTEXT},
    "data": {"name": "given"},
    "training": {"batch": 8, "clip": 1.0},
    **ADAM,
}
ROWS = [7, 50, 3]
DLRM: Table = {
    "model": {"name": "dlrm", "numbers": 2, "rows": ROWS, "width": 8, "bottom": [16], "top": [16, 8]},
    "data": {"name": "given"},
    "training": {"batch": 8},
    **ADAM,
}

ALONE: Split = 1, {}
CHAIN: list[Split] = [
    (2, {"data": 2}),
    (2, {"pipeline": 2}),
    (2, {"tensor": 2}),
    (2, {"data": 2, "zero": 3}),
    (2, {"data": 2, "zero": 1}),
    (4, {"data": 2, "tensor": 2, "zero": 2}),
    (4, {"pipeline": 2, "data": 2, "zero": 1}),
    (2, {"pipeline": 2, "schedule": "zero-bubble"}),
    ALONE,
]
# Splits with f32 weights beside lower ones, and splits without, in turn.
LOWER_CHAIN = [CHAIN[index] for index in (0, 3, 4, 1, 8)]
TABLES: list[Split] = [(2, {"embeddings": kind}) for kind in ("replicated", "row_wise", "table_wise", "replicated")]
MOE = changed(GPT, model={"name": "gpt-moe", "experts": 3})
# With four ranks one has no expert.
EXPERTS: list[Split] = [
    (2, {"experts": "sharded"}),
    (4, {"experts": "sharded"}),
    ALONE,
    (2, {"experts": "sharded", "zero": 3}),
]


class Tokens:
    """Sequences that go up by 1 to 7, from anywhere, modulo 251."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Any, seeds: Any) -> Any:
        import torch

        from netfold_train import Batch

        starts = torch.tensor(indices)[:, None]
        rows = (37 * starts + torch.arange(CONTEXT + 1) * (1 + starts % 7)) % 251
        return Batch((rows[:, :-1],), rows[:, 1:])


class Clicks:
    """Numbers, a row of each table, and a target of 0 or 1."""

    def __init__(self, count: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(3)
        self._numbers = torch.randn(count, 2, generator=generator)
        self._asked = torch.stack([torch.randint(rows, (count,), generator=generator) for rows in ROWS], 1)

    def __len__(self) -> int:
        return len(self._asked)

    def batch(self, indices: Any, seeds: Any) -> Any:
        from netfold_train import Batch

        chosen = list(indices)
        return Batch((self._numbers[chosen], self._asked[chosen]), (self._asked[chosen].sum(1) % 2).float())


def train_once(world: World, folder: Path | None, recipe: Table, split: Split, steps: int, look: Any = None) -> Any:
    """Up to step `steps`, on as many ranks as the split has: the losses, or what `look` makes of the trainer then;
    None on the other ranks."""
    from netfold_train import Data, Metric, Recipe, Trainer

    ranks, parallel = split
    with world(ranks) as here:
        if not here:
            return None
        examples = Tokens if recipe["model"]["name"].startswith("gpt") else Clicks
        metric = Metric(
            "of no account", "", "lower", lambda output, target: output.reshape(len(output), -1).sum(1), 1.0, "none"
        )
        data = Data(examples(64), examples(8), metric)
        asked = Recipe.model_validate(changed(recipe, parallel=parallel, training={"steps": steps}))
        trainer = Trainer(asked, folder=folder, data=data)
        outcome = trainer.fit()
        return outcome.losses if look is None else look(trainer)


def in_turn(world: World, folder: Path, recipe: Table, splits: Sequence[Split]) -> tuple[float, ...]:
    """The losses of several attempts, in order."""
    losses: tuple[float, ...] = ()
    for number, split in enumerate(splits, 1):
        losses += train_once(world, folder, recipe, split, SAVED_AT * number) or ()
    return losses


def every_split(rank: int, folder: Path, world: World) -> Any:
    """Losses of an uninterrupted run on one rank, and of attempts under several splits in turn."""
    found: dict[str, Any] = {}
    for name, recipe, splits in (
        ("f32", GPT, CHAIN),
        ("bf16", changed(GPT, training={"precision": "bf16"}), LOWER_CHAIN),
        ("tables", DLRM, TABLES),
        ("experts", MOE, EXPERTS),
    ):
        whole = train_once(world, None, recipe, ALONE, SAVED_AT * len(splits))
        found[name] = whole, in_turn(world, folder / name, recipe, splits)
    return found


def same_split(rank: int, folder: Path, world: World) -> Any:
    """Losses of a run, and of a run that resumes from its middle."""
    found: dict[str, Any] = {}
    for name, split, changes in (
        ("pipeline", (2, {"pipeline": 2}), {"training": {"precision": "bf16"}}),
        ("zero 1", (2, {"zero": 1}), {"training": {"precision": "f16"}, "optimizer": {"name": "lamb"}}),
        ("zero 3", (2, {"zero": 3}), {"optimizer": {"name": "lamb"}}),
        ("diloco", (2, {"data": 2}), {"diloco": {"every": SAVED_AT}}),
    ):
        recipe = changed(GPT, checkpoint={"every": SAVED_AT}, **changes)
        whole = train_once(world, folder / name, recipe, split, 2 * SAVED_AT)
        if rank == 0:
            shutil.rmtree(folder / name / "checkpoints" / f"step-{2 * SAVED_AT:06d}")
        found[name] = whole, train_once(world, folder / name, recipe, split, 2 * SAVED_AT)
    return found


def carried_over(rank: int, folder: Path, world: World) -> Any:
    """The state of a job in bf16 at its end, and the state of a job under another split that loads its checkpoint."""
    splits: dict[str, Split] = {
        "zero 0": (2, {"data": 2}),
        "zero 1": (2, {"zero": 1}),
        "zero 3": (2, {"zero": 3}),
        "tensor x zero 1": (4, {"tensor": 2, "zero": 1}),
        "tensor x zero 3": (4, {"tensor": 2, "zero": 3}),
        "pipeline x zero 1": (4, {"pipeline": 2, "data": 2, "zero": 1}),
    }
    recipe = changed(GPT, training={"precision": "bf16"})
    found: dict[str, Any] = {}
    for before, after in (
        ("zero 0", "zero 3"), ("zero 3", "tensor x zero 1"), ("tensor x zero 1", "pipeline x zero 1"),
        ("pipeline x zero 1", "tensor x zero 3"), ("tensor x zero 3", "zero 1"), ("zero 1", "zero 0"),
    ):  # fmt: skip
        into = folder / f"{before} to {after}"
        # The second job has no step left: its state is the loaded one.
        found[into.name] = [train_once(world, into, recipe, splits[each], SAVED_AT, _held) for each in (before, after)]
    return found


def _held(trainer: Any) -> dict[str, int]:
    """Checksums of what this rank would give to a checkpoint, each tensor made whole; and that weights are the rounded
    ones of those."""
    import torch
    from torch.distributed.tensor import DTensor

    from netfold_train.checkpoint.state import collect_state

    parameters = dict(trainer.replica.named_parameters())
    tensors = collect_state(trainer.replica, parameters, trainer.update.states(), buffers=False)
    for name, each in parameters.items():
        given = tensors.get(f"model.{name}")
        if given is not None:
            assert given.dtype == torch.float32, name
            local = given.to_local() if isinstance(given, DTensor) else given
            own = each.to_local() if isinstance(each, DTensor) else each
            assert torch.equal(own.detach(), local.to(own.dtype)), name
    whole = {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in tensors.items()}
    return {key: zlib.crc32(each.contiguous().numpy().tobytes()) for key, each in whole.items()}


def outer_elsewhere(rank: int, folder: Path, world: World) -> Any:
    """The state that each of two DiLoCo ranks loads; then one rank, and two without DiLoCo, resume their checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    apart = changed(GPT, diloco={"every": SAVED_AT})
    wants = []

    def look(trainer: Any) -> None:
        path = folder / "two" / "checkpoints" / f"step-{SAVED_AT:06d}"
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        wants.extend(trainer.update.states({key.partition(".")[0] for key in saved}))

    train_once(world, folder / "two", apart, (2, {"data": 2}), SAVED_AT, look)
    if rank == 0:
        shutil.copytree(folder / "two", folder / "together")
    fewer = train_once(world, folder / "two", apart, ALONE, 2 * SAVED_AT)
    together = train_once(world, folder / "together", GPT, (2, {"data": 2}), 2 * SAVED_AT)
    again = train_once(world, folder / "together", apart, (2, {"data": 2}), 3 * SAVED_AT)
    return set(wants), fewer, together, again


FOUND = Cases(4, 80, [every_split, same_split, carried_over, outer_elsewhere])


@pytest.mark.parametrize(("kind", "rounding"), [("f32", 1e-5), ("bf16", 2e-3), ("tables", 1e-5), ("experts", 1e-5)])
def test_a_run_resumes_under_every_other_split(kind: str, rounding: float) -> None:
    whole, losses = FOUND[every_split][0][kind]
    assert losses == pytest.approx(whole, rel=rounding)


def test_a_run_resumed_under_the_same_split_has_the_same_bits() -> None:
    for found in FOUND[same_split][:2]:
        for name, (whole, losses) in found.items():
            assert whole is None or (losses == whole[SAVED_AT:] and len(set(whole)) == 2 * SAVED_AT), name


def test_a_change_of_split_keeps_every_bit_of_weights_and_optimizer_states() -> None:
    for change in FOUND[carried_over][0]:
        kept = []
        for number in (0, 1):
            held: dict[str, int] = {}
            for rank in FOUND[carried_over]:
                for key, checksum in (rank[change][number] or {}).items():
                    assert held.setdefault(key, checksum) == checksum, f"{change}: ranks differ in {key}"
            kept.append(held)
        assert kept[0] == kept[1] and any("exp_avg" in key for key in kept[0]), change


def test_diloco_ranks_load_their_own_state_and_resume_under_other_splits() -> None:
    for number, (wants, fewer, together, again) in enumerate(FOUND[outer_elsewhere][:2]):
        assert wants == {"outer", f"inner{number}"}
        for losses in ([fewer] if number == 0 else []) + [together, again]:
            assert len(losses) == SAVED_AT and all(map(math.isfinite, losses))
