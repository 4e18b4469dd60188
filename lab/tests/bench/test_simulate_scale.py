"""bench/simulate_scale.py: a simulated start-up does what real ranks do, in their order, and its networks add up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, values

from netfold import Communicator, FileStore
from netfold.bootstrap import shm_discovery
from netfold.bootstrap.tree import Receive, Send, StartTree

BENCH = Path(__file__).parents[3] / "lab" / "bench"
COSTS = {
    "server_connection_s": 1e-4,
    "client_connection_s": 1e-4,
    "server_request_s": 2e-5,
    "client_request_s": 2e-5,
    "accept_s": 1e-4,
    "join_s": 1e-4,
    "send_s": 5e-6,
    "receive_s": 5e-6,
    "copy_byte_s": 1e-10,
    "encode_byte_s": 5e-9,
    "decode_byte_s": 1e-8,
}
GIGABIT = 125e6


class Even:
    """A network without distances."""

    def latency_s(self, source: int, to: int) -> float:
        return 5e-6 if source == to else 2e-5


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import start_simulation

    return start_simulation


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import network_model

    return network_model


def start_up(start: Any, ranks: int, per_host: int, costs: dict[str, Any] | None = None, **how: Any) -> Any:
    hosts = start.even_hosts(ranks, per_host)
    made = start.Costs(**COSTS, **(costs or {}))
    return start.StartUp(hosts, start.meet(hosts), made, Even(), GIGABIT, **how)


class NotedStore(FileStore):
    def __init__(self, folder: str, noted: list[Any]) -> None:
        super().__init__(folder)
        self._noted = noted

    def set(self, key: str, value: bytes) -> None:
        self._noted.append(("set", key))
        super().set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        self._noted.append(("get", key))
        return super().get(key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        self._noted.append(("add", key))
        return super().add(key, amount)

    def get_first(self, keys: Sequence[str], timeout_s: float) -> list[bytes]:
        """Waits for all keys, so that the requests are the same in each run."""
        self._noted.append(("get", "\n".join(keys)))
        return [super(NotedStore, self).get(key, timeout_s) for key in keys]

    def set_all(self, values: Mapping[str, bytes]) -> None:
        self._noted.append(("set", "\n".join(values)))
        for key, value in values.items():
            super().set(key, value)


def real_rank(rank: int, size: int, folder: str, per_host: int) -> list[Any]:
    """Requests of the store, and steps of the tree, of a real rank until its group is there."""
    noted: list[Any] = []
    send, receive, own_host = StartTree._send, StartTree._receive, shm_discovery.host_identity()

    def noted_send(tree: StartTree, step: Send, what: str) -> None:
        if step.peers:
            noted.append(("send", step.peers))
        send(tree, step, what)

    def noted_receive(tree: StartTree, peer: int, *how: Any) -> Any:
        noted.append(("receive", peer))
        return receive(tree, peer, *how)

    # This process is the rank's alone.
    StartTree._send = noted_send  # type: ignore[method-assign]
    StartTree._receive = noted_receive  # type: ignore[method-assign]
    shm_discovery.host_identity = lambda: f"{own_host} {rank // per_host}"
    with Communicator(NotedStore(folder, noted), rank, size) as group:
        found = list(noted)
        # Rank 0 ends with its group; nobody closes before all have noted theirs.
        assert group.all_reduce(np.ones(1, np.float32))[0] == size
    return found


@pytest.mark.native
@pytest.mark.parametrize(("ranks", "per_host"), [(2, 1), (4, 4), (7, 3), (12, 1)])
def test_a_simulated_rank_does_what_a_real_one_does_in_the_same_order(start: Any, ranks: int, per_host: int) -> None:
    noted: list[list[Any]] = [[] for _ in range(ranks)]

    def watch(rank: int, step: Any) -> None:
        if isinstance(step, list):
            noted[rank] += [(request.kind, request.key) for request in step]
        elif isinstance(step, Send) and step.peers:
            noted[rank].append(("send", step.peers))
        elif isinstance(step, Receive):
            noted[rank].append(("receive", step.peer))

    start_up(start, ranks, per_host, watch=watch).run()
    assert noted == values(run_ranks(real_rank, ranks, per_host))


def test_a_start_of_1024_ranks_is_simulated_in_seconds(start: Any) -> None:
    began = time.monotonic()
    found = start_up(start, 1024, 64).run()
    assert time.monotonic() - began < seconds(10)
    # Claim and owner; the job; address; place. Rank 0 also sets the job, reads all addresses, and sets all places, 128
    # with a request.
    assert found.requests == {"add": 1024, "set": 2 * 1024 + 1 + 8, "get": 2 * 1024 + 8}
    # A leader has at most 8 + 8 children; each sends a frame in an exchange.
    assert max(found.frames.values()) < 100
    phases = list(found.ends_s)
    assert phases == ["store", "job", "places", "connected", "addresses", "shared memory", "table", "native group"]
    assert sorted(found.ends_s.values()) == list(found.ends_s.values())


def test_the_same_start_is_simulated_twice(start: Any) -> None:
    first, second = (start_up(start, 100, 8, begin_s=0.5).run() for _ in range(2))
    assert first == second


def test_fewer_cores_keys_and_places_in_the_queue_take_their_time(start: Any) -> None:
    alone = start_up(start, 200, 8, {"batch": 1}).run()
    assert start_up(start, 200, 8, cores=2).run().seconds > 1.5 * alone.seconds
    batched = start_up(start, 200, 8, {"batch": 64}).run()
    assert sum(alone.requests.values()) - sum(batched.requests.values()) == 2 * 200 - 2 * 4
    assert batched.ends_s["places"] < alone.ends_s["places"]
    queued = start_up(start, 200, 8, {"backlog": 50}).run()
    assert queued.dropped >= 150 and queued.most_waiting <= 50
    assert queued.ends_s["store"] > 1.0


def test_a_failure_of_the_script_does_not_pass_for_a_start(start: Any) -> None:
    broken = start_up(start, 4, 4)
    broken._met.requests[3]["address"].clear()  # so rank 0 waits for rank 3's address
    with pytest.raises(AssertionError, match="4 ranks never ended, the first is 0"):
        broken.run()


def test_steps_on_a_network_without_sharing_take_what_the_formulas_say(network: Any) -> None:
    latency = network.Latency(stack_s=1e-5, link_s=0.0, memory_s=5e-6)
    between = network.Between(network.FatTree(latency), 16, 1e9, 4e9)
    size = 1 << 20
    share = size * 15 / 16
    assert between.ring(size) == pytest.approx(30 * 1e-5 + 2 * share / 1e9 + share / 4e9)
    assert between.halving_doubling(size) == pytest.approx(8 * 1e-5 + 2 * share / 1e9 + share / 4e9)
    assert between.tree(8) == pytest.approx(8 * (1e-5 + 8 / 1e9) + 4 * 8 / 4e9)


def test_the_routes_of_a_dragonfly(network: Any) -> None:
    dragonfly = network.Dragonfly(network.Latency(0.0, 1.0, 0.0), hosts=3 * 128)
    source = np.zeros(4, np.int64)
    assert list(dragonfly.links(source, np.array([1, 8, 128, 383]))) == [2, 3, 5, 5]
    # All hosts of a router send to another router of the group over one link, and a group to another over 64.
    own = np.arange(3 * 128)
    assert set(dragonfly.sharing(own, own ^ 8)) == {8.0}
    assert set(dragonfly.sharing(own[:256], own[:256] ^ 128)) == {2.0}
    assert set(dragonfly.sharing(own, own ^ 1)) == {1.0}
    # A ring has one message between two routers.
    assert set(dragonfly.sharing(own, np.roll(own, -1))) == {1.0}


@pytest.mark.torch
@pytest.mark.jobs
def test_the_page_of_1024_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "simulate_scale.py"), "--ranks", "1024", "--beside", ""]
    subprocess.run([*command, "-o", str(tmp_path / "page.md")], check=True, capture_output=True, timeout=seconds(300))
    page = (tmp_path / "page.md").read_text()
    for heading in ("## Start-up", "## all_reduce", "## Beside the talk", "## What breaks next"):
        assert heading in page
    assert "| 1,024 | torch's | fat tree | 100 |" in page
