"""An MPI beside the others, where one is here: which, what its series is called, and what must be said of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from netfold.bench.figures.figure import Measurements
from netfold.bench.rack_runner import Configuration


def ways_among(counts: Sequence[int], options: Mapping[str, Any], mpi: str) -> list[tuple[str, Configuration]]:
    """Every series among so many hosts each, with its name: those of `options`, and this MPI's, if there is one."""
    told: list[tuple[str, dict[str, Any]]] = [(series, {"options": each}) for series, each in options.items()]
    if mpi:
        told.append((_series(mpi), {"mpi": mpi}))
    return [(series, Configuration(f"{series}, {count}", count, **each)) for count in counts for series, each in told]


def series_of(taken: Measurements) -> list[str]:
    """One, or none."""
    mpi = taken.settings.get("mpi", "")
    return [_series(mpi)] if mpi else []


def said_of(taken: Measurements, hosts: Sequence[int]) -> str:
    """A sentence on what the times of the figure's MPI measure, among so many hosts; or that it has none."""
    mpi = taken.settings.get("mpi", "")
    if not mpi:
        return "No MPI here (make bench-peers), so none stands beside these."
    crowded = [str(count) for count in hosts if count > taken.cores]
    if not crowded:
        return (
            f"MPI is {mpi}, one rank a host, by TCP alone; its ranks spin while they wait, each on a core of its own."
        )
    return (
        f"MPI is {mpi}, one rank a host, by TCP alone. Its ranks spin while they wait: among {', '.join(crowded)} "
        f"hosts, more than the {taken.cores} cores, its times measure how ranks that spin take these from each other "
        "and from the links, the more so the smaller the message."
    )


def _series(mpi: str) -> str:
    return f"MPI ({mpi})"
