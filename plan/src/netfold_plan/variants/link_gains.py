"""Step-time gains by a host that aggregates in place of a cluster's switches, by the rate of the host's link.

A switch that aggregates has one port per worker (c = P). A host that runs `netfold switch` mostly has one link, whose
rate is c times a worker's; a ring then takes the rest. The host has as many cores as its link needs, so the comparison
is of links alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from netfold_plan.cluster import Aggregator, Cluster
from netfold_plan.model.catalogue import find_model
from netfold_plan.request import Request, parse_request
from netfold_plan.search import PredictedJob, search

# c; None is one port per worker.
LINKS: tuple[int | None, ...] = (1, 2, 4, None)


def name_of(c: int | None) -> str:
    return "c = P" if c is None else f"c = {c}"


def measured_request(name: str, cluster: str, workers: int) -> Request:
    """Data-parallel training in f32 of a model of the catalogue, at its published speed and batch per worker."""
    batch = find_model(name).speed.batch
    job = {"gpus": workers, "batch": workers * batch, "precision": "f32", "optimizer": "momentum", "overlap": True}
    split = {"tensor": 1, "pipeline": 1, "zero": 0, "recompute": "none", "micro_batch": batch}
    return parse_request({"model": f"{name}:measured=true", "cluster": cluster, "job": job, "split": split}, {})


def with_host_aggregators(cluster: Cluster, c: int | None) -> Cluster:
    """The cluster with one such host in place of the aggregating switches of each tier."""
    host = Aggregator(c=float(c or 0), ports=c is None, core_bytes_per_s=math.inf)
    tiers = (
        replace(tier, in_network=False, aggregators=(host,)) if tier.in_network else tier for tier in cluster.tiers
    )
    return replace(cluster, tiers=tuple(tiers))


def best_choice(request: Request, cluster: Cluster | None = None, *, in_network: bool | None = None) -> PredictedJob:
    """The fastest split of a request. cluster, in_network: in place of the request's own. Raises ValueError."""
    job = request.job if in_network is None else replace(request.job, in_network=in_network)
    return search(request.model, cluster or request.cluster, request.devices, job, request.space).best


def gains(request: Request) -> Mapping[int | None, float]:
    """By c: the throughput with such a host over the throughput by host algorithms alone."""
    ring = best_choice(request, in_network=False).prediction.samples_per_s
    return {
        c: best_choice(request, with_host_aggregators(request.cluster, c), in_network=True).prediction.samples_per_s
        / ring
        for c in LINKS
    }
