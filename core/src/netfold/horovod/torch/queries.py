"""Horovod's questions about the build, and its timeline."""

from __future__ import annotations

import torch

from netfold.horovod.torch.world import world

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "start_timeline",
    "stop_timeline",
]


def _is_built() -> bool:
    """False: netfold's own transports carry the data, also that of ranks that mpirun started."""
    return False


mpi_enabled = mpi_built = gloo_enabled = gloo_built = ddl_built = ccl_built = _is_built


def mpi_threads_supported() -> bool:
    """ValueError, as in a Horovod without MPI."""
    raise ValueError("there is no MPI to ask: netfold has transports of its own")


def nccl_built() -> int:
    """0: this interface copies tensors of GPUs through the host."""
    return 0


def cuda_built() -> bool:
    """Whether torch can hold tensors in the memory of CUDA devices; they are copied through the host."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """NotImplementedError: a profile is recorded from the start of the process."""
    world()
    raise NotImplementedError(
        f"netfold writes no Horovod timeline to {file_path}: start the job with `netfold profile run -- torchrun ...`, "
        "which records every operation of every rank, with a page and a trace for Perfetto"
    )


def stop_timeline() -> None:
    """Does nothing: no timeline runs."""
    world()
