"""What the talks' switches would be worth behind a link: a host in their place, c = 1, 2, 4 and a port a worker.

A switch that adds has a port a worker (c = P). A host that adds (`netfold switch`) mostly has one link, c times a
worker's, and then a ring takes the rest. Cores are as many as that link needs: what is compared is the links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from netfold.plan.cluster import Aggregator, Cluster
from netfold.plan.validate.claims.claim import ClaimJob

# c; None is a port a worker.
LINKS: tuple[int | None, ...] = (1, 2, 4, None)


def name_of(c: int | None) -> str:
    return "c = P" if c is None else f"c = {c}"


def in_the_place_of_switches(cluster: Cluster, c: int | None) -> Cluster:
    """The cluster with such a host in each tier whose switches add, in their place."""
    host = Aggregator(c=float(c or 0), ports=c is None, core_bytes_per_s=math.inf)
    return replace(
        cluster,
        tiers=tuple(
            replace(tier, in_network=False, aggregators=(host,)) if tier.in_network else tier for tier in cluster.tiers
        ),
    )


def gains(asked: ClaimJob) -> Mapping[int | None, float]:
    """By c: how many times as many samples a second as by host algorithms alone."""
    cluster = asked.request().cluster
    ring = asked.best(in_network=False).prediction.samples_per_s
    return {
        c: asked.best(in_the_place_of_switches(cluster, c), in_network=True).prediction.samples_per_s / ring
        for c in LINKS
    }


def said_of(asked: ClaimJob) -> str:
    """A clause: `a host in the switch's place gains 6.0%, 12.1%, 23.4% and 64.0% with c = 1, ...`."""
    found = gains(asked)
    percents = _listed([f"{100 * (of - 1):.1f}%" for of in found.values()])
    return f"a host in the switch's place gains {percents} with {_listed([name_of(c) for c in found])}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
