"""Constants of the analytical model, each with its meaning; docs/explanation/plan-model.md has their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """All of them are ratios, or times that hardly depend on the device; rates come from its datasheet.

    matmul_part: of peak FLOP/s, what a large matmul reaches. matmul_depth: multiply-adds an element of the result that
    its start and end cost. unaligned_part: of peak, where a matmul's rows are not a multiple of 16 bytes long.
    fused_part: of peak, attention in one kernel.
    memory_part: of the memory's rate, what kernels bound by it reach. kernel_s: of a kernel that does next to nothing.
    launch_s: of the host, a kernel, with all that the framework does before it. blend: how far launching and computing
    hide each other; 1 not at all, infinite wholly. blend_talking: the same where collectives make both wait.
    collective_s: of a collective, before its first byte. copy_bytes_per_s: at which it passes its buffer through a
    device, beside what the links take. network_part: of the rate between nodes, what collectives reach.
    send_bytes_per_s: at most of one message between two pipeline stages. update_bytes: moved an element by Adam, casts
    and the norm among them. tempo: of what layers take, for all that is in none of these; 1 until measured runs say
    otherwise. spread: half of the 80% band, of the step.
    """

    matmul_part: float = 0.841
    matmul_depth: float = 222.0
    unaligned_part: float = 0.245
    fused_part: float = 0.32
    memory_part: float = 0.678
    kernel_s: float = 4e-6
    launch_s: float = 48.5e-6
    blend: float = 3.95
    blend_talking: float = 1.72
    collective_s: float = 50e-6
    copy_bytes_per_s: float = 590e9
    network_part: float = 1.0
    send_bytes_per_s: float = 13.4e9
    update_bytes: float = 27.7
    tempo: float = 1.0
    spread: float = 0.115


FITTED = Constants()
