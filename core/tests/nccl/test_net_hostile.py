"""A peer of the job that is faulty or hostile, over a fabric whose adapter reaches memory of GPUs.

Nothing that it sends lets this process touch memory of a GPU by its CPU, which would end the process. Its comm fails,
and other comms go on.
"""

from __future__ import annotations

import re
from ctypes import c_void_p
from pathlib import Path

import numpy as np
import pytest
from nccl.hostile import Hostile, HostileLibrary
from nccl.loader import CUDA, REMOTE_ERROR, NcclError, Plugin
from nccl.test_net import exchange, pattern, wait_for_peer
from nccl.test_net_cuda import Gpu
from nccl.test_net_direct import DIRECT, Memory
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("libfabric")]

# Two chunks, as the stand-in for the provider writes at most 512 KiB at once.
TWO_CHUNKS = 1 << 20


def moves(gpu: Gpu, plugin: Plugin, to: c_void_p, back: c_void_p, rank: int) -> None:
    ours, into = (Memory(gpu, plugin, comm, CUDA, 700_000) for comm in (to, back))
    ours.values[:] = pattern(700_000, rank)
    received = plugin.receive(back, [into.data], registrations=[into.registration])
    plugin.wait(received, plugin.send(to, ours.data, registration=ours.registration))
    assert np.array_equal(into.values, pattern(700_000, 1 - rank))


def meets(rank: int, size: int, folder: str, driver: str, hostile_library: str, what: Hostile, bytes_: int) -> str:
    """Rank 0 is hostile in one message to rank 1, or from it. Returns rank 1's error."""
    hostile = HostileLibrary(hostile_library) if rank == 0 else None
    gpu, plugin, store = Gpu(driver), Plugin(), FileStore(folder)
    to, back = exchange(plugin, rank, folder)
    to_other, from_other = exchange(plugin, rank, f"{folder}/others")
    moves(gpu, plugin, to, back, rank)
    store.set(f"ready/{rank}", b"")
    store.get(f"ready/{1 - rank}", 60)
    is_sender = rank == (1 if what is Hostile.REFUSED else 0)
    memory = Memory(gpu, plugin, to if is_sender else back, CUDA, bytes_)
    said, text = Path(folder) / "failed", ""
    end = np.zeros(1, np.uint8)
    ended = plugin.receive(from_other, [end], [9]) if hostile is not None else None
    if hostile is not None:
        hostile.becomes(what)
    if is_sender:
        request = plugin.send(to, memory.data, registration=memory.registration)
    else:
        request = plugin.receive(back, [memory.data], registrations=[memory.registration])
    if hostile is None:
        with pytest.raises(NcclError) as failed:
            plugin.wait(request)
        assert failed.value.code == REMOTE_ERROR
        text = str(failed.value)
        said.touch()
        plugin.wait(plugin.send(to_other, end, 9))
    else:
        while not said.exists():  # its provider moves only in calls, as every rank's
            assert ended is not None and plugin.test(ended) is None
            try:
                request = None if request is None or plugin.test(request) else request
            except NcclError:
                request = None
        assert hostile.changed
        hostile.becomes(Hostile.HONEST)
        plugin.wait(ended)
    moves(gpu, plugin, to_other, from_other, rank)
    wait_for_peer(rank, folder)
    plugin.close(to, back)
    plugin.close(to_other, from_other)
    return text


@pytest.mark.parametrize(
    ("what", "bytes_", "words"),
    [
        # Before its accept or after, as the ranks' turns come.
        (
            Hostile.LONGER,
            TWO_CHUNKS,
            "rank 0 broke the point-to-point protocol: it sent "
            "(32 bytes for memory of a GPU|values of a message that was not accepted)",
        ),
        (
            Hostile.TWICE,
            TWO_CHUNKS,
            "rank 0 broke the stream's protocol: it named memory that it was not granted",
        ),
        (Hostile.FOREIGN, TWO_CHUNKS, "rank 0 broke the stream's protocol: it named memory that it was not granted"),
        (Hostile.EAGER, 4096, "rank 1 receives bytes that were not announced into memory of a GPU"),
        (
            Hostile.REFUSED,
            TWO_CHUNKS,
            "rank 1 broke the point-to-point protocol: it sent an accept of",
        ),
    ],
)
def test_a_hostile_peer_fails_its_comm_alone(
    driver: str, hostile_library: str, what: Hostile, bytes_: int, words: str
) -> None:
    _, said = values(run_ranks(meets, 2, driver, hostile_library, what, bytes_, env=DIRECT, timeout_s=60))
    assert re.search(words, said), said
