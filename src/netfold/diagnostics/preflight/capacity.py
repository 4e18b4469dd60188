"""What each switch takes while all hosts send to it, measured by a group that ends at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from netfold.bootstrap.capacity import measure
from netfold.communicator import Communicator, Options
from netfold.diagnostics.preflight.facts import Facts
from netfold.errors import NetfoldError
from netfold.switch_protocol.control_messages import switches_of

# Ten times what a job takes for it: the figure is read by people, who wait.
BUDGET_S = 0.5


@dataclass(frozen=True)
class Capacity:
    """Of one switch, as all ranks measured it."""

    endpoint: str
    """As rank 0 names it; another rank may have another switch of the same tree."""
    bytes_per_s: float = 0.0
    """Of tensor, that it gives back while one rank of each host sends; 0 where `error` says why not."""
    error: str = ""


def measure_switches(communicator: Communicator, facts: Sequence[Facts]) -> list[Capacity]:
    """Each switch of NETFOLD_SWITCH by itself; empty where one of them cannot be joined, or all ranks share memory.

    Collective, and the same on all ranks. facts: of all ranks. Each switch is joined by a group that ends at once:
    nothing is held afterwards. Cost: a group's making and BUDGET_S for each switch.
    """
    rooms = [each.switches for each in facts]
    can_be_joined = not any(room.error or room.udp_error for each in rooms for room in each)
    if not can_be_joined or len({len(each) for each in rooms}) > 1 or len(set(communicator.group.nodes)) < 2:
        return []
    own = switches_of(Options().resolved().switch)
    endpoints = [room.endpoint for room in rooms[0]]
    # One that is named twice, for two of its threads, has one link all the same.
    return [
        _measure(communicator, [own[place] for place, each in enumerate(endpoints) if each == endpoint], endpoint)
        for endpoint in dict.fromkeys(endpoints)
    ]


def _measure(communicator: Communicator, own: Sequence[str], endpoint: str) -> Capacity:
    between = "hierarchical:in_network" if communicator.group.topology.has_levels else "in_network"
    options = replace(
        communicator.group.options, switch=",".join(own), algorithm=f"all_reduce={between}", wire_dtype="auto"
    )
    group: Communicator | None = None
    try:
        group = communicator.split(0, options=options)
        assert group is not None, "every rank gave a color"
        joined = group

        def run(kind: str, dtype: str, reduce: str, values: np.ndarray[Any, Any]) -> None:
            joined.all_reduce(values, op=reduce)

        measured = measure(run, len(own), budget_s=BUDGET_S, lost=group.group.lost_switches)
        found = Capacity(endpoint, sum(measured.rates), measured.why_not)
    except NetfoldError as error:
        found = Capacity(endpoint, error=str(error))
    # Also where this rank failed: another one may not have. Who has left cannot help another to its last result.
    communicator.barrier()
    if group is not None:
        group.close()
    return found


def agreed(said: Sequence[Sequence[Capacity]]) -> list[Capacity]:
    """Of all ranks, by rank, one for each switch: the first error, or what rank 0 has."""
    return [next((each for each in of_switch if each.error), of_switch[0]) for of_switch in zip(*said, strict=True)]
