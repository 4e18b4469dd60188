"""The training loop: the result does not depend on the number of ranks."""

from __future__ import annotations

import pytest
from training import TINY_GPT, changed, trained


def test_two_ranks_learn_the_same_as_one() -> None:
    (alone,), (outcomes,) = trained([TINY_GPT], 1), trained([changed(TINY_GPT, parallel={"data": 2})], 2)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    # Four steps of f32: sums of the same gradients in another order. Losses are about 5.
    assert outcomes[0].losses == pytest.approx(alone[0].losses, rel=1e-5)
    assert len(set(alone[0].losses)) == 4
