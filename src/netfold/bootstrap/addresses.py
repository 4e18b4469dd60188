"""The addresses of a rank, and the interfaces over which it reaches others.

All interfaces that the user names are used side by side: rail k of every rank is its k-th. Where none is named, the
address that routes to the rendezvous comes first, then those of the host's other interfaces. Each pair of ranks uses
the first address that connects them. This is tried and not inferred, since every host may have a bridge of the same
address that leads nowhere.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

import psutil

from netfold.errors import RendezvousError
from netfold.options import Options
from netfold.switch_protocol.control_messages import is_loopback, parse_switch, switches_of


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
    """The interfaces that the user names, else all. RendezvousError for an unknown interface or host."""
    if options.interface:
        names = [name.strip() for name in options.interface.split(",") if name.strip()]
        return Interfaces(tuple(_address_of(name) for name in names), named=True)
    first = _routed(options, store_host)
    # Ranks that meet over the loopback are on one machine, and need no other address.
    return Interfaces((first,) if is_loopback(first) else (first, *_others(first)), named=False)


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


def _others(first: str) -> list[str]:
    """Addresses of other interfaces that are up, of the same family as the first. Link-local ones are left out."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
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
    addresses = [each.address for each in known[interface] if each.family == socket.AF_INET]
    if not addresses:
        raise RendezvousError(f"NETFOLD_INTERFACE={interface}: it has no IPv4 address (give its address for IPv6)")
    return addresses[0]
