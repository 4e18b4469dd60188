"""What the analytical model was fitted to, each number with what it means; docs/plan/model.md has their sources."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """All of them are ratios, or times that hardly depend on the device; rates come from its datasheet.

    matmul_part: of peak FLOP/s, what a large matmul reaches. matmul_depth: multiply-adds an element of the result that
    its start and end cost. unaligned_part: of peak, where a matmul's rows are not a multiple of 16 bytes long.
    memory_part: of the memory's rate, what kernels bound by it reach. kernel_s: of a kernel that does next to nothing.
    launch_s: of the host, a kernel, with all that the framework does before it. late_s: what a collective waits for the
    last of its ranks, for each of the others, while hosts are what limits them. blend: how far launching and computing
    hide each other; 1 not at all, infinite wholly. collective_s: of a collective, before its first byte.
    copy_part: of a device's memory's rate, at which a collective reads and writes its buffer. send_bytes_per_s: at most
    of one message between two pipeline stages. update_bytes: moved an element by Adam, casts and the norm among them.
    spread: half of the 80% band, of the step.
    """

    matmul_part: float = 0.85
    matmul_depth: float = 190.0
    unaligned_part: float = 0.27
    memory_part: float = 0.57
    kernel_s: float = 4e-6
    launch_s: float = 43e-6
    late_s: float = 43e-6
    blend: float = 2.0
    collective_s: float = 60e-6
    copy_part: float = 0.29
    send_bytes_per_s: float = 13.4e9
    update_bytes: float = 40.0
    spread: float = 0.15


FITTED = Constants()
