"""NETFOLD_SECURITY between ranks: an attacker who reads, changes, repeats and cuts, and ranks whose options differ."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interceptor import ThroughInterceptor
from ranks import Outcome, run_ranks, values

from netfold import Communicator, FileStore, Options
from netfold._native import auth
from netfold.errors import PeerLost

pytestmark = pytest.mark.native

COUNT = 300_000


def options_of(security: str, **others: Any) -> Options:
    return Options(transport="tcp", algorithm="all_reduce=ring", security=security, **others)


def _attacked(rank: int, size: int, folder: str, security: str, attack: str, reconnect_s: int) -> str:
    """The outcome of an all_reduce while its connection is attacked: right, wrong or the error."""
    store = ThroughInterceptor(folder)
    with Communicator(store, rank, size, options=options_of(security, reconnect_s=reconnect_s), timeout_s=20) as group:
        group.barrier()
        for turn in range(8):
            if rank == 0 and turn == 3:
                store.interceptor.attack = attack
            array = np.arange(COUNT, dtype=np.int64) * (rank + 1) + turn
            try:
                group.all_reduce(array)
            except PeerLost as error:
                if "a record came with a wrong tag" in str(error).partition("gave up")[0]:
                    assert auth.forged_records() == 1
                raise
            if not (array == np.arange(COUNT, dtype=np.int64) * (size * (size + 1) // 2) + size * turn).all():
                return "wrong"
        group.barrier()
        if rank == 0:
            assert store.interceptor.done.is_set()
    return "right"


def attacked(security: str, attack: str, reconnect_s: int = 10) -> list[Outcome]:
    return run_ranks(_attacked, 2, security, attack, reconnect_s, timeout_s=60)


def test_without_security_a_byte_changed_in_transit_changes_a_sum() -> None:
    # Why the other levels exist. A few bytes in a hundred thousand are a header's, whose change is an error.
    tries = [attacked("none", "flip")]
    while "wrong" not in [outcome.value for outcome in tries[-1]] and len(tries) < 3:
        tries.append(attacked("none", "flip"))
    assert "wrong" in [outcome.value for outcome in tries[-1]], tries


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
@pytest.mark.parametrize("attack", ["flip", "repeat", "leave out"])
@pytest.mark.parametrize("reconnect_s", [10, 0])
def test_bytes_changed_in_transit_raise_an_error(security: str, attack: str, reconnect_s: int) -> None:
    outcomes = attacked(security, attack, reconnect_s)
    assert [outcome.error for outcome in outcomes] == ["PeerLost", "PeerLost"], outcomes
    said = [outcome.text for outcome in outcomes if "a record came with a wrong tag" in outcome.text]
    assert said and all(f"NETFOLD_SECURITY={security}" in text for text in said), outcomes


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_a_connection_cut_in_transit_never_makes_a_wrong_sum(security: str) -> None:
    # Bytes that the attacker has acknowledged and not forwarded are lost: only an error is possible then.
    for outcome in attacked(security, "cut"):
        assert outcome.value == "right" or outcome.error == "PeerLost", outcome


PATTERN = b"no attacker may read these bytes"


def _captured(rank: int, size: int, folder: str, security: str) -> bytes:
    store = ThroughInterceptor(folder)
    with Communicator(store, rank, size, options=options_of(security), timeout_s=30) as group:
        tensor = np.frombuffer(PATTERN * 1000, np.uint8).copy()
        group.broadcast(tensor, 0)
        assert tensor.tobytes() == PATTERN * 1000
        if rank == 0:
            group.send(tensor, 1)
        else:
            got = np.zeros_like(tensor)
            group.receive(got, 0)
            assert (got == tensor).all()
        group.barrier()
    return b"".join(store.interceptor.captured) if rank == 0 else b""


@pytest.mark.parametrize("security", ["none", "authenticate", "encrypt"])
def test_a_man_in_the_middle_reads_tensors_and_messages_unless_encrypted(security: str) -> None:
    captured = values(run_ranks(_captured, 2, security))[0]
    assert len(captured) > 2 * 1000 * len(PATTERN)
    # The messages of the start-up, too.
    for known in (PATTERN, b"127.0.0.1:"):
        assert (known in captured) == (security != "encrypt"), known


def _modes(rank: int, size: int, folder: str, security: str) -> set[int]:
    """The modes of a file store's folder and of its files that have content."""
    os.umask(0o022)
    store = Path(folder) / "store"
    with Communicator(FileStore(store), rank, size, options=options_of(security)) as group:
        group.barrier()
        paths = [store, *(each for each in store.iterdir() if each.stat().st_size > 0)]
        modes = {path.stat().st_mode & 0o777 for path in paths}
        assert len(paths) > size
        group.barrier()
        return modes


@pytest.mark.parametrize("security", ["none", "encrypt"])
def test_other_users_cannot_read_the_secret_in_a_file_store(security: str) -> None:
    assert values(run_ranks(_modes, 2, security)) == [{0o700, 0o600}] * 2


def _apart(rank: int, size: int, folder: str, securities: tuple[str, ...]) -> None:
    with Communicator(
        FileStore(folder), rank, size, options=Options(security=securities[rank]), join_timeout_s=10
    ) as group:
        group.barrier()


def test_ranks_with_different_security_refuse_each_other() -> None:
    for securities in (("none", "authenticate"), ("encrypt", "authenticate")):
        for outcome in run_ranks(_apart, 2, securities):
            assert outcome.error == "RendezvousError", outcome
            assert (
                f"rank 1 has NETFOLD_SECURITY={securities[1]}, rank 0 has NETFOLD_SECURITY={securities[0]}"
                in outcome.text
            )


def _with_files(rank: int, size: int, folder: str, texts: tuple[str | None, ...]) -> float:
    path = None
    if texts[rank] is not None:
        path = Path(folder, f"secret-{rank}")
        path.touch(mode=0o600)
        path.write_text(texts[rank] or "")
    options = options_of("encrypt", secret_file=None if path is None else str(path))
    with Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=10) as group:
        array = np.full(3, float(rank + 1))
        group.all_reduce(array)
        return float(array[0])


def test_a_secret_file_is_part_of_all_keys() -> None:
    assert values(run_ranks(_with_files, 2, ("s" * 40, "s" * 40))) == [3.0, 3.0]
    for texts in (("s" * 40, "t" * 40), ("s" * 40, None), (None, "t" * 40)):
        for outcome in run_ranks(_with_files, 2, texts):
            assert outcome.error == "RendezvousError", outcome
            assert "rank 1 has another secret than rank 0" in outcome.text
    for outcome in run_ranks(_with_files, 1, ("too short",)):
        assert outcome.error == "ValueError" and "NETFOLD_SECRET_FILE=" in outcome.text, outcome
        assert "too short" not in re.sub(r"File .*", "", outcome.text.split("\n")[0])


def _without_libcrypto(rank: int, size: int, folder: str) -> None:
    from netfold.bootstrap import security

    if rank == 1:

        class Missing:
            unavailable_reason = staticmethod(lambda: "OpenSSL's libcrypto.so.3 cannot be opened (no such file)")

        security.auth = Missing
    options = options_of("encrypt")
    with Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=10) as group:
        group.barrier()


def test_a_host_without_libcrypto_refuses_on_all_ranks() -> None:
    for outcome in run_ranks(_without_libcrypto, 2):
        assert "NETFOLD_SECURITY=encrypt needs OpenSSL 3's libcrypto on every host of the job" in outcome.text, outcome
        assert outcome.error in ("ValueError", "RendezvousError")


@pytest.mark.parametrize("transport", ["fabric:tcp", "fabric:tcp,memory"])
def test_security_over_a_fabric_is_refused(transport: str) -> None:
    for outcome in run_ranks(_over, 2, transport):
        assert outcome.error in ("ValueError", "RendezvousError"), outcome
        assert f"NETFOLD_SECURITY=authenticate and NETFOLD_TRANSPORT={transport} exclude each other" in outcome.text


def _over(rank: int, size: int, folder: str, transport: str) -> None:
    options = Options(transport=transport, security="authenticate")
    Communicator(FileStore(folder), rank, size, options=options, join_timeout_s=10).close()


def _all_shapes(rank: int, size: int, folder: str, security: str, interface: str | None) -> int:
    """Operations of many sizes, messages in both directions at once, and an end while bytes are in flight."""
    options = Options(transport="tcp", security=security, interface=interface)
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=60) as group:
        for count in (1, 7, 1000, 16_384, 65_537, 1_000_003):
            array = np.arange(count, dtype=np.int64) + rank
            group.all_reduce(array)
            assert (array == np.arange(count, dtype=np.int64) * size + size * (size - 1) // 2).all()
            everything = np.zeros(size * count, np.int32)
            group.all_gather(np.full(count, rank, np.int32), everything)
            assert (everything.reshape(size, count) == np.arange(size)[:, None]).all()
            got = np.zeros(count, np.int64)
            sent = group.send(np.arange(count, dtype=np.int64) + rank, (rank + 1) % size, asynchronous=True)
            group.receive(got, (rank - 1) % size)
            sent.wait()
            assert (got == np.arange(count, dtype=np.int64) + (rank - 1) % size).all()
        # The first rank to finish leaves: none of the bytes that it sent may be lost.
        array = np.arange(4_000_000, dtype=np.int64) + rank
        group.broadcast(array, 0)
        assert (array == np.arange(4_000_000, dtype=np.int64)).all()
    return os.getpid()


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
@pytest.mark.parametrize("interface", [None, "127.0.0.1,127.0.0.2"])
def test_all_operations_go_through_records_of_every_length(security: str, interface: str | None) -> None:
    assert len(set(values(run_ranks(_all_shapes, 3, security, interface, timeout_s=90)))) == 3
