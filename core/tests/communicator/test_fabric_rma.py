"""RMA over the fabric: memory exported to a provider is its owner's again before a failure is raised."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any

import numpy as np
import pytest
from load import seconds
from ranks import run_ranks, run_threads, values
from test_fabric import LOOPBACK, SOON_S, join

from netfold import Communicator
from netfold._native import fabric
from netfold.bootstrap.fabric import port_of

PROVIDERS = ("tcp", "net")
# Takes tenths of a second over loopback: a rank that stops or dies after some hundredths is in the middle.
COUNT = 16 << 20
MIDDLE_S = 0.06


def ring(rank: int, size: int, folder: str, provider: str, **options: Any) -> Communicator:
    return join(rank, size, folder, provider, algorithm="ring", **options)


def stop_for_a_while() -> None:
    """Stop this process after a short delay, by another process that is not stopped."""
    me = os.getpid()
    subprocess.Popen(["/bin/sh", "-c", f"sleep {MIDDLE_S}; kill -STOP {me}; sleep 0.7; kill -CONT {me}"])


def is_left_alone(mine: np.ndarray, port: Any, until: float) -> bool:
    """Whether an owner's writes to returned memory stay, whatever data comes later."""
    mine[:] = 7
    while time.monotonic() < until:
        port.progress()
    return bool(np.all(mine == 7))


def vanishes(rank: int, size: int, folder: str, provider: str, fault: str) -> list[Any]:
    found: list[Any] = []
    group = ring(rank, size, f"{folder}/a", provider)
    port = port_of(provider, LOOPBACK)
    mine = np.ones(COUNT, np.int64)
    group.barrier()
    if rank == 1 and fault == "dies":
        threading.Timer(MIDDLE_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 1 and fault == "stops":
        stop_for_a_while()
    began = time.monotonic()
    try:
        for _ in range(100):
            if fault == "dies":
                group.all_reduce(mine)
            elif rank == 0:
                group.receive(mine, 1, timeout_s=0.3)
            else:
                group.send(mine, 0)
        found.append("nothing went wrong")
    except Exception as error:
        found.append(f"{type(error).__name__} {getattr(error, 'rank', None)}")
    assert time.monotonic() - began < seconds(SOON_S)
    found.append(port.is_open)
    if rank == 0:
        found.append(is_left_alone(mine, port, began + (0.3 if fault == "dies" else 1.1)))
    group.close()
    return found


def failed(provider: str, fault: str, said: str) -> bool:
    """Whether the port of the rank that is left is open afterwards."""
    found = run_ranks(vanishes, 2, provider, fault, dies=[1])
    assert not found[0].error, found[0]
    text, is_open, is_kept = found[0].value
    assert text == said
    assert is_kept
    return bool(is_open)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_memory_granted_to_a_rank_that_dies_is_its_owners_again_when_the_failure_is_raised(provider: str) -> None:
    failed(provider, "dies", "PeerLost 1")  # it may have died without a grant


@pytest.mark.parametrize("provider", PROVIDERS)
def test_memory_granted_to_a_rank_that_stops_is_its_owners_again_when_the_failure_is_raised(provider: str) -> None:
    """The rank may still write to memory that it was granted, unless the endpoint is closed.

    It stops at some moment: between two messages it has no grant, and the endpoint may stay open.
    """
    tries = 5
    assert not all(failed(provider, "stops", "CollectiveTimeout 1") for _ in range(tries))


def waits_elsewhere(rank: int, size: int, folder: str, provider: str) -> list[Any]:
    a, b = (ring(rank, size, f"{folder}/{name}", provider) for name in "ab")
    port = port_of(provider, LOOPBACK)
    found: list[Any] = []
    mine = np.zeros(300_000, np.int64)
    a.barrier()
    if rank == 0:
        try:
            a.all_reduce(mine, timeout_s=0.2)
        except Exception as error:
            found.append(type(error).__name__)
    b.all_reduce(np.ones(300_000))
    found += [port.is_open, np.all(mine == 0)]
    b.barrier()
    for group in (a, b):
        group.close()
    return [*found, port.counters["grants_cancelled"]]


@pytest.mark.parametrize("provider", ["tcp", "strict:seed=3+tcp"])
def test_living_ranks_return_grants_and_other_groups_go_on(provider: str) -> None:
    first, second = values(run_ranks(waits_elsewhere, 2, provider))
    assert first[0] == "CollectiveTimeout"
    assert first[1] and second[0], "is open"
    assert first[2], "was written to"
    assert first[-1] > 0


def test_a_new_group_opens_a_new_endpoint_where_the_last_had_to_be_closed() -> None:
    values(run_threads(closes_and_comes_again, 2))


def closes_and_comes_again(rank: int, size: int, folder: str) -> None:
    with ring(rank, size, f"{folder}/a", "net") as group:
        group.all_reduce(np.ones(300_000))
        before = port_of("net", LOOPBACK)
        group.barrier()
    before.force_close("the test closes it")
    with ring(rank, size, f"{folder}/b", "net") as group:
        assert port_of("net", LOOPBACK) is not before
        mine = np.ones(300_000)
        group.all_reduce(mine)
        np.testing.assert_array_equal(mine, np.full(300_000, 2.0))


def says_why_not(rank: int, size: int, folder: str) -> str:
    with ring(rank, size, folder, "net", interface="127.0.0.1,127.0.0.2") as group:
        return group.group.why("all_reduce", 1 << 24)


def test_a_group_without_rma_says_why() -> None:
    found = values(run_threads(says_why_not, 2))
    assert all("segments, which are copied: there are several rails" in said for said in found), found
    port = fabric.StreamMux("tcp", [*LOOPBACK, "127.0.0.2"])
    assert "several rails" in port.why_not_rma
    port = fabric.StreamMux("tcp", list(LOOPBACK))
    assert port.why_not_rma == ""
    port.set(rma_min_bytes=0, registration_cache_entries=0, registration_cache_bytes=0)
    assert "NETFOLD_RMA_MIN_BYTES" in port.why_not_rma
