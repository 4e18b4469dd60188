"""The backends that a benchmark compares. A backend is one way to call a collective: one file here calls it.

    gloo, netfold, ...          a torch.distributed backend, on plain torch tensors
    netfold:shared              the same, on tensors from netfold.empty()
    netfold:ring:bf16           the same with this algorithm and wire format; the parts may stand in any order
    communicator[:...]          netfold.Communicator on NumPy arrays, without torch; takes the same parts
    mpi:openmpi|intel|mpich     mpi4py on NumPy arrays, in place where MPI can (MPI.IN_PLACE)
    mpi:...:out                 the same out of place, which is faster with some MPIs

Backends of one *world* live in the same processes. Two MPIs cannot share processes, so each has a world of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import netfold
from netfold._native import engine
from netfold.tuning import SUPPORTS
from netfold_lab.bench.collectives import Collective
from netfold_lab.bench.sizes import parse_dtype
from netfold_lab.bench.test_data import Array

MPIS = ("openmpi", "intel", "mpich")
NETFOLDS = ("netfold", "communicator")
TORCHS = ("gloo", "nccl", "ucc", "xccl")
# A netfold backend's name takes one part of each kind, in any order.
VARIANTS = ("shared",)
ALGORITHMS = tuple(name for name in SUPPORTS if name not in ("local", "point_to_point"))
WIRES = ("f32", "bf16", "f16", "i32", "i8")


class RefusedError(RuntimeError):
    """The backend cannot do this; the message is the backend's own. The benchmark goes on without this backend."""


@dataclass(frozen=True)
class Buffer:
    """The memory of one call's input or output."""

    values: Array  # flat NumPy view
    native: Any  # the same memory in the type that the backend takes


class Pending(Protocol):
    """A collective that was started."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """One rank's end of a backend. Every rank makes the same calls in the same order."""

    in_place: bool

    def empty(self, count: int, dtype: str) -> Buffer:
        """Allocate a buffer of the kind that users of this backend have. Raises RefusedError for a dtype it lacks."""
        ...

    def bind(
        self, collective: Collective, redop: str, send: Buffer, receive: Buffer, *, asynchronous: bool = False
    ) -> Callable[[], Any]:
        """Return the call on these buffers, ready to be timed; `send` is `receive` where it runs in place.

        redop: one of collectives.REDOPS, for collectives that reduce. Raises RefusedError for one it lacks.
        asynchronous: of all_reduce and all_to_all, the call that only starts it and returns a Pending.
        """
        ...

    def records(self) -> Any | None:
        """Return netfold's event records, oldest first; None for a backend that is not netfold."""
        ...


class World(Protocol):
    """One rank of the processes that some backends share."""

    rank: int
    size: int
    versions: dict[str, str]

    def backend(self, name: "BackendName") -> Backend:
        """Make the backend; all ranks of the world call this. Raises RefusedError."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BackendName:
    """A backend of one run, as its ranks need it."""

    label: str  # unique in a run
    world: str  # the processes in which the backend lives
    kind: str  # the torch backend's name, or the world's
    variant: str = ""  # shared, out; "": neither
    algorithm: str = ""  # netfold takes it for every operation; "": netfold's own choice
    wire: str = ""  # the wire format, likewise
    settings: Mapping[str, str] | None = None  # further fields of netfold.Options
    ranks: int = 0  # the first so many ranks of the world; 0: all
    payload_bytes: int | None = None  # of values in a packet to the switch; None: found by trying

    @property
    def is_netfold(self) -> bool:
        return self.kind in NETFOLDS

    def options(self) -> netfold.Options | None:
        """Return the group's options; None: as the environment says."""
        named = {"algorithm": self.algorithm, "wire_dtype": self.wire}
        fields: dict[str, Any] = {name: value for name, value in named.items() if value} | dict(self.settings or {})
        return netfold.Options(**fields) if fields else None


def parse_backend(text: str, label: str | None = None) -> BackendName:
    """Read `gloo`, `netfold:shared`, `communicator`, `mpi:intel:out`. Raises ValueError, which lists what there is."""
    first, *rest = text.split(":")
    if first == "mpi":
        if not rest or rest[0] not in MPIS or rest[1:] not in ([], ["out"]):
            raise ValueError(
                f"backend {text!r} is not understood; there are {', '.join(f'mpi:{m}[:out]' for m in MPIS)}"
            )
        return BackendName(label or text, rest[0], rest[0], "".join(rest[1:]))
    if not first or (rest and first not in NETFOLDS):
        raise ValueError(
            f"backend {text!r} is not understood; a torch backend, netfold, communicator or mpi:NAME is wanted, and "
            f"only netfold and communicator take words behind a colon: {_words()}"
        )
    if first not in NETFOLDS and first not in TORCHS and first not in (there := _of_torch()):
        raise ValueError(f"torch has no backend {first!r}; there are {', '.join((*NETFOLDS, *there))} and mpi:NAME")
    world = "communicator" if first == "communicator" else "torch"
    variant, algorithm, wire = _parts(text, rest)
    return BackendName(label or text, world, first, variant, algorithm, wire)


def _of_torch() -> list[str]:
    """Return the names of torch's backends, those that other packages registered among them. Imports torch."""
    import torch.distributed as dist

    return [name for name in dist.Backend.backend_list if name not in ("undefined", *NETFOLDS)]


def _parts(text: str, words: Sequence[str]) -> list[str]:
    """Return [variant, algorithm, wire format] from a netfold backend's name."""
    parts = ["", "", ""]
    for word in words:
        kind = next((kind for kind, known in enumerate((VARIANTS, ALGORITHMS, WIRES)) if word in known), None)
        if kind is None:
            raise ValueError(f"backend {text!r} is not understood: {word!r} is none of {_words()}")
        if parts[kind]:
            raise ValueError(f"backend {text!r} is not understood: it says both {parts[kind]} and {word}")
        parts[kind] = word
    return parts


def _words() -> str:
    return f"{', '.join(VARIANTS)}; the algorithms {', '.join(ALGORITHMS)}; the wire formats {', '.join(WIRES)}"


@contextlib.contextmanager
def refusing(name: BackendName) -> Iterator[None]:
    """Turn netfold's error about the options in a backend's name into RefusedError."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if name.options() is None:
            raise
        raise RefusedError(str(error)) from error


def algorithm_of(records: Any | None) -> tuple[str, str] | None:
    """Return (algorithm, wire format) of the newest event record; None without one."""
    if records is None or len(records) == 0:
        return None
    newest = records[-1]
    algorithm = next(name for name, number in engine.ALGORITHMS.items() if number == newest["algorithm"])
    return algorithm, next(name for name, number in engine.DTYPES.items() if number == newest["wire"])


def shared_empty(count: int, dtype: str) -> Array:
    """Allocate an array by netfold.empty(). NumPy has no bf16: such an array holds its bits."""
    kind = np.dtype("uint16" if dtype == "bf16" else parse_dtype(dtype).torch_name)
    return np.asarray(netfold.empty(count, kind))


def parse_backends(backends: Sequence[str]) -> list[BackendName]:
    """Read the names of a run's backends, each with a label of its own."""
    return [parse_backend(backend, label) for backend, label in zip(backends, unique_labels(backends), strict=True)]


def unique_labels(backends: Sequence[str]) -> list[str]:
    """Return the backends' names, with a number where one occurs more than once: gloo, gloo#2."""
    seen: dict[str, int] = {}
    result = []
    for backend in backends:
        seen[backend] = seen.get(backend, 0) + 1
        result.append(backend if seen[backend] == 1 else f"{backend}#{seen[backend]}")
    return result


def ping_pong(
    other: int | None, rank: int, send: Callable[[int], object], receive: Callable[[int], object]
) -> Callable[[], object]:
    """Return the call of one of two partners: the lower rank sends first. A rank without a partner does nothing."""
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def exchange() -> None:
        first(other)
        second(other)

    return exchange
