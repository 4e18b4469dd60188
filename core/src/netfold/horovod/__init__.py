"""Data-parallel training by Horovod's interface, for NumPy, JAX and any framework's arrays, without torch and MPI.

    import netfold.horovod as hvd

    hvd.init()                                         # torchrun, mpirun, srun; without a launcher: one rank
    parameters = hvd.broadcast_parameters(parameters)
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))

The functions here use the script's only `Session`, which `init` makes and `shutdown` ends. As everywhere in netfold,
every rank makes the same calls in the same order, so calls need no names. May import: communicator.

Always: only `broadcast_parameters` writes to arrays of the caller; a result is the same kind of array as the argument
(`tree.restore`); no operation is under way after `shutdown`.

Tests: `.venv/bin/pytest core/tests/horovod`
"""

from __future__ import annotations

from typing import Any

from netfold.horovod.job import init, is_initialized, session, shutdown
from netfold.horovod.optimizer import DistributedOptimizer
from netfold.horovod.session import Average, Compression, Handle, Max, Min, Product, Session, Sum

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Session",
    "Sum",
    "allgather",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "session",
    "shutdown",
    "size",
    "synchronize",
]


def rank() -> int:
    """This process's rank in the job, from 0."""
    return session().communicator.rank


def size() -> int:
    """The number of ranks in the job."""
    return session().communicator.size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return session().local[0]


def local_size() -> int:
    """The number of ranks on this host."""
    return session().local[1]


def allreduce(
    tensor: Any, *, op: str = Average, compression: str | None = Compression.none, name: str | None = None
) -> Any:
    """Return the reduction of all ranks' tensors, a new array of the same kind.

    name: has no effect, here and below, since ranks match calls by their order; Horovod's scripts pass it.
    """
    return session().allreduce(tensor, op=op, compression=compression)


def allreduce_async(
    tensor: Any, *, op: str = Average, compression: str | None = Compression.none, name: str | None = None
) -> Handle:
    """Begin an allreduce; `synchronize` returns its result."""
    return session().allreduce_async(tensor, op=op, compression=compression)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done


def grouped_allreduce(tensors: Any, *, op: str = Average, compression: str | None = Compression.none) -> Any:
    """Reduce all arrays of a list, a dict or a deeper tree, fused into few messages. Returns the same tree."""
    return session().grouped_allreduce(tensors, op=op, compression=compression)


def allgather(tensor: Any, *, name: str | None = None) -> Any:
    """Return every rank's rows, by rank: [sum of rows, ...]. Ranks may have different numbers of rows."""
    return session().allgather(tensor)


def broadcast(tensor: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the root's tensor, a new array. On other ranks, `tensor` gives the shape and dtype."""
    return session().broadcast(tensor, root_rank)


def alltoall(tensor: Any, splits: Any = None, *, name: str | None = None) -> Any:
    """Send splits[r] rows to rank r, by default the same number to each rank. Return the received rows, by rank.

    With `splits`, returns also how many rows came from each rank: [ranks] int64.
    """
    return session().alltoall(tensor, splits)


def barrier() -> None:
    """Return when every rank has called this."""
    session().communicator.barrier()


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> Any:
    """Copy the root's parameters, a list, a dict or a deeper tree of arrays, to every rank.

    Writable arrays (of NumPy, torch) are overwritten in place. Use the returned tree: it holds these arrays, and new
    arrays in place of immutable ones (of JAX).
    """
    return session().broadcast_parameters(parameters, root_rank)


def broadcast_object(value: Any, root_rank: int = 0) -> Any:
    """Return the root's value, by pickle. Only authenticated ranks of this job can send one."""
    return session().broadcast_object(value, root_rank)
