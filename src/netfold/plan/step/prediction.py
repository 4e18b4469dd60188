"""What a step of training will take: of time, by what it is spent on, and of memory."""

from __future__ import annotations

from dataclasses import dataclass

from netfold.plan.step.stages import Stage

# What communication is for.
KINDS = ("tensor", "pipeline", "data", "tables")


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
    """One step. The parts add up to step_s: compute, bubble, optimizer and what communication is exposed, by kind.

    low_s, high_s: the band that about 80 of 100 measured steps lie in. memory: against memory_bytes that a device has.
    samples_per_s: of all ranks. mfu: arithmetic that the model needs, of the devices' peak. limit: what most of the
    time goes to, in a sentence. stages: what each pipeline stage does for one microbatch.
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
