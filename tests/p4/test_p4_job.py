"""Jobs on a P4 pipeline: ranks in network namespaces, a simple_switch between them, `netfold switch` as control plane.

Needs root, simple_switch and p4c-bm2-ss.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import Deadline, seconds
from p4_rig import SWITCH_IP, SWITCH_MAC, THRIFT_PORT, compile_program, inside, ip_of, mac_of, why_no_pipeline

from netfold._native import engine
from netfold.rack.command import run
from netfold.rack.processes import Process, spawn, stop

LACK = why_no_pipeline()
pytestmark = [pytest.mark.rack, pytest.mark.skipif(LACK is not None, reason=f"no P4 pipeline can be run: {LACK}")]

HOSTS = 3
STEPS, LONG_STEPS = 6, 40
SWITCH_PORT, SOFTWARE_PORT, METRICS_PORT, STORE_PORT = 7171, 7272, 9171, 29710

# Reduces what argv[1] names, in `steps` steps, and writes the results and the records' algorithms.
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


# Trains a model by DDP in argv[2] steps, and writes the bits of its weights.
TRAIN = """
import sys
import numpy as np
import torch
import torch.distributed as dist
folder, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("netfold")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 10))
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
draw = torch.Generator().manual_seed(rank)
for _ in range(steps):
    loss = (ddp(torch.randn(8, 40, generator=draw)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()
np.savez(f"{folder}/rank{rank}", weights=weights.view(np.uint32), loss=loss.item())
dist.destroy_process_group()
"""


class Network:
    """Hosts with an interface each, on the ports of a simple_switch; the last has the control plane."""

    def __init__(self, folder: Path, names: list[str], switch: str) -> None:
        self.folder, self.names, self.switch_namespace = folder, names, switch
        self.started: list[Process] = []
        places = {ip_of(host): {"mac": mac_of(host).hex(":"), "port": host} for host in range(HOSTS)}
        places[SWITCH_IP] = {"mac": SWITCH_MAC.hex(":"), "port": HOSTS}
        self.hosts_file = folder / "hosts.json"
        self.hosts_file.write_text(json.dumps(places))

    def spawn(self, namespace: str, *argv: str, **environment: str) -> Process:
        process = spawn(["ip", "netns", "exec", namespace, *argv], {**os.environ, **environment})
        self.started.append(process)
        return process

    def start_daemon(self, port: int, *words: str) -> Process:
        command = [sys.executable, "-m", "netfold.cli", "switch", "--listen", f"{SWITCH_IP}:{port}", "--open", *words]
        daemon = self.spawn(self.switch_namespace, *command)
        assert daemon.stdout is not None
        while "listening" not in (line := daemon.stdout.readline()):
            assert line, "the switch ended"
        return daemon

    def start_pipeline_daemon(self) -> Process:
        pipeline = ["--pipeline", f"127.0.0.1:{THRIFT_PORT}", "--hosts", str(self.hosts_file)]
        metrics = ["--metrics", f"127.0.0.1:{METRICS_PORT}"]
        return self.start_daemon(SWITCH_PORT, "--dataplane", "bmv2", *pipeline, *metrics)

    def status(self) -> dict[str, Any]:
        with inside(self.switch_namespace), urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/status") as reply:
            return json.load(reply)  # type: ignore[no-any-return]

    def start_ranks(self, folder: Path, steps: int, port: int = SWITCH_PORT, script: str = RANK) -> list[Process]:
        folder.mkdir(exist_ok=True)
        ranks = []
        for rank in range(HOSTS):
            command = f'exec "$0" -c "$1" "$2" "$3" >"{folder}/log{rank}" 2>&1'
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS),
                "MASTER_ADDR": ip_of(0),
                "MASTER_PORT": str(STORE_PORT),
                "NETFOLD_TRANSPORT": "tcp",
                "NETFOLD_SWITCH": f"{SWITCH_IP}:{port}",
                "NETFOLD_ALGORITHM": "in_network",
                "NETFOLD_WIRE_DTYPE": "i32",
                "NETFOLD_REJOIN_S": "1",
            }
            argv = ["sh", "-c", command, sys.executable, script, str(folder), str(steps)]
            ranks.append(self.spawn(self.names[rank], *argv, **environment))
        return ranks

    def results(self, folder: Path, ranks: list[Process]) -> list[dict[str, np.ndarray]]:
        for rank, process in enumerate(ranks):
            process.wait(seconds(120))
            assert process.returncode == 0, (folder / f"log{rank}").read_text()
        return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(HOSTS)]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("job")
    program = compile_program(folder, 32, 4096)
    tag = f"nfpj{os.getpid() % 10000}"
    names, switch = [f"{tag}-{host}" for host in range(HOSTS)], f"{tag}-switch"
    with contextlib.ExitStack() as stack:
        for name in [*names, switch]:
            run(["ip", "netns", "add", name])
            stack.callback(run, ["ip", "netns", "del", name])
            run(["ip", "-n", name, "link", "set", "lo", "up"])
        for host, name in enumerate([*names, switch]):
            mac, ip = (mac_of(host), ip_of(host)) if host < HOSTS else (SWITCH_MAC, SWITCH_IP)
            ends = (["netns", switch, "name", f"p{host}"], ["netns", name, "name", "eth0", "address", mac.hex(":")])
            run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]])
            run(["ip", "-n", switch, "link", "set", f"p{host}", "addrgenmode", "none", "up"])
            # simple_switch forwards packets as they are: unfinished checksums and segments longer than the MTU too.
            off = ["tx", "off", "tso", "off", "gso", "off", "gro", "off"]
            run(["ip", "netns", "exec", name, "ethtool", "-K", "eth0", *off])
            run(["ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0"])
            run(["ip", "-n", name, "link", "set", "eth0", "addrgenmode", "none", "up"])
        there = Network(folder, names, switch)
        stack.callback(lambda: stop(there.started))
        ports = [word for port in range(HOSTS + 1) for word in ("-i", f"{port}@p{port}")]
        there.spawn(switch, "simple_switch", *ports, "--thrift-port", str(THRIFT_PORT), str(program))
        yield there


@pytest.fixture(scope="module")
def pipeline_daemon(network: Network) -> Iterator[Process]:
    deadline = Deadline(20)
    while True:
        try:
            daemon = network.start_pipeline_daemon()
            break
        except AssertionError:
            assert deadline.left(), "simple_switch did not start"
    yield daemon
    stop([daemon])


IN_NETWORK, F64 = engine.ALGORITHMS["in_network"], engine.DTYPES["f64"]


@pytest.mark.torch
def test_ddp_trains_through_the_pipeline_to_the_weights_of_the_software_switch(
    network: Network, pipeline_daemon: Process
) -> None:
    pytest.importorskip("torch")
    daemon = network.start_daemon(SOFTWARE_PORT)
    folder = network.folder / "ddp-software"
    software = network.results(folder, network.start_ranks(folder, STEPS, SOFTWARE_PORT, TRAIN))
    stop([daemon])
    before = network.status()["totals"]["results"]
    folder = network.folder / "ddp"
    own = network.results(folder, network.start_ranks(folder, STEPS, script=TRAIN))
    for each in own:
        np.testing.assert_array_equal(each["weights"], software[0]["weights"])
    # 3,070 gradients, 32 in a packet, in each step.
    assert network.status()["totals"]["results"] - before >= STEPS * 96


@pytest.fixture(scope="module")
def by_software(network: Network, pipeline_daemon: Process) -> dict[int, dict[str, np.ndarray]]:
    """The results of rank 0 with a software switch beside the pipeline's daemon, by the number of steps."""
    daemon = network.start_daemon(SOFTWARE_PORT)
    found = {}
    for steps in (STEPS, LONG_STEPS):
        folder = network.folder / f"software{steps}"
        found[steps] = network.results(folder, network.start_ranks(folder, steps, SOFTWARE_PORT))[0]
    stop([daemon])
    return found


def check(own: list[dict[str, np.ndarray]], software: dict[str, np.ndarray]) -> None:
    """Compare the results of all ranks with those of the software switch: the same bits where integers were added."""
    for each in own:
        np.testing.assert_array_equal(each["results"], software["results"])
        np.testing.assert_allclose(each["sums"], software["sums"], rtol=1e-12, atol=1e-12)
        assert not each["errors"].any()


def test_ranks_reduce_through_the_pipeline_with_the_bits_of_the_software_switch(
    network: Network, pipeline_daemon: Process, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = network.folder / "pipeline"
    own = network.results(folder, network.start_ranks(folder, STEPS))
    check(own, by_software[STEPS])
    for each in own:
        # What the profile cannot add went by a host algorithm, and only that.
        by_switch = each["algorithms"] == IN_NETWORK
        np.testing.assert_array_equal(by_switch, each["dtypes"] != F64)
    totals = network.status()["totals"]
    # The least number of packets of 32 values: f32 sums and their magnitudes, i32 sums, maxima, bytes and barriers.
    chunks = STEPS * (-(-5_003 // 32) + -(-40 // 32) + -(-777 // 32) + -(-130 // 32) + -(-1_001 // 128) + 1)
    assert totals["results"] >= chunks
    assert totals["contributions"] == HOSTS * totals["results"]
    for reason in ("malformed", "foreign", "worker", "source", "window"):
        assert totals["drops"][reason] == 0, totals["drops"]


def test_lost_packets_cost_no_sum(
    network: Network, pipeline_daemon: Process, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    before = network.status()["totals"]
    for name in network.names:
        chains = [
            f'chain {hook} {{ type filter hook {hook} device "eth0" priority 0; '
            "meta l4proto udp numgen random mod 100 < 3 drop; }\n"
            for hook in ("ingress", "egress")
        ]
        run(["ip", "netns", "exec", name, "nft", "-f", "-"], stdin=f"table netdev lossy {{\n{''.join(chains)}}}\n")
    try:
        folder = network.folder / "lossy"
        check(network.results(folder, network.start_ranks(folder, STEPS)), by_software[STEPS])
    finally:
        for name in network.names:
            run(["ip", "netns", "exec", name, "nft", "delete", "table", "netdev", "lossy"])
    totals = network.status()["totals"]
    assert totals["results_resent"] > before["results_resent"]


def test_a_control_plane_that_dies_costs_no_step_and_the_group_returns_to_the_pipeline(
    network: Network, pipeline_daemon: Process, by_software: dict[int, dict[str, np.ndarray]]
) -> None:
    folder = network.folder / "killed"
    folder.mkdir()
    (folder / "slowly").touch()
    ranks = network.start_ranks(folder, LONG_STEPS)
    log = folder / "log0"

    def wait_for(pattern: str) -> None:
        deadline = Deadline(40)
        while not (log.exists() and re.search(pattern, log.read_text())):
            assert deadline.left() and ranks[0].poll() is None, log.read_text()
            time.sleep(0.05)

    wait_for("under way")
    # The daemon is a child of `ip netns exec`, which becomes it.
    os.kill(pipeline_daemon.pid, signal.SIGKILL)
    wait_for("is gone")
    daemon = network.start_pipeline_daemon()
    try:
        wait_for("has the group again")
        (folder / "slowly").unlink()
        own = network.results(folder, ranks)
        check(own, by_software[LONG_STEPS])
        assert network.status()["totals"]["results"] > 0
    finally:
        stop([daemon])
