"""How long one device computes: matmuls by their shape, memory-bound kernels by bytes, launches by their count."""

from __future__ import annotations

from netfold.plan.cluster import Device
from netfold.plan.model import Matmul, Pass
from netfold.plan.step.constants import Constants

# Elements of the result that one block of threads works on, by cuBLAS's usual choice for large matmuls.
_TILE = 128
# Of the inner dimension, what is split off for idle multiprocessors; the fitted runs, up to 50257, show no splitting.
_SPLIT = 65536
# Bytes that rows must be a multiple of for tensor cores at full rate (NVIDIA, matrix multiplication user's guide).
_ALIGNED_BYTES = 16


def matmul_s(matmul: Matmul, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    """Seconds: of arithmetic, where few tiles or a short inner dimension cost; or of memory, if that takes longer."""
    if matmul.fused:
        return matmul.flops / (constants.fused_part * device.kept_up(precision))
    m, n, k, count = matmul.m, matmul.n, matmul.k, matmul.count
    aligned = all(size * item_bytes % _ALIGNED_BYTES == 0 for size in (n, k))
    part = constants.matmul_part if aligned else constants.unaligned_part
    tiles = -(-m // _TILE) * -(-n // _TILE) * count
    # Where tiles are few, a long inner dimension is split among the multiprocessors that would be idle.
    flops = 2.0 * _TILE * _TILE * k * max(tiles, device.multiprocessors / max(1, k // _SPLIT))
    arithmetic = flops * (1 + constants.matmul_depth / k) / (part * device.kept_up(precision))
    moved = float(item_bytes * (m * k + k * n + m * n) * count)
    return max(arithmetic, moved_s(moved, device, constants))


def moved_s(size_bytes: float, device: Device, constants: Constants) -> float:
    """Seconds for kernels that read and write so much."""
    return size_bytes / (constants.memory_part * device.memory_bytes_per_s)


def device_s(work: Pass, device: Device, precision: str, item_bytes: int, constants: Constants) -> float:
    """Seconds that the device is busy."""
    if work.measured_s:
        return work.measured_s
    arithmetic = sum(matmul_s(each, device, precision, item_bytes, constants) for each in work.matmuls)
    return arithmetic + moved_s(work.moved_bytes, device, constants) + work.kernels * constants.kernel_s


def host_s(work: Pass, constants: Constants) -> float:
    """Seconds that launching takes."""
    return 0.0 if work.measured_s else work.kernels * constants.launch_s


def blended(device: float, host: float, blend: float) -> float:
    """Seconds of both together: launches run ahead of the device, but not past every wait."""
    if not device or not host:
        return device + host
    return float((device**blend + host**blend) ** (1 / blend))
