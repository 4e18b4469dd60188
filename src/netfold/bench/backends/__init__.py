"""Who is measured. A backend is one way to call a collective; a new one is a file here and a line in `_WORLDS`.

    gloo, netfold, ...          a torch.distributed backend, on plain torch tensors
    netfold:shared              the same, on tensors that netfold.empty() made
    netfold:ring:bf16           the same by that algorithm, in that wire format; either, and `shared`, in any order
    communicator[:...]          netfold.Communicator on NumPy arrays, no torch; the same words
    mpi:openmpi|intel|mpich     mpi4py on NumPy arrays, in place where MPI can (MPI.IN_PLACE)
    mpi:...:out                 the same out of place: some MPIs are the faster so

Sides of one *world* live in the same processes: two MPIs cannot, so each has a world of its own.
"""

from netfold.bench.backends.backend import (
    Backend,
    BackendName,
    Buffer,
    Pending,
    RefusedError,
    World,
    how_it_ran,
    parse_backend,
    shared_empty,
    unique_labels,
)

__all__ = [
    "Backend",
    "BackendName",
    "Buffer",
    "Pending",
    "RefusedError",
    "World",
    "how_it_ran",
    "parse_backend",
    "shared_empty",
    "unique_labels",
]
