"""Constants of the analytical model; docs/explanation/plan-model.md has their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Ratios, and times that hardly depend on the device; rates come from a device's datasheet.

    matmul_part: part of peak FLOP/s that a large matmul reaches.
    matmul_depth: multiply-adds per element of the result that the start and the end of a matmul cost.
    unaligned_part: part of peak where the rows of a matmul are not a multiple of 16 bytes long.
    fused_part: part of peak of attention in one kernel.
    memory_part: part of the memory's rate that memory-bound kernels reach.
    kernel_s: a kernel that does next to nothing.
    launch_s: the host's time per kernel, with everything that the framework does before.
    blend: how far launching and computing hide each other; 1: not at all, infinite: wholly.
    blend_collective: the same where collectives make both wait.
    collective_s: a collective before its first byte.
    copy_bytes_per_s: at which a collective passes its buffer through a device, in addition to the time on links.
    network_part: part of the rate between nodes that collectives reach.
    send_bytes_per_s: the highest rate of one message between two pipeline stages.
    update_bytes: moved per element by Adam, with casts and the norm.
    layer_factor: a factor on layers for everything else; 1 until measured runs show another value.
    spread: half of the 80% band of a step.
    """

    matmul_part: float = 0.841
    matmul_depth: float = 222.0
    unaligned_part: float = 0.245
    fused_part: float = 0.32
    memory_part: float = 0.678
    kernel_s: float = 4e-6
    launch_s: float = 48.5e-6
    blend: float = 3.95
    blend_collective: float = 1.72
    collective_s: float = 50e-6
    copy_bytes_per_s: float = 590e9
    network_part: float = 1.0
    send_bytes_per_s: float = 13.4e9
    update_bytes: float = 27.7
    layer_factor: float = 1.0
    spread: float = 0.115


FITTED = Constants()
