"""A switch that listens on all its addresses answers each worker from the address that the worker connected to.

Ranks are threads of this process; loopback has all of 127.0.0.0/8. In network namespaces: test_rack_homes.py.
"""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from load import seconds
from ranks import run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import protocol
from netfold._native.dataplane import DataPlane

HELLO = protocol.FLAGS["hello"]


def add(rank: int, size: int, folder: str, endpoints: list[str]) -> float:
    options = Options(switch=endpoints[rank], algorithm="all_reduce=in_network")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=10) as group:
        # Longer than one packet, so that results travel in bursts.
        buffer = np.arange(100_000, dtype=np.float32) + rank
        group.all_reduce(buffer)
        return float(buffer[-1])


def test_workers_that_use_different_addresses_of_the_switch_join_one_job() -> None:
    with running_switch("--listen", "0.0.0.0:0", "--open") as switch:
        port = switch.endpoint.rpartition(":")[2]
        endpoints = [f"127.0.0.{host}:{port}" for host in (1, 2, 3)]
        assert values(run_threads(add, 3, endpoints, timeout_s=60)) == [3 * 99_999.0 + 3] * 3


def test_data_ports_are_only_on_the_address_where_the_switch_listens() -> None:
    with running_switch("--listen", "127.0.0.2:0") as switch:

        def bound(rank: int, size: int, folder: str) -> list[str]:
            options = Options(switch=switch.endpoint)
            with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20) as group:
                (port,) = set(switch.wait_for(r" port=(\d+)"))
                group.barrier()
                addresses = [line.split()[1] for line in Path("/proc/net/udp").read_text().splitlines()[1:]]
                group.barrier()
                return [each for each in addresses if each.endswith(f":{int(port):04X}")]

        little_endian = "0200007F"
        for found in values(run_threads(bound, 2, timeout_s=60)):
            assert [each.split(":")[0] for each in found] == [little_endian]


def hello(worker: int, nonce: int, payload_bytes: int = 8) -> bytes:
    header = protocol.Header()
    for name, value in {"flags": HELLO, "job": 1, "incarnation": 2, "worker": worker, "packet_number": nonce}.items():
        setattr(header, name, value)
    return bytes(header.pack()) + bytes(payload_bytes)


@pytest.mark.parametrize(
    ("family", "everywhere", "addresses"),
    [(socket.AF_INET, "0.0.0.0", ["127.0.0.1", "127.0.0.2", "127.1.2.3"]), (socket.AF_INET6, "::", ["::1"])],
    ids=["IPv4", "IPv6"],
)
def test_a_reply_comes_from_the_address_that_the_worker_sent_to(
    family: socket.AddressFamily, everywhere: str, addresses: list[str]
) -> None:
    plane = DataPlane()
    nonces = [77 + worker for worker in range(len(addresses))]
    port = plane.open(1, 2, everywhere, nonces, [], 1 << 16)
    for worker, local in enumerate(addresses):
        with socket.socket(family, socket.SOCK_DGRAM) as ours:
            ours.bind((addresses[0], 0))
            ours.settimeout(seconds(5))
            plane.set_worker_address(1, worker, *ours.getsockname()[:2], local)
            packet = hello(worker, nonces[worker])
            ours.sendto(packet, (local, port))
            answer, source = ours.recvfrom(65536)
            assert (answer, source[:2]) == (packet, (local, port))
    plane.close(1)
