"""Clusters: a device, tiers of links, TOML presets with the sources of their figures."""

from netfold.plan.cluster.cluster import Cluster, Device, Tier
from netfold.plan.cluster.load import cluster_of, devices, load_cluster, preset_names

__all__ = ["Cluster", "Device", "Tier", "cluster_of", "devices", "load_cluster", "preset_names"]
