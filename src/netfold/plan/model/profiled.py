"""A model as a profile shows it: how long a rank computes, and when which gradients are there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from netfold.plan.model.layer_cost import Bucket, Layer, Measured, Pass, ShardSpec

# A backward pass takes about twice as long as a forward pass: where its begin does not show, it is put there.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class Profiled(Measured):
    """One rank's step, on the device that it was measured on.

    samples: of a rank in a step. ready_s: when each bucket's gradients were there, in computing since the step began;
    bucket_bytes: of each on the wire. computed_s: until the last had been reduced; update_s: after that. ranks: that
    were measured; step_s, exposed_s: a step there, and what of it waited for communication, medians. notes: what else
    there is to say.
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
        """From the first moment on at which the forward pass can have ended."""
        return self.computed_s - min(_FORWARD * self.computed_s, self.ready_s[0])

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """A layer a bucket, the last bucket's first. Raises ValueError for anything but the step that was measured."""
        self.as_it_ran(share)
        first = self.computed_s - self.backward_s
        ends = (first, *self.ready_s, self.computed_s)
        # Between one bucket and the next; then what is still computed when the last is on its way.
        took = [max(0.0, there - before) for before, there in pairwise(ends)]
        an_element = self.parameters / sum(self.bucket_bytes)
        made = [
            _layer(f"bucket {number}", seconds, size * an_element)
            for number, (seconds, size) in enumerate(zip(took, self.bucket_bytes, strict=False))
        ]
        return (_layer("forward, and after the buckets", took[-1], 0.0, first), *reversed(made))

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """Those that travelled, whatever else is asked for."""
        count = len(self.bucket_bytes)
        return tuple(Bucket(size / gradient_bytes, count - number) for number, size in enumerate(self.bucket_bytes))


def _layer(name: str, backward_s: float, parameters: float, forward_s: float = 0.0) -> Layer:
    forward, backward = Pass(measured_s=forward_s), Pass(measured_s=backward_s)
    return Layer(name, forward, backward, Pass(), parameters, kept_bytes=0.0, input_bytes=0.0)
