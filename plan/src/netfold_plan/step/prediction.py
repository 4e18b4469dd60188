"""The prediction for a step of training: time by its use, and memory."""

from __future__ import annotations

from dataclasses import dataclass

from netfold_plan.step.stages import Stage


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that needs most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Prediction:
    """One step: compute_s, bubble_s, optimizer_s and all of exposed_s add up to step_s.

    low_s, high_s: about 80 of 100 measured steps lie between these.
    exposed_s: communication that computing does not hide, by kind: tensor, pipeline, data, tables.
    memory_bytes: what a device has for tensors.
    samples_per_s: of all ranks.
    mfu: arithmetic that the model needs, over the devices' peak.
    limit: what most of the time is spent on, as text.
    stages: the work of each pipeline stage for one microbatch.
    """

    step_s: float
    low_s: float
    high_s: float
    compute_s: float
    bubble_s: float
    optimizer_s: float
    exposed_s: dict[str, float]
    memory: Memory
    memory_bytes: float
    samples_per_s: float
    mfu: float
    limit: str
    stages: tuple[Stage, ...] = ()

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.memory_bytes
