"""Combinations of parallelism on one mesh, each against one process with the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from training import TINY_GPT, changed, trained

SHORT = changed(TINY_GPT, training={"steps": 3})
AVERAGED = {"every": 1, "lr": 1.0, "momentum": 0.0}
SPLITS: dict[str, dict[str, Any]] = {
    "data x tensor": {"data": 2, "tensor": 2},
    "data x tensor, sequence": {"data": 2, "tensor": 2, "sequence": True},
    "data x tensor, ZeRO 1": {"data": 2, "tensor": 2, "zero": 1},
    "data x tensor, ZeRO 2": {"data": 2, "tensor": 2, "zero": 2},
    "data x tensor, ZeRO 3": {"data": 2, "tensor": 2, "zero": 3},
    "data x pipeline": {"data": 2, "pipeline": 2, "microbatches": 4},
    "data x pipeline, ZeRO 1": {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 1},
    "data x pipeline, ZeRO 2": {"data": 2, "pipeline": 2, "microbatches": 4, "zero": 2},
    "data x pipeline, ZeRO 3, interleaved": {"data": 2, "pipeline": 2, "zero": 3, "schedule": "interleaved"},
    "data x pipeline, zero bubble": {"data": 2, "pipeline": 2, "schedule": "zero-bubble"},
    "pipeline x tensor": {"pipeline": 2, "tensor": 2, "microbatches": 4},
    "pipeline x tensor by rows, zero bubble": {
        "pipeline": 2,
        "tensor": 2,
        "style": "colwise",
        "schedule": "zero-bubble-v",
    },
}
# Both kinds cast the tensors that pass between them.
IN_BF16 = (
    "data x tensor, ZeRO 1",
    "data x tensor, ZeRO 3",
    "data x pipeline, ZeRO 1",
    "data x pipeline, ZeRO 2",
    "pipeline x tensor",
)
# With plain SGD and an average in every step, DiLoCo ranks learn the same as ranks that sum gradients.
APART = {"data x tensor, apart": {"data": 2, "tensor": 2}, "data x pipeline, apart": {"data": 2, "pipeline": 2}}


def recipes(precision: str) -> dict[str, dict[str, Any]]:
    short = changed(SHORT, training={"precision": precision})
    chosen = SPLITS if precision == "f32" else IN_BF16
    made = {name: changed(short, parallel=SPLITS[name]) for name in chosen}
    if precision == "f32":
        plain = changed(short, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0})
        made |= {name: {**changed(plain, parallel=split), "diloco": AVERAGED} for name, split in APART.items()}
    return made


@functools.cache
def losses(ranks: int) -> dict[tuple[str, str], tuple[float, ...]]:
    """The losses of every recipe by name and precision. One rank has the whole batch, with or without momentum."""
    if ranks == 1:
        names = [("momentum", "f32"), ("plain", "f32"), ("momentum", "bf16")]
        asked = [
            changed(SHORT, training={"precision": precision}, optimizer={} if name == "momentum" else {"momentum": 0.0})
            for name, precision in names
        ]
    else:
        names = [(name, precision) for precision in ("f32", "bf16") for name in recipes(precision)]
        asked = [recipes(precision)[name] for name, precision in names]
    found = {}
    for name, outcomes in zip(names, trained(asked, ranks), strict=True):
        assert len({outcome.losses for outcome in outcomes}) == 1, f"ranks say different things of {name}"
        found[name] = outcomes[0].losses
    return found


@pytest.mark.parametrize("name", [*SPLITS, *APART])
def test_a_product_of_parallelisms_learns_the_same_as_one_process(name: str) -> None:
    alone = losses(1)["plain" if name in APART else "momentum", "f32"]
    # Sums of the same f32 terms in another order; losses are about 5.
    assert losses(4)[name, "f32"] == pytest.approx(alone, rel=2e-6)
    assert len(set(alone)) == 3


@pytest.mark.parametrize("name", IN_BF16)
def test_a_product_in_bf16_learns_the_same_as_one_process_in_bf16(name: str) -> None:
    # A bf16 number is rounded by 2^-9 of itself at most, each on its own; the mean over 512 tokens by far less.
    assert losses(4)[name, "bf16"] == pytest.approx(losses(1)["momentum", "bf16"], rel=2.0**-9)
