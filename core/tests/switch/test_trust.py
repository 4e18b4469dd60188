"""TLS, fingerprints and tokens: which peers may join, and what an unauthenticated peer learns and costs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from load import seconds
from ranks import Outcome, RunningSwitch, private, run_command, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native_dev import control
from netfold.communicator.switch_tree import query_path_to_root
from netfold.switch import Switch, Tokens
from netfold.switch.certificate import server_context
from netfold.switch.daemon import AUTHENTICATION_TIMEOUT_S
from netfold.switch.log import RateLimit
from netfold.switch.parent import Parent
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess
from netfold.switch_protocol.pinned_tls import FingerprintError, PinnedStream

JOIN_S = 30.0
VISION = "a" * 31 + "1"
SPEECH = "b" * 31 + "2"
LINES = f"""
# tenant  token
vision {VISION} names=vision-*,shared
speech {SPEECH} weight=2  # twice as much
"""


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return private(tmp_path / "tokens", LINES)


@pytest.fixture
def switch(tokens: str) -> Iterator[RunningSwitch]:
    with running_switch("--token-file", tokens) as running:
        yield running


def add(rank: int, size: int, folder: str, options: Options) -> float:
    with Communicator(
        FileStore(folder), rank, size, options=options, timeout_s=seconds(20), join_timeout_s=JOIN_S
    ) as group:
        buffer = np.arange(300_000, dtype=np.float32) % 1000 + rank
        group.all_reduce(buffer)
        assert (buffer == np.arange(300_000) % 1000 * size + size * (size - 1) / 2).all()
        return float(buffer[-1])


def vision(running: RunningSwitch, tmp_path: Path, token: str = VISION, **words: Any) -> Options:
    return Options(
        **{
            "switch": running.endpoint,
            "token_file": private(tmp_path / "token", token + "\n"),
            "job_name": "vision-1",
            **words,
        }
    )


def refused(outcomes: list[Outcome], *words: str) -> None:
    for outcome in outcomes:
        assert outcome.error == "SwitchError", outcome.text
        for word in words:
            assert word in outcome.text


def test_a_job_with_a_token_reduces_over_tls(switch: RunningSwitch, tmp_path: Path) -> None:
    assert re.fullmatch(r"127\.0\.0\.1:\d+#[0-9a-f]{64}", switch.endpoint)
    assert values(run_threads(add, 3, vision(switch, tmp_path))) == [999 * 3 + 3.0] * 3
    switch.wait_for("event=started .*name=vision-1 tenant=vision")
    for secret in (VISION, SPEECH):
        assert secret not in switch.log()


def test_an_unknown_token_is_refused_and_not_quoted(switch: RunningSwitch, tmp_path: Path) -> None:
    wrong = VISION[:-1] + "9"
    outcomes = run_threads(add, 2, vision(switch, tmp_path, wrong))
    refused(outcomes, "refused: this switch does not know the token of NETFOLD_TOKEN_FILE")
    assert wrong not in switch.log() + "".join(outcome.text for outcome in outcomes)
    switch.wait_for("event=refused .*reason=token", count=2)


def test_a_join_without_a_token_is_refused(switch: RunningSwitch) -> None:
    refused(
        run_threads(add, 2, Options(switch=switch.endpoint)), "requires a token, and none came; set NETFOLD_TOKEN_FILE"
    )


def test_a_jobs_name_must_match_its_tokens_patterns(switch: RunningSwitch, tmp_path: Path) -> None:
    outcomes = run_threads(add, 2, vision(switch, tmp_path, job_name="nlp-1"))
    refused(outcomes, "refused: vision's jobs are called vision-* or shared, not 'nlp-1' (NETFOLD_JOB_NAME)")


def eavesdropper(forward_to: tuple[str, int] | None, received: list[bytes], answer: bytes = b"") -> str:
    """A listener that stores what it receives and replies once; with `forward_to`, a relay that changes nothing."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep:
                    received.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        with server:
            while True:
                stream, _ = server.accept()
                if forward_to is None:
                    received.append(stream.recv(65536))
                    stream.sendall(answer)
                    stream.close()
                    continue
                other = socket.create_connection(forward_to)
                threading.Thread(target=pump, args=(stream, other, True), daemon=True).start()
                threading.Thread(target=pump, args=(other, stream, False), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_token_is_not_sent_to_a_switch_with_another_certificate(switch: RunningSwitch, tmp_path: Path) -> None:
    wrong = switch.endpoint.split("#")[0] + "#" + "0" * 64
    began = time.monotonic()
    outcomes = run_threads(add, 2, vision(switch, tmp_path, switch=wrong))
    refused(outcomes, "is not the one that NETFOLD_SWITCH names", switch.endpoint.split("#")[1], "nothing was sent")
    assert time.monotonic() - began < JOIN_S, "the error comes at once, and not at the join timeout"
    assert "event=refused" not in switch.log(), "no join arrived"


def test_a_token_is_not_sent_without_a_fingerprint(switch: RunningSwitch, tmp_path: Path) -> None:
    received: list[bytes] = []
    endpoint = eavesdropper(None, received)
    outcomes = run_threads(add, 2, vision(switch, tmp_path, switch=endpoint))
    refused(outcomes, "has no fingerprint: no certificate proves which switch answers there", "host:port#")
    assert received == []


def test_a_worker_without_fingerprint_gets_a_hint(switch: RunningSwitch) -> None:
    outcomes = run_threads(add, 2, Options(switch=switch.endpoint.split("#")[0]))
    refused(outcomes, "one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint")


def test_a_fingerprint_of_an_open_switch_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with running_switch() as switch:
        outcomes = run_threads(add, 2, vision(switch, tmp_path, switch=switch.endpoint + "#" + "0" * 64))
    refused(outcomes, "did not shake hands", "One that is open speaks no TLS")


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "No such file"),
        (VISION, 0o640, "can be read by others (mode 640): chmod 600"),
        ("short", 0o600, "a token is 32 to 256 letters and digits"),
        (f"vision {VISION}", 0o600, "a token is 32 to 256 letters and digits"),
        ("\udcff", 0o600, "NETFOLD_TOKEN_FILE="),
    ],
)
def test_an_invalid_token_file_is_named_and_not_quoted(
    switch: RunningSwitch, tmp_path: Path, content: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "mine"
    if content is not None:
        path.write_bytes(content.encode("utf-8", errors="surrogateescape"))
        path.chmod(mode)
    outcomes = run_threads(add, 2, vision(switch, tmp_path, token_file=str(path)))
    refused(outcomes, f"NETFOLD_TOKEN_FILE={path}", words)
    assert VISION not in "".join(outcome.text for outcome in outcomes)


def credential_at(switch: RunningSwitch, token: object) -> object:
    """The credential of a worker with this token; anything that is no text goes as it is."""
    fingerprint = control_messages.parse_switch(switch.endpoint, what="endpoint").fingerprint or ""
    return control_messages.credential_of(token, fingerprint) if isinstance(token, str) else token


def join(switch: RunningSwitch, token: str, **words: Any) -> PinnedStream:
    """Send a join by hand, over TLS."""
    host, port, fingerprint = control_messages.parse_switch(switch.endpoint, what="endpoint")
    assert fingerprint is not None
    stream = PinnedStream(socket.create_connection((host, port), 5), fingerprint)
    message = {
        "type": "join",
        "version": control_messages.VERSION,
        "job": "j",
        "name": "vision-1",
        "rank": 0,
        "ranks": [0, 1],
    }
    control_messages.send(stream, {**message, "port": 9, "credential": credential_at(switch, token), **words})
    return stream


def test_another_tenant_cannot_join_a_job_by_its_name(switch: RunningSwitch) -> None:
    ours = join(switch, VISION, timeout_s=5.0)
    assert control_messages.receive(ours)["type"] == "admitted"
    theirs = join(switch, SPEECH, rank=1)
    answer = control_messages.receive(theirs)
    refused = {"type": "refused", "version": control_messages.VERSION}
    assert answer == {**refused, "reason": "this job belongs to another token: all its ranks need the same token"}
    mine = join(switch, VISION, rank=1)
    assert control_messages.receive(mine)["type"] == "admitted"
    for stream in (ours, theirs, mine):
        stream.close()


def test_a_credential_that_is_no_bytes_is_refused_like_a_missing_one(switch: RunningSwitch) -> None:
    for credential in (7, None, [VISION], VISION):
        answer = control_messages.receive(join(switch, VISION, credential=credential))
        assert answer["type"] == "refused"
        assert "none came" in answer["reason"]


def test_the_network_sees_neither_token_nor_job_name(switch: RunningSwitch, tmp_path: Path) -> None:
    received: list[bytes] = []
    host, port, fingerprint = control_messages.parse_switch(switch.endpoint, what="endpoint")
    relay = eavesdropper((host, port), received)
    stream = PinnedStream(
        socket.create_connection(control_messages.parse_endpoint(relay, what="relay"), 5), fingerprint or ""
    )
    join_message = {
        "type": "join",
        "version": control_messages.VERSION,
        "job": "j",
        "name": "vision-1",
        "rank": 0,
        "ranks": [0],
    }
    control_messages.send(stream, {**join_message, "port": 9, "credential": credential_at(switch, VISION)})
    assert control_messages.receive(stream)["type"] == "admitted"
    stream.close()
    assert received
    for secret in (VISION, "vision-1"):
        assert secret.encode() not in b"".join(received)


def test_silent_peers_keep_no_worker_out(switch: RunningSwitch, tmp_path: Path) -> None:
    host, port, _ = control_messages.parse_switch(switch.endpoint, what="endpoint")
    silent = [socket.create_connection((host, port), 5) for _ in range(600)]
    try:
        assert values(run_threads(add, 2, vision(switch, tmp_path))) == [999 * 2 + 1.0] * 2
        # At least 88 were dropped; the log has some of them.
        switch.wait_for("others came before it joined", count=RateLimit.BURST)
        silent[0].settimeout(seconds(5))
        assert _is_disconnected(silent[0])
    finally:
        for stream in silent:
            stream.close()
    assert values(run_threads(add, 2, vision(switch, tmp_path))) == [999 * 2 + 1.0] * 2


def _is_disconnected(stream: socket.socket) -> bool:
    try:
        return stream.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_silent_peer_is_disconnected_in_time(switch: RunningSwitch) -> None:
    host, port, fingerprint = control_messages.parse_switch(switch.endpoint, what="endpoint")
    began = time.monotonic()
    before_tls = socket.create_connection((host, port), 5)
    within_tls = PinnedStream(socket.create_connection((host, port), 5), fingerprint or "")
    for stream in (before_tls, within_tls):
        stream.settimeout(seconds(30))
        assert stream.recv(1) == b""
        # The switch starts its timer when it accepts, after `began`.
        assert time.monotonic() - began > AUTHENTICATION_TIMEOUT_S - 0.1
    assert time.monotonic() - began < seconds(2 * AUTHENTICATION_TIMEOUT_S)
    switch.wait_for("10 s were over before it joined", count=2)


def test_garbage_instead_of_a_handshake_is_dropped(switch: RunningSwitch, tmp_path: Path) -> None:
    host, port, _ = control_messages.parse_switch(switch.endpoint, what="endpoint")
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
    for words in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(3000),
        hello,
        hello + os.urandom(600),
        b"\x15\x03\x03\x00\x02\x02\x28",
    ):
        with socket.create_connection((host, port), 5) as stream:
            stream.sendall(words)
            stream.shutdown(socket.SHUT_WR)
            stream.settimeout(seconds(5))
            try:
                while stream.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert values(run_threads(add, 2, vision(switch, tmp_path))) == [999 * 2 + 1.0] * 2


def test_a_stored_certificate_keeps_its_fingerprint_over_restarts(tokens: str, tmp_path: Path) -> None:
    """The first start makes the folder."""
    state = tmp_path / "state"
    fingerprints = []
    for folder in (("--state-dir", str(state)), ("--state-dir", str(state)), ()):
        with running_switch("--token-file", tokens, *folder) as switch:
            fingerprints.append(switch.endpoint.split("#")[1])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert [(path.name, path.stat().st_mode & 0o777) for path in state.iterdir()] == [("switch.pem", 0o600)]
    assert state.stat().st_mode & 0o777 == 0o700


def command(*options: str) -> subprocess.CompletedProcess[str]:
    return run_command("switch", "--listen", "127.0.0.1:0", *options)


def test_an_unusable_state_folder_is_named(tokens: str, tmp_path: Path) -> None:
    absent = command("--token-file", tokens, "--state-dir", str(tmp_path / "none" / "state"))
    assert (absent.returncode, absent.stderr) == (
        2,
        f"netfold switch: --state-dir {tmp_path}/none/state: there is no folder {tmp_path}/none to make it in\n",
    )
    assert not (tmp_path / "none").exists()
    file = command("--token-file", tokens, "--state-dir", tokens)
    assert (file.returncode, file.stderr) == (2, f"netfold switch: {tokens}: File exists; choose another path\n")
    private(tmp_path / "switch.pem", "no certificate")
    broken = command("--token-file", tokens, "--state-dir", str(tmp_path))
    assert broken.returncode == 2
    assert "holds no key and certificate" in broken.stderr
    (tmp_path / "switch.pem").chmod(0o644)
    shown = command("--token-file", tokens, "--state-dir", str(tmp_path))
    assert shown.returncode == 2
    assert "can be read by others (mode 644)" in shown.stderr


def test_a_full_disk_leaves_no_partial_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        server_context(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tokens_and_open_contradict_each_other(tokens: str) -> None:
    ended = command("--token-file", tokens, "--open")
    assert ended.returncode == 2
    assert "--open turns tokens and TLS off, and --token-file needs both" in ended.stderr


def test_a_state_folder_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which only a switch with --token-file has"):
        Switch("127.0.0.1", 0, state_dir=tmp_path)


def test_tokens_let_a_switch_listen_to_a_network(tokens: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 is not a loopback address"):
        Switch("0.0.0.0", 0)
    with running_switch("--token-file", tokens, "--listen", "0.0.0.0:0") as switch:
        endpoint = switch.endpoint.replace("0.0.0.0", "127.0.0.1")
        assert values(run_threads(add, 2, vision(switch, tmp_path, switch=endpoint))) == [999 * 2 + 1.0] * 2
        refused(run_threads(add, 2, Options(switch=endpoint)), "requires a token, and none came")


@pytest.mark.parametrize(("listen", "level"), [("127.0.0.1:0", "info"), ("0.0.0.0:0", "warning")])
def test_an_open_switch_logs_that_it_is_open(listen: str, level: str) -> None:
    with running_switch("--open", "--listen", listen) as switch:
        switch.wait_for(f"level={level} event=open .*no tokens and no TLS: whoever reaches")


def test_the_log_of_a_job_that_runs_well_has_short_lines_and_no_warning() -> None:
    with running_switch() as switch:
        values(run_threads(add, 2, Options(switch=switch.endpoint)))
        switch.wait_for("event=closed")
        lines = switch.log().splitlines()
    assert [line for line in lines if "level=info" not in line or len(line) > 280] == []


def test_a_tenant_has_the_bounds_of_its_line(tokens: str) -> None:
    found = Tokens.read(Path(tokens))
    fingerprint = "0" * 64
    credentials = found.credentials(fingerprint)
    vision, speech = (credentials.find(control_messages.credential_of(each, fingerprint)) for each in (VISION, SPEECH))
    assert vision is not None and speech is not None
    assert (vision.name, vision.weight, vision.slots, vision.memory_bytes) == ("vision", 1, None, None)
    assert (speech.name, speech.weight) == ("speech", 2)
    assert [vision.allows_job_name(name) for name in ("vision-a", "shared", "shared2", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert speech.allows_job_name("")
    assert credentials.find(control_messages.credential_of(VISION[:-1] + "2", fingerprint)) is None
    assert VISION not in repr(vars(found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 tenants"),
        ("vision", "line 1: expected: tenant token"),
        ("vision short", "line 1: a token is 32 to 256"),
        (f"\nvi/sion {VISION}", "line 2: expected: tenant token"),
        (f"vision {VISION} speed=9", "line 1: tenant 'vision': weight=, names=, slots= and memory="),
        (f"vision {VISION} weight=1 weight=2", "each once"),
        (f"vision {VISION} weight=0", "weight= needs a number above 0"),
        (f"vision {VISION} memory=lots", "memory= needs a number above 0"),
        (f"vision {VISION}\nspeech {VISION}", "line 2: tenant 'speech', or its token, occurs twice"),
        (f"vision {VISION}\nvision {SPEECH}", "line 2: tenant 'vision', or its token, occurs twice"),
    ],
)
def test_an_invalid_line_is_named_without_its_token(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        Tokens.read(Path(private(tmp_path / "tokens", text)))
    assert VISION not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1#", "127.0.0.1:1#12", "127.0.0.1:1#" + "g" * 64, "#" + "0" * 64])
def test_an_endpoint_with_half_a_fingerprint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="NETFOLD_SWITCH is "):
        Options(switch=endpoint).resolved({})


def tls_server(serve: Callable[[ssl.SSLSocket], None]) -> str:
    """Serve one connection over TLS in a thread; yield host:port#fingerprint."""
    context, fingerprint = server_context(None)
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener:
            stream, _ = listener.accept()
            with context.wrap_socket(stream, server_side=True) as inside:
                serve(inside)

    threading.Thread(target=run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}#{fingerprint}"


def test_one_thread_receives_while_others_send() -> None:
    count, size = 300, 5000

    def echo(inside: ssl.SSLSocket) -> None:
        while data := inside.recv(1 << 16):
            inside.sendall(data)

    host, port, fingerprint = control_messages.parse_switch(tls_server(echo), what="endpoint")
    stream = PinnedStream(socket.create_connection((host, port), 5), fingerprint or "")
    stream.settimeout(seconds(10))
    found: list[bytes] = []

    def receive() -> None:
        for _ in range(2 * count):
            found.append(control_messages.receive(stream)["body"])

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()

    def send(letter: bytes) -> None:
        for number in range(count):
            control_messages.send(stream, {"type": "x", "body": letter * (size + number)})

    senders = [threading.Thread(target=send, args=(letter,), daemon=True) for letter in (b"a", b"b")]
    for sender in senders:
        sender.start()
    for thread in (*senders, receiver):
        thread.join(seconds(20))
        assert not thread.is_alive()
    stream.close()
    for letter in (b"a", b"b"):
        assert [body for body in found if body[:1] == letter] == [letter * (size + number) for number in range(count)]


def test_a_cut_tls_stream_ends_like_a_socket() -> None:
    host, port, fingerprint = control_messages.parse_switch(
        tls_server(lambda inside: inside.sendall(b"abc")), what="endpoint"
    )
    stream = PinnedStream(socket.create_connection((host, port), 5), fingerprint or "")
    assert control_messages.receive_exactly(stream, 3) == b"abc"
    assert stream.recv(1) == b""
    stream.close()


def test_another_certificate_gives_no_connection() -> None:
    host, port, _ = control_messages.parse_switch(tls_server(lambda inside: None), what="endpoint")
    with socket.create_connection((host, port), 5) as stream, pytest.raises(FingerprintError, match="0" * 64):
        PinnedStream(stream, "0" * 64)


@contextlib.contextmanager
def fake_switch() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A fake that answers `path` as a switch does, with a certificate of its own: its address and what it received."""
    context, fingerprint = server_context(None)
    received: list[dict[str, Any]] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with context.wrap_socket(server.accept()[0], server_side=True) as stream:
                        received.append(control_messages.receive(stream))
                        path = {"version": control_messages.VERSION, "switches": [[77, ""]], "error": ""}
                        control_messages.send(stream, {"type": "path", **path})

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}#{fingerprint}", received
        server.shutdown(socket.SHUT_RDWR)
        thread.join(seconds(10))


def _ask_in_python(endpoint: str, token_file: str, rank: int) -> None:
    query_path_to_root(SwitchAccess(endpoint, token_file, rank, (0, 1)), 10.0)


def _ask_natively(endpoint: str, token_file: str, rank: int) -> None:
    fields = {"job": "0" * 16, "rank": rank, "ranks": [0, 1], "window_bytes": 1 << 20, "security": "none"}
    tree = msgpack.packb(None)
    control.query_path_to_root(endpoint=endpoint, token_file=token_file, timeout_s=10.0, tree=tree, **fields)


def _ask_as_a_leaf(endpoint: str, token_file: str, rank: int) -> None:
    asyncio.run(Parent(endpoint, Path(token_file)).path([rank]))


@pytest.mark.parametrize("ask", [_ask_in_python, _ask_natively, _ask_as_a_leaf])
def test_a_fake_switch_gets_nothing_with_which_it_could_join_another(
    switch: RunningSwitch, tmp_path: Path, ask: Callable[[str, str, int], None]
) -> None:
    token_file = private(tmp_path / "token", VISION + "\n")
    with fake_switch() as (endpoint, received):
        ask(endpoint, token_file, 0)
    (message,) = received
    assert VISION.encode() not in msgpack.packb(message)
    # The fake switch sends the worker's words to the one that the user named.
    answer = control_messages.receive(join(switch, VISION, credential=message["credential"]))
    assert (answer["type"], "does not know the token" in answer["reason"]) == ("refused", True)
    # The test itself: the same words are right at a switch with this certificate.
    assert message["credential"] == credential_at(dataclasses.replace(switch, endpoint=endpoint), VISION)


def test_when_a_leaf_dies_its_fake_parent_gets_no_token(tokens: str, tmp_path: Path) -> None:
    token_file = private(tmp_path / "token", VISION + "\n")
    with fake_switch() as (endpoint, received):
        with running_switch("--token-file", tokens, "--parent", endpoint) as leaf:
            _ask_in_python(leaf.endpoint, token_file, 0)
            asked = len(received)
            assert asked and all("credential" not in message for message in received), "the leaf has no token for it"
        _ask_in_python(leaf.endpoint, token_file, 0)
    assert len(received) > asked, "the worker asked the parent that the leaf had named"
    assert VISION.encode() not in msgpack.packb(received)
    assert received[-1]["credential"] != credential_at(leaf, VISION)
