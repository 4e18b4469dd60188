"""A job of training: batch, precision, and the split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

PRECISIONS = ("f32", "tf32", "f16", "bf16")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
WIRES = ("f32", "bf16", "f16")
RECOMPUTATIONS = ("none", "selective", "full")
# Bytes of state per element, beside weights and gradients; the state is f32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "adam": 8}


@dataclass(frozen=True)
class Split:
    """Ranks by kind of parallelism; tensor ranks are next to each other, then data, then pipeline (as in Megatron-LM).

    interleave: virtual stages of the model per pipeline rank.
    sequence: tensor ranks split norms and dropouts by tokens (Korthikanti et al. 2022).
    zero: what data ranks split: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too (Rajbhandari et al. 2020).
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    sequence: bool = False
    zero: int = 0

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def text(self) -> str:
        said = f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}"
        if self.interleave > 1:
            said += f", {self.interleave} virtual stages"
        if self.sequence:
            said += ", sequence"
        return said + (f", ZeRO-{self.zero}" if self.zero else "")


@dataclass(frozen=True)
class Job:
    """global_batch: samples of a step. micro_batch: samples that one rank computes at a time.

    precision: of matmuls and activations.
    in_network: the network reduces gradients, and activations among tensor ranks, where every tier that they cross can.
    overlap: gradients are reduced during the backward pass of the last microbatch; with ZeRO-2 and 3, of each one.
    bucket_bytes: the size of a bucket of gradients.
    gradient_bytes: of a gradient's element, in memory and on the wire.
    wire: the format in which all_reduce sends gradients of 4 bytes; bf16 and f16 halve the bytes.
    scattered: tensor ranks, which hold the same activations, each send a part to the next stage, which gathers them
    (Narayanan et al. 2021, section 4.1), as Megatron-LM and DeepSpeed do; else each sends all.
    prefetch: ZeRO-3 gathers a layer's weights while the layer before computes; else computing waits for every gather.
    Raises ValueError for an unknown word, and for a batch that cannot be divided evenly.
    """

    global_batch: int
    micro_batch: int = 1
    split: Split = field(default_factory=Split)
    precision: str = "bf16"
    schedule: str = "1f1b"
    recomputation: str = "none"
    optimizer: str = "adam"
    overlap: bool = False
    in_network: bool = False
    bucket_bytes: float = 25 * 2**20
    gradient_bytes: int = 4
    scattered: bool = True
    prefetch: bool = True
    wire: str = "f32"

    def __post_init__(self) -> None:
        for name, words in (
            ("precision", PRECISIONS),
            ("schedule", SCHEDULES),
            ("recomputation", RECOMPUTATIONS),
            ("optimizer", tuple(OPTIMIZERS)),
            ("wire", WIRES),
        ):
            if getattr(self, name) not in words:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(words)}")
        if self.wire != "f32" and self.gradient_bytes != 4:
            raise ValueError(
                f"wire={self.wire!r} is for gradients of 4 bytes, not of {self.gradient_bytes}; leave one of them out"
            )
        if self.global_batch % (self.micro_batch * self.split.data):
            raise ValueError(
                f"a global batch of {self.global_batch} cannot be divided evenly by {self.split.data} data-parallel "
                f"ranks with microbatches of {self.micro_batch}; "
                f"it must be a multiple of {self.micro_batch * self.split.data}"
            )

    @property
    def microbatches(self) -> int:
        """Of one rank in one step."""
        return self.global_batch // (self.micro_batch * self.split.data)

    @property
    def item_bytes(self) -> int:
        """Of an activation."""
        return 2 if self.precision in ("f16", "bf16") else 4
