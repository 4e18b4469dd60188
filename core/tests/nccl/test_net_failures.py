"""The plugin where something is wrong: connections that break, ranks that die, unauthenticated peers, settings."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from ctypes import c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breaking import WAYS, breaking, connections, hang_up
from interceptor import Interceptor
from load import seconds
from nccl.loader import INVALID_USAGE, REMOTE_ERROR, SYSTEM_ERROR, WARN, NcclError, Plugin
from nccl.test_net import APART, ENV, exchange, pattern
from ranks import run_ranks, values

from netfold import FileStore

pytestmark = pytest.mark.native

IDLE = 2000


def port_of(handle: bytes) -> int:
    return int(struct.unpack_from("=H", handle, 6)[0])


def through(handle: bytes, middle: Interceptor) -> bytes:
    return handle[:6] + struct.pack("=H", middle.port) + handle[8:]


def one_way(rank: int, folder: str) -> tuple[Plugin, c_void_p]:
    """Rank 0's comm to send to rank 1, and rank 1's to receive with."""
    plugin = Plugin()
    store = FileStore(folder)
    if rank == 0:
        return plugin, plugin.connect(store.get("handle", 30))
    handle, listener = plugin.listen()
    store.set("handle", handle)
    return plugin, plugin.accept(listener)


def work_while_breaking(rank: int, size: int, folder: str, how: Callable[[int], None]) -> tuple[int, list[str]]:
    plugin, comm = one_way(rank, folder)
    store = FileStore(folder)
    with breaking(how, rank, 0.07) as broken:
        for round_ in range(40):
            ours = pattern((1000, 120_000, 5 << 20)[round_ % 3], round_)
            if rank == 0:
                plugin.wait(plugin.send(comm, ours, round_), quiet_s=40)
            else:
                into = np.zeros(ours.nbytes, np.uint8)
                plugin.wait(plugin.receive(comm, [into], [round_]), quiet_s=40)
                assert np.array_equal(into, ours), round_
            time.sleep(0.03)
    store.set(f"done/{rank}", b"")
    store.get(f"done/{1 - rank}", 60)
    plugin.close(comm)
    return len(broken), [text for _, text in plugin.log]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("security", "streams"), [("none", "1"), ("encrypt", "2")])
def test_connections_that_break_are_made_again_and_no_byte_is_lost(
    how: Callable[[int], None], security: str, streams: str
) -> None:
    env = {**APART, "NETFOLD_SECURITY": security, "NETFOLD_NCCL_STREAMS": streams}
    found = values(run_ranks(work_while_breaking, 2, how, env=env, timeout_s=120))
    assert sum(broken for broken, _ in found) > 5
    assert any("was made again" in text for text in found[0][1])


def a_receiver_leaves_first(rank: int, size: int, folder: str) -> list[str]:
    plugin, comm = one_way(rank, folder)
    store, data = FileStore(folder), pattern(1000, 1)
    if rank == 1:
        plugin.wait(plugin.receive(comm, [np.zeros_like(data)]))
        plugin.close(receive=comm)
        store.get("done", 60)
        return []
    plugin.wait(plugin.send(comm, data))
    until = time.monotonic() + seconds(20)
    while connections():  # the endpoint's own thread looks
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(NcclError, match="rank 1 left: it closed the connection"):
        plugin.wait(plugin.send(comm, data))
    store.set("done", b"")
    return [text for _, text in plugin.log]


def test_an_end_that_leaves_first_is_no_broken_connection() -> None:
    """Real jobs had the line "broke, and is made again" at their end, wherever one rank closed before the other."""
    sender, _ = values(run_ranks(a_receiver_leaves_first, 2, env=APART, timeout_s=60))
    assert not any("made again" in text for text in sender)


def break_behind_the_last_request(rank: int, size: int, folder: str) -> None:
    """The connection breaks after the sender's last request is done: only the endpoint's own thread can notice that."""
    plugin, comm = one_way(rank, folder)
    store = FileStore(folder)
    if rank == 0:
        ours = pattern(100_000, 1)
        plugin.wait(plugin.send(comm, ours))
        store.set("sent", b"")
        store.get("done", 60)
        return
    store.get("sent", 60)
    for fd in connections():
        hang_up(fd)
    into = np.zeros(100_000, np.uint8)
    plugin.wait(plugin.receive(comm, [into]))
    assert np.array_equal(into, pattern(100_000, 1))
    store.set("done", b"")


def test_a_break_behind_the_last_request_is_noticed() -> None:
    values(run_ranks(break_behind_the_last_request, 2, env=APART, timeout_s=60))


def forged_stream(rank: int, size: int, folder: str) -> str:
    plugin = Plugin()
    store = FileStore(folder)
    ours = pattern(20 << 20, 0)
    if rank == 0:
        comm = plugin.connect(store.get("handle", 30))
        with pytest.raises(NcclError) as failed:
            plugin.wait(plugin.send(comm, ours), quiet_s=30)
    else:
        handle, listener = plugin.listen()
        middle = Interceptor("127.0.0.1", port_of(handle))
        middle.attack = "flip"
        store.set("handle", through(handle, middle))
        comm = plugin.accept(listener)
        with pytest.raises(NcclError) as failed:
            plugin.wait(plugin.receive(comm, [np.zeros_like(ours)]), quiet_s=30)
        assert middle.done.is_set()
    return str(failed.value)


def test_a_changed_byte_of_a_protected_stream_ends_it_and_is_not_used() -> None:
    env = {**APART, "NETFOLD_SECURITY": "authenticate", "NETFOLD_RECONNECT_S": "1"}
    receiver = values(run_ranks(forged_stream, 2, env=env, timeout_s=120))[1]
    assert "a record came with a wrong tag" in receiver


def dying_sender(rank: int, size: int, folder: str) -> tuple[int, str, float]:
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    if rank == 0:
        ours = pattern(10, 0)
        plugin.wait(plugin.send(to, ours))
        os.kill(os.getpid(), signal.SIGKILL)
    into = np.zeros(10, np.uint8)
    plugin.wait(plugin.receive(back, [into]))
    began = time.monotonic()
    with pytest.raises(NcclError) as lost:
        plugin.wait(plugin.receive(back, [into]), quiet_s=30)
    return lost.value.code, str(lost.value), time.monotonic() - began


def test_the_death_of_a_rank_ends_what_waits_for_it() -> None:
    env = {**APART, "NETFOLD_RECONNECT_S": "1"}
    code, text, waited_s = values(run_ranks(dying_sender, 2, env=env, dies=[0])[1:])[0]
    assert code == REMOTE_ERROR
    assert "receiving from 127.0.0.1:" in text
    assert "NETFOLD_RECONNECT_S" in text
    assert waited_s < seconds(4)


def broken_for_good(rank: int, size: int, folder: str) -> tuple[str, float]:
    plugin, comm = one_way(rank, folder)
    store = FileStore(folder)
    store.set(f"ready/{rank}", b"")
    store.get(f"ready/{1 - rank}", 30)
    data = np.zeros(100, np.uint8)
    if rank == 1:
        for fd in connections():
            hang_up(fd)
    began = time.monotonic()
    with pytest.raises(NcclError) as lost:
        while True:
            plugin.wait(plugin.send(comm, data) if rank == 0 else plugin.receive(comm, [data]))
    return str(lost.value), time.monotonic() - began


@pytest.mark.parametrize("env", [{**APART, "NETFOLD_RECONNECT_S": "0"}, ENV], ids=["asked for", "within a host"])
def test_a_connection_that_may_not_be_made_again_ends_at_once(env: dict[str, str]) -> None:
    for text, waited_s in values(run_ranks(broken_for_good, 2, env=env)):
        assert "closed its connection" in text
        assert waited_s < seconds(3)


def closes_its_listener(rank: int, size: int, folder: str) -> str:
    """Rank 1 closes its listener with a connection that it never took."""
    plugin, store = Plugin(), FileStore(folder)
    if rank == 1:
        handle, listener = plugin.listen()
        store.set("handle", handle)
        store.get("connected", 30)
        plugin.close_listen(listener)
        store.get("done", 60)
        return ""
    comm = plugin.connect(store.get("handle", 30))
    store.set("connected", b"")
    with pytest.raises(NcclError) as failed:
        while True:
            plugin.wait(plugin.send(comm, np.zeros(100, np.uint8)))
    store.set("done", b"")
    plugin.close(comm)
    return str(failed.value)


@pytest.mark.parametrize("env", [ENV, APART], ids=["within a host", "apart"])
def test_a_connection_that_nobody_took_ends_with_its_listener(env: dict[str, str]) -> None:
    assert "closed" in values(run_ranks(closes_its_listener, 2, env=env))[0]


def leaving(rank: int, size: int, folder: str) -> str:
    """Rank 0 closes at once after its last request is done: all of it still arrives, and then the end."""
    plugin = Plugin()
    to, back = exchange(plugin, rank, folder)
    if rank == 0:
        ours = pattern(100_000, 3)
        plugin.wait(plugin.send(to, ours))
        plugin.close(to)
        FileStore(folder).get("done", 60)
        return ""
    time.sleep(0.5)  # everything is under way
    into = np.zeros(100_000, np.uint8)
    plugin.wait(plugin.receive(back, [into]))
    assert np.array_equal(into, pattern(100_000, 3))
    with pytest.raises(NcclError) as left:
        plugin.wait(plugin.receive(back, [into]))
    FileStore(folder).set("done", b"")
    return str(left.value)


def test_what_was_sent_before_a_close_arrives() -> None:
    assert "left: it closed the connection" in values(run_ranks(leaving, 2, env=ENV))[1]


def among_unauthenticated_peers(rank: int, size: int, folder: str) -> None:
    plugin = Plugin()
    store = FileStore(folder)
    handle, listener = plugin.listen()
    store.set(f"handle/{rank}", handle)
    peer = store.get(f"handle/{1 - rank}", 30)
    # More than the handshakes that a process has under way at once: the rest waits until the first give up.
    silent = [socket.create_connection(("127.0.0.1", port_of(peer))) for _ in range(300)]
    for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", b"nfnccl01" + bytes(200), os.urandom(1 << 16)):
        with socket.create_connection(("127.0.0.1", port_of(peer))) as peer_of_nobody:
            threading.Thread(target=peer_of_nobody.sendall, args=(garbage,), daemon=True).start()
            time.sleep(0.05)
    with pytest.raises(NcclError):  # a wrong secret
        plugin.connect(peer[:48] + bytes(32) + peer[80:])
    to = plugin.connect(peer)
    back = plugin.accept(listener)
    into = np.zeros(1000, np.uint8)
    ours = pattern(1000, rank)
    plugin.wait(plugin.receive(back, [into]), plugin.send(to, ours))
    assert np.array_equal(into, pattern(1000, 1 - rank))
    for each in silent:
        each.close()
    store.set(f"done/{rank}", b"")
    store.get(f"done/{1 - rank}", 60)
    plugin.close(to, back)


def test_unauthenticated_peers_change_nothing() -> None:
    values(run_ranks(among_unauthenticated_peers, 2, env=ENV, timeout_s=60))


def among_idle_peers(rank: int, size: int, folder: str) -> tuple[float, int]:
    """Rank 0 makes many idle connections to rank 1 before its own. The time of its own, and rank 1's descriptors."""
    store = FileStore(folder)
    plugin = Plugin()
    if rank == 1:
        handle, listener = plugin.listen()
        before = len(os.listdir("/proc/self/fd"))
        store.set("handle", handle)
        comm = plugin.accept(listener)
        files = len(os.listdir("/proc/self/fd")) - before
        into = np.zeros(1000, np.uint8)
        plugin.wait(plugin.receive(comm, [into], [0]))
        assert np.array_equal(into, pattern(1000, 0))
        store.set("done", b"")
        return 0.0, files
    handle = store.get("handle", seconds(30))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1 << 16, hard))
    address = socket.inet_ntoa(handle[8:12]), port_of(handle)
    idle = [socket.create_connection(address, seconds(10)) for _ in range(IDLE)]
    began = time.monotonic()
    comm = plugin.connect(handle)
    took_s = time.monotonic() - began
    plugin.wait(plugin.send(comm, pattern(1000, 0), 0))
    store.get("done", seconds(30))
    for each in idle:
        each.close()
    return took_s, 0


def test_idle_peers_are_bounded_and_keep_no_rank_out() -> None:
    (took_s, _), (_, files) = values(run_ranks(among_idle_peers, 2, env=ENV, timeout_s=120))
    # 256 at a time, for the 5 s that a handshake may take, would be 40 s.
    assert took_s < seconds(10)
    assert files <= 256 + 20


def failing_init(rank: int, size: int, folder: str) -> tuple[int, str]:
    with pytest.raises(NcclError) as refused:
        Plugin()
    return refused.value.code, str(refused.value)


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"NETFOLD_SECURITY": "some"}, "NETFOLD_SECURITY=some is not one of none, authenticate, encrypt"),
        ({"NETFOLD_NCCL_STREAMS": "9"}, "NETFOLD_NCCL_STREAMS=9 is not a whole number of 1 to 8"),
        ({"NETFOLD_PORTS": "8000-70"}, "NETFOLD_PORTS=8000-70 is no port and no range of ports, such as 29600-29607"),
        ({"NETFOLD_RECONNECT_S": "x"}, "NETFOLD_RECONNECT_S=x is not a whole number of 0 to 3600"),
        ({"NETFOLD_INTERFACE": "eth77"}, "NETFOLD_INTERFACE names eth77, which this host does not have"),
    ],
)
def test_a_wrong_setting_is_one_sentence_and_nccl_goes_on_without_the_plugin(
    env: dict[str, str], sentence: str
) -> None:
    code, text = values(run_ranks(failing_init, 1, env=env))[0]
    assert code == INVALID_USAGE
    assert sentence in text


def ports_in_a_range(rank: int, size: int, folder: str) -> list[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        os.environ["NETFOLD_PORTS"] = f"{first}-{first + 20}"
        handle, _ = Plugin().listen()
    return [first, port_of(handle)]


def test_the_plugin_listens_on_the_first_free_port_of_the_range() -> None:
    first, port = values(run_ranks(ports_in_a_range, 1, env=ENV))[0]
    assert first < port <= first + 20


def no_free_port(rank: int, size: int, folder: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        os.environ["NETFOLD_PORTS"] = str(taken.getsockname()[1])
        with pytest.raises(NcclError) as refused:
            Plugin().listen()
    return str(refused.value)


def test_a_range_without_a_free_port_is_one_sentence() -> None:
    text = values(run_ranks(no_free_port, 1, env=ENV))[0]
    assert "is free on lo; every process of a host needs one" in text


def unlike_security(rank: int, size: int, folder: str) -> str:
    os.environ["NETFOLD_SECURITY"] = ("none", "encrypt")[rank]
    plugin = Plugin()
    store = FileStore(folder)
    if rank == 1:
        handle, _ = plugin.listen()
        store.set("handle", handle)
        store.get("done", 60)
        return "\n".join(text for _, text in plugin.log)
    with pytest.raises(NcclError) as refused:
        plugin.connect(store.get("handle", 30))
    store.set("done", b"")
    return str(refused.value)


def test_ranks_with_unlike_security_are_told() -> None:
    connects, listens = values(run_ranks(unlike_security, 2))
    assert "no connection to " in connects
    assert "its NETFOLD_SECURITY is not this rank's" in listens


def unlike_secrets(rank: int, size: int, folder: str, files: tuple[str, str]) -> str:
    os.environ["NETFOLD_SECRET_FILE"] = files[rank]
    plugin = Plugin()
    store = FileStore(folder)
    if rank == 1:
        handle, listener = plugin.listen()
        store.set("handle", handle)
        if files[0] == files[1]:
            plugin.accept(listener)
        store.get("done", 60)
        return "\n".join(text for _, text in plugin.log)
    try:
        plugin.connect(store.get("handle", 30))
        return "connected"
    except NcclError as refused:
        return str(refused)
    finally:
        store.set("done", b"")


def secret_file(folder: Path, name: str, text: str, mode: int = 0o600) -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_secret_of_the_job_is_needed_beside_the_handle(tmp_path: Path) -> None:
    one, other = secret_file(tmp_path, "one", "a" * 32 + "\n"), secret_file(tmp_path, "other", "b" * 32)
    assert values(run_ranks(unlike_secrets, 2, (one, one), env=ENV))[0] == "connected"
    connects, listens = values(run_ranks(unlike_secrets, 2, (one, other), env=ENV))
    assert "the other end does not know the listener's secret" in connects
    assert "aaaa" not in connects + listens


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("a" * 32, 0o644, "it can be read by others: chmod 600"),
        ("a" * 31, 0o600, "it has to hold 32 to 256 letters and digits"),
        ("a" * 40 + "-", 0o600, "it has to hold 32 to 256 letters and digits"),
    ],
)
def test_a_secret_file_that_is_none_is_one_sentence(tmp_path: Path, text: str, mode: int, sentence: str) -> None:
    env = {"NETFOLD_SECRET_FILE": secret_file(tmp_path, "secret", text, mode)}
    _, refused = values(run_ranks(failing_init, 1, env=env))[0]
    assert sentence in refused
    assert "aaaa" not in refused.replace(str(tmp_path), "")


def foreign_handle(rank: int, size: int, folder: str) -> tuple[int, str]:
    plugin = Plugin()
    with pytest.raises(NcclError) as refused:
        plugin.connect(bytes(128))
    return refused.value.code, str(refused.value)


def test_a_handle_of_another_network_is_refused() -> None:
    code, text = values(run_ranks(foreign_handle, 1, env=ENV))[0]
    assert code == REMOTE_ERROR
    assert "every rank must use it" in text


def vanished_listener(rank: int, size: int, folder: str) -> tuple[int, str]:
    plugin = Plugin()
    handle, _ = plugin.listen()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(NcclError) as refused:
        plugin.connect(handle[:6] + struct.pack("=H", port) + handle[8:])
    return refused.value.code, str(refused.value)


def test_a_rank_that_is_gone_is_named_by_its_address() -> None:
    code, text = values(run_ranks(vanished_listener, 1, env=ENV))[0]
    assert code == REMOTE_ERROR
    assert "no connection to 127.0.0.1:" in text
    assert "refused" in text


def a_log(rank: int, size: int, folder: str) -> list[Any]:
    plugin = Plugin()
    handle, _ = plugin.listen()
    return [handle.hex(), plugin.log]


def test_no_secret_is_logged() -> None:
    handle, log = values(run_ranks(a_log, 1, env=ENV))[0]
    secret = handle[2 * 48 : 2 * 80]
    assert int(secret, 16) != 0
    assert secret not in str(log)
    assert all(level != WARN for level, _ in log)
    assert SYSTEM_ERROR == 2


def handles_of_another(rank: int, size: int, folder: str) -> str:
    plugin = Plugin()
    handle, listener = plugin.listen()
    pending = struct.pack("=Q", 0xDEAD0000)  # where this process would note a connection under way
    to = plugin.connect(handle[:112] + pending + handle[120:])
    back = plugin.accept(listener)
    ours, into = pattern(1000, 1), np.zeros(1000, np.uint8)
    plugin.wait(plugin.receive(back, [into]), plugin.send(to, ours))
    assert np.array_equal(into, ours)
    with pytest.raises(NcclError) as failed:
        plugin.connect(handle[:5] + bytes(1) + handle[6:])
    plugin.close_listen(listener)
    plugin.close(to, back)
    return str(failed.value)


def test_a_handle_with_the_wrong_content_is_harmless() -> None:
    (said,) = values(run_ranks(handles_of_another, 1, env=ENV))
    assert "the handle asks for no connection, and is damaged" in said, said
