"""The ranks that share memory, found by trying."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from load import settles
from ranks import run_ranks, run_threads, values

from netfold import Communicator, FileStore, Options
from netfold.bootstrap import shm_discovery as discovery
from netfold.bootstrap.shm_discovery import discover_nodes
from netfold.communicator import RendezvousError
from netfold.switch_protocol import control_messages

pytestmark = pytest.mark.native


def nodes(rank: int, size: int, folder: str, apart: set[int]) -> tuple[tuple[int, ...], str]:
    """The nodes found, and how all_reduce runs."""
    options = Options(transport="tcp" if rank in apart else "auto")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = np.full(100_000, rank + 1.0)
        group.all_reduce(buffer)
        assert (buffer == size * (size + 1) / 2).all()
        return group.group.nodes, group.group.why("all_reduce", buffer.nbytes)


@pytest.mark.parametrize(
    ("size", "apart", "expected"),
    [
        (1, set(), (0,)),
        (4, set(), (0, 0, 0, 0)),
        (4, {0}, (0, 1, 1, 1)),
        (4, {1, 2}, (0, 1, 2, 0)),
        (3, {0, 1, 2}, (0, 1, 2)),
    ],
)
def test_ranks_that_reach_each_others_memory_agree_on_their_node(
    size: int, apart: set[int], expected: tuple[int, ...]
) -> None:
    for found, why in values(run_threads(nodes, size, apart)):
        assert found == expected
        if size > 1:
            assert why.startswith("shared_memory") == (not apart), why


def a_long_name(rank: int, size: int, folder: str) -> tuple[int, ...]:
    long = Path(folder, *["a-folder-with-a-rather-long-name"] * 6)
    long.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = str(long)
    tempfile.tempdir = None
    with Communicator(FileStore(folder), rank, size, timeout_s=20, join_timeout_s=20) as group:
        group.barrier()
        assert not list(long.iterdir())  # nothing is left behind
        return group.group.nodes


def test_a_folder_name_too_long_for_a_socket_works() -> None:
    assert values(run_ranks(a_long_name, 2)) == [(0, 0)] * 2


def open_descriptors() -> list[str]:
    """The target of each descriptor of this process."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return found


def count_of_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:netfold (deleted)")


def test_a_closed_group_leaves_no_descriptor_mapping_or_folder() -> None:
    values(run_threads(nodes, 3, set()))  # resources that are made once a process
    descriptors, mappings = open_descriptors(), count_of_mappings()
    for _ in range(3):
        values(run_threads(nodes, 3, set()))

    def is_gone() -> bool:
        gc.collect()
        return len(open_descriptors()) <= len(descriptors) and count_of_mappings() <= mappings

    # Tests before this one may have left connections that close a moment later.
    assert settles(is_gone, 20), (sorted(open_descriptors()), sorted(descriptors), count_of_mappings(), mappings)
    assert threading.active_count() < 10


@pytest.mark.parametrize(("rank", "steps"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)])
def test_a_rank_that_leaves_during_the_exchange_is_named(rank: int, steps: int) -> None:
    """The other rank sends the first `steps` messages, and leaves."""
    peer = 1 - rank
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            if steps > 0:
                control_messages.send(theirs, {"type": "node", "path": "/nonexistent", "token": bytes(16)})
            if steps > 1 and peer > rank:
                theirs.sendall(b"\1" if steps == 2 else b"\0")  # whether it will connect
        with pytest.raises(RendezvousError, match=f"rank {rank}: rank {peer} (left|did not answer in time)") as found:
            discover_nodes(rank, 2, [None, mine] if peer else [mine, None], enabled=True, deadline=time.monotonic() + 1)
    assert found.value.rank == peer


def test_a_silent_unauthenticated_peer_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(discovery, "_GREETING_S", 1.0)
    streams = socket.socketpair()
    found: dict[int, tuple[int, ...]] = {}

    def find(rank: int) -> None:
        sockets = [None, streams[0]] if rank == 0 else [streams[1], None]
        found[rank], node = discover_nodes(rank, 2, sockets, enabled=True, deadline=time.monotonic() + 60)
        assert node is not None
        node.close()

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(2)]
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with streams[0], streams[1], silent:
        threads[0].start()

        def connects() -> bool:
            with contextlib.suppress(OSError):
                silent.connect(str(next(tmp_path.glob("*/socket"), "")))
                return True
            return False

        assert settles(connects)
        threads[1].start()
        for thread in threads:
            thread.join()
    assert found == {0: (0, 0), 1: (0, 0)}
