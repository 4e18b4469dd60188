"""A fabric (libfabric) against TCP and UDP, and what registered memory brings, between two processes of one machine:

    .venv/bin/python lab/bench/fabric.py fabric            # streams against plain libfabric, rings against TCP's
    .venv/bin/python lab/bench/fabric.py fabric-switch     # in-network all_reduce over a fabric against UDP
    .venv/bin/python lab/bench/fabric.py registrations     # RMA and the registration cache, for the gradients of EDSR

Sides take turns in every round. A ratio is the median of the rounds' ratios, with 5% .. 95%.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import driver
import numpy as np
from driver import Place, Rank, Ranks, cell, take_turns

from netfold._native import fabric as native
from netfold_lab.bench.spread import paired_ratios

HERE = Path(__file__).parent
ADDRESS = "127.0.0.1"
UDP = "udp"
# Bytes, and messages there and back a round.
PING_PONGS = ((64, 100), (1024, 100), (16 << 10, 60), (64 << 10, 60), (1 << 20, 20), (16 << 20, 3), (64 << 20, 1))
# Bytes, and calls per round.
RINGS = ((64 << 10, 200), (1 << 20, 40), (16 << 20, 4), (64 << 20, 1))
SUMS = ((4, 100), (64 << 10, 30), (1 << 20, 8), (16 << 20, 1))
SWITCH_PROVIDERS = ("tcp;ofi_rxm", "udp;ofi_rxd", "shm")
CACHE_PROVIDERS = ("tcp;ofi_rxm", "net")
_RMA = {"NETFOLD_ALGORITHM": "ring", "NETFOLD_INTERFACE": ADDRESS, "NETFOLD_PROBE": "off"}
# The experiment of MVAPICH2-GDR's talk (default, with a registration cache, with direct paths), on this machine.
CONFIGURATIONS = {
    "segments, copied (default of the talk)": {**_RMA, "NETFOLD_RMA_MIN_BYTES": "0"},
    "direct, registered by each operation": {**_RMA, "NETFOLD_REGISTRATION_CACHE_BYTES": "0"},
    "direct, with the registration cache": _RMA,
}
# Before these steps DDP's buckets are not in their places.
WARM_STEPS = 4
BUCKET_MB = 64


def add(me: Rank, sides: dict[str, dict[str, Any]]) -> None:
    """A rank with a group for each side. An order: the seconds of a call, the mean of some."""
    with contextlib.ExitStack() as stack:
        groups = {
            side: stack.enter_context(
                me.communicator(str(number), timeout_s=20, probe="off", interface=ADDRESS, **options)
            )
            for number, (side, options) in enumerate(sides.items())
        }

        def all_reduce(side: str, size: int, calls: int) -> float:
            group = groups[side]
            data = np.full(size // 4, me.rank + 1.0, np.float32)
            group.all_reduce(data)
            assert (data == me.size * (me.size + 1) / 2).all(), f"a wrong sum over {side}"
            seconds = float(np.mean(me.time(lambda: group.all_reduce(data, op="max"), calls)))
            if group.group.recoveries:
                assert not group.group.recoveries[0].state, group.group.recoveries[0].state
            return seconds

        me.serve(all_reduce)


def fabric(provider: str = "tcp;ofi_rxm", rounds: int = 15) -> str:
    """The fabric against what it goes over."""
    streams = []
    for size, pairs in ping_pongs(provider, rounds).items():
        piped, plain = zip(*pairs, strict=True)
        us = [f"{np.median(of):.1f}" for of in (piped, plain)]
        streams.append([f"{size:,} bytes", *us, cell(paired_ratios(plain, piped))])
    rows = []
    sides = {transport: {"transport": transport, "algorithm": "ring"} for transport in (f"fabric:{provider}", "tcp")}
    with driver.ranks_at(Place(2), add, sides) as ranks:
        for size, calls in RINGS:
            ours, tcp = seconds_of(ranks, list(sides), size, calls, rounds).values()
            ms = [f"{np.median(of) * 1e3:.2f}" for of in (ours, tcp)]
            rows.append([f"{size:,} bytes", *ms, cell(paired_ratios(tcp, ours))])
    return f"""Provider {provider}, libfabric {native.version()}. The ping-pongs are those of fabric_ping_pong.cpp. The
plain one has the form of libfabric's own fi_pingpong, which gives means; means are of no use where other processes take
the cores.

{driver.table("ping-pong, one way | stream us | plain libfabric us | speed against plain libfabric", streams)}

{driver.table("all_reduce by a ring, 2 ranks | fabric ms | tcp ms | speed against tcp", rows)}"""


def seconds_of(ranks: Ranks, sides: list[str], size: int, calls: int, rounds: int) -> dict[str, list[float]]:
    return take_turns(sides, rounds, lambda side: max(ranks.ask(side, size, calls)))


def ping_pongs(provider: str, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """By bytes: microseconds one way through a stream and by plain calls, for each round."""
    transport = HERE.parent / "core" / "native" / "transport"
    sources = [path for path in (transport / "fabric").glob("*.cpp") if path.name != "libfabric_stub.cpp"]
    sources += [HERE / "fabric_ping_pong.cpp", transport / "socket.cpp"]
    includes = [transport.parent / folder / "include" for folder in ("transport", "auth")]
    found: dict[int, list[tuple[float, float]]] = {}
    for size, stream_us, plain_us in driver.run_cpp(sources, includes, provider, rounds, *itertools.chain(*PING_PONGS)):
        found.setdefault(int(size), []).append((float(stream_us), float(plain_us)))
    return found


def fabric_switch(rounds: int = 15) -> str:
    """In-network aggregation over a fabric, beside UDP."""
    sides = {UDP: "tcp", **{provider: f"fabric:{provider}" for provider in SWITCH_PROVIDERS}}
    options = {
        side: {"transport": transport, "algorithm": "in_network", "rejoin_s": 0} for side, transport in sides.items()
    }
    fabrics = tuple(word for provider in SWITCH_PROVIDERS for word in ("--fabric", provider))
    rows = []
    with driver.ranks_at(Place(2, switch=True, switch_options=fabrics), add, options) as ranks:
        for size, calls in SUMS:
            found = seconds_of(ranks, list(sides), size, calls, rounds)
            row = [f"{size:,}", f"{np.median(found[UDP]) * 1e3:.3f}"]
            for provider in SWITCH_PROVIDERS:
                row += [f"{np.median(found[provider]) * 1e3:.3f}", cell(paired_ratios(found[UDP], found[provider]))]
            rows.append(row)
    head = " | ".join(f"{provider} ms | its speed against UDP" for provider in SWITCH_PROVIDERS)
    return f"""all_reduce of f32 through a switch on the same machine, libfabric {native.version()}.

{driver.table(f"bytes | UDP ms | {head}", rows)}"""


def train(me: Rank) -> None:
    """A rank that trains EDSR. An order: seconds in all_reduce of each step, by netfold's records; hits and misses."""
    import os

    import torch
    import torch.distributed as dist

    from netfold.communicator.group import KINDS
    from netfold_train.zoo.models.edsr import large

    torch.manual_seed(0)
    network = large().module
    # So small that computing does not hide what is measured.
    patch = torch.rand(1, 3, 6, 6)

    def run(environment: dict[str, str], steps: int) -> tuple[list[float], int, int]:
        for name in [name for name in os.environ if name.startswith("NETFOLD_")]:
            del os.environ[name]
        os.environ.update(environment)
        with me.torch_group():
            ddp = torch.nn.parallel.DistributedDataParallel(
                network, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
            )
            began_ns = []
            for _ in range(steps):
                began_ns.append(time.monotonic_ns())
                ddp.zero_grad(set_to_none=False)
                ddp(patch).square().mean().backward()
            backend: Any = dist.group.WORLD
            records = backend.netfold.events()
            records = records[(records["operation"] == KINDS["all_reduce"]) & (records["bytes"] > 1 << 20)]
            spent = records["finished_ns"] - records["started_ns"]
            by_step = np.searchsorted(began_ns, records["queued_ns"]) - 1
            seconds = [float(spent[by_step == step].sum()) / 1e9 for step in range(steps)]
            hits, misses = (int(records[f"registration_{what}"].sum()) for what in ("hits", "misses"))
            del ddp
            return seconds, hits, misses

    me.serve(run)


def registering_us(provider: str, size: int, times: int) -> float:
    """Microseconds to register so many bytes: the time to post a receive into memory that no registration covers."""
    port, other = (native.StreamMux(provider, [ADDRESS]) for _ in range(2))
    stream, peer = port.open(native.make_doorbell()), other.open(native.make_doorbell())
    stream.connect(peer.offer)
    peer.connect(stream.offer)
    memory = np.ones(size, np.uint8)
    seconds = []
    for name in range(times):
        began = time.perf_counter()
        assert stream.post_receive(name, memory.ctypes.data, size)
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)) * 1e6


def registrations(rounds: int = 5, steps: int = 12) -> str:
    """Registered memory and the direct path, for the gradients of EDSR."""
    with driver.ranks_at(Place(2), train, deadline_s=7200) as ranks:
        rows = list(cache_rows(ranks, rounds, steps))
        attached, later = [], []
        for _ in range(rounds):
            answers = ranks.ask({"NETFOLD_PROBE": "off", "NETFOLD_SINGLE_COPY": "off"}, steps)
            seconds = driver.slowest(answer[0] for answer in answers)
            attached.append(seconds[WARM_STEPS - 1])
            later.append(float(np.median(seconds[WARM_STEPS:])))
    costs = [
        [f"registering {BUCKET_MB} MB with {each}", f"{registering_us(each, BUCKET_MB << 20, times=15):.1f} us"]
        for each in CACHE_PROVIDERS
    ]
    first_ms, later_ms = (np.median(of) * 1e3 for of in (attached, later))
    costs.append(
        [
            "shared memory of the host: all_reduce of a step's buckets when they are attached, against a later step",
            f"{first_ms:.1f} ms against {later_ms:.1f} ms, {cell(paired_ratios(attached, later))}",
        ]
    )
    head = "provider | configuration | ms in all_reduce a step | time against the first configuration | hits"
    return f"""EDSR (32 blocks of 256 features), 163 MB of gradients in buckets of {BUCKET_MB} MB as Horovod's, under
DDP; libfabric {native.version()}. The time in all_reduce is by netfold's records, once DDP has laid out its buckets.

{driver.table(head, rows)}

A bucket misses until it has come from the same address in three steps; from then on every use hits.

{driver.table("what is cached | costs", costs)}"""


def cache_rows(ranks: Ranks, rounds: int, steps: int) -> Iterator[list[str]]:
    for provider in CACHE_PROVIDERS:

        def run(name: str, provider: str = provider) -> tuple[float, int, int]:
            answers = ranks.ask({**CONFIGURATIONS[name], "NETFOLD_TRANSPORT": f"fabric:{provider}"}, steps)
            seconds = driver.slowest(answer[0] for answer in answers)
            return float(np.median(seconds[WARM_STEPS:])), *answers[0][1:]

        found = take_turns(list(CONFIGURATIONS), rounds, run, warmups=0)
        first = [seconds for seconds, _, _ in next(iter(found.values()))]
        for name, runs in found.items():
            seconds, hits, misses = (list(each) for each in zip(*runs, strict=True))
            uses = sum(hits) + sum(misses)
            hit_ratio = f"{100 * sum(hits) / uses:.0f}%" if uses else "-"
            yield [provider, name, f"{np.median(seconds) * 1e3:.1f}", cell(paired_ratios(seconds, first)), hit_ratio]


if __name__ == "__main__":
    driver.run(fabric, fabric_switch, registrations)
