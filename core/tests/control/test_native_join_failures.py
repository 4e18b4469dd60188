"""Joins by the native client that fail: the sentence is that of Python's client, in time, and no secret is in it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from load import seconds
from native_rank import add, join
from native_rank import fields as request_fields
from ranks import RunningSwitch, private, run_threads, running_switch

from netfold._native_dev import control
from netfold.communicator.membership import Membership
from netfold.errors import SwitchError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess
from netfold.switch_protocol.control_messages import VERSION, Message

pytestmark = pytest.mark.native

TOKEN = "0123456789abcdef" * 4  # the same in every process of pytest-xdist, which names tests by it
JOB = "ab" * 16


def native_says(endpoint: str, **options: Any) -> str:
    with pytest.raises(RuntimeError) as raised:
        join(0, 1, endpoint, job=JOB, **options)
    return str(raised.value)


def python_says(endpoint: str, *, token_file: str = "", security: str = "none", timeout_s: float = 20.0) -> str:
    access = SwitchAccess(endpoint, token_file or None, 0, (0,), security)
    with pytest.raises((SwitchError, ValueError)) as raised:
        Membership.join(access, job=JOB, timeout_s=timeout_s)
    return str(raised.value)


def both_say(endpoint: str, **options: Any) -> str:
    said = native_says(endpoint, **options)
    assert said == python_says(endpoint, **options)
    return said


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RunningSwitch]:
    with running_switch("--token-file", private(tmp_path / "tokens", f"vision {TOKEN}\n")) as switch:
        yield switch
        assert TOKEN not in switch.log()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    assert "refused the connection: nothing listens there" in both_say(endpoint)


def test_a_host_that_is_not_known() -> None:
    said = native_says("nowhere.invalid:7171", timeout_s=2.0)
    assert said.startswith("rank 0: the switch at nowhere.invalid:7171 (NETFOLD_SWITCH): 'nowhere.invalid' is no host")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":7171",
        "host:",
        "host:70000",
        "host:-1",
        "host:7171#",
        "host:7171#zz",
        "host:7171#" + "a" * 63,
        "a:1 ",
    ],
)
def test_addresses_are_parsed_as_python_does(text: str) -> None:
    def parsed(parse: Callable[[str], Any]) -> Any:
        try:
            return tuple(parse(text))
        except ValueError as error:
            return str(error)

    wanted = parsed(lambda each: control_messages.parse_switch(each, what="NETFOLD_SWITCH"))
    found = parsed(control.parse_address)
    if isinstance(wanted, tuple):
        assert found == (*wanted[:2], wanted[2] or "")
    else:
        assert found == wanted


def test_addresses_with_brackets_and_fingerprints() -> None:
    assert control.parse_address(" [::1]:7171#" + "A" * 64) == ("::1", 7171, "a" * 64)


def test_an_unknown_token_and_no_token(guarded: RunningSwitch, tmp_path: Path) -> None:
    other = private(tmp_path / "other", "b" * 40 + "\n")
    assert "does not know the token" in both_say(guarded.endpoint, token_file=other)
    assert "requires a token, and none came" in both_say(guarded.endpoint)


def test_a_switch_with_another_fingerprint_gets_nothing(guarded: RunningSwitch, tmp_path: Path) -> None:
    token_file = private(tmp_path / "token", TOKEN)
    plain, _, fingerprint = guarded.endpoint.partition("#")
    wrong = f"{plain}#{'0' if fingerprint[0] != '0' else '1'}{fingerprint[1:]}"
    said = both_say(wrong, token_file=token_file)
    assert "is not the one that NETFOLD_SWITCH names" in said and "nothing was sent" in said
    assert fingerprint in said and TOKEN not in said
    assert "event=refused" not in guarded.log()


def test_a_token_without_a_fingerprint_is_not_sent(tmp_path: Path) -> None:
    received: list[bytes] = []

    def serve(stream: socket.socket) -> None:
        received.append(stream.recv(1000))

    token_file = private(tmp_path / "token", TOKEN)
    with fake(serve) as endpoint:
        said = both_say(endpoint, token_file=token_file)
    assert "no certificate proves which switch answers there" in said and TOKEN not in said
    assert received == []


@pytest.mark.parametrize("security", ["authenticate", "encrypt"])
def test_security_needs_a_fingerprint(security: str) -> None:
    assert f"has no keys, and NETFOLD_SECURITY={security}" in both_say("127.0.0.1:9", security=security)


def test_a_switch_without_tls_and_one_with_it(guarded: RunningSwitch) -> None:
    with running_switch() as switch:
        said = native_says(f"{switch.endpoint}#{'a' * 64}")
    assert f"{switch.endpoint} (NETFOLD_SWITCH) did not shake hands (" in said and "started with --token-file?" in said
    said = native_says(guarded.endpoint.partition("#")[0])
    assert "is no netfold switch, or it stopped while this rank joined" in said
    assert said.endswith("one with --token-file speaks TLS: NETFOLD_SWITCH=host:port#fingerprint")


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (TOKEN, 0o644, "can be read by others"),
        ("short", 0o600, "a token is 32 to 256 letters and digits"),
        ("a" * 257, 0o600, "a token is 32 to 256 letters and digits"),
        ("a" * 40 + " " + "b", 0o600, "a token is 32 to 256 letters and digits"),
        ("a" * ((1 << 20) + 1), 0o600, "longer than"),
        (None, 0o600, "No such file"),
        ("folder", 0o600, "no file of this user"),
        ("pipe", 0o600, "no file of this user"),
    ],
)
def test_files_that_hold_no_token(tmp_path: Path, text: str | None, mode: int, why: str) -> None:
    path = tmp_path / "token"
    if text == "folder":
        path.mkdir()
    elif text == "pipe":
        os.mkfifo(path, mode)
    elif text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(RuntimeError) as raised:
        control.read_token(str(path))
    assert str(raised.value).startswith(f"NETFOLD_TOKEN_FILE={path}: ") and why in str(raised.value)
    assert text is None or len(text) < 20 or text[:20] not in str(raised.value)


@pytest.mark.parametrize("token", [TOKEN, "_+/=.-" * 8, "a" * 32, "b" * 256])
def test_files_with_a_token(tmp_path: Path, token: str) -> None:
    control_messages.check_token(token)
    assert control.read_token(private(tmp_path / "token", f" \n{token}\r\n\n")) == token
    assert control.read_token("") == ""


def test_a_full_switch() -> None:
    with running_switch("--max-jobs", "1") as switch:
        first = join(0, 1, switch.endpoint, job="cd" * 16)
        said = both_say(switch.endpoint)
        assert " refused: " in said and "full" in said
        first.leave("done")


def test_a_job_without_one_of_its_ranks() -> None:
    with running_switch() as switch:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="refused: rank 1 did not join within 1 s"):
            join(0, 2, switch.endpoint, job=JOB, timeout_s=1.0)
        assert time.monotonic() - start < seconds(8)


def test_a_rank_that_joins_twice() -> None:
    with running_switch() as switch:
        outcomes = run_threads(lambda *_: join(0, 2, switch.endpoint, job=JOB, timeout_s=2.0), 2)
        assert any("two processes have the same rank" in outcome.text for outcome in outcomes)


@pytest.mark.parametrize(
    "fields",
    [
        {"job": ""},
        {"job": "ab"},
        {"job": "g" * 32},
        {"job": "a" * 129},
        {"rank": 5},
        {"ranks": []},
        {"ranks": [0, 0]},
        {"window_bytes": 0},
        {"timeout_s": 0.0},
        {"timeout_s": 1e9},
    ],
)
def test_a_request_that_no_switch_would_take(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        control.join(**{**request_fields(0, 1, "127.0.0.1:9", job=JOB, timeout_s=1.0), **fields})


# --- switches that are none, or mean harm ---


@contextlib.contextmanager
def fake(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve each connection in a thread, and close it afterwards; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def handle(stream: socket.socket) -> None:
            with contextlib.suppress(OSError, EOFError), stream:
                serve(stream)

        def accept() -> None:
            while True:
                try:
                    stream, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=handle, args=(stream,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends the wait in accept


def answers(*messages: Message) -> Callable[[socket.socket], None]:
    """Answer each message with the next of these."""

    def serve(stream: socket.socket) -> None:
        for message in messages:
            control_messages.receive(stream)
            control_messages.send(stream, message)
        stream.recv(1)

    return serve


ADMITTED = {"type": "admitted", "version": VERSION, "job_id": 1, "incarnation": 7, "worker": 0, "nonce": 1, "port": 9}


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, -1, None, "9", 9.0])
@pytest.mark.parametrize("message", [ADMITTED, {"type": "refused", "reason": "no"}, {"type": "greeted"}])
def test_a_switch_of_another_version(version: Any, message: Message) -> None:
    with fake(answers({**message, "version": version})) as endpoint:
        said = native_says(endpoint)
        if version != 9.0:  # to Python 9.0 is 9
            assert said == python_says(endpoint)
    assert "control protocol" in said


def test_a_refusal_without_a_version() -> None:
    with fake(answers({"type": "refused", "reason": "this switch speaks control protocol 5"})) as endpoint:
        assert both_say(endpoint).endswith("refused: this switch speaks control protocol 5")


def test_a_reason_is_one_line_of_bounded_length() -> None:
    reason = "line\nother\x1b[31m" + "ä" * 5000
    with fake(answers({"type": "refused", "version": VERSION, "reason": reason})) as endpoint:
        said = native_says(endpoint)
    assert "\n" not in said and "\x1b" not in said and len(said) < 1000 and "line other" in said


def garbage() -> dict[str, bytes]:
    def framed(body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + body

    def without(field: str) -> bytes:
        return framed(msgpack.packb({name: value for name, value in ADMITTED.items() if name != field}))

    def changed(**fields: Any) -> bytes:
        return framed(msgpack.packb({**ADMITTED, **fields}))

    return {
        "a web server": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        "nothing": b"",
        "half a length": b"\0\0",
        "half a message": framed(msgpack.packb(ADMITTED))[:20],
        "a long message": struct.pack(">I", 1 << 31) + b"a" * 100,
        "an empty message": framed(b""),
        "no msgpack": framed(b"\xc1" * 50),
        "no map": framed(msgpack.packb([1, 2])),
        "no type": framed(msgpack.packb({"version": VERSION})),
        "a type that is no text": framed(msgpack.packb({"type": 5, "version": VERSION})),
        "another type": framed(msgpack.packb({"type": "start", "version": VERSION})),
        "deep": framed(b"\x91" * 60_000),
        **{f"without {field}": without(field) for field in ("job_id", "incarnation", "worker", "nonce", "port")},
        "a job that is too large": changed(job_id=1 << 32),
        "a job that is negative": changed(job_id=-1),
        "a job that is text": changed(job_id="1"),
        "another worker": changed(worker=1),
        "a port that is too large": changed(port=1 << 16),
        "a nonce that is text": changed(nonce="1"),
        "a short secret": changed(secret=b"s" * 31, result_secret=b"r" * 32),
        "a secret that is text": changed(secret="s" * 32, result_secret=b"r" * 32),
        "no second secret": changed(secret=b"s" * 32),
        "a profile without a length": changed(profile="hardware"),
        "a profile of no length": changed(profile="hardware", payload_bytes=0),
        "a profile of an odd length": changed(profile="hardware", payload_bytes=12),
        "a profile of a large length": changed(profile="hardware", payload_bytes=1 << 40),
    }


@pytest.mark.parametrize("name", garbage())
def test_a_server_that_answers_garbage(name: str) -> None:
    def serve(stream: socket.socket) -> None:
        control_messages.receive(stream)
        stream.sendall(garbage()[name])

    with fake(serve) as endpoint:
        start = time.monotonic()
        said = native_says(endpoint, timeout_s=5.0)
        assert time.monotonic() - start < seconds(4)
    assert said.startswith(f"rank 0: the switch at {endpoint} (NETFOLD_SWITCH) is no netfold switch, or it stopped")
    assert "ssssssss" not in said and "rrrrrrrr" not in said


@pytest.mark.parametrize("seed", range(20))
def test_a_server_that_answers_random_bytes_inside_tls_or_without(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def serve(stream: socket.socket) -> None:
        stream.sendall(draw.bytes(int(draw.integers(1, 3000))))
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(1000):
            pass

    with fake(serve) as endpoint:
        assert "is no netfold switch" in native_says(endpoint, timeout_s=5.0)
        assert "did not shake hands" in native_says(f"{endpoint}#{'a' * 64}", timeout_s=5.0)


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """Send back every packet, as a switch does with hellos; yield the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    packet, peer = udp.recvfrom(1 << 16)
                    udp.sendto(packet, peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield udp.getsockname()[1]
        finally:
            ended.set()
            thread.join()


START = {"type": "start", "epoch": 1, "payload_bytes": 1408, "window": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": 1 << 32},
        {"epoch": None},
        {"payload_bytes": 0},
        {"payload_bytes": 1404},
        {"payload_bytes": 8888},  # longer than any packet that came back
        {"payload_bytes": -8},
        {"window": 0},
        {"window": 1 << 20},  # 1.5 GB
        {"window": "8"},
        {"type": "admitted"},
    ],
)
def test_a_start_that_makes_no_sense(fields: Message) -> None:
    with echo() as port, fake(answers({**ADMITTED, "port": port}, {**START, **fields})) as endpoint:
        said = native_says(endpoint, timeout_s=5.0)
    assert "is no netfold switch, or it stopped while this rank joined: " in said


@pytest.mark.parametrize("message", [{"type": "refused", "reason": "rank 1 left"}, {"type": "left"}, None])
def test_a_refusal_while_the_path_is_probed_is_the_reason(message: Message | None) -> None:
    def serve(stream: socket.socket) -> None:
        control_messages.receive(stream)
        control_messages.send(stream, {**ADMITTED, "port": port})
        if message is not None:
            control_messages.send(stream, message)
            stream.recv(1)

    with silent_port() as port, fake(serve) as endpoint:
        said = both_say(endpoint, timeout_s=1.0)
    is_refused = message is not None and message["type"] == "refused"
    assert said.endswith("refused: rank 1 left") if is_refused else "no UDP packet came back" in said


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        yield udp.getsockname()[1]


def test_a_path_that_returns_no_packet() -> None:
    with silent_port() as port, fake(answers({**ADMITTED, "port": port})) as endpoint:
        said = both_say(endpoint, timeout_s=1.0)
    assert f"no UDP packet came back from its data port {port}" in said


def test_a_switch_that_closes_after_the_admission() -> None:
    def serve(stream: socket.socket) -> None:
        control_messages.receive(stream)
        control_messages.send(stream, {**ADMITTED, "port": port})
        control_messages.receive(stream)  # ready

    with echo() as port, fake(serve) as endpoint:
        assert "it stopped while this rank joined: the connection was closed; check the address" in both_say(endpoint)


@pytest.mark.parametrize(
    ("fingerprint", "sent"),
    [
        ("", b""),
        ("", control_messages.encode(ADMITTED)),
        ("#" + "a" * 64, b""),
        ("#" + "a" * 64, b"\x16\x03\x03\x3f\x00" + b"\0" * 0x3F00),  # a record of TLS
    ],
)
def test_a_slow_server_costs_no_more_than_the_deadline(fingerprint: str, sent: bytes) -> None:
    ended = threading.Event()

    def serve(stream: socket.socket) -> None:
        for each in sent:
            stream.sendall(bytes([each]))
            ended.wait(0.1)
        ended.wait(seconds(20))

    with fake(serve) as endpoint:
        start = time.monotonic()
        said = native_says(endpoint + fingerprint, timeout_s=1.0)
        assert time.monotonic() - start < seconds(6)
        ended.set()
    if fingerprint:
        assert "did not shake hands" in said
    else:
        assert "did not answer within 1.0 s: either it is no netfold switch, or it is stopped" in said


def test_an_address_that_drops_everything() -> None:
    # A full backlog: the kernel drops further requests.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                stream = stack.enter_context(socket.socket())
                stream.setblocking(False)
                stream.connect_ex(address)
            assert "did not answer within 1.0 s; check the address" in both_say(
                f"127.0.0.1:{address[1]}", timeout_s=1.0
            )


def admit_and_then(then: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def serve(stream: socket.socket) -> None:
        with echo() as port:
            answers_two = ({**ADMITTED, "port": port}, START)
            for message in answers_two:
                control_messages.receive(stream)
                control_messages.send(stream, message)
        then(stream)

    return serve


def test_a_switch_of_the_hardware_profile_fixes_the_length_of_packets() -> None:
    with echo() as port:
        admitted = {**ADMITTED, "port": port, "profile": "hardware", "payload_bytes": 512}
        with fake(answers(admitted, {**START, "payload_bytes": 512})) as endpoint:
            member = join(0, 1, endpoint, job=JOB)
            assert member.hardware and member.payload_bytes == 512 and member.window == 8
            member.leave("done")


def answer_queries(stream: socket.socket, **fields: Any) -> None:
    while True:
        query = control_messages.receive(stream)
        if query["type"] == "leave":
            return
        control_messages.send(stream, {"type": query["type"], "serial": query["serial"], **fields})


def test_a_switch_that_answers_and_sends_no_result_is_lost() -> None:
    with fake(admit_and_then(lambda stream: answer_queries(stream, ranks=[]))) as endpoint:
        member = join(0, 1, endpoint, job=JOB)
        with pytest.raises(RuntimeError, match="packets have not passed between it and rank 0 for"):
            add(member, np.ones(10, np.float32), 1)


def test_a_switch_that_waits_for_another_rank_is_not_lost() -> None:
    with fake(admit_and_then(lambda stream: answer_queries(stream, ranks=[1]))) as endpoint:
        member = join(0, 1, endpoint, job=JOB)
        with pytest.raises(RuntimeError, match="the deadline passed"):
            member.all_reduce(np.ones(1, np.float32).ctypes.data, 4, 0, 0, 1, 0, int(5e9))


def test_a_switch_that_names_a_lost_one_above_it() -> None:
    def refuse(stream: socket.socket) -> None:
        control_messages.send(stream, {"type": "refused", "reason": "it stopped", "switch": "10.9.9.9:7171"})

    with fake(admit_and_then(refuse)) as endpoint:
        said = join(0, 1, endpoint, job=JOB).watch(int(seconds(10) * 1e9))
    assert said == "the switch at 10.9.9.9:7171 is gone (it stopped)"


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff\xff",
        control_messages.encode({"type": "left", "ranks": "all"}),
        control_messages.encode({"type": "left"}),
        control_messages.encode({"type": "alive"}),
        control_messages.encode({"type": "left", "ranks": [-1]}),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
    ],
)
def test_garbage_after_the_start_ends_the_membership(message: bytes) -> None:
    def send(stream: socket.socket) -> None:
        stream.sendall(message)
        stream.recv(1)

    with fake(admit_and_then(send)) as endpoint:
        said = join(0, 1, endpoint, job=JOB).watch(int(seconds(10) * 1e9))
    assert said.startswith(f"the switch at {endpoint} is gone (")
    with fake(admit_and_then(send)) as endpoint:
        lost: list[str] = []
        member = Membership.join(SwitchAccess(endpoint, None, 0, (0,)), job=JOB, timeout_s=seconds(20))
        member._receive(lambda _, why: lost.append(why))
        member.leave("done")
    assert len(lost) == 1 and "it sent a malformed control message" in lost[0], lost


def test_messages_of_other_types_and_ranks_are_ignored() -> None:
    def chat(stream: socket.socket) -> None:
        for message in (
            {"type": "weather"},
            {"type": "left", "ranks": [7], "reason": "x"},
            {"type": "alive", "serial": 99},
        ):
            control_messages.send(stream, message)
        answer_queries(stream)

    with fake(admit_and_then(chat)) as endpoint:
        member = join(0, 1, endpoint, job=JOB)
        assert member.watch(int(2.5e9)) == ""
        member.leave("done")


def test_a_switch_that_floods_does_not_hold_the_caller() -> None:
    flood = control_messages.encode({"type": "weather", "text": "x" * 60_000})

    def pour(stream: socket.socket) -> None:
        while True:
            stream.sendall(flood)

    with fake(admit_and_then(pour)) as endpoint:
        member = join(0, 1, endpoint, job=JOB)
        start = time.monotonic()
        member.watch(int(1e9))
        assert time.monotonic() - start < seconds(3)
        member.leave("done")
        assert time.monotonic() - start < seconds(6)
