"""f16's loss scaling: small gradients stay above what f16 rounds to zero (Micikevicius et al. 2018, section 3.2).

The numbers are those of torch.amp.GradScaler, which does not serve here: it refuses f16 gradients, because it would
divide them in f16, where they vanish again (here they are f32: `Precision.lend`); and each of its ranks
would decide for itself whether a step overflowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

INITIAL = 2.0**16
GROWS_AFTER_STEPS = 2000


class LossScale:
    """The factor that losses are multiplied by: doubled after 2000 good steps in a row, halved by an overflow."""

    def __init__(self) -> None:
        self.value = INITIAL
        """A power of two: dividing by it is exact."""
        self._good_steps = 0

    def overflowed(self, gradients: Iterable[Tensor]) -> bool:
        """Whether any rank's gradients hold a number that is not finite; the scale for the next step follows from it.

        Collective over the world: one all_reduce of a number, so all ranks leave the same steps out. Raises
        ArithmeticError on all of them where gradients overflow although losses are not made larger any more.
        """
        local = [part.to_local() if isinstance(part, DTensor) else part for part in gradients]
        # The largest magnitude is infinite or NaN exactly where one element is, and no sum overflows on the way to it.
        largest = torch.nn.utils.get_total_norm([part for part in local if part.numel()], float("inf"))
        found = torch.logical_not(torch.isfinite(largest)).to(torch.int32).reshape(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        overflowed = bool(found)
        if overflowed:
            self.value, self._good_steps = self.value / 2, 0
            if self.value < 1.0:
                raise ArithmeticError(
                    "gradients overflow f16 at a loss scale of 1: the loss diverges, or the model needs a larger "
                    'range; try training.precision = "bf16" or a smaller optimizer.lr'
                )
        else:
            self._good_steps += 1
            if self._good_steps == GROWS_AFTER_STEPS:
                self.value, self._good_steps = self.value * 2, 0
        return overflowed

    def state_dict(self) -> dict[str, Any]:
        return {"loss_scale": self.value, "loss_scale_good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["loss_scale"]), int(state["loss_scale_good_steps"])
