"""Data-parallel training in Horovod's words, for NumPy, JAX and any framework's arrays: no torch, no MPI.

    import netfold.horovod as hvd

    hvd.init()                                         # torchrun, mpirun, srun; without a launcher: one rank
    parameters = hvd.broadcast_parameters(parameters)
    optimizer = hvd.DistributedOptimizer(optax.adam(1e-3))

A script's one `Session` (made by `init`, ended by `shutdown`) is behind the functions here. As everywhere in netfold,
every rank makes the same calls in the same order, so names are not needed to match them. May import: communicator.

Always: what a caller passes in is not written to, but by `broadcast_parameters`; a result comes back as the kind of
array that went in (`tree.restore`); no array stays in flight after `shutdown`.

Tests: `.venv/bin/pytest tests/horovod`
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
    """This process's number, from 0."""
    return session().communicator.rank


def size() -> int:
    """Ranks in the job."""
    return session().communicator.size


def local_rank() -> int:
    """This process's number among those of its host."""
    return session().local[0]


def local_size() -> int:
    """Ranks on this host."""
    return session().local[1]


def allreduce(
    tensor: Any, *, op: str = Average, compression: str | None = Compression.none, name: str | None = None
) -> Any:
    """The reduction of every rank's tensor, a new array of the same kind. `name` is taken for Horovod's scripts' sake:
    calls are matched by their order."""
    return session().allreduce(tensor, op=op, compression=compression)


def allreduce_async(
    tensor: Any, *, op: str = Average, compression: str | None = Compression.none, name: str | None = None
) -> Handle:
    """Begin an allreduce: `synchronize` gives what `allreduce` would."""
    return session().allreduce_async(tensor, op=op, compression=compression)


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.done


def grouped_allreduce(tensors: Any, *, op: str = Average, compression: str | None = Compression.none) -> Any:
    """allreduce of all arrays of a list, a dict or a deeper tree at once, fused into few messages; the same tree."""
    return session().grouped_allreduce(tensors, op=op, compression=compression)


def allgather(tensor: Any, *, name: str | None = None) -> Any:
    """Every rank's rows, one after the other: [sum of rows, ...]. Ranks may have differently many rows."""
    return session().allgather(tensor)


def broadcast(tensor: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """The root's tensor on every rank, a new array; elsewhere `tensor` says shape and dtype."""
    return session().broadcast(tensor, root_rank)


def alltoall(tensor: Any, splits: Any = None, *, name: str | None = None) -> Any:
    """Rows to every rank and from every rank: equally many, or splits[r] to rank r.

    Returns the received rows in rank order; with `splits` also an int64 array, how many came from each rank.
    """
    return session().alltoall(tensor, splits)


def barrier() -> None:
    """Return when every rank has called."""
    session().communicator.barrier()


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> Any:
    """Give every rank the root's parameters: a list, a dict or a deeper tree of arrays.

    Arrays that can be written (NumPy's, torch's) are overwritten in place; the returned tree holds them, and new arrays
    in place of immutable ones (JAX's): use the returned tree.
    """
    return session().broadcast_parameters(parameters, root_rank)


def broadcast_object(value: Any, root_rank: int = 0) -> Any:
    """The root's value on every rank, by pickle: only from ranks of this job, which have proved that they are."""
    return session().broadcast_object(value, root_rank)
