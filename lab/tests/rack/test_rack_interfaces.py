"""Hosts with several interfaces: which are used, that all are, behind a firewall, and after a connection is cut.
Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from load import seconds

from netfold_lab.rack.command import run, why_unavailable
from netfold_lab.rack.processes import Process, spawn, stop

LACK = why_unavailable(loss=True)
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=str(LACK))]

STORE_PORT = 29700

# What a rank does after it has joined as `group`; its last output is a line of JSON.
PROLOGUE = """
import json, os, time
import numpy as np
from netfold import Communicator
with Communicator.from_environment(timeout_s=30, join_timeout_s=8) as group:
    rank, size = group.rank, group.size
    array = np.full(1000, rank + 1.0)
    group.all_reduce(array)
    assert (array == size * (size + 1) / 2).all()
"""


class Hosts:
    """Network namespaces, and veth pairs between two of them, each with its own subnet."""

    def __init__(self, count: int) -> None:
        tag = f"nft{os.getpid() % 10000}"
        self.names = [f"{tag}-{host}" for host in range(count)]
        self._cables = 0
        self._processes: list[Process] = []
        for name in self.names:
            run(["ip", "netns", "add", name])
            self.ip(self.names.index(name), "link", "set", "lo", "up")

    def ip(self, host: int, *words: str) -> str:
        return run(["ip", "-n", self.names[host], *words])

    def cable(self, first: int, second: int, rate: str = "") -> tuple[str, str]:
        """The interface on either host (cN), whose addresses are 10.77.N.1 and .2; and a rate for it."""
        number, self._cables = self._cables, self._cables + 1
        device = f"c{number}"
        ends = [["netns", self.names[host], "name", device] for host in (first, second)]
        run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        for place, host in enumerate((first, second), start=1):
            self.address(host, device, f"10.77.{number}.{place}/24")
            if rate:
                words = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
                run(["ip", "netns", "exec", self.names[host], "tc", "qdisc", "add", "dev", device, *words])
        return f"10.77.{number}.1", f"10.77.{number}.2"

    def address(self, host: int, device: str, address: str) -> None:
        self.ip(host, "addr", "add", address, "dev", device)
        self.ip(host, "link", "set", device, "up")

    def add_bridge(self, host: int, device: str, address: str) -> None:
        """Add a bridge as containers do: it is up, with an address that another host has too."""
        self.ip(host, "link", "add", device, "type", "bridge")
        self.address(host, device, address)

    def start(self, script: str, master: str, **settings: str) -> list[Process]:
        """Start a rank on every host."""
        ranks = []
        for rank, name in enumerate(self.names):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.names)),
                "MASTER_ADDR": master,
                "MASTER_PORT": str(STORE_PORT),
                "NETFOLD_LOG": "debug",
                "NETFOLD_TRANSPORT": "tcp",  # for they do share this machine's memory
                **{f"NETFOLD_{key.upper()}": value for key, value in settings.items()},
            }
            argv = ["ip", "netns", "exec", name, sys.executable, "-c", PROLOGUE + script]
            ranks.append(spawn(argv, environment))
        self._processes += ranks
        return ranks

    def sent_bytes(self, host: int, device: str) -> int:
        return int(json.loads(self.ip(host, "-j", "-s", "link", "show", device))[0]["stats64"]["tx"]["bytes"])

    def firewall(self, host: int, rules: str) -> None:
        run(["ip", "netns", "exec", self.names[host], "nft", "-f", "-"], stdin=rules)

    def close(self) -> None:
        stop(self._processes)
        for name in self.names:
            run(["ip", "netns", "del", name])


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    there = Hosts(count)
    try:
        yield there
    finally:
        there.close()


def outputs(ranks: Sequence[Process], timeout_s: float = 60) -> list[str]:
    texts = [process.communicate(timeout=seconds(timeout_s))[0] for process in ranks]
    for process, text in zip(ranks, texts, strict=True):
        assert process.returncode == 0, text
    return texts


def last_json(text: str) -> Any:
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith(("[", "{"))))


def test_every_pair_of_hosts_uses_an_address_that_connects_them() -> None:
    """A triangle: the rendezvous's interface does not reach the third host, and all bridges have one address."""
    with hosts(3) as there:
        master, _ = there.cable(0, 1)
        there.cable(0, 2)
        there.cable(1, 2)
        for host in range(3):
            there.add_bridge(host, "a-bridge0", "172.29.0.1/16")
            # Hosts 1 and 2 find the rendezvous, whichever subnet its address is in.
            if host:
                there.ip(host, "route", "replace", f"{master}/32", "dev", f"c{host - 1}")
        texts = outputs(there.start("", master))
    between_1_and_2 = [line for line in texts[2].splitlines() if "rank 1" in line and "10.77.2." in line]
    assert between_1_and_2, texts[2]
    assert any("cannot reach rank 1 at 10.77.0.2" in line or "did not answer at 10.77.0.2" in line
               for line in texts[2].splitlines()), texts[2]  # fmt: skip


SEND_MUCH = """
    big = np.zeros(5_000_000, np.float32)
    group.barrier()
    began = time.monotonic()
    if rank == 0:
        group.send(big, 1)
        group.barrier()
    else:
        group.receive(big, 0)
        group.barrier()
    print(json.dumps([time.monotonic() - began]))
"""


def gain_of_a_second_link(**how: str) -> float:
    """Measure how much sooner 20 MB are there over two links of 200 Mbit/s; shaped, so that only this ratio
    depends on the machine."""
    with hosts(2) as there:
        master, _ = there.cable(0, 1, "200mbit")
        there.cable(0, 1, "200mbit")
        seconds = {}
        for named in ("c0", "c0,c1"):
            before = [there.sent_bytes(0, device) for device in ("c0", "c1")]
            texts = outputs(there.start(SEND_MUCH, master, interface=named, **how))
            sent = [there.sent_bytes(0, device) - old for device, old in zip(("c0", "c1"), before, strict=True)]
            seconds[named] = last_json(texts[0])[0]
            if named == "c0":
                assert sent[1] < 10_000, "the interface that was not named"
            else:
                assert 0.45 < sent[0] / sum(sent) < 0.55, sent
                assert "c0" in texts[0] and "c1" in texts[0], "the log names both interfaces"
    print(f"20 MB over one link: {seconds['c0']:.3f} s, over two: {seconds['c0,c1']:.3f} s")
    return float(seconds["c0"] / seconds["c0,c1"])


def test_stripes_use_the_named_interfaces_and_add_their_rates() -> None:
    assert 1.7 < gain_of_a_second_link(algorithm="direct") < 2.3


def test_one_open_port_for_each_process_is_enough() -> None:
    # The firewall admits replies, the rendezvous and one port, and drops everything else.
    rules = f"""table inet wall {{
      chain in {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
        tcp dport {{ {STORE_PORT}-{STORE_PORT + 8}, 29800 }} accept
      }}
    }}"""
    several = """
    for part in [group.split(rank % 2), group.split(0)]:
        if part is not None:
            part.barrier()
            part.close()
    group.send(array, (rank + 1) % size, asynchronous=True)
    group.receive(array, (rank - 1) % size)
    group.barrier()
"""
    with hosts(2) as there:
        master, _ = there.cable(0, 1)
        for host in range(2):
            there.firewall(host, rules)
        outputs(there.start(several, master, ports="29800"))
        # Check the test itself: behind the same firewall another port is unreachable.
        ranks = there.start("", master, ports="29801")
        texts = [process.communicate(timeout=seconds(60))[0] for process in ranks]
        assert all(process.returncode != 0 for process in ranks)
        assert "29801" in "".join(texts) and "did not answer at 10.77.0.1:29801" in "".join(texts), texts


UNTIL_STOPPED = """
    print("ready", flush=True)
    turns, stop = 0, np.zeros(1)
    while not stop[0]:
        array = np.arange(200_003, dtype=np.int64) * (rank + 1) + turns
        group.all_reduce(array)
        np.testing.assert_array_equal(array, np.arange(200_003, dtype=np.int64) * 3 + 2 * turns)
        turns += 1
        stop[0] = rank == 0 and os.path.exists(FLAG)
        group.broadcast(stop, 0)
    print(json.dumps([turns]))
"""


def test_a_firewall_that_forgets_its_connections_costs_no_byte(tmp_path: Path) -> None:
    """Every packet of a connection is answered by a reset, for half a second. (If new ones were refused, too, the rank
    would look dead, as if its port were closed.)"""
    reject = """table inet cut {
      chain in {
        type filter hook input priority 0; policy accept;
        iifname c0 tcp flags & syn == 0 reject with tcp reset
      }
    }"""
    flag = tmp_path / "stop"
    script = UNTIL_STOPPED.replace("FLAG", repr(str(flag)))
    with hosts(2) as there:
        master, _ = there.cable(0, 1)
        ranks = there.start(script, master, algorithm="ring")
        time.sleep(3)
        for _ in range(2):
            there.firewall(1, reject)
            time.sleep(0.5)
            there.firewall(1, "delete table inet cut")
            time.sleep(1.5)
        flag.touch()
        texts = outputs(ranks)
    assert last_json(texts[0])[0] > 10
    assert sum("was made again" in text for text in texts) == 2, texts
