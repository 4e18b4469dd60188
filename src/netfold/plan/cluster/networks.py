"""Another network between a cluster's nodes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from netfold.plan.cluster.aggregator import Aggregator
from netfold.plan.cluster.cluster import Cluster, Tier
from netfold.plan.cluster.load import aggregators_of
from netfold.plan.quantity import parse_quantity
from netfold.plan.words import suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NETWORKS = Path(__file__).parent / "networks.toml"


@dataclass(frozen=True)
class Network:
    """What changes between nodes; None stays. Rates are of a node. part: of the line's rate. most: a bound."""

    name: str
    source: str
    bytes_per_s: float | None = None
    part: float = 1.0
    most_bytes_per_s: float | None = None
    latency_s: float | None = None
    oversubscription: float | None = None
    in_network: bool | None = None
    aggregators: tuple[Aggregator, ...] = ()

    @property
    def aggregates(self) -> bool:
        return bool(self.in_network or self.aggregators)


@lru_cache(maxsize=1)
def networks() -> dict[str, Network]:
    """Those that ship with netfold, by name."""
    tree = tomllib.loads(_NETWORKS.read_text(encoding="utf-8"))
    return {name: _network(name, said) for name, said in tree.items()}


def with_network(cluster: Cluster, name: str) -> Cluster:
    """The cluster with that network in the tiers beyond its nodes; in its only tier, where there is one.

    Raises ValueError for a name that is none.
    """
    if name not in networks():
        raise ValueError(f"there is no network {name!r}; {suggest(name, networks())}")
    network = networks()[name]
    inside = cluster.tiers[:1] if len(cluster.tiers) > 1 else ()
    sharing = cluster.node if inside else 1
    tiers = (*inside, *(_with(tier, network, sharing) for tier in cluster.tiers[len(inside) :]))
    return replace(cluster, name=f"{cluster.name}, {name}", tiers=tiers)


def _with(tier: Tier, network: Network, sharing: int) -> Tier:
    line = tier.bytes_per_s * sharing if network.bytes_per_s is None else network.bytes_per_s
    line = min(network.part * line, network.most_bytes_per_s or float("inf"))
    return replace(
        tier,
        bytes_per_s=line / sharing,
        latency_s=tier.latency_s if network.latency_s is None else network.latency_s,
        oversubscription=tier.oversubscription if network.oversubscription is None else network.oversubscription,
        # Where hosts are to add, the tier's own switches do not: what is compared is these hosts.
        in_network=tier.in_network and not network.aggregators if network.in_network is None else network.in_network,
        aggregators=network.aggregators or (() if network.in_network else tier.aggregators),
        # What was measured is the old network's.
        under_load=tier.under_load if network.bytes_per_s is None else 1.0,
    )


def _network(name: str, said: dict[str, object]) -> Network:
    def quantity(key: str, kind: str) -> float | None:
        return parse_quantity(said[key], kind, f"network {name}, {key}") if key in said else None

    return Network(
        name,
        str(said["source"]),
        quantity("rate", "rate"),
        float(str(said.get("part", 1.0))),
        quantity("most", "rate"),
        quantity("latency", "time"),
        float(str(said["oversubscription"])) if "oversubscription" in said else None,
        bool(said["in_network"]) if "in_network" in said else None,
        aggregators_of(said.get("aggregator", []), f"network {name}"),
    )
