"""A rack of network namespaces: hosts with ranks, and switches between them that are P4 pipelines or Linux bridges.

Each switch has a namespace with a daemon: the control plane of its pipeline, or a switch in software.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from load import Deadline, seconds
from p4_rig import THRIFT_PORT, inside, ip_of, mac_of

from netfold_lab.rack.command import run
from netfold_lab.rack.processes import Process, spawn, stop

METRICS_PORT, STORE_PORT = 9171, 29710
_racks = itertools.count()

# Reduces in argv[2] steps, and writes the results and the records' algorithms to argv[1].
RANK = """
import logging, os, sys, time
import numpy as np
from netfold import Communicator
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
folder, steps = sys.argv[1], int(sys.argv[2])
with Communicator.from_environment(timeout_s=60, join_timeout_s=30) as group:
    rank = group.rank
    draw = np.random.default_rng(rank)
    results, sums = [], []
    for step in range(steps):
        floats = draw.standard_normal(5_003, np.float32) * 10.0 ** (step % 7)
        group.all_reduce(floats)
        results.append(floats.view(np.uint32))
        integers = draw.integers(-2**31, 2**31, 777, dtype=np.int32)
        group.all_reduce(integers)
        results.append(integers.view(np.uint32))
        largest = draw.integers(-2**31, 2**31, 130, dtype=np.int32)
        group.all_reduce(largest, op="max")
        results.append(largest.view(np.uint32))
        doubles = draw.standard_normal(50)
        group.all_reduce(doubles)
        sums.append(doubles)
        data = draw.integers(0, 255, 1_001, dtype=np.uint8)
        group.broadcast(data, root=1)
        results.append(data.astype(np.uint32))
        group.barrier()
        if step == 3:
            print("under way", flush=True)
        if os.path.exists(f"{folder}/slowly"):
            time.sleep(0.3)
    records = group.group.events()
    np.savez(f"{folder}/rank{rank}", results=np.concatenate(results), sums=np.concatenate(sums),
             algorithms=records["algorithm"], dtypes=records["dtype"], errors=records["error"])
    print("done", flush=True)
"""
# The least number of packets of 32 values in a step of RANK: f32 sums and their magnitudes, i32 sums, maxima, bytes and
# a barrier.
CHUNKS_OF_STEP = -(-5_003 // 32) + -(-40 // 32) + -(-777 // 32) + -(-130 // 32) + -(-1_001 // 128) + 1


@dataclass
class Switch:
    """A switch of the rack.

    program: of its pipeline; None for a bridge.
    hosts: that are plugged into it. up: the switch above it.
    """

    name: str
    program: Path | None
    hosts: Sequence[int]
    up: Switch | None = None
    number: int = -1
    namespace: str = ""
    ports: list[int | Switch] = field(default_factory=list)  # what each leads to; itself: its daemon
    pipeline: Process | None = None

    @property
    def ip(self) -> str:
        return f"10.9.0.{100 + self.number}"

    @property
    def mac(self) -> bytes:
        return bytes.fromhex("02000000ff") + bytes([self.number])


class Rack:
    """Hosts and switches. `side`: hosts also have an interface eth1 on a bridge of their own, 10.8.0.0/24."""

    def __init__(self, folder: Path, switches: Sequence[Switch], *, side: bool = False) -> None:
        self.folder, self.switches, self.side = folder, switches, side
        self.hosts = sorted(host for switch in switches for host in switch.hosts)
        self.started: list[Process] = []
        self._tag = f"nfpt{os.getpid() % 10000}-{next(_racks)}"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rack:
        with self._stack:
            self._build()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self._tag}-{host}"

    def _build(self) -> None:
        for number, switch in enumerate(self.switches):
            switch.number, switch.namespace, switch.ports = number, f"{self._tag}-{switch.name}", []
        spaces = [*map(self.host, self.hosts), *(switch.namespace for switch in self.switches)]
        for name in [*spaces, *([f"{self._tag}-side"] if self.side else [])]:
            run(["ip", "netns", "add", name])
            self._stack.callback(run, ["ip", "netns", "del", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        self._stack.callback(lambda: stop(self.started))
        for switch in self.switches:
            if switch.program is None:
                run(["ip", "-n", switch.namespace, "link", "add", "eth0", "type", "bridge"])
                self._configure(switch.namespace, "eth0", switch.mac, switch.ip)
            for host in switch.hosts:
                self._plug(switch, host, self.host(host), "eth0")
                self._configure(self.host(host), "eth0", mac_of(host), ip_of(host))
        for switch in self.switches:
            if switch.up is not None:
                self._plug(switch, switch.up, switch.up.namespace, f"p{len(switch.up.ports)}")
                self._add_port(switch.up, switch)
        for switch in self.switches:
            if switch.program is not None:
                self._plug(switch, switch, switch.namespace, "eth0")
                self._configure(switch.namespace, "eth0", switch.mac, switch.ip)
                self.start_pipeline(switch)
        if self.side:
            bridge = f"{self._tag}-side"
            run(["ip", "-n", bridge, "link", "add", "br0", "type", "bridge"])
            run(["ip", "-n", bridge, "link", "set", "br0", "up"])
            for host in self.hosts:
                ends = ["netns", bridge, "name", f"p{host}"], ["netns", self.host(host), "name", "eth1"]
                run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
                run(["ip", "-n", bridge, "link", "set", f"p{host}", "master", "br0", "up"])
                run(["ip", "-n", self.host(host), "addr", "add", f"10.8.0.{host + 1}/24", "dev", "eth1"])
                run(["ip", "-n", self.host(host), "link", "set", "eth1", "up"])

    def _plug(self, switch: Switch, leads_to: int | Switch, namespace: str, name: str) -> None:
        """Lead the next port of `switch` to the interface `name` of a namespace."""
        ends = ["netns", switch.namespace, "name", f"p{len(switch.ports)}"], ["netns", namespace, "name", name]
        run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
        self._add_port(switch, leads_to)

    def _add_port(self, switch: Switch, leads_to: int | Switch) -> None:
        port = f"p{len(switch.ports)}"
        run(["ip", "-n", switch.namespace, "link", "set", port, "addrgenmode", "none", "up"])
        if switch.program is None:
            run(["ip", "-n", switch.namespace, "link", "set", port, "master", "eth0"])
        switch.ports.append(leads_to)

    def _configure(self, namespace: str, name: str, mac: bytes, ip: str) -> None:
        # simple_switch forwards packets as they are: unfinished checksums and segments longer than the MTU too.
        off = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"]
        run(["ip", "netns", "exec", namespace, "ethtool", "-K", name, *off])
        run(["ip", "-n", namespace, "link", "set", name, "address", mac.hex(":")])
        run(["ip", "-n", namespace, "addr", "add", f"{ip}/24", "dev", name])
        run(["ip", "-n", namespace, "link", "set", name, "addrgenmode", "none", "up"])

    def start_pipeline(self, switch: Switch) -> None:
        ports = [word for port in range(len(switch.ports)) for word in ("-i", f"{port}@p{port}")]
        words = ["--thrift-port", str(THRIFT_PORT), "--device-id", str(1 + switch.number)]
        switch.pipeline = self.spawn(switch.namespace, "simple_switch", *ports, *words, str(switch.program))

    def kill_pipeline(self, switch: Switch) -> None:
        assert switch.pipeline is not None
        switch.pipeline.kill()
        switch.pipeline.wait(seconds(20))

    def hosts_file(self, switch: Switch) -> Path:
        """Write what the switch's daemon must know: the port that leads to each address."""
        places = {}
        for port, leads_to in enumerate(switch.ports):
            for ip, mac in self._beyond(leads_to, switch):
                places[ip] = {"mac": mac.hex(":"), "port": port}
        path = self.folder / f"hosts-{switch.name}.json"
        path.write_text(json.dumps(places))
        return path

    def _beyond(self, place: int | Switch, behind: Switch) -> list[tuple[str, bytes]]:
        """The addresses at a host or switch, and beyond it, as seen from the switch `behind`."""
        if isinstance(place, int):
            return [(ip_of(place), mac_of(place))]
        if place is behind:
            return [(place.ip, place.mac)]
        others = [self._beyond(each, place) for each in place.ports if each is not behind and each is not place]
        return [(place.ip, place.mac), *itertools.chain.from_iterable(others)]

    def spawn(self, namespace: str, *argv: str, **environment: str) -> Process:
        process = spawn(["ip", "netns", "exec", namespace, *argv], {**os.environ, **environment})
        self.started.append(process)
        return process

    def daemon_command(self, switch: Switch, port: int, *words: str, software: bool = False) -> list[str]:
        listen = ["--listen", f"{switch.ip}:{port}", "--open"]
        if switch.program is not None and not software:
            pipeline = ["--pipeline", f"127.0.0.1:{THRIFT_PORT}", "--hosts", str(self.hosts_file(switch))]
            listen += ["--dataplane", "bmv2", *pipeline]
        return [sys.executable, "-m", "netfold.cli", "switch", *listen, *words]

    def start_daemon(self, switch: Switch, port: int = 7171, *, software: bool = False) -> Process:
        """Start the daemon of a switch below its parent's, once the pipeline is there.

        software: beside the pipeline's daemon, without metrics.
        """
        parent = [] if switch.up is None else ["--parent", f"{switch.up.ip}:{port}"]
        metrics = [] if software else ["--metrics", f"127.0.0.1:{METRICS_PORT}"]
        command = self.daemon_command(switch, port, *metrics, *parent, software=software)
        deadline = Deadline(30)
        while True:
            daemon = self.spawn(switch.namespace, *command)
            assert daemon.stdout is not None
            while line := daemon.stdout.readline():
                if "listening" in line:
                    return daemon
            assert deadline.left(), f"the daemon of {switch.name} does not start"

    def status(self, switch: Switch) -> dict[str, Any]:
        with inside(switch.namespace), urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/status") as reply:
            return json.load(reply)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def lose(self, percent: int) -> Iterator[None]:
        """Lose UDP packets on every link of a host, and on those between switches, in both directions."""
        hooks = [(self.host(host), "eth0", ["ingress", "egress"]) for host in self.hosts]
        for switch in self.switches:
            for port, leads_to in enumerate(switch.ports):
                if isinstance(leads_to, Switch) and leads_to is not switch:
                    # simple_switch's sockets see a packet before the hook of ingress does.
                    hooks.append((switch.namespace, f"p{port}", ["egress"]))
        by_space: dict[str, list[str]] = {}
        for space, device, kinds in hooks:
            by_space.setdefault(space, []).extend(
                f'chain {kind}_{device} {{ type filter hook {kind} device "{device}" priority 0; '
                f"meta l4proto udp numgen random mod 100 < {percent} drop; }}\n"
                for kind in kinds
            )
        for space, chains in by_space.items():
            run(["ip", "netns", "exec", space, "nft", "-f", "-"], stdin=f"table netdev lossy {{\n{''.join(chains)}}}\n")
        try:
            yield
        finally:
            for space in by_space:
                run(["ip", "netns", "exec", space, "nft", "delete", "table", "netdev", "lossy"])

    def start_ranks(
        self,
        folder: Path,
        steps: int,
        *,
        port: int = 7171,
        hosts: Sequence[int] | None = None,
        script: str = RANK,
        store_port: int = STORE_PORT,
        **environment: str,
    ) -> list[Process]:
        """Start a rank on each of `hosts`; its switch is the one that its host is plugged into."""
        folder.mkdir(exist_ok=True)
        ranks = []
        hosts = self.hosts if hosts is None else hosts
        network = "10.8.0" if self.side else "10.9.0"
        for rank, host in enumerate(hosts):
            switch = next(each for each in self.switches if host in each.hosts)
            command = f'exec "$0" -c "$1" "$2" "$3" >"{folder}/log{rank}" 2>&1'
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "MASTER_ADDR": f"{network}.{hosts[0] + 1}",
                "MASTER_PORT": str(store_port),
                "NETFOLD_TRANSPORT": "tcp",
                "NETFOLD_SWITCH": f"{switch.ip}:{port}",
                "NETFOLD_ALGORITHM": "in_network",
                "NETFOLD_WIRE_DTYPE": "i32",
                "NETFOLD_REJOIN_S": "1",
                **({"NETFOLD_INTERFACE": "eth1"} if self.side else {}),
                **environment,
            }
            argv = ["sh", "-c", command, sys.executable, script, str(folder), str(steps)]
            ranks.append(self.spawn(self.host(host), *argv, **own))
        return ranks


def results(folder: Path, ranks: Sequence[Process]) -> list[dict[str, np.ndarray]]:
    """The results of all ranks, once they ended well."""
    for rank, process in enumerate(ranks):
        process.wait(seconds(120))
        assert process.returncode == 0, (folder / f"log{rank}").read_text()
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(len(ranks))]


def check(own: Sequence[dict[str, np.ndarray]], software: dict[str, np.ndarray]) -> None:
    """Compare all ranks' results with those of switches in software: the same bits where integers were added."""
    for each in own:
        np.testing.assert_array_equal(each["results"], software["results"])
        np.testing.assert_allclose(each["sums"], software["sums"], rtol=1e-12, atol=1e-12)
        assert not each["errors"].any()


def wait_for(log: Path, pattern: str, process: Process) -> None:
    """Wait until a rank wrote that."""
    deadline = Deadline(60)
    while not (log.exists() and re.search(pattern, log.read_text())):
        assert deadline.left() and process.poll() is None, log.read_text()
        time.sleep(0.05)
