"""A job's packets over libfabric: sums as over UDP on the strict provider, authentication of hellos, and losses of
packets, providers, switches and workers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_in_network as by_udp
from fabrics import need_libfabric
from load import seconds
from ranks import RunningSwitch, private, run_ranks, run_threads, running_switch, values
from reductions import FLOAT_OPS, INTEGER_OPS

from netfold import Communicator, FileStore, Options
from netfold._native import engine, protocol
from netfold._native.dataplane import DataPlane
from netfold._native.transport import FabricPort
from netfold.communicator import PeerLost
from netfold.switch.status_table import fetch_status
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.data_path import fabric_payload

need_libfabric()

HERE = "127.0.0.1"
STRICT = "strict+tcp"
SOON_S = 4.0
IN_NETWORK = engine.ALGORITHMS["in_network"]
TOKEN, POOR_TOKEN = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSwitch]:
    """A switch with tokens, so that every packet is authenticated. It serves UDP as well."""
    folder = tmp_path_factory.mktemp("tokens")
    private(folder / "tokens", f"all {TOKEN}\npoor {POOR_TOKEN} memory=2M\n")
    private(folder / "token", TOKEN)
    private(folder / "poor", POOR_TOKEN)
    options = ("--threads", "2", "--metrics", f"{HERE}:0", "--token-file", str(folder / "tokens"))
    with running_switch("--fabric", STRICT, *options) as running:
        yield running


@pytest.fixture(scope="module")
def open_switch() -> Iterator[RunningSwitch]:
    with running_switch("--fabric", "tcp", "--fabric", "udp", "--fabric", "shm") as running:
        yield running


def join(
    rank: int,
    size: int,
    folder: str,
    endpoint: str,
    provider: str | None = STRICT,
    *,
    timeout_s: float = 20,
    **how: Any,
) -> Communicator:
    options = {
        "switch": endpoint,
        "probe": "off",
        "algorithm": "in_network",
        "transport": "tcp" if provider is None else f"fabric:{provider}",
        "interface": HERE,
        "rejoin_s": 0,
        **how,
    }
    return Communicator(
        FileStore(folder), rank, size, options=Options(**options), timeout_s=timeout_s, join_timeout_s=60
    )


def token_of(running: RunningSwitch, name: str = "token") -> str:
    """The workers' token file, beside the switch's own."""
    arguments = running.process.args
    assert isinstance(arguments, list)
    return str(Path(arguments[arguments.index("--token-file") + 1]).with_name(name))


def adds(group: Communicator, *counts: int) -> None:
    """Sums of integers that reveal a misplaced packet."""
    for count in counts:
        mine = np.arange(count, dtype=np.int64) * (group.rank + 1)
        group.all_reduce(mine)
        np.testing.assert_array_equal(mine, np.arange(count) * (group.size * (group.size + 1) // 2))


def every_operation(rank: int, size: int, folder: str, endpoint: str, token_file: str) -> set[int]:
    with join(rank, size, folder, endpoint, token_file=token_file) as group:
        for dtype in by_udp.DTYPES:
            for count in (1, 5003):
                by_udp.moves(group, dtype, count)
                by_udp.reduces(group, "sum", dtype, count)
            for op in FLOAT_OPS if dtype.startswith("float") else INTEGER_OPS:
                by_udp.reduces(group, op, dtype, 109)
            group.barrier()
        return {int(event["algorithm"]) for event in group.group.events()}


def test_every_operation_gives_the_bits_that_it_gives_over_udp(switch: RunningSwitch) -> None:
    found = values(run_threads(every_operation, 3, switch.endpoint, token_of(switch), timeout_s=60))
    assert found == [{IN_NETWORK}] * 3
    switch.wait_for(r"payload_bytes=4032 .*fabric=\"strict\+tcp;ofi_rxm\" authenticated=yes")


def both(rank: int, size: int, folder: str, endpoint: str, token_file: str) -> list[int]:
    twice = f"{endpoint},{endpoint}"
    with (
        join(rank, size, f"{folder}/fabric", twice, token_file=token_file) as over_fabric,
        join(rank, size, f"{folder}/udp", endpoint, None, token_file=token_file) as over_udp,
    ):
        other = threading.Thread(target=adds, args=(over_udp, 5, 50_000, 7))
        other.start()
        adds(over_fabric, 100_003, 5, 50_000)
        other.join()
        over_udp.barrier()
        return [over_fabric.group.traffic(number)["packets_sent"] for number in range(2)]  # type: ignore[index]


def test_jobs_over_udp_and_over_both_fabric_threads_run_side_by_side(switch: RunningSwitch) -> None:
    metrics = switch.wait_for(r"metrics at http://([\d.]+:\d+)/")[0]
    status = fetch_status(control_messages.parse_endpoint(metrics, what="metrics"))
    assert list(status["fabrics"]) == ["tcp;ofi_rxm"]
    found = values(run_threads(both, 2, switch.endpoint, token_of(switch)))
    assert all(count > 10 for counts in found for count in counts), found


def through_the_end(rank: int, size: int, folder: str, running: RunningSwitch, dies: bool, **how: Any) -> str:
    with join(rank, size, folder, running.endpoint, **how) as group:
        adds(group, 1, 1000)
        if dies:
            adds(group, 300_007)
            assert group.group.traffic()["retransmissions"] > 0  # type: ignore[index]
            if rank == 0:
                running.process.kill()
        began = time.monotonic()
        # Until all ranks know of the loss: they must make the same calls.
        know = np.zeros(1, np.int64)
        while know[0] < size:
            assert time.monotonic() - began < seconds(3 * SOON_S)
            know[0] = bool(group.group.recoveries[0].state)
            group.all_reduce(know)
        adds(group, 1000, 1)
        return group.group.recoveries[0].state


def test_lost_packets_are_retransmitted_and_a_dead_switch_costs_no_step() -> None:
    with running_switch("--fabric", "strict:drops=20+tcp") as running:
        for state in values(run_threads(through_the_end, 2, running, True)):
            assert "is gone" in state


def test_failing_sends_take_the_group_off_the_switch_with_the_providers_text(
    switch: RunningSwitch,
) -> None:
    def fails(rank: int, size: int, folder: str) -> str:
        how = {"provider": "strict:fails=80+tcp", "token_file": token_of(switch)}
        return through_the_end(rank, size, folder, switch, False, **how)

    states = values(run_threads(fails, 2))
    words = "provider strict+tcp;ofi_rxm: sending failed: this wire was told to fail"
    assert any(words in state for state in states), states


def over_others(rank: int, size: int, folder: str, endpoint: str) -> None:
    for provider in ("udp", "shm"):
        with join(rank, size, f"{folder}/{provider}", endpoint, provider) as group:
            adds(group, 1, 1000, 300_007)


def dies(rank: int, size: int, folder: str, endpoint: str) -> tuple[str, int, float]:
    with join(rank, size, folder, endpoint, "tcp") as group:
        adds(group, 1000, 100_003)
        through = Path(folder, "through")  # rank 0 may still receive the last sum
        if rank == 1:
            while not through.exists():
                time.sleep(0.005)
            os.kill(os.getpid(), signal.SIGKILL)
        through.touch()
        began = time.monotonic()
        with pytest.raises(PeerLost) as raised:
            adds(group, 500_000)
        return str(raised.value), raised.value.rank, time.monotonic() - began


def test_sums_are_correct_over_other_providers_and_a_dead_worker_is_named(open_switch: RunningSwitch) -> None:
    text, rank, took_s = values(run_ranks(dies, 2, open_switch.endpoint, dies=[1])[:1])[0]
    assert rank == 1, text
    assert took_s < seconds(SOON_S)
    # The switch has other fabrics. Ranks are threads: files of shm are removed when this process ends.
    values(run_threads(over_others, 2, open_switch.endpoint))


def test_a_switch_without_the_fabric_names_its_own_and_nothing_else_is_used(switch: RunningSwitch) -> None:
    token_file = token_of(switch)
    for outcome in run_threads(lambda *rank: join(*rank, switch.endpoint, "sockets", token_file=token_file), 2):
        assert outcome.error == "SwitchError"
        what = "refused: this switch takes packets over UDP, provider tcp;ofi_rxm, and not over provider sockets"
        assert f"{what}: start it with --fabric" in outcome.text


def test_buffers_for_a_fabric_are_memory_of_the_tenant(switch: RunningSwitch) -> None:
    poor = token_of(switch, "poor")
    for outcome in run_threads(lambda *rank: join(*rank, switch.endpoint, "tcp", token_file=poor), 2):
        assert outcome.error == "SwitchError"
    assert any(
        "take 6." in what and "2.0 MiB are free" in what for what in switch.wait_for("buffers for packets.*free")
    )
    with_less = {"token_file": poor, "window_bytes": 1 << 17}
    values(run_threads(lambda *rank: adds(join(*rank, switch.endpoint, "tcp", **with_less), 1000), 2))


def test_a_switch_is_not_started_for_a_provider_that_is_not_there() -> None:
    says = r"--fabric bogus: libfabric .* has no provider 'bogus'"
    with pytest.raises(AssertionError, match=says), running_switch("--fabric", "bogus"):
        pass


def test_a_tree_uses_the_fabric_on_every_link_and_a_parent_without_it_is_named() -> None:
    def add(rank: int, size: int, folder: str, endpoints: list[str], provider: str) -> None:
        with join(rank, size, folder, endpoints[rank], provider) as group:
            adds(group, 1, 60_007)

    with (
        running_switch("--fabric", "strict:seed=5+tcp") as root,
        running_switch("--fabric", "strict:drops=50+tcp", "--fabric", "udp", "--parent", root.endpoint) as leaf,
    ):
        ways = [leaf.endpoint, root.endpoint]
        values(run_threads(add, 2, ways, "tcp"))
        root.wait_for("workers=2 .*fabric=")
        found = run_threads(add, 2, ways, "udp")
        assert {outcome.error for outcome in found} == {"SwitchError"}
        assert any("over UDP, provider tcp;ofi_rxm, and not over provider udp;ofi_rxd" in one.text for one in found)


class Job:
    """A job with keys on a DataPlane, where the test plays one of two workers."""

    JOB, INCARNATION = 0x0A0B0C0D, 77

    def __init__(self) -> None:
        self.plane = DataPlane()
        self.nonces, self.proofs = ([secrets.randbits(64) for _ in range(2)] for _ in range(2))
        self.keys = [secrets.token_bytes(16) for _ in range(2)]
        self.place = self.plane.open_on_fabric(
            job=self.JOB,
            incarnation=self.INCARNATION,
            provider=STRICT,
            host=HERE,
            nonces=self.nonces,
            proofs=self.proofs,
            hello_keys=self.keys,
            packet_bytes=4096,
            in_flight_bytes=1 << 16,
        )

    def worker(self, *, tag: int | None = None, known: bool = True) -> FabricPort:
        """Worker 0's port. tag: sent instead of the assigned one."""
        port = FabricPort(STRICT, HERE, packet_bytes=4096, in_flight_bytes=1 << 16)
        if known:
            self.plane.set_worker_fabric_address(self.JOB, 0, port.address["name"], port.address["tag"])
        port.connect(self.place["name"], self.place["tags"][0] if tag is None else tag)
        return port

    def hello(
        self, port: FabricPort, *, key: bytes | None = None, nonce: int | None = None, payload: int | None = None
    ) -> int | None:
        found: int | None = port.hello(
            job=self.JOB,
            incarnation=self.INCARNATION,
            worker=0,
            nonce=self.nonces[0] if nonce is None else nonce,
            packet_bytes=(payload or fabric_payload(4096)) + protocol.HEADER_BYTES,
            key=key or self.keys[0],
            timeout_ns=150_000_000,
        )
        return found

    def drops(self) -> set[str]:
        return {reason for reason, count in self.plane.counters(self.JOB)["drops"].items() if count}

    def drops_hellos(self, reason: str, port: FabricPort, **how: Any) -> None:
        """The packets arrive, and no other counter grows."""
        before, deadline = self.drops(), time.monotonic() + 10
        was = self.plane.counters(self.JOB)["drops"][reason]
        while self.plane.counters(self.JOB)["drops"][reason] == was:
            assert self.hello(port, **how) is None
            assert time.monotonic() < deadline, self.plane.counters(self.JOB)
        assert self.drops() == before | {reason}


def test_a_hello_needs_the_workers_tag_key_and_nonce_and_returns_its_proof() -> None:
    job = Job()
    job.drops_hellos("source", job.worker(known=False))
    job.drops_hellos("source", job.worker(tag=job.place["tags"][1]))
    job.drops_hellos("source", job.worker(tag=secrets.randbits(48)))
    port = job.worker()
    job.drops_hellos("unauthenticated", port, key=job.keys[1])
    job.drops_hellos("worker", port, nonce=1 ^ job.nonces[0])
    assert job.plane.counters(job.JOB)["hellos"] == 0
    deadline = time.monotonic() + seconds(10)
    while (proof := job.hello(port)) is None:
        assert time.monotonic() < deadline
    assert proof == job.proofs[0]
    assert job.hello(port, payload=1 << 15) is None, "longer than a message"
    assert job.hello(port, payload=1024) == proof
    job.plane.close(job.JOB)


def test_a_worker_without_a_returned_hello_is_not_ready(open_switch: RunningSwitch) -> None:
    elsewhere = FabricPort("tcp", HERE, packet_bytes=4096, in_flight_bytes=4096).address
    place = {"provider": "tcp;ofi_rxm", "name": elsewhere["name"], "tag": 7}
    join = {
        "type": "join",
        "version": control_messages.VERSION,
        "job": "j",
        "name": "",
        "ranks": [0, 1],
        "timeout_s": 10,
    }

    def says(message: dict[str, Any]) -> socket.socket:
        stream = socket.create_connection(open_switch.address, 10)
        control_messages.send(stream, {**join, **message})
        return stream

    with says({"rank": 0, "fabric": place}) as first, says({"rank": 1, "port": 9}) as second:
        admitted, refused = control_messages.receive(first), control_messages.receive(second)
        assert admitted["type"] == "admitted", admitted
        assert "rank 1's packets come over UDP, others' over provider tcp;ofi_rxm" in refused["reason"]
        control_messages.send(first, {"type": "ready", "payload_bytes": 1024, "proof": admitted["nonce"]})
        open_switch.wait_for("ready without the number that its hello came back with")
    for wrong in ({"provider": ""}, {"name": b""}, {"name": bytes(513)}, {"tag": -1}):
        with says({"rank": 0, "fabric": {**place, **wrong}}) as stream:
            assert stream.recv(1) == b"", wrong
    with says({"rank": 0, "fabric": {**place, "name": bytes(16)}}) as stream:
        assert "rank 0 is nowhere on the fabric" in control_messages.receive(stream)["reason"]
