"""Clusters from TOML: presets by name, other files by path, and measured links."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from netfold.tuning.measured_link import measured_link
from netfold_plan.cluster.aggregator import CORE_BYTES_PER_S, Aggregator
from netfold_plan.cluster.cluster import Cluster, Device, Processors, Tier
from netfold_plan.job import PRECISIONS
from netfold_plan.toml_file import Table, read_toml
from netfold_plan.words import suggest

_HERE = Path(__file__).parent
_PRESETS = _HERE / "presets"
_DEVICE = (
    *("name", "flops", "memory", "memory_rate", "reserved", "multiprocessors", "sustained", "copy_rate"),
    *("power", "source"),
)
_TIER = (
    *("name", "devices", "latency", "rate", "measured", "oversubscription"),
    *("in_network", "nvls", "switch_ports", "switch_latency", "burst", "under_load", "aggregator"),
)
_AGGREGATOR = ("link", "hosts", "cores", "core_rate", "worker")
# The value of `link` for a link of as many ports as there are workers.
_PORTS = "a port per worker"
_AS_NEEDED = "as the link needs"
# The prefix of a measured cluster's name. It has this many hosts, as the Ethernet presets have, unless it says hosts=.
_MEASURED, _MEASURED_HOSTS = "measured=", 1024


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


@lru_cache(maxsize=64)
def load_cluster(name: str, device: Device | None = None) -> Cluster:
    """Load a cluster by a preset's name, by the path of a TOML file, or by `measured=FILE,device=NAME,hosts=64`.

    device: of a measured cluster that names no device. Raises ValueError, in one sentence, for any other name.
    """
    if name.startswith(_MEASURED):
        return _measured(name, device)
    if name.endswith(".toml") or "/" in name:
        return _read(Path(name))
    if name not in preset_names():
        raise ValueError(f"there is no cluster {name!r}; {suggest(name, preset_names())} (or give a .toml file's path)")
    return _read(_PRESETS / f"{name}.toml")


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """The devices that ship with netfold, by name."""
    path = _HERE / "devices.toml"
    tree, _ = read_toml(path, "cluster")
    return {name: _device(name, table, f"{path.name}: {name}") for name, table in tree.items()}


def _measured(name: str, device: Device | None) -> Cluster:
    """Hosts of one device each, on a measured link."""
    where = "a measured cluster"
    file, *rest = (each.strip() for each in name.removeprefix(_MEASURED).split(","))
    keys: dict[str, str] = {}
    for each in rest:
        key, equals, value = (part.strip() for part in each.partition("="))
        if not equals or key in keys:
            raise ValueError(f"{where}: {each!r} must be one key with a value; write device=a100-80, or hosts=64")
        keys[key] = value
    table = Table(keys, where, ("device", "hosts"))
    if not file:
        raise table.error("names no file; write measured=links.json")
    if "device" not in keys and device is None:
        raise table.error(f"names no device; write {name},device=a100-80 ({', '.join(devices())})")
    hosts = keys.get("hosts", str(_MEASURED_HOSTS))
    if not hosts.isdecimal() or int(hosts) < 1:
        raise table.error(f"hosts = {hosts!r}; it must be a whole number from 1 on")
    tier = {"name": "the measured link", "devices": int(hosts), "measured": file}
    named = keys.get("device") or next(iter(devices()))
    found = cluster_of({"device": named, "tier": [tier], "sources": [f"measured: {file}"]}, file)
    return found if device is None or "device" in keys else replace(found, device=device)


def _read(path: Path) -> Cluster:
    tree, _ = read_toml(path, "cluster")
    return cluster_of(tree, path.stem)


def cluster_of(tree: dict[str, Any], name: str) -> Cluster:
    """The cluster of a file's keys. Raises ValueError, in one sentence, for an unknown, missing or impossible key."""
    where = f"cluster {name}"
    known = ("device", "tier", "sources", "price_an_hour", "shared")
    table = Table(tree, where, known, required=("device", "tier"))
    device = _named_device(table, name)
    if not table.tables("tier"):
        raise table.error("has no tier; it needs at least one tier with all its devices")
    tiers: tuple[Tier, ...] = ()
    inside = 1
    for each in table.tables("tier"):
        tier = _tier(each, where, inside)
        tiers += (tier,)
        if tier.devices < inside or tier.devices % inside:
            raise table.error(
                f"tier {tier.name} joins {tier.devices} devices, and the tier inside it {inside}; tiers are listed "
                "from the inside out, and each joins a multiple of the devices of the tier inside"
            )
        inside = tier.devices
    if len(tiers) > 1 and tiers[0].aggregators:
        raise table.error(
            f"tier {tiers[0].name} is inside a host, and an aggregator is a host; give it to a tier further out"
        )
    sources = tree.get("sources", [])
    if not isinstance(sources, list):
        raise table.error("sources must be a list of texts")
    shared = _shared(tree["shared"], f"{where}, shared") if "shared" in tree else None
    if shared is not None and any(tier.aggregators for tier in tiers):
        raise table.error(
            "has [shared] cores, whose switch replaces the hosts' switch, and an aggregator; leave one of them out"
        )
    return Cluster(name, device, tiers, tuple(map(str, sources)), table.number("price_an_hour", 0.0), shared)


def _named_device(table: Table, name: str) -> Device:
    given = table.keys["device"]
    if isinstance(given, dict):
        return _device(str(given.get("name", name)), given, f"{table.where}, device")
    if not isinstance(given, str):
        raise table.error("device must be a name, or a table [device] with flops and memory")
    if given not in devices():
        raise table.error(f"there is no device {given!r}; {suggest(given, devices())}")
    return devices()[given]


def _shared(keys: Any, where: str) -> Processors:
    if not isinstance(keys, dict):
        raise ValueError(f"{where}: must be a table, [shared], with cores")
    table = Table(keys, where, ("cores", "operation", "message", "rate", "switch_rate"), required=("cores",))
    byte_s = (1 / table.positive(key, "rate") if key in table else 0.0 for key in ("rate", "switch_rate"))
    seconds = (table.quantity(key, "time") for key in ("operation", "message"))
    return Processors(table.whole("cores"), *seconds, *byte_s)


def _device(name: str, keys: dict[str, Any], where: str) -> Device:
    table = Table(keys, where, _DEVICE, required=("flops", "memory", "memory_rate"))
    flops = keys["flops"]
    if not isinstance(flops, dict) or not flops:
        raise table.error('flops must be a table by precision, such as { f16 = "125 TFLOP/s" }')
    peaks = Table(flops, f"{where}, flops", PRECISIONS)
    memory_bytes, reserved_bytes = table.positive("memory", "bytes"), table.quantity("reserved", "bytes")
    if reserved_bytes >= memory_bytes:
        raise table.error(f"reserved = {keys['reserved']} leaves nothing of a memory of {keys['memory']}")
    return Device(
        name,
        flops={precision: peaks.positive(precision, "flops") for precision in flops},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=table.positive("memory_rate", "rate"),
        multiprocessors=table.whole("multiprocessors", 1),
        sustained=_part(table, "sustained"),
        copy_bytes_per_s=table.quantity("copy_rate", "rate"),
        power_w=table.quantity("power", "power"),
        reserved_bytes=reserved_bytes,
    )


def _part(table: Table, key: str) -> float:
    """A ratio above 0."""
    if not (found := table.number(key, 1.0, most=1.0)):
        raise table.error(f"{key} is 0; it must be more")
    return found


def _tier(keys: dict[str, Any], cluster: str, sharing: int) -> Tier:
    """sharing: devices of the tier inside, which share a measured host's link."""
    link_keys = ("measured",) if "measured" in keys else ("latency", "rate")
    table = Table(keys, f"{cluster}, tier {keys.get('name', '?')}", _TIER, ("name", "devices", *link_keys))
    if "measured" in keys:
        if "latency" in keys or "rate" in keys:
            raise table.error("has both a measured link and a latency or a rate; leave one of them out")
        link = measured_link(Path(str(keys["measured"])))
        latency_s, bytes_per_s = link.latency_s, link.bytes_per_s / sharing
    else:
        latency_s, bytes_per_s = table.quantity("latency", "time"), table.positive("rate", "rate")
    nvls = table.truth("nvls")
    in_network = table.truth("in_network", nvls)
    if nvls and not in_network:
        raise table.error("nvls is a reduction in the network, and in_network is false; leave one of them out")
    if ("switch_ports" in keys) != ("switch_latency" in keys):
        raise table.error("has only one of switch_ports and switch_latency; a tree of switches needs both")
    ports = table.whole("switch_ports") if "switch_ports" in keys else 0
    if 0 < ports < 4:
        raise table.error(f"a tree needs switches with at least 4 ports, and these have {ports}")
    aggregators = aggregators_of(table)
    if aggregators and in_network:
        raise table.error("has an aggregator, and in_network, whose switches aggregate; leave one of them out")
    return Tier(
        str(keys["name"]),
        table.whole("devices"),
        latency_s,
        bytes_per_s,
        oversubscription=table.number("oversubscription", 1.0, least=1.0),
        in_network=in_network,
        nvls=nvls,
        switch_ports=ports,
        switch_latency_s=table.quantity("switch_latency", "time"),
        burst_bytes=table.quantity("burst", "bytes"),
        under_load=_part(table, "under_load"),
        aggregators=aggregators,
    )


def aggregators_of(table: Table) -> tuple[Aggregator, ...]:
    """The [[tier.aggregator]] tables of a tier or of a network. Raises ValueError, in one sentence."""
    return tuple(_aggregator(each, f"{table.where}, aggregator") for each in table.tables("aggregator"))


def _aggregator(keys: dict[str, Any], where: str) -> Aggregator:
    table = Table(keys, where, _AGGREGATOR, required=("link",))
    link, worker = keys["link"], table.truth("worker")
    if worker and link == _PORTS:
        raise table.error("a worker's host has no port for each worker; write link = 4, its link over a worker's")
    has_rate = isinstance(link, str) and link != _PORTS
    c = 0.0 if isinstance(link, str) else table.number("link", 0.0)
    if not isinstance(link, str) and not c:
        raise table.error("link is 0; it must be more")
    return Aggregator(
        table.whole("hosts", 1),
        c,
        table.positive("link", "rate") if has_rate else 0.0,
        link == _PORTS,
        0 if keys.get("cores") == _AS_NEEDED else table.whole("cores", 1),
        table.positive("core_rate", "rate") if "core_rate" in keys else CORE_BYTES_PER_S,
        worker,
    )
