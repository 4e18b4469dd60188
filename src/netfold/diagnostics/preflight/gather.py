"""Every rank's facts and links, on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from netfold.communicator import Communicator
from netfold.diagnostics.preflight.capacity import Capacity, agreed, measure_switches
from netfold.diagnostics.preflight.facts import Facts, facts_here
from netfold.diagnostics.preflight.links import PairLink, measure_links


@dataclass(frozen=True)
class PreflightFacts:
    """What is judged."""

    facts: Sequence[Facts]
    """By rank."""
    links: Sequence[PairLink]
    """One a pair of hosts, by its ranks."""
    nodes: Sequence[int]
    """By rank, which ranks share memory: the same number."""
    reached: Sequence[str]
    """By rank, over which interface it reaches which others."""
    capacities: Sequence[Capacity] = ()
    """Of each switch, where that was measured."""
    link_bytes_per_s: float = 0.0
    """Of a host's link, by which a job chooses its algorithms; 0 where it was not measured."""


def check_alone(folder: Path | None = None) -> PreflightFacts:
    """This host, without a job. folder: where one will write."""
    return PreflightFacts([facts_here(folder=folder)], [], [0], [""])


def check_ranks(communicator: Communicator, folder: Path | None = None, *, capacity: bool = False) -> PreflightFacts:
    """All ranks of a group, the same on every one. Collective; well below a second on one host, and about as many
    quarters of a second as there are hosts. A rank that does not come is named by the group's own errors. capacity:
    measure, too, what the switches take, which joins each of them for a moment."""
    own = facts_here(communicator.rank, folder=folder)
    facts = [Facts.from_json(text) for text in _exchange(communicator, own.to_json())]
    nodes = list(communicator.group.nodes)
    players = [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    links = measure_links(communicator, players) if len(players) > 1 else []
    capacities = measure_switches(communicator, facts) if capacity else []
    said = {
        "links": [asdict(link) for link in links],
        "reached": "; ".join(communicator.group.interfaces),
        "capacities": [asdict(each) for each in capacities],
    }
    answers = [json.loads(text) for text in _exchange(communicator, json.dumps(said).encode())]
    found = sorted((PairLink(**link) for answer in answers for link in answer["links"]), key=lambda x: (x.one, x.other))
    measured = agreed([[Capacity(**each) for each in answer["capacities"]] for answer in answers])
    link = communicator.group.links
    rate = link.network.bytes_per_s if link.measured else 0.0
    return PreflightFacts(facts, found, nodes, [answer["reached"] for answer in answers], measured, rate)


def _exchange(communicator: Communicator, text: bytes) -> list[bytes]:
    """Every rank's, by rank."""
    sizes = [int(row[0]) for row in communicator.all_gather(np.array([len(text)], np.int64))]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [row.tobytes()[:size] for row, size in zip(communicator.all_gather(padded), sizes, strict=True)]
