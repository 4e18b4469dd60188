"""What a backend must offer, and how backends are named."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import netfold
from netfold._native import engine
from netfold.bench.collectives import Collective
from netfold.bench.sizes import parse_dtype
from netfold.bench.test_data import Array
from netfold.tuning import SUPPORTS

MPIS = ("openmpi", "intel", "mpich")
NETFOLDS = ("netfold", "communicator")
# What a netfold backend may be told, in any order, one of each.
VARIANTS = ("shared",)
ALGORITHMS = tuple(name for name in SUPPORTS if name not in ("local", "point_to_point"))
WIRES = ("f32", "bf16", "f16", "i32", "i8")


class RefusedError(RuntimeError):
    """This backend does not do that; the message is what it said. The benchmark goes on with the others."""


@dataclass(frozen=True)
class Buffer:
    """values: the memory as NumPy sees it, flat; native: the same memory as the backend takes it."""

    values: Array
    native: Any


class Pending(Protocol):
    """What was started and is under way."""

    def wait(self) -> object: ...


class Backend(Protocol):
    """One rank's end of one way to call collectives. Every rank makes the same calls in the same order."""

    in_place: bool

    def empty(self, count: int, dtype: str) -> Buffer:
        """A buffer of the kind that users of this backend have. Raises RefusedError for a dtype it lacks."""
        ...

    def bind(self, collective: Collective, redop: str, send: Buffer, receive: Buffer) -> Callable[[], object]:
        """The blocking call on these buffers, ready to be timed; `send` is `receive` where it runs in place.

        redop: of collectives.REDOPS, for those that reduce. Raises RefusedError for one it lacks.
        """
        ...

    def start(self, collective: Collective, send: Buffer, receive: Buffer) -> Callable[[], Pending]:
        """The call that starts all_reduce or all_to_all on these buffers and returns at once. Raises RefusedError."""
        ...

    def records(self) -> Any | None:
        """netfold's own event records, oldest first; None for anyone else."""
        ...


class World(Protocol):
    """One rank of a set of processes in which some backends live."""

    rank: int
    size: int
    versions: dict[str, str]

    def backend(self, name: "BackendName") -> Backend: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class BackendName:
    """label: unique in a run; world: which processes; kind: a torch backend's name, or the world's; variant: ''...

    algorithm, wire: what netfold is told to take for every operation; '': its own choice.
    """

    label: str
    world: str
    kind: str
    variant: str
    algorithm: str = ""
    wire: str = ""

    @property
    def is_netfold(self) -> bool:
        return self.kind in NETFOLDS

    def options(self) -> netfold.Options | None:
        """None: as the environment says."""
        if not self.algorithm and not self.wire:
            return None
        return netfold.Options(algorithm=self.algorithm or None, wire_dtype=self.wire or None)


def parse_backend(text: str, label: str | None = None) -> BackendName:
    """From `gloo`, `netfold:shared`, `communicator`, `mpi:intel:out`; ValueError says what there is."""
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
            f"only "
            f"netfold and communicator take words behind a colon: {_words()}"
        )
    return BackendName(label or text, "communicator" if first == "communicator" else "torch", first, *_told(text, rest))


def _told(text: str, words: Sequence[str]) -> tuple[str, str, str]:
    """(variant, algorithm, wire) from a netfold backend's words."""
    kinds = (VARIANTS, ALGORITHMS, WIRES)
    told = ["", "", ""]
    for word in words:
        kind = next((index for index, known in enumerate(kinds) if word in known), None)
        if kind is None:
            raise ValueError(f"backend {text!r} is not understood: {word!r} is none of {_words()}")
        if told[kind]:
            raise ValueError(f"backend {text!r} is not understood: it says both {told[kind]} and {word}")
        told[kind] = word
    return told[0], told[1], told[2]


def _words() -> str:
    return f"{', '.join(VARIANTS)}; the algorithms {', '.join(ALGORITHMS)}; the wire formats {', '.join(WIRES)}"


@contextlib.contextmanager
def refusing(name: BackendName) -> Iterator[None]:
    """What netfold says to words that it cannot follow, as a refusal."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if name.options() is None:
            raise
        raise RefusedError(str(error)) from error


def how_it_ran(records: Any | None) -> tuple[str, str] | None:
    """(algorithm, wire format) of the newest of netfold's event records; None without one."""
    if records is None or len(records) == 0:
        return None
    newest = records[-1]
    algorithm = next(name for name, number in engine.ALGORITHMS.items() if number == newest["algorithm"])
    return algorithm, next(name for name, number in engine.DTYPES.items() if number == newest["wire"])


def shared_empty(count: int, dtype: str) -> Array:
    """An array from netfold.empty(); bf16, which NumPy lacks, as its bits. Raises RefusedError where there is none."""
    make = getattr(netfold, "empty", None)
    if make is None:
        raise RefusedError("this netfold has no netfold.empty(), so no buffers of shared memory")
    return np.asarray(make(count, np.dtype("uint16" if dtype == "bf16" else parse_dtype(dtype).torch_name)))


def unique_labels(backends: Sequence[str]) -> list[str]:
    """The backends' names, with a number where one stands more than once: gloo, gloo#2."""
    seen: dict[str, int] = {}
    result = []
    for backend in backends:
        seen[backend] = seen.get(backend, 0) + 1
        result.append(backend if seen[backend] == 1 else f"{backend}#{seen[backend]}")
    return result


def ping_pong(
    other: int | None, rank: int, send: Callable[[int], object], receive: Callable[[int], object]
) -> Callable[[], object]:
    """The call of one of two partners: the lower rank speaks first. Nothing for who has none."""
    if other is None:
        return lambda: None
    first, second = (send, receive) if rank < other else (receive, send)

    def play() -> None:
        first(other)
        second(other)

    return play
