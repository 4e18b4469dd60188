"""Another network between a cluster's nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from netfold_plan.cluster.aggregator import Aggregator
from netfold_plan.cluster.cluster import Cluster, Tier
from netfold_plan.cluster.load import aggregators_of
from netfold_plan.toml_file import Table, read_toml
from netfold_plan.words import suggest

_NETWORKS = Path(__file__).parent / "networks.toml"
_KEYS = ("source", "rate", "part", "most", "latency", "oversubscription", "in_network", "aggregator")


@dataclass(frozen=True)
class Network:
    """The changes between nodes. None: the cluster's own value stays. Rates are per node.

    part: of the line's rate. most_bytes_per_s: an upper bound of the rate.
    """

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
    """The networks that ship with netfold, by name."""
    tree, _ = read_toml(_NETWORKS)
    return {name: _network(name, Table(keys, f"network {name}", _KEYS)) for name, keys in tree.items()}


def with_network(cluster: Cluster, name: str) -> Cluster:
    """The cluster with that network in the tiers outside its nodes, or in its only tier.

    Raises ValueError for an unknown name.
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
        # Hosts that aggregate are compared alone: the tier's own switches then do not aggregate.
        in_network=tier.in_network and not network.aggregators if network.in_network is None else network.in_network,
        aggregators=network.aggregators or (() if network.in_network else tier.aggregators),
        # The rate under load was measured on the old network.
        under_load=tier.under_load if network.bytes_per_s is None else 1.0,
    )


def _network(name: str, table: Table) -> Network:
    return Network(
        name,
        str(table.keys["source"]),
        table.quantity("rate", "rate") if "rate" in table else None,
        table.number("part", 1.0),
        table.quantity("most", "rate") if "most" in table else None,
        table.quantity("latency", "time") if "latency" in table else None,
        table.number("oversubscription", 1.0) if "oversubscription" in table else None,
        table.truth("in_network") if "in_network" in table else None,
        aggregators_of(table),
    )
