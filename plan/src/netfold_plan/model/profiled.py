"""A model as a profile shows it: how long a rank computes, and when its gradients are ready."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from netfold_plan.model.layer_cost import Bucket, Layer, Measured, Pass, ShardSpec

# A backward pass takes about twice as long as a forward pass. Its begin is assumed there where it does not show.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class Profiled(Measured):
    """One rank's step on the device of the measurement.

    samples: of a rank in a step.
    ready_s: seconds of computing from the begin of the step until each bucket is ready. bucket_bytes: on the wire.
    computed_s: until the last bucket is reduced. update_s: after that.
    ranks: of the measurement. step_s, exposed_s: its step, and the part that waited for communication; medians.
    notes: what was left out of the measurement.
    """

    name: str
    samples: int
    ready_s: tuple[float, ...]
    bucket_bytes: tuple[float, ...]
    computed_s: float
    update_s: float
    parameters: float
    ranks: int
    step_s: float
    exposed_s: float
    notes: tuple[str, ...] = ()

    @property
    def after_gradients_s(self) -> float:
        return self.update_s

    @property
    def backward_s(self) -> float:
        """From the first moment at which the forward pass can have ended."""
        return self.computed_s - min(_FORWARD * self.computed_s, self.ready_s[0])

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """One layer per bucket, the last bucket's first. Raises ValueError for any share but the measured one."""
        self.as_it_ran(share)
        first = self.computed_s - self.backward_s
        ends = (first, *self.ready_s, self.computed_s)
        # From one bucket to the next; last the computing while the last bucket is reduced.
        took = [max(0.0, there - before) for before, there in pairwise(ends)]
        an_element = self.parameters / sum(self.bucket_bytes)
        made = [
            _layer(f"bucket {number}", seconds, size * an_element)
            for number, (seconds, size) in enumerate(zip(took, self.bucket_bytes, strict=False))
        ]
        return (_layer("forward, and after the buckets", took[-1], 0.0, first), *reversed(made))

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """The measured buckets, whatever size is asked for."""
        count = len(self.bucket_bytes)
        return tuple(Bucket(size / gradient_bytes, count - number) for number, size in enumerate(self.bucket_bytes))


def _layer(name: str, backward_s: float, parameters: float, forward_s: float = 0.0) -> Layer:
    forward, backward = Pass(measured_s=forward_s), Pass(measured_s=backward_s)
    return Layer(name, forward, backward, Pass(), parameters, kept_bytes=0.0, input_bytes=0.0)
