"""The computing time of a device: matmuls by their shape, memory-bound kernels by bytes, launches by their number."""

from __future__ import annotations

from netfold_plan.cluster import Device
from netfold_plan.model import Matmul, Pass
from netfold_plan.step.constants import Constants

# Rows and columns of the result that one block of threads works on: cuBLAS's usual choice for large matmuls.
_TILE = 128
# The inner dimension is split among idle multiprocessors in parts of this size. The fitted runs have inner dimensions
# up to 50257 and show no splitting.
_SPLIT = 65536
# For full rate on tensor cores rows must be a multiple of so many bytes (NVIDIA, matrix multiplication user's guide).
_ALIGNED_BYTES = 16


def matmul_s(matmul: Matmul, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    """Seconds of arithmetic, or of memory where that is more. Few tiles and a short inner dimension cost extra."""
    if matmul.fused:
        return matmul.flops / (constants.fused_part * device.kept_up(precision))
    m, n, k, count = matmul.m, matmul.n, matmul.k, matmul.count
    aligned = all(size * item_bytes % _ALIGNED_BYTES == 0 for size in (n, k))
    part = constants.matmul_part if aligned else constants.unaligned_part
    tiles = -(-m // _TILE) * -(-n // _TILE) * count
    # With few tiles a long inner dimension is split among multiprocessors that would be idle.
    flops = 2.0 * _TILE * _TILE * k * max(tiles, device.multiprocessors / max(1, k // _SPLIT))
    arithmetic = flops * (1 + constants.matmul_depth / k) / (part * device.kept_up(precision))
    moved = float(item_bytes * (m * k + k * n + m * n) * count)
    return max(arithmetic, moved_s(moved, device, constants))


def moved_s(size_bytes: float, device: Device, constants: Constants) -> float:
    """Seconds of kernels that read and write so many bytes."""
    return size_bytes / (constants.memory_part * device.memory_bytes_per_s)


def device_s(work: Pass, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    """Seconds that the device is busy."""
    if work.measured_s:
        return work.measured_s
    arithmetic = sum(matmul_s(each, device, precision, item_bytes, constants) for each in work.matmuls)
    return arithmetic + moved_s(work.moved_bytes, device, constants) + work.kernels * constants.kernel_s


def host_s(work: Pass, constants: Constants) -> float:
    """Seconds that launches take on the host."""
    return 0.0 if work.measured_s else work.kernels * constants.launch_s


def blended(busy_s: float, launching_s: float, blend: float) -> float:
    """Seconds of device and host together: launches run ahead of the device, but not past every wait."""
    if not busy_s or not launching_s:
        return busy_s + launching_s
    return float((busy_s**blend + launching_s**blend) ** (1 / blend))
