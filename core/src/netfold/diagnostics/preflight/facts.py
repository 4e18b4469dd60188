"""One rank's facts about its host: plain values that travel as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from netfold.bootstrap.addresses import Interfaces, interface_of, interfaces_before_job
from netfold.bootstrap.fabric import preview_transport
from netfold.communicator import Options
from netfold.errors import NetfoldError, SwitchError
from netfold.switch_protocol.control_client import query_quota
from netfold.switch_protocol.control_messages import switches_of

# Of variables with these in their names, the facts hold only that they are set.
_SECRET = ("TOKEN", "SECRET", "KEY", "PASSWORD")
_PACKAGES = ("netfold", "torch", "numpy")
_SHM = Path("/dev/shm")
# The timeout of a query to a switch.
SWITCH_S = 3.0


@dataclass(frozen=True)
class SwitchQuota:
    """A switch's free quota, or the error of the query."""

    endpoint: str
    error: str = ""
    jobs: int = 0
    workers: int = 0
    memory_bytes: int = 0
    slots: int = -1
    udp_error: str = ""
    """The reason why UDP packets do not reach a switch that responds over TCP; empty if they would go over a fabric."""
    buffer_bytes: int = 0
    """The kernel's receive buffer for a job's packets; 0 if unknown, or if packets go over a fabric."""
    window_bytes: int = 0
    threads: int = 1
    """Threads that handle packets. A group that names the switch n times uses n of them."""
    remedy: str = ""
    """The advice about `error`; empty where there is none."""


@dataclass(frozen=True)
class Facts:
    """The facts of one rank and its host."""

    rank: int
    host: str
    boot: str
    """Unique for each host: the kernel's boot id, and the network namespace."""
    cores: int
    """Cores that this process may use."""
    memory_free_bytes: int
    shm_free_bytes: int
    """-1 without /dev/shm."""
    open_files_limit: int
    """-1: unlimited."""
    disk: str
    disk_free_bytes: int
    versions: Mapping[str, str]
    kernel: str
    environment: Mapping[str, str]
    """NETFOLD_*; a secret's value is "set"."""
    congestion: str
    interfaces: Sequence[str]
    """Interfaces offered to other ranks, in order of preference: "eth0 (10.0.0.3), MTU 1500, 10000 Mbit/s"."""
    interface_error: str
    mtu: int
    """Of the first interface."""
    switches: Sequence[SwitchQuota]
    fabric: str = ""
    """Description of the fabric that NETFOLD_TRANSPORT names in place of TCP; empty if it names none."""
    fabric_error: str = ""
    """The reason why this host cannot use that fabric."""
    speed_mbit: int = 0
    """Of the first interface, as reported by its driver; 0 if unknown, or for a virtual interface."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Facts:
        return cls(**{**values, "switches": [SwitchQuota(**quota) for quota in values["switches"]]})


def facts_here(rank: int = 0, *, folder: Path | None = None, interfaces: Interfaces | None = None) -> Facts:
    """Collect the facts of this process.

    interfaces: of its group; None: those of a job that would start here.
    folder: where the job will write.
    Queries each switch of NETFOLD_SWITCH over TCP and UDP, for at most SWITCH_S and 1 s each.
    """
    options = Options().resolved()
    names, error, mtu, speed_mbit = _interfaces(options, interfaces)
    fabric, fabric_error = preview_transport(options) if not error else ("", "")
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
        switches=[_quota(endpoint, options, rank) for endpoint in switches_of(options.switch)],
        fabric=fabric,
        fabric_error=fabric_error,
    )


def _quota(endpoint: str, options: Options, rank: int) -> SwitchQuota:
    bare = endpoint.partition("#")[0]
    by_udp = options.fabric is None
    try:
        quota = query_quota(endpoint, token_file=options.token_file, rank=rank, timeout_s=SWITCH_S, udp=by_udp)
    except SwitchError as error:
        return SwitchQuota(bare, error=error.what, remedy=error.remedy)
    except (NetfoldError, ValueError) as error:
        return SwitchQuota(bare, error=str(error))
    return SwitchQuota(bare, "", *(quota if by_udp else quota._replace(buffer_bytes=0, window_bytes=0)))


def _interfaces(options: Options, interfaces: Interfaces | None) -> tuple[list[str], str, int, int]:
    try:
        hosts = (interfaces or interfaces_before_job(options)).hosts
    except (NetfoldError, ValueError) as error:
        return [], str(error), 0, 0
    stats = psutil.net_if_stats()
    described, mtus, speeds = [], [], []
    for host in hosts:
        name = interface_of(host)
        known = stats.get(name)
        mtus.append(known.mtu if known else 0)
        speeds.append(known.speed if known and _has_hardware(name) else 0)
        speed = f", {speeds[-1]} Mbit/s" if speeds[-1] else ""
        described.append(f"{name} ({host}), MTU {mtus[-1]}{speed}")
    return described, "", mtus[0], speeds[0]


def _has_hardware(interface: str) -> bool:
    """Whether the interface's speed is real: a veth pair always reports 10 Gbit/s, a bond its members'."""
    folder = Path("/sys/class/net", interface)
    return (folder / "device").exists() or (folder / "bonding").exists()


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in environment.items() if name.startswith("NETFOLD_")}
    return {name: "set" if any(part in name for part in _SECRET) else value for name, value in own.items()}


def _version(package: str) -> str:
    """The installed version, read without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _limit(which: int) -> int:
    """The hard limit: a group raises the soft one."""
    _, hard = resource.getrlimit(which)
    return -1 if hard == resource.RLIM_INFINITY else hard


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
