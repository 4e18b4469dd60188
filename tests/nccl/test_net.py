"""The plugin's network, as NCCL calls it: messages between processes by every version of the interface."""

from __future__ import annotations

import numpy as np
import pytest
from nccl.loader import MAX_REQUESTS, VERSIONS, Plugin
from ranks import run_ranks, values

from netfold import FileStore

SIZES = (0, 1, 8, 4096, 128 << 10, (128 << 10) + 1, 512 << 10, 3_000_017)
ENV = {"NETFOLD_INTERFACE": "lo"}


def pattern(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def exchange(plugin: Plugin, rank: int, folder: str):
    """A comm in each direction between ranks 0 and 1: to send with, to receive with."""
    store = FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"handle/{rank}", handle)
    to = plugin.connect(store.get(f"handle/{1 - rank}", 30))
    back = plugin.accept(listener)
    plugin.close_listen(listener)
    return to, back


def messages_of_many_sizes(rank: int, size: int, folder: str, version: int) -> None:
    plugin = Plugin(version)
    to, back = exchange(plugin, rank, folder)
    for round_, bytes_ in enumerate(SIZES):
        ours, into = pattern(bytes_, 2 * round_ + rank), np.zeros(bytes_ + 100, np.uint8)
        received = plugin.receive(back, [into], [5])
        sent = plugin.send(to, ours, 5)
        sizes, _ = plugin.wait(received, sent)
        assert sizes == [bytes_], "the size is that of the message"
        assert np.array_equal(into[:bytes_], pattern(bytes_, 2 * round_ + 1 - rank))
        assert not into[bytes_:].any()
    plugin.close(to, back)


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_arrive_by_every_version(version: int) -> None:
    values(run_ranks(messages_of_many_sizes, 2, version, env=ENV))


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
@pytest.mark.parametrize("streams", ["1", "3"])
def test_messages_arrive_over_several_streams_and_protected(security: str, streams: str) -> None:
    env = {**ENV, "NETFOLD_SECURITY": security, "NETFOLD_NCCL_STREAMS": streams}
    values(run_ranks(messages_of_many_sizes, 2, 12, env=env))
