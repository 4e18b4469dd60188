"""The interfaces of a job: named, excluded, or by the route to where its ranks meet; doctor looks at the same."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from netfold.bootstrap import addresses
from netfold.bootstrap.addresses import Interfaces, interfaces_before_job, own_interfaces
from netfold.diagnostics.preflight.facts import facts_here
from netfold.errors import RendezvousError
from netfold.options import Options

HOST = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.1", "fd01::1"],
    "eth1": ["10.1.0.1"],
    "docker0": ["172.17.0.1"],
    "ib0": ["fe80::1%ib0", "fd02::1"],
    "usb0": ["fe80::2%usb0"],
}


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose name has an address of the loopback, as on Debian, and whose default route is eth0."""

    def of(address: str) -> Any:
        return SimpleNamespace(address=address, family=socket.AF_INET6 if ":" in address else socket.AF_INET)

    known = {name: [of(address) for address in each] for name, each in HOST.items()}
    stats = {name: SimpleNamespace(isup=True, mtu=1500, speed=0) for name in HOST}
    routes = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "myself": "127.0.0.1", "other": "10.1.0.1"}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(addresses, "_default_route", lambda: "10.0.0.1")
    monkeypatch.setattr(
        addresses, "_routed", lambda _, host: routes.get(str(host), "10.0.0.1" if host else "127.0.0.1")
    )
    for name in ("MASTER_ADDR", "NETFOLD_INTERFACE", "NETFOLD_SWITCH"):
        monkeypatch.delenv(name, raising=False)


def hosts(interface: str | None, meeting: str | None) -> tuple[str, ...]:
    return own_interfaces(Options(interface=interface).resolved({}), meeting).hosts


@pytest.mark.parametrize(
    ("interface", "meeting", "expected"),
    [
        ("eth0", "other", ("10.0.0.1",)),
        ("eth1,eth0", "other", ("10.1.0.1", "10.0.0.1")),
        ("ib0", "other", ("fd02::1",)),  # of IPv6 only
        (None, "other", ("10.1.0.1", "10.0.0.1", "172.17.0.1")),
        ("^lo,docker", "other", ("10.1.0.1", "10.0.0.1")),
        ("^eth1", "other", ("10.0.0.1", "172.17.0.1")),
        ("^lo", "127.0.0.1", ("10.0.0.1", "10.1.0.1", "172.17.0.1")),
        (None, "localhost", ("127.0.0.1",)),
        # The host's own name is a loopback address for itself alone: other hosts need another address.
        (None, "myself", ("10.0.0.1", "10.1.0.1", "172.17.0.1", "127.0.0.1")),
    ],
)
def test_the_interfaces_of_a_rank(interface: str | None, meeting: str, expected: tuple[str, ...]) -> None:
    assert hosts(interface, meeting) == expected


@pytest.mark.parametrize(
    ("interface", "text"),
    [
        ("usb0", "usb0: it has no IPv4 address, and none of IPv6 beyond its own link"),
        ("nosuch0", "no such interface"),
        ("lo,^eth0", "one \\^ before the whole list"),
        ("^lo,eth,docker", "it excludes every interface that this rank could use, which are eth1, eth0, docker0"),
    ],
)
def test_interfaces_that_leave_nothing_are_refused_in_a_sentence(interface: str, text: str) -> None:
    with pytest.raises(RendezvousError, match=text):
        hosts(interface, "other")


@pytest.mark.parametrize(
    ("environment", "first"),
    [
        ({}, "10.0.0.1"),
        ({"MASTER_ADDR": "other"}, "10.1.0.1"),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "other", "MASTER_PORT": "1"}, "10.1.0.1"),
    ],
)
def test_doctor_looks_at_the_interface_of_the_job(
    environment: dict[str, str], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert interfaces_before_job(Options().resolved({}), environment).hosts[0] == first
    assert f"({first})" in facts_here().interfaces[0]
    of_the_job = Interfaces(("10.1.0.1",), named=True)
    assert facts_here(interfaces=of_the_job).interfaces == ["eth1 (10.1.0.1), MTU 1500"]
