"""Where a rank can be reached, and over which interfaces it reaches others.

Interfaces that the user names are used, all of them, side by side: rail k of every rank is its k-th. Where none is
named, the address that routes to the rendezvous comes first and those of the host's other interfaces after it, and each
pair of ranks takes the first over which they meet: tried, not inferred, since every host may have a bridge of the same
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
    """This rank's addresses. `named`: by the user, each a rail; else one rail, over the first that reaches a peer."""

    hosts: tuple[str, ...]
    named: bool

    @property
    def rails(self) -> int:
        return len(self.hosts) if self.named else 1


def own_interfaces(options: Options, store_host: str | None) -> Interfaces:
    """As the user names them, or as described above. RendezvousError for an interface or a host that is not known."""
    if options.interface:
        names = [name.strip() for name in options.interface.split(",") if name.strip()]
        return Interfaces(tuple(_address_of(name) for name in names), named=True)
    first = _routed(options, store_host)
    # Who meets over the loopback is on one machine, and need not be found from outside.
    return Interfaces((first,) if is_loopback(first) else (first, *_others(first)), named=False)


def interface_of(host: str) -> str:
    """The name of the interface that has this address, the address itself where none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == host for each in addresses):
            return name
    return host


def _routed(options: Options, store_host: str | None) -> str:
    towards = store_host
    if towards is None and options.switch is not None:
        towards = parse_switch(switches_of(options.switch)[0], what="NETFOLD_SWITCH").host
    if towards is None:
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: asks the routing table
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        source = "the rendezvous" if store_host is not None else "NETFOLD_SWITCH"
        raise RendezvousError(f"{source} names {towards!r}, no host that is known here ({error.strerror})") from None
    except OSError as error:
        raise RendezvousError(f"no route to {towards} ({error}); name an interface by NETFOLD_INTERFACE") from None


def _others(first: str) -> list[str]:
    """Of interfaces that are up, of the same family as the first; link-local ones mean nothing to another host."""
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
