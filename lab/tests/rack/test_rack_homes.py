"""A switch with an address on each of two interfaces: workers that use either join one job. Needs root.

Each worker's host drops packets from any address but the one that the worker was given, as a stateful firewall does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from load import seconds

from netfold_lab.rack.command import run, why_unavailable
from netfold_lab.rack.processes import Process, spawn, stop

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

SWITCH_PORT = 7171

RANK = """
import logging, sys
import numpy as np
from netfold import Communicator, FileStore, Options
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
folder, rank, switch, interface = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
options = Options(switch=switch, algorithm="all_reduce=in_network", interface=interface, transport="tcp")
with Communicator(FileStore(folder), rank, 2, options=options, timeout_s=30, join_timeout_s=20) as group:
    values = np.arange(300_000, dtype=np.float32)
    for step in range(5):
        array = values * (rank + 1) + step
        group.all_reduce(array)
        assert (array == values * 3 + 2 * step).all(), step
"""


@contextlib.contextmanager
def two_networks(addresses: list[tuple[str, str]], prefix: int) -> Iterator[list[str]]:
    """Namespaces of two hosts and a switch between them. addresses: by network, the host's and the switch's."""
    tag = f"nfh{os.getpid() % 10000}"
    names = [f"{tag}-0", f"{tag}-1", f"{tag}-switch"]
    switch = names[-1]
    try:
        for name in names:
            run(["ip", "netns", "add", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        within = ["ip", "netns", "exec", switch]
        run([*within, "sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])
        for host, (host_address, ours) in enumerate(addresses):
            ends = (["netns", names[host], "name", "eth0"], ["netns", switch, "name", f"eth{host}"])
            run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
            for name, device, address in ((names[host], "eth0", host_address), (switch, f"eth{host}", ours)):
                run(["ip", "-n", name, "addr", "add", f"{address}/{prefix}", "dev", device, "nodad"])
                run(["ip", "-n", name, "link", "set", device, "up"])
            # The ranks' own connections pass through the switch's host.
            run(["ip", "-n", names[host], "route", "add", "default", "via", ours])
            family = "ip6" if ":" in ours else "ip"
            rules = (
                f"table inet homes {{ chain c {{ type filter hook input priority 0; "
                f"meta l4proto udp {family} saddr != {ours} drop\n}}\n}}\n"
            )
            run(["ip", "netns", "exec", names[host], "nft", "-f", "-"], stdin=rules)
        yield names
    finally:
        for name in names:
            with contextlib.suppress(Exception):
                run(["ip", "netns", "del", name])


@pytest.mark.parametrize(
    ("everywhere", "addresses", "prefix"),
    [
        ("0.0.0.0", [("10.78.1.1", "10.78.1.254"), ("10.78.2.1", "10.78.2.254")], 24),
        ("[::]", [("fd78:1::1", "fd78:1::fe"), ("fd78:2::1", "fd78:2::fe")], 64),
    ],
    ids=["IPv4", "IPv6"],
)
def test_workers_of_two_networks_get_results_from_their_own_networks_address(
    everywhere: str, addresses: list[tuple[str, str]], prefix: int, tmp_path: Path
) -> None:
    with two_networks(addresses, prefix) as names:

        def there(host: int, *argv: str) -> Process:
            return spawn(["ip", "netns", "exec", names[host], *argv], {})

        listen = ["switch", "--listen", f"{everywhere}:{SWITCH_PORT}", "--open", "--drain", "0s"]
        processes = [there(2, sys.executable, "-m", "netfold.cli", *listen)]
        try:
            assert processes[0].stdout is not None
            while "listening" not in (line := processes[0].stdout.readline()):
                assert line, "the switch ended"
            logs = [tmp_path / f"rank{rank}" for rank in range(2)]
            for rank, (host_address, ours) in enumerate(addresses):
                endpoint = f"[{ours}]:{SWITCH_PORT}" if ":" in ours else f"{ours}:{SWITCH_PORT}"
                arguments = [RANK, str(tmp_path / "store"), str(rank), endpoint, host_address]
                command = f'exec "$0" -c "$@" >"{logs[rank]}" 2>&1'
                processes.append(there(rank, "sh", "-c", command, sys.executable, *arguments))
            for rank in range(2):
                assert processes[1 + rank].wait(seconds(60)) == 0, "\n".join(each.read_text() for each in logs)
                assert logs[rank].read_text() == "", "the group lost its switch and logged a warning"
        finally:
            stop(processes)
