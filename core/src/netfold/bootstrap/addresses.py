"""The addresses of a rank, and the interfaces over which it reaches others.

All interfaces that the user names are used side by side: rail k of every rank is its k-th. Where none is named, the
address that routes to the rendezvous comes first, then those of the host's other interfaces. Each pair of ranks uses
the first address that connects them. This is tried and not inferred, since every host may have a bridge of the same
address that leads nowhere.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from netfold.bootstrap import launchers
from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import is_loopback, parse_switch, switches_of

# An address that no host has (RFC 5737): its route is the default one.
_ELSEWHERE = "192.0.2.1"


@dataclass(frozen=True)
class Interfaces:
    """This rank's addresses."""

    hosts: tuple[str, ...]
    named: bool
    """By the user: each address is a rail. Else there is one rail, over the first address that reaches a peer."""

    @property
    def rails(self) -> int:
        return len(self.hosts) if self.named else 1


def own_interfaces(options: Options, store_host: str | None) -> Interfaces:
    """The interfaces that the user names, else all but those that the user excludes.

    RendezvousError for an unknown interface or host.
    """
    chosen = options.interface or ""
    names = [name.strip() for name in chosen.removeprefix("^").split(",") if name.strip()]
    if any(name.startswith("^") for name in names):
        raise RendezvousError(f"NETFOLD_INTERFACE={chosen}: one ^ before the whole list excludes all of its interfaces")
    if names and not chosen.startswith("^"):
        return Interfaces(tuple(_address_of(name) for name in names), named=True)
    first = _routed(options, store_host)
    hosts: tuple[str, ...] = (first,)
    if is_loopback(first) and store_host is not None and _is_name(store_host):
        # Some systems give a host's own name a loopback address, for that host alone. Ranks elsewhere need another one.
        routed = _default_route()
        hosts = (*((routed, *_others(routed)) if routed else ()), first)
    elif not is_loopback(first):
        # Ranks that meet over the loopback are on one machine, and need no other address.
        hosts = (first, *_others(first))
    if all(_is_excluded(host, names) for host in hosts) and (routed := _default_route()):
        hosts = (*hosts, routed, *_others(routed))
    left = tuple(host for host in hosts if not _is_excluded(host, names))
    if not left:
        raise RendezvousError(
            f"NETFOLD_INTERFACE={chosen}: it excludes every interface that this rank could use, which are "
            f"{', '.join(dict.fromkeys(map(interface_of, hosts)))}"
        )
    return Interfaces(left, named=False)


def interfaces_before_job(options: Options, environment: Mapping[str, str] = os.environ) -> Interfaces:
    """The interfaces of a job that would start here: as `own_interfaces` for where its launcher lets the ranks meet.

    Without a launcher and a switch: for the default route.
    """
    host = environment.get("MASTER_ADDR") or None
    if host is None and launchers.is_launched(environment):
        host = launchers.placement(environment).host
    if host is None and options.switch is None and _default_route():
        host = _ELSEWHERE
    return own_interfaces(options, host)


def interface_of(host: str) -> str:
    """The name of the interface with this address, or the address itself where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return name
    return host


def encoded(host: str) -> bytes:
    """A host's name for a look-up. For a name as text, Python imports Unicode's tables, which take 1.5 MB."""
    return host.encode() if host.isascii() else host.encode("idna")


def _routed(options: Options, store_host: str | None) -> str:
    towards = store_host
    if towards is None and options.switch is not None:
        towards = parse_switch(switches_of(options.switch)[0], what="NETFOLD_SWITCH").host
    if towards is None:
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(encoded(towards), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing, only asks the routing table
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        source = "the rendezvous" if store_host is not None else "NETFOLD_SWITCH"
        raise RendezvousError(f"{source} names {towards!r}, no host that is known here ({error.strerror})") from None
    except OSError as error:
        raise RendezvousError(f"no route to {towards} ({error}); name an interface by NETFOLD_INTERFACE") from None


def _is_excluded(host: str, names: Sequence[str]) -> bool:
    """As NCCL does: by the first letters of the interface's name. docker excludes docker0."""
    return interface_of(host).startswith(tuple(names))


def _is_name(host: str) -> bool:
    """Whether a host is named by a name that is not the loopback's own, and no address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return not host.lower().startswith("localhost")
    return False


def _default_route() -> str:
    """This host's IPv4 address on its default route; "" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))  # sends nothing, only asks the routing table
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _others(first: str) -> list[str]:
    """Addresses of other interfaces that are up, of the same family as the first. Link-local ones are left out."""
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    version = ipaddress.ip_address(first).version
    return [host for name in up for host in _usable(name) if host != first and _version(host) == version]


def _usable(name: str) -> list[str]:
    found = [each.address for each in psutil.net_if_addrs().get(name, ()) if each.family in _FAMILIES]
    addresses = [(host, ipaddress.ip_address(host)) for host in found if "%" not in host]
    return [host for host, address in addresses if not address.is_loopback and not address.is_link_local]


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _version(host: str) -> int:
    return ipaddress.ip_address(host).version


def _address_of(interface: str) -> str:
    try:
        return str(ipaddress.ip_address(interface))  # an address already
    except ValueError:
        pass
    known = psutil.net_if_addrs()
    if interface not in known:
        raise RendezvousError(f"NETFOLD_INTERFACE={interface}: no such interface; this host has {', '.join(known)}")
    # IPv4 first. A link-local address of IPv6 means nothing to another host.
    by_family = sorted(known[interface], key=lambda each: each.family != socket.AF_INET)
    addresses = [each.address for each in by_family if each.family in _FAMILIES and "%" not in each.address]
    if not addresses:
        raise RendezvousError(
            f"NETFOLD_INTERFACE={interface}: it has no IPv4 address, and none of IPv6 beyond its own link"
        )
    return addresses[0]
