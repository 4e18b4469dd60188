"""Gather all ranks' facts and measurements on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from netfold.communicator import Communicator
from netfold.diagnostics.preflight.capacity import Capacity, agreed, measure_switches
from netfold.diagnostics.preflight.facts import Facts, facts_here
from netfold.diagnostics.preflight.links import PairLink, measure_links


@dataclass(frozen=True)
class PreflightFacts:
    """The input of the rules."""

    facts: Sequence[Facts]
    """By rank."""
    links: Sequence[PairLink]
    """One for each pair of hosts, sorted by ranks."""
    nodes: Sequence[int]
    """By rank; ranks with the same number share memory."""
    reached: Sequence[str]
    """By rank: the interfaces over which it reaches other ranks."""
    capacities: Sequence[Capacity] = ()
    """Of each switch, if measured."""
    link_bytes_per_s: float = 0.0
    """Of a host's link, by which a job chooses its algorithms; 0 if not measured."""


def check_alone(folder: Path | None = None) -> PreflightFacts:
    """Check this host, without a job. folder: where a job will write."""
    return PreflightFacts([facts_here(folder=folder)], [], [0], [""])


def check_ranks(communicator: Communicator, folder: Path | None = None, *, capacity: bool = False) -> PreflightFacts:
    """Check all ranks of a group. Collective; the result is the same on every rank.

    folder: where the job will write.
    capacity: also measure the switches' capacity, which joins each of them for about BUDGET_S.
    Cost: well below 1 s on one host, about 0.25 s for each host. The group's own errors name a missing rank.
    """
    own = facts_here(communicator.rank, folder=folder, interfaces=communicator.endpoint.interfaces)
    facts = [Facts.from_json(values) for values in _exchange(communicator, asdict(own))]
    nodes = list(communicator.group.nodes)
    leaders = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    links = measure_links(communicator, leaders) if len(leaders) > 1 else []
    capacities = measure_switches(communicator, facts) if capacity else []
    own_results = {
        "links": [asdict(link) for link in links],
        "reached": "; ".join(communicator.group.interfaces),
        "capacities": [asdict(each) for each in capacities],
    }
    results = _exchange(communicator, own_results)
    all_links = (PairLink(**link) for result in results for link in result["links"])
    by_ranks = sorted(all_links, key=lambda link: (link.one, link.other))
    measured = agreed([[Capacity(**each) for each in result["capacities"]] for result in results])
    group_links = communicator.group.links
    rate = group_links.network.bytes_per_s if group_links.measured else 0.0
    return PreflightFacts(facts, by_ranks, nodes, [result["reached"] for result in results], measured, rate)


def _exchange(communicator: Communicator, value: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather every rank's value as JSON, by rank."""
    text = json.dumps(value).encode()
    sizes = [int(row[0]) for row in communicator.all_gather(np.array([len(text)], np.int64))]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [json.loads(row.tobytes()[:size]) for row, size in zip(communicator.all_gather(padded), sizes, strict=True)]
