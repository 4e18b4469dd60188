"""Clusters from TOML: those that ship with netfold by name, a file of one's own by its path."""

from __future__ import annotations

import difflib
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from netfold.plan.cluster.aggregator import CORE_BYTES_PER_S, Aggregator
from netfold.plan.cluster.cluster import Cluster, Device, Processors, Tier
from netfold.plan.cluster.measured import measured_link
from netfold.plan.job import PRECISIONS
from netfold.plan.quantity import parse_quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HERE = Path(__file__).parent
_PRESETS = _HERE / "presets"
_DEVICES = _HERE / "devices.toml"
_TIER = (
    *("name", "devices", "latency", "rate", "measured", "oversubscription"),
    *("in_network", "nvls", "switch_ports", "switch_latency", "burst", "under_load", "aggregator"),
)
_AGGREGATOR = ("link", "hosts", "cores", "core_rate", "worker")
# A link of as many ports as there are workers.
_PORTS = "a port a worker"
# Far above any that there is, and small enough to be divided by as a float.
_MOST_WHOLE = 1 << 40
# What begins the name of a cluster whose link netfold has measured; of so many hosts, as the presets of ordinary
# Ethernet have, where it does not say.
_MEASURED, _MOST_HOSTS = "measured=", 1024


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.toml")))


@lru_cache(maxsize=64)
def load_cluster(name: str, device: Device | None = None) -> Cluster:
    """A preset's name, the path of a TOML file, or `measured=FILE,device=NAME,hosts=64`, whose device is `device` where
    it names none. Raises ValueError, in a sentence, for any other.
    """
    if name.startswith(_MEASURED):
        return _measured(name, device)
    if name.endswith(".toml") or "/" in name:
        return _read(Path(name))
    if name not in preset_names():
        raise ValueError(
            f"there is no cluster {name!r}; {_nearest(name, preset_names())}, or give a file's path (.toml)"
        )
    return _read(_PRESETS / f"{name}.toml")


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """Those that ship with netfold, by name."""
    tree = _parse(_DEVICES)
    return {name: _device(name, table, f"{_DEVICES.name}: {name}") for name, table in tree.items()}


def _nearest(word: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cluster {path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"cluster {path}: lists or tables lie inside each other too deeply to be read") from None
    except ValueError as error:  # no UTF-8, no TOML, a number of thousands of digits
        raise ValueError(f"cluster {path}: is not TOML: {error}") from None


def _measured(said: str, device: Device | None) -> Cluster:
    """Hosts of one device each, on a link that was measured."""
    where = "a measured cluster"
    file, *rest = (each.strip() for each in said.removeprefix(_MEASURED).split(","))
    keys: dict[str, str] = {}
    for each in rest:
        key, equals, value = (part.strip() for part in each.partition("="))
        if not equals or key in keys:
            raise ValueError(f"{where}: {each!r} is no key and its value, once; write device=a100-80, or hosts=64")
        keys[key] = value
    _only(keys, where, ("device", "hosts"))
    if not file:
        raise ValueError(f"{where}: says no file; write measured=links.json")
    if "device" not in keys and device is None:
        raise ValueError(
            f"{where}: says nothing of what computes; write {said},device=a100-80 ({', '.join(devices())})"
        )
    hosts = keys.get("hosts", str(_MOST_HOSTS))
    if not hosts.isdecimal() or int(hosts) < 1:
        raise ValueError(f"{where}: hosts = {hosts!r} is no number of hosts; 1 is the least")
    tier = {"name": "the measured link", "devices": int(hosts), "measured": file}
    named = keys.get("device") or next(iter(devices()))
    found = cluster_of({"device": named, "tier": [tier], "sources": [f"measured: {file}"]}, file)
    return found if device is None or "device" in keys else replace(found, device=device)


def _read(path: Path) -> Cluster:
    return cluster_of(_parse(path), path.stem)


def cluster_of(tree: dict[str, Any], name: str) -> Cluster:
    """What a file's keys say. Raises ValueError, in a sentence, for one that is not known, missing or impossible."""
    where = f"cluster {name}"
    _only(tree, where, ("device", "tier", "sources", "price_an_hour", "shared"))
    for key in ("device", "tier"):
        if key not in tree:
            raise ValueError(f"{where}: says nothing of its {key}; docs/reference/plan/cluster.md has an example")
    given = tree["device"]
    if not isinstance(given, (str, dict)):
        raise ValueError(f"{where}: device is a name, or a table [device]; see docs/reference/plan/cluster.md")
    if not isinstance(tree["tier"], list) or not all(isinstance(each, dict) for each in tree["tier"]):
        raise ValueError(f"{where}: tiers are tables, [[tier]] each; docs/reference/plan/cluster.md has an example")
    if isinstance(given, str):
        if given not in devices():
            raise ValueError(f"{where}: there is no device {given!r}; {_nearest(given, tuple(devices()))}")
        device = devices()[given]
    else:
        device = _device(str(given.get("name", name)), given, f"{where}, device")
    tiers: tuple[Tier, ...] = ()
    if not tree["tier"]:
        raise ValueError(f"{where}: has no tier; one with all its devices is the least")
    inside = 1
    for table in tree["tier"]:
        tier = _tier(table, where, inside)
        tiers += (tier,)
        if tier.devices < inside or tier.devices % inside:
            raise ValueError(
                f"{where}: tier {tier.name} joins {tier.devices} devices, the one inside it {inside}; tiers are given "
                "from the inside out, each a whole number of those inside"
            )
        inside = tier.devices
    if len(tiers) > 1 and tiers[0].aggregators:
        raise ValueError(
            f"{where}: tier {tiers[0].name} is inside a host, and an aggregator is a host; give it to a tier beyond"
        )
    sources = tree.get("sources", [])
    if not isinstance(sources, list):
        raise ValueError(f"{where}: sources is a list of texts")
    price = _number(tree.get("price_an_hour", 0.0), where, "price_an_hour")
    shared = _shared(tree["shared"], f"{where}, shared") if "shared" in tree else None
    if shared is not None and any(tier.aggregators for tier in tiers):
        raise ValueError(
            f"{where}: has [shared] cores, whose switch stands in the place of the hosts' switch, and an aggregator; "
            "leave one out"
        )
    return Cluster(name, device, tiers, tuple(map(str, sources)), price, shared)


def _shared(table: Any, where: str) -> Processors:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: is a table, [shared]; docs/reference/plan/cluster.md has an example")
    _only(table, where, ("cores", "operation", "message", "rate", "switch_rate"))
    _needs(table, where, ("cores",))

    def seconds(key: str) -> float:
        return parse_quantity(table[key], "time", f"{where}, {key}") if key in table else 0.0

    def byte_s(key: str) -> float:
        return 1 / _positive(parse_quantity(table[key], "rate", f"{where}, {key}"), where, key) if key in table else 0.0

    return Processors(
        _whole(table["cores"], where, "cores"),
        seconds("operation"),
        seconds("message"),
        byte_s("rate"),
        byte_s("switch_rate"),
    )


def _device(name: str, table: dict[str, Any], where: str) -> Device:
    _only(
        table,
        where,
        (
            *("name", "flops", "memory", "memory_rate", "reserved", "multiprocessors", "sustained", "copy_rate"),
            *("power", "source"),
        ),
    )
    _needs(table, where, ("flops", "memory", "memory_rate"))
    if not isinstance(table["flops"], dict) or not table["flops"]:
        raise ValueError(f'{where}: flops is a table by precision, such as {{ f16 = "125 TFLOP/s" }}')
    _only(table["flops"], f"{where}, flops", PRECISIONS)
    flops = {
        key: _positive(parse_quantity(value, "flops", f"{where}, {key}"), where, key)
        for key, value in table["flops"].items()
    }
    memory = _positive(parse_quantity(table["memory"], "bytes", f"{where}, memory"), where, "memory")
    reserved = parse_quantity(table["reserved"], "bytes", f"{where}, reserved") if "reserved" in table else 0.0
    if reserved >= memory:
        raise ValueError(f"{where}: reserved = {table['reserved']} leaves nothing of a memory of {table['memory']}")
    return Device(
        name,
        flops,
        memory,
        _positive(parse_quantity(table["memory_rate"], "rate", f"{where}, memory_rate"), where, "memory_rate"),
        _whole(table.get("multiprocessors", 1), where, "multiprocessors"),
        _part(table.get("sustained", 1.0), where, "sustained"),
        parse_quantity(table["copy_rate"], "rate", f"{where}, copy_rate") if "copy_rate" in table else 0.0,
        parse_quantity(table["power"], "power", f"{where}, power") if "power" in table else 0.0,
        reserved,
    )


def _tier(table: dict[str, Any], cluster: str, sharing: int) -> Tier:
    """sharing: devices of the tier inside, which share a measured host's link."""
    where = f"{cluster}, tier {table.get('name', '?')}"
    _only(table, where, _TIER)
    if "measured" in table and ("latency" in table or "rate" in table):
        raise ValueError(f"{where}: is measured, and says latency or rate too; leave one out")
    _needs(table, where, ("name", "devices", *(() if "measured" in table else ("latency", "rate"))))
    devices = _whole(table["devices"], where, "devices")
    oversubscription = _number(table.get("oversubscription", 1), where, "oversubscription")
    if oversubscription < 1:
        raise ValueError(f"{where}: oversubscription = {oversubscription:g} is below 1, which is none")
    for key in ("in_network", "nvls"):
        if not isinstance(table.get(key, False), bool):
            raise ValueError(f"{where}: {key} = {table[key]!r}; it must be true or false")
    nvls = bool(table.get("nvls", False))
    if nvls and not table.get("in_network", True):
        raise ValueError(f"{where}: nvls is a reduction in the network, and in_network is false; leave one out")
    ports, switch_latency_s = _switch(table, where)
    if "measured" in table:
        link = measured_link(Path(str(table["measured"])))
        latency_s, bytes_per_s = link.latency_s, link.bytes_per_s / sharing
    else:
        latency_s = parse_quantity(table["latency"], "time", f"{where}, latency")
        bytes_per_s = _positive(parse_quantity(table["rate"], "rate", f"{where}, rate"), where, "rate")
    in_network = nvls or bool(table.get("in_network", False))
    aggregators = aggregators_of(table.get("aggregator", []), where)
    if aggregators and in_network:
        raise ValueError(f"{where}: has an aggregator, and in_network, whose switches add themselves; leave one out")
    return Tier(
        str(table["name"]),
        devices,
        latency_s,
        bytes_per_s,
        oversubscription,
        in_network,
        nvls,
        ports,
        switch_latency_s,
        parse_quantity(table["burst"], "bytes", f"{where}, burst") if "burst" in table else 0.0,
        _part(table.get("under_load", 1), where, "under_load"),
        aggregators,
    )


def aggregators_of(tables: object, where: str) -> tuple[Aggregator, ...]:
    """What [[tier.aggregator]] tables say. Raises ValueError, in a sentence, for what they cannot."""
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ValueError(
            f"{where}: aggregators are tables, [[tier.aggregator]] each; docs/reference/plan/cluster.md has an example"
        )
    return tuple(_aggregator(each, f"{where}, aggregator") for each in tables)


def _aggregator(table: dict[str, Any], where: str) -> Aggregator:
    _only(table, where, _AGGREGATOR)
    _needs(table, where, ("link",))
    worker = table.get("worker", False)
    if not isinstance(worker, bool):
        raise ValueError(f"{where}: worker = {worker!r}; it must be true or false")
    link, c, bytes_per_s = table["link"], 0.0, 0.0
    if isinstance(link, str) and link != _PORTS:
        bytes_per_s = _positive(parse_quantity(link, "rate", f"{where}, link"), where, "link")
    elif not isinstance(link, str):
        c = _positive(_number(link, where, "link"), where, "link")
    if worker and link == _PORTS:
        raise ValueError(f"{where}: a worker's host has no port a worker; say link = 4, its link over a worker's")
    core = parse_quantity(table["core_rate"], "rate", f"{where}, core_rate") if "core_rate" in table else None
    return Aggregator(
        _whole(table.get("hosts", 1), where, "hosts"),
        c,
        bytes_per_s,
        link == _PORTS,
        _whole(table.get("cores", 1), where, "cores"),
        CORE_BYTES_PER_S if core is None else _positive(core, where, "core_rate"),
        worker,
    )


def _switch(table: dict[str, Any], where: str) -> tuple[int, float]:
    """Ports of a switch, and what a further level of them takes."""
    if ("switch_ports" in table) != ("switch_latency" in table):
        raise ValueError(f"{where}: says one of switch_ports and switch_latency; a tree of switches needs both")
    if "switch_ports" not in table:
        return 0, 0.0
    ports = _whole(table["switch_ports"], where, "switch_ports")
    if ports < 4:
        raise ValueError(f"{where}: a tree cannot be made of switches with {ports} ports; 4 is the least")
    return ports, parse_quantity(table["switch_latency"], "time", f"{where}, switch_latency")


def _whole(value: object, where: str, key: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_WHOLE:
        raise ValueError(f"{where}: {key} = {value!r} is no number of {key}; 1 is the least, {_MOST_WHOLE} the most")
    return value


def _number(value: object, where: str, key: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{where}: {key} = {value!r}; it must be a number, not below 0")
    return float(value)


def _positive(value: float, where: str, key: str) -> float:
    if value <= 0:
        raise ValueError(f"{where}: {key} is 0; it must be more")
    return value


def _part(value: object, where: str, key: str) -> float:
    if not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{where}: {key} = {value!r} is no part; it must be above 0, and 1 at most")
    return float(value)


def _needs(table: dict[str, Any], where: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        if key not in table:
            raise ValueError(f"{where}: says nothing of its {key}; docs/reference/plan/cluster.md has an example")


def _only(table: dict[str, Any], where: str, keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            raise ValueError(f"{where}: {key!r} is not known; {_nearest(key, keys)}")
