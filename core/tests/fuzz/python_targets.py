"""The Python parsers of untrusted bytes, one function each: only the errors that they document may come out.

    .venv/bin/python core/tests/fuzz/python_targets.py NAME SECONDS FOUND     fuzz under atheris; new inputs go to FOUND
    .venv/bin/python core/tests/fuzz/python_targets.py --seeds                write the seeds of every corpus anew

A target takes the bytes and returns, or raises what it may not. Atheris (PyPI) guides itself by the lines that an input
reaches. core/tests/fuzz/test_python_fuzz.py runs all kept inputs, and changes them by hypothesis where atheris is
absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from targets import corpus

ANSWER_S = 5.0
# A target that uses more memory breaks an invariant.
MEMORY_MB = 1024


class InvariantError(Exception):
    """A parser raised an undocumented error, which is the cause."""


def control_message(data: bytes) -> None:
    """A message behind its length, and the checks of a first message."""
    from netfold.switch_protocol import control_messages

    with contextlib.suppress(control_messages.ProtocolError):
        control_messages.length_of(data[:4].ljust(4, b"\0"))
        message = control_messages.decode(data[4:])
        control_messages.version_problem(message, them="the worker", us="this switch")
        # As bytes, since a NaN equals none.
        said = control_messages.encode(message)
        assert control_messages.encode(control_messages.decode(said[4:])) == said


def handshake(data: bytes) -> None:
    """Bytes that a peer sends to a listener before it closes the connection."""
    from netfold.bootstrap.handshake import Hello, accept

    async def opened() -> Hello | None:
        stream.setblocking(False)
        try:
            accepted = accept(stream, lambda hello: b"s" * 32 if hello.size else None, lambda _: True)
            found = await asyncio.wait_for(accepted, ANSWER_S)
            return None if found is None else found[0]
        except (EOFError, OSError):
            return None

    stream, peer = socket.socketpair()
    with stream, peer:
        peer.sendall(data[:4096])
        peer.shutdown(socket.SHUT_WR)
        assert _loop().run_until_complete(opened()) is None, "an unauthenticated peer was accepted"


def switch(data: bytes) -> None:
    """Messages that a peer sends to a switch, each behind its length; the connection ends after them."""
    _of_switch().serve(data)


def store(data: bytes) -> None:
    """Requests to rank 0's store behind a hello of its job: the connection ends in order, whatever comes."""
    from netfold.bootstrap.tcp_store import ENTRY_BYTES, TcpStoreServer, _Connection
    from netfold.switch_protocol import control_messages

    server = TcpStoreServer.__new__(TcpStoreServer)
    server.job, server.connections = "job", set()
    server._bytes, server.pending_bytes, server._values, server._counters, server._waiting = 0, 0, {}, {}, {}
    transport = mock.Mock()
    transport.get_write_buffer_size.return_value = 0
    connection = _Connection(server, _loop())
    connection.connection_made(transport)
    connection.data_received(control_messages.encode({"type": "hello", "job": "job"}))
    left = data[:16384]
    while left:  # a client sends one request at a time
        end = 4 + int.from_bytes(left[:4], "big")
        connection.data_received(left[:end])
        left = left[end:]
    connection.connection_lost(None)
    assert not server.connections and not server._waiting, "the store keeps a connection that has ended"
    assert server.pending_bytes == 0, "the store counts bytes of a connection that has ended"
    entries = [len(key) + len(value) for key, value in server._values.items()] + [*map(len, server._counters)]
    assert server._bytes == sum(entries) + ENTRY_BYTES * len(entries), "the store's count of its bytes is wrong"


def tokens(data: bytes) -> None:
    """A token file."""
    from netfold.switch.tokens import Tokens

    path = _folder() / "tokens"
    path.write_bytes(data)
    path.chmod(0o600)
    with contextlib.suppress(ValueError):
        Tokens.read(path)


def recipe(data: bytes) -> None:
    """A recipe file."""
    from netfold_train.recipe.errors import RecipeError
    from netfold_train.recipe.load import load

    path = _folder() / "recipe.toml"
    path.write_bytes(data)
    with contextlib.suppress(RecipeError):
        load(path)


def cluster(data: bytes) -> None:
    """A cluster file."""
    from netfold_plan.cluster.load import load_cluster

    path = _folder() / "cluster.toml"
    path.write_bytes(data)
    load_cluster.cache_clear()
    with contextlib.suppress(ValueError):
        load_cluster(str(path))


def measured(data: bytes) -> None:
    """A link's measurements, which a cluster file may name."""
    from netfold.tuning.measured_link import measured_link

    path = _folder() / "links.json"
    path.write_bytes(data)
    with contextlib.suppress(ValueError):
        measured_link(path)


def profile(data: bytes) -> None:
    """A profile's files: run.json and a rank's own, up to a line of four dashes each."""
    from netfold.profile.run import RunError, read_run

    folder = _folder() / "run"
    (folder / "rank-0000").mkdir(parents=True, exist_ok=True)
    (folder / "rank-0001").mkdir(parents=True, exist_ok=True)
    parts = data.split(b"\n----\n")
    names = (
        "run.json",
        "rank-0000/metadata.json",
        "rank-0001/metadata.json",
        "rank-0000/operations",
        "rank-0000/steps",
    )
    for place, name in enumerate(names):
        (folder / name).write_bytes(parts[place] if place < len(parts) else b"")
    with contextlib.suppress(RunError):
        read_run(folder)


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (control_message, handshake, switch, store, tokens, recipe, cluster, measured, profile)
}


def check(name: str, data: bytes) -> None:
    """Run a target. InvariantError where it raises."""
    try:
        TARGETS[name](data)
    except Exception as error:
        raise InvariantError(f"{name} raised {error!r} for {data!r}") from error


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="netfold-fuzz-"))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


class _Switch:
    """A real switch's way from a connection to its end, without the connection."""

    def __init__(self) -> None:
        from netfold.switch import Limits, Switch

        async def make() -> Any:
            return Switch("127.0.0.1", 0, limits=Limits(jobs=4, workers=8, memory_bytes=1 << 24))

        self.errors: list[dict[str, Any]] = []
        self.switch = _loop().run_until_complete(make())
        _loop().set_exception_handler(lambda _, about: self.errors.append(about))

    def serve(self, data: bytes) -> None:
        logging.disable(logging.CRITICAL)  # a line for each input; other tests of this process want their lines
        try:
            _loop().run_until_complete(asyncio.wait_for(self._serve(data), ANSWER_S))
        finally:
            logging.disable(logging.NOTSET)
        assert not self.errors, self.errors
        assert not self.switch._ledger.jobs, "an unauthenticated peer left a job"

    async def _serve(self, data: bytes) -> None:
        from netfold.switch.acceptor import Connection

        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        await self.switch._sessions.serve(Connection(reader, _Writer(), "127.0.0.1:9", lambda: None))  # type: ignore[arg-type]
        await asyncio.gather(*self.switch._jobs.tasks)


class _Writer:
    """The part of a StreamWriter that a switch uses, without a peer."""

    def __init__(self) -> None:
        self.transport = self

    def write(self, data: bytes) -> None:
        assert data

    async def drain(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    close = abort

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 9)


@functools.cache
def _of_switch() -> _Switch:
    return _Switch()


def framed(*messages: dict[str, Any]) -> bytes:
    from netfold.switch_protocol import control_messages

    return b"".join(map(control_messages.encode, messages))


def seeds() -> dict[str, list[bytes]]:
    """The seeds of a corpus: whole inputs of each kind, since mutation alone finds no format."""
    from netfold.switch_protocol import control_messages
    from netfold_plan.cluster import load as clusters
    from netfold_train.recipe import load

    version = {"version": control_messages.VERSION}
    join = {"type": "join", **version, "job": "j", "name": "", "rank": 0, "ranks": [0], "port": 9, "timeout_s": 5.0}
    both = {**join, "ranks": [0, 1], "window_bytes": 4096}
    tree = {**join, "tree": [[1, [[0, 0]]], [2, [[0, 0, 1, 1], [1, 1]]]]}
    ready = {"type": "ready", "payload_bytes": 1408}
    missing = {"type": "stragglers", "chunk": 1, "serial": 2}
    leave = {"type": "leave", "reason": "done", "fault": -1}
    hello = struct.pack(">8sB16sIIIBB32s", b"netfold3", 1, b"t" * 16, 1, 0, 3, 0, 0, b"n" * 32)
    about = (
        b'{"rank": 0, "size": 2, "host": "h", "pid": 1, "source": "event records", "names": {"operation": {"0": '
        b'"all_reduce"}}, "groups": {"1": {"name": "g", "backend": "netfold", "ranks": [0, 1]}}, "coverage_gaps": [], '
        b'"versions": {}, "lost": 0, "registrations": {}, "format": 1}'
    )
    second = about.replace(b'"rank": 0', b'"rank": 1')
    return {
        "control_message": [framed(join), framed(missing), framed({"type": "start", "at": b"\0\xff", "n": 1.5})],
        "handshake": [hello, hello + b"p" * 32, hello.replace(b"netfold3", b"netfold2")],
        "switch": [
            framed(join, ready, missing, {"type": "alive", "serial": 1}, leave),
            framed(both, ready),
            framed(tree, ready),
            framed({**join, "fabric": {"provider": "tcp", "name": b"n", "tag": 1}}),
            framed({"type": "path", **version, "below": [1, 2]}),
            framed({"type": "quota", **version}),
            framed({**join, "switch": 7, "endpoint": "127.0.0.1:1"}),
        ],
        "store": [
            framed({"type": "set", "values": {"k": b"v"}}, {"type": "get", "keys": ["k"], "timeout_s": 1.0}),
            framed({"type": "add", "key": "k", "amount": 2}, {"type": "add", "key": "k", "amount": -1}),
        ],
        "tokens": [
            b"# tenants\nvision " + b"a" * 40 + b"\nspeech " + b"b" * 40 + b" weight=2 names=a-*,b slots=8 memory=1M"
        ],
        "recipe": [path.read_bytes() for path in map(load.find_shipped, map(Path, load.shipped_names()))],
        "cluster": [path.read_bytes() for path in sorted(clusters._PRESETS.glob("*.toml"))[:6]],
        "measured": [
            b'{"links": [{"latency_s": 1e-5, "forward_bytes_per_s": 1e9, "reverse_bytes_per_s": 2e9}]}',
            b'{"place": {"workers": 4}, "rows": ['
            + b", ".join(
                b'{"backend": "a", "time_ns": {"median": %d}, "collective": "all_reduce", "size_bytes": %d, '
                b'"algorithm": '
                b'"ring"}' % (1000 + size, size)
                for size in (4096, 1 << 20)
            )
            + b"]}",
        ],
        "profile": [
            b"\n----\n".join((b'{"command": ["x"]}', about, second, bytes(88), bytes(16))),
            b"\n----\n".join((b"{}", about, b"", b"")),
        ],
    }


def write_seeds() -> None:
    import hashlib

    for name, inputs in seeds().items():
        corpus(name).mkdir(parents=True, exist_ok=True)
        for data in inputs:
            (corpus(name) / hashlib.sha1(data).hexdigest()).write_bytes(data)


# What of each target is followed by lines; the whole package costs most of the time.
FOLLOWED = {
    "control_message": ("netfold.switch_protocol.control_messages",),
    "handshake": ("netfold.bootstrap.handshake",),
    "switch": ("netfold.switch_protocol.control_messages", "netfold.switch"),
    "store": ("netfold.switch_protocol.control_messages", "netfold.bootstrap.tcp_store"),
    "tokens": ("netfold.switch_protocol.control_messages", "netfold.switch.tokens"),
    "recipe": ("netfold_train.recipe", "tomllib"),
    "cluster": ("netfold_plan.cluster", "tomllib"),
    "measured": ("netfold.tuning.measured_link", "netfold.tuning.fit"),
    "profile": ("netfold.profile.run",),
}


def _follow(atheris: Any, name: str) -> None:
    """Let atheris see the lines of the parsers that a target has run by now.

    Its import hook does not see a package that is installed editable, as netfold is here.
    """
    for module in [each for at, each in sys.modules.items() if at.startswith(FOLLOWED[name])]:
        for each in list(vars(module).values()):
            holders = vars(each).values() if isinstance(each, type) else [each]
            for function in [getattr(one, "__func__", one) for one in holders]:
                if isinstance(function, types.FunctionType) and function.__module__.startswith(FOLLOWED[name]):
                    with contextlib.suppress(RuntimeError):  # it is followed already
                        atheris.instrument_func(function)


def main(name: str, seconds: str, found: str) -> None:
    import atheris

    for data in seeds()[name]:
        check(name, data)  # imports what it needs
    _follow(atheris, name)
    Path(found).mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-seed=1", "-max_len=4096", "-timeout=20", f"-rss_limit_mb={MEMORY_MB}"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={found}/", found, str(corpus(name))],
        lambda data: check(name, data),
    )
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(_folder(), ignore_errors=True)


if __name__ == "__main__":
    write_seeds() if sys.argv[1:] == ["--seeds"] else main(*sys.argv[1:])
