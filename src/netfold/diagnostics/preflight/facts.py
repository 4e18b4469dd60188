"""What a rank knows of its own host, as plain values that travel as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from netfold.bootstrap.addresses import interface_of, own_interfaces
from netfold.bootstrap.fabric import preview_transport
from netfold.communicator import Options
from netfold.errors import NetfoldError
from netfold.switch_protocol.control_client import query_quota
from netfold.switch_protocol.control_messages import switches_of

# Whose values are nobody's business; that they are set is.
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_PACKAGES = ("netfold", "torch", "numpy")
_SHM = Path("/dev/shm")
# How long a switch may take to say what it has left.
SWITCH_S = 3.0


@dataclass(frozen=True)
class SwitchQuota:
    """What a switch could grant, or why it could not be asked."""

    endpoint: str
    error: str = ""
    jobs: int = 0
    workers: int = 0
    memory_bytes: int = 0
    slots: int = -1
    udp_error: str = ""
    """Why packets would not reach it, though it answers over TCP; not tried where they would go over a fabric."""
    buffer_bytes: int = 0
    """What its kernel grants a job's packets; 0 where it does not say, or where packets go over a fabric."""
    window_bytes: int = 0
    threads: int = 1
    """That handle packets; a group has one for each time that it names the switch."""


@dataclass(frozen=True)
class Facts:
    """Of one rank and the host it runs on."""

    rank: int
    host: str
    boot: str
    """Of this host, different for each: the kernel's boot id."""
    cores: int
    """That this process may use."""
    memory_free_bytes: int
    shm_free_bytes: int
    """-1 where there is no /dev/shm."""
    open_files_limit: int
    """-1 for none."""
    disk: str
    disk_free_bytes: int
    versions: Mapping[str, str]
    kernel: str
    environment: Mapping[str, str]
    """NETFOLD_*; a secret's value is "set"."""
    congestion: str
    interfaces: Sequence[str]
    """"eth0 (10.0.0.3), MTU 1500, 10000 Mbit/s": those offered to other ranks, the first first."""
    interface_error: str
    mtu: int
    """Of the first."""
    switches: Sequence[SwitchQuota]
    fabric: str = ""
    """What NETFOLD_TRANSPORT names in the place of TCP, in words; empty where it names nothing."""
    fabric_error: str = ""
    """Why this host cannot go over it."""
    speed_mbit: int = 0
    """Of the first interface, as its driver says; 0 where it does not, or where no hardware is behind it."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Facts:
        values = json.loads(text)
        values["switches"] = [SwitchQuota(**room) for room in values["switches"]]
        return cls(**values)


def facts_here(rank: int = 0, *, folder: Path | None = None, store_host: str | None = None) -> Facts:
    """Of this process. folder: where the job will write. Asks each switch of NETFOLD_SWITCH, over
    TCP and UDP: SWITCH_S and a second each at most."""
    options = Options().resolved()
    names, error, mtu, speed_mbit = _interfaces(options, store_host)
    fabric, fabric_error = preview_transport(options, store_host) if not error else ("", "")
    disk = _existing(folder or Path.cwd())
    return Facts(
        rank=rank,
        host=socket.gethostname(),
        boot=_read("/proc/sys/kernel/random/boot_id") + _read("/proc/self/ns/net", link=True),
        cores=len(os.sched_getaffinity(0)),
        memory_free_bytes=psutil.virtual_memory().available,
        shm_free_bytes=shutil.disk_usage(_SHM).free if _SHM.is_dir() else -1,
        open_files_limit=_limit(resource.RLIMIT_NOFILE),
        disk=str(disk),
        disk_free_bytes=shutil.disk_usage(disk).free,
        versions={"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        kernel=platform.release(),
        environment=_environment(os.environ),
        congestion=_read("/proc/sys/net/ipv4/tcp_congestion_control"),
        interfaces=names,
        interface_error=error,
        mtu=mtu,
        speed_mbit=speed_mbit,
        switches=[_room(endpoint, options, rank) for endpoint in switches_of(options.switch)],
        fabric=fabric,
        fabric_error=fabric_error,
    )


def _room(endpoint: str, options: Options, rank: int) -> SwitchQuota:
    bare = endpoint.partition("#")[0]
    by_udp = options.switch_fabric is None
    try:
        room = query_quota(endpoint, token_file=options.token_file, rank=rank, timeout_s=SWITCH_S, udp=by_udp)
    except (NetfoldError, ValueError) as error:
        return SwitchQuota(bare, error=str(error))
    return SwitchQuota(bare, "", *(room if by_udp else room._replace(buffer_bytes=0, window_bytes=0)))


def _interfaces(options: Options, store_host: str | None) -> tuple[list[str], str, int, int]:
    try:
        hosts = own_interfaces(options, store_host).hosts
    except (NetfoldError, ValueError) as error:
        return [], str(error), 0, 0
    stats = psutil.net_if_stats()
    described, mtus, speeds = [], [], []
    for host in hosts:
        name = interface_of(host)
        known = stats.get(name)
        mtus.append(known.mtu if known else 0)
        speeds.append(known.speed if known and _has_hardware(name) else 0)
        speed = f", {known.speed} Mbit/s" if known and known.speed else ""
        described.append(f"{name} ({host}), MTU {mtus[-1]}{speed}")
    return described, "", mtus[0], speeds[0]


def _has_hardware(interface: str) -> bool:
    """A pair of virtual interfaces calls itself 10 Gbit/s, whatever carries it. A bond has the speed of its parts."""
    place = Path("/sys/class/net", interface)
    return (place / "device").exists() or (place / "bonding").exists()


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith("NETFOLD_")}
    return {name: "set" if any(word in name for word in _SECRET) else value for name, value in found.items()}


def _version(package: str) -> str:
    """Without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _read(path: str, *, link: bool = False) -> str:
    try:
        return os.readlink(path) if link else Path(path).read_text().strip()
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
