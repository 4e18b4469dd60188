"""Measure each switch's capacity while all hosts send, in a group that is closed afterwards."""

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

# Ten times a job's own budget: here a user waits for an accurate figure.
BUDGET_S = 0.5


@dataclass(frozen=True)
class Capacity:
    """The capacity of one switch, measured by all ranks."""

    endpoint: str
    """As on rank 0; another rank may name another switch of the same tree."""
    bytes_per_s: float = 0.0
    """Bytes of tensor that the switch returns while one rank of each host sends; 0 if not measured."""
    error: str = ""
    """The reason why it was not measured."""


def measure_switches(communicator: Communicator, facts: Sequence[Facts]) -> list[Capacity]:
    """Measure each switch of NETFOLD_SWITCH alone. Collective; the result is the same on all ranks.

    facts: of all ranks, by rank.
    Empty if any rank cannot join a switch, or if all ranks share memory. Each measurement makes a group and closes it:
    nothing stays allocated. Cost: for each switch, making a group and BUDGET_S.
    """
    quotas = [each.switches for each in facts]
    can_join = not any(quota.error or quota.udp_error for each in quotas for quota in each)
    if not can_join or len({len(each) for each in quotas}) > 1 or len(set(communicator.group.nodes)) < 2:
        return []
    own = switches_of(Options().resolved().switch)
    endpoints = [quota.endpoint for quota in quotas[0]]
    # A switch may be named twice, for two of its threads, but has one link.
    return [
        _measure(communicator, [own[index] for index, each in enumerate(endpoints) if each == endpoint], endpoint)
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
        capacity = Capacity(endpoint, sum(measured.rates), measured.why_not)
    except NetfoldError as error:
        capacity = Capacity(endpoint, error=str(error))
    # Wait for all ranks, even after an error here: another rank may still need this rank's packets to finish.
    communicator.barrier()
    if group is not None:
        group.close()
    return capacity


def agreed(by_rank: Sequence[Sequence[Capacity]]) -> list[Capacity]:
    """Merge all ranks' results into one for each switch: the first error, else rank 0's result."""
    return [next((each for each in of_switch if each.error), of_switch[0]) for of_switch in zip(*by_rank, strict=True)]
