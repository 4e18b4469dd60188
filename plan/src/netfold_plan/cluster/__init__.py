"""Clusters: a device, tiers of links, aggregators, and TOML presets with the sources of their figures."""

from netfold_plan.cluster.aggregator import BOX, SPARE_HOST, Aggregator
from netfold_plan.cluster.cluster import Cluster, Device, Tier
from netfold_plan.cluster.load import cluster_of, devices, load_cluster, preset_names

__all__ = [
    "BOX",
    "SPARE_HOST",
    "Aggregator",
    "Cluster",
    "Device",
    "Tier",
    "cluster_of",
    "devices",
    "load_cluster",
    "preset_names",
]
