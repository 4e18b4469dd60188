"""A loss that training may share out: one in which every sample weighs alike.

Ranks, microbatches and parts of a batch are averaged as equals. A mean over something that samples have unequally much
of (tokens that are not padding) would weigh a token by who shares the batch with it, silently; so it is looked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]
SAMPLES_TRIED = 8
# Of the first calls all are looked at, then one in so many.
CALLS_TRIED, EVERY = 16, 100
# f32 sums in another order differ by far less; shares that differ by less do no harm.
TOLERANCE = 1e-3


class EqualWeights:
    """A loss that checks itself now and then while it is `on`: against the mean of the losses of its single samples.

    Raises ValueError where they differ. Costs as many more calls of the loss, without gradients, as samples are tried.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._calls = 0
        self._one: tuple[Tensor, Tensor] | None = None
        self.on = False

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self.on:
            self._calls += 1
            if self._calls <= CALLS_TRIED or self._calls % EVERY == 0:
                self._look(output.detach(), target)
        return self._loss(output, target)

    def _look(self, output: Tensor, target: Tensor) -> None:
        if len(target) == 1:
            # Two calls with one sample each are as good as one with two.
            before, self._one = self._one, (output, target)
            if before is None or before[0].shape != output.shape:
                return
            output, target = torch.cat([before[0], output]), torch.cat([before[1], target])
            self._one = None
        check(self._loss, output[:SAMPLES_TRIED], target[:SAMPLES_TRIED])


@torch.no_grad()
def check(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Raise ValueError unless the loss of these samples, [n, ...] each, is the mean of the losses of each of them."""
    together = float(loss(output, target))
    single = [float(loss(output[i : i + 1], target[i : i + 1])) for i in range(len(target))]
    mean, size = sum(single) / len(single), sum(map(abs, single)) / len(single)
    # What is no number is not this check's.
    if together != together or abs(together - mean) <= TOLERANCE * size + 1e-6:
        return
    raise ValueError(
        f"the model's loss of {len(single)} samples is {together:.6g}, but the mean of their single losses is "
        f"{mean:.6g}: samples do not weigh alike, so what is learnt depends on how a batch is shared out; take the "
        "mean over each sample first (of its tokens that count), then over samples, or train on one rank with "
        "accumulate = 1"
    )
