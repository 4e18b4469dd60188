"""The clusters, models and networks that ship with netfold, as text and as objects for JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from netfold import units
from netfold_plan.cluster import Cluster, Tier, load_cluster, preset_names
from netfold_plan.cluster.networks import Network, networks
from netfold_plan.model import catalogue
from netfold_plan.model.registry import KINDS, find_model, model_presets, names


def render_clusters() -> str:
    return "\n\n".join(_cluster(load_cluster(name)) for name in preset_names())


def list_clusters() -> list[dict[str, Any]]:
    return [asdict(load_cluster(name)) for name in preset_names()]


def list_models() -> list[dict[str, Any]]:
    """Name and parameters; a preset's kind, dimensions and source, a layered model's measured speed and its source."""
    found: list[dict[str, Any]] = []
    for name in names():
        more = model_presets().get(name) or {"kind": "layers", **asdict(catalogue.find_model(name).speed)}
        found.append({"name": name, "parameters": find_model(name).parameters, **more})
    return found


def list_networks() -> list[dict[str, Any]]:
    return [asdict(network) for network in networks().values()]


def render_models() -> str:
    lines = []
    for name, said in model_presets().items():
        sizes = ", ".join(f"{key} {value}" for key, value in said.items() if key not in ("kind", "source"))
        lines += [f"{name}: {said['kind']}, {units.big(find_model(name).parameters)} parameters ({sizes})"]
        lines += [f"  from: {said['source']}"]
    for name in names():
        if name not in model_presets():
            speed = catalogue.find_model(name).speed
            lines += [f"{name}: {units.big(find_model(name).parameters)} parameters, layer by layer"]
            lines += [
                f"  with :measured=true, {speed.samples_per_s:,.4g} samples per second of a device: {speed.source}"
            ]
    for kind, keys in KINDS.items():
        example = ",".join(f"{key}={'..' if default is None else default}" for key, default in keys.items())
        lines.append(f"any other: {kind}:{example}")
    return "\n".join(lines)


def render_networks() -> str:
    return "\n".join(line for network in networks().values() for line in _network(network))


def _cluster(cluster: Cluster) -> str:
    device = cluster.device
    peaks = ", ".join(f"{value / 1e12:g} {precision}" for precision, value in device.flops.items())
    lines = [
        f"{cluster.name}: {cluster.devices:,} x {device.name}, {units.size(device.memory_bytes)} at "
        f"{units.rate(device.memory_bytes_per_s)}; TFLOP/s: {peaks}"
    ]
    lines += [f"  {_tier(tier)}" for tier in cluster.tiers]
    return "\n".join([*lines, *_sources(cluster.sources)])


def _tier(tier: Tier) -> str:
    said = (
        f"{tier.name} joins {tier.devices:,}: {units.rate(tier.bytes_per_s)} per device each way, "
        f"{units.seconds(tier.latency_s)}"
    )
    said += f", {tier.oversubscription:g} times oversubscribed" if tier.oversubscription > 1 else ""
    said += f", {100 * tier.under_load:g}% of it under load" if tier.under_load < 1 else ""
    said += f", switches of {tier.switch_ports} ports" if tier.switch_ports else ""
    if tier.nvls:
        return said + ", NVLink's switches add"
    if tier.in_network:
        return said + ", its switches add"
    return said + "".join(f", {each.text()}" for each in tier.aggregators)


def _network(network: Network) -> list[str]:
    changes = []
    if network.bytes_per_s is not None:
        changes.append(f"{units.rate(network.bytes_per_s)} per node each way")
    if network.part != 1:
        changes.append(f"{units.ratio(network.part)} of the line")
    if network.most_bytes_per_s is not None:
        changes.append(f"{units.rate(network.most_bytes_per_s)} per node at most")
    if network.latency_s is not None:
        changes.append(units.seconds(network.latency_s))
    if network.oversubscription is not None:
        changes.append(f"{network.oversubscription:g} times oversubscribed")
    if network.in_network:
        changes.append("switches that add")
    changes += [each.text() for each in network.aggregators]
    return [f"{network.name}: {', '.join(changes)}", *_sources([network.source])]


def _sources(sources: Sequence[str]) -> list[str]:
    return [f"  from: {source}" for source in sources]
