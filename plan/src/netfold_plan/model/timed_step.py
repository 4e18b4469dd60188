"""A model as a profile of one host shows it: the time of each layer, the buckets of gradients, and when each is ready.

The host was measured without communication. A step of many hosts adds their communication and the resources that they
share. `lab/bench/one_host.py` writes such a profile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netfold_plan.model.layer_cost import Bucket, Layer, Measured, Pass, ShardSpec


@dataclass(frozen=True)
class TimedLayer:
    """forward_s, backward_s: on the device. forward_host_s, backward_host_s: on the processor, before that."""

    name: str
    parameters: int
    forward_s: float
    backward_s: float
    forward_host_s: float
    backward_host_s: float


@dataclass(frozen=True)
class ReadyBucket:
    """Gradients that are sent together after the backward passes of `layers` layers, counted from the last one.

    host_s: on the processor, from then until they are sent.
    """

    size_bytes: int
    layers: int
    host_s: float


@dataclass(frozen=True)
class TimedStep(Measured):
    """samples: of a rank in a step. timed: layers in order. ready: buckets in the order in which they are sent.

    closing_host_s: on the processor, from the end of the last bucket to the vote of all ranks.
    vote_bytes: of that vote, a small all_reduce.
    updating_host_s: on the processor, from the vote to the next step.
    beside_host_s: of the processor's other threads, during the whole step.
    crowded: how many times as long the processor takes while every core of its machine does the same work: the cores
    share the memory's rate.
    """

    name: str
    samples: int
    timed: tuple[TimedLayer, ...]
    ready: tuple[ReadyBucket, ...]
    closing_host_s: float
    vote_bytes: int
    updating_host_s: float
    beside_host_s: float
    crowded: float = 1.0

    @property
    def parameters(self) -> float:
        return float(sum(layer.parameters for layer in self.timed))

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        """Raises ValueError for any share but the measured one."""
        self.as_it_ran(share)
        return tuple(
            Layer(
                each.name,
                Pass(measured_s=each.forward_s + each.forward_host_s),
                Pass(measured_s=each.backward_s + each.backward_host_s),
                Pass(),
                parameters=float(each.parameters),
                kept_bytes=0.0,
                input_bytes=0.0,
            )
            for each in self.timed
        )

    @property
    def after_gradients_s(self) -> float:
        return self.closing_host_s + self.updating_host_s

    def buckets(self, bucket_bytes: float, gradient_bytes: int) -> tuple[Bucket, ...]:
        """The measured buckets, whatever size is asked for."""
        return tuple(Bucket(each.size_bytes / gradient_bytes, len(self.timed) - each.layers) for each in self.ready)


def timed_step_of(data: dict[str, Any]) -> TimedStep:
    """The inverse of `dataclasses.asdict`. Raises ValueError, in one sentence, for any other object."""
    try:
        timed = tuple(TimedLayer(**each) for each in data["timed"])
        ready = tuple(ReadyBucket(**each) for each in data["ready"])
        return TimedStep(**data | {"timed": timed, "ready": ready})
    except (KeyError, TypeError):
        raise ValueError("this is not a profile of one host's step; lab/bench/one_host.py writes one") from None


def read_timed_step(path: Path) -> TimedStep:
    """Read a file of `lab/bench/one_host.py`. Raises ValueError, in one sentence, for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return timed_step_of(found["profile"] if isinstance(found, dict) and "profile" in found else {})
    except OSError as error:
        raise ValueError(f"model {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"model {path}: {error}") from None
