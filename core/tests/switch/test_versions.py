"""Peers of another version: a sentence on both sides names both versions and the side to upgrade
(docs/reference/versions.md).

The test acts as an older or newer peer: it sends the first message of that version to a running switch, or answers a
worker's first message as a switch of that version does.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_threads, running_switch

import netfold
from netfold import Communicator, FileStore, Options
from netfold._native import protocol
from netfold.communicator.membership import Membership
from netfold.errors import SwitchError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess, query_quota

ROOT = Path(__file__).parents[3]
VERSION = control_messages.VERSION
OURS = f"(netfold {netfold.__version__}) speaks control protocol {VERSION}"
OTHERS = [VERSION - 1, VERSION + 1]

JOIN: dict[str, Any] = {"type": "join", "job": "j", "rank": 0, "ranks": [0], "port": 9, "window_bytes": 1 << 20}
FIRST: dict[str, dict[str, Any]] = {
    "join": JOIN,
    "path": {"type": "path", "below": []},
    "quota": {"type": "quota"},
    "a type of its own": {"type": "greet"},
}


def ask(address: tuple[str, int], message: dict[str, Any]) -> dict[str, Any]:
    with socket.create_connection(address, 10) as stream:
        control_messages.send(stream, message)
        return control_messages.receive(stream)


def test_a_switch_refuses_every_first_message_of_another_version_and_names_the_upgrade() -> None:
    with running_switch() as switch:
        for peer_version in OTHERS:
            older = "the worker" if peer_version < VERSION else "this switch"
            rest = f"speaks control protocol {peer_version}, this switch {OURS}: upgrade netfold where"
            for name, message in FIRST.items():
                answer = ask(switch.address, {**message, "version": peer_version})
                reason = f"the worker {rest} {older} runs"
                assert answer == {"type": "refused", "version": VERSION, "reason": reason}, name
            switch.wait_for(rf"event=refused .*reason=version .*{re.escape(reason)}", count=len(FIRST))
            answer = ask(switch.address, {"type": "path", "below": [5], "version": peer_version})
            assert answer["reason"].startswith(f"the switch below {rest}")


def test_a_switch_refuses_a_worker_without_a_version() -> None:
    unclear: list[dict[str, Any]] = [{}, {"version": str(VERSION)}, {"version": None}, {"version": [VERSION]}]
    with running_switch() as switch:
        for fields in unclear:
            answer = ask(switch.address, {**JOIN, **fields})
            assert answer["type"] == "refused"
            assert answer["reason"] == (
                f"the worker does not say which control protocol it speaks, and this switch {OURS}: run the same "
                "netfold on both sides"
            )


@contextlib.contextmanager
def fake_switch(answer: dict[str, Any]) -> Iterator[str]:
    """Answer every connection's first message with `answer`; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    stream, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError, EOFError), stream:
                    control_messages.receive(stream)
                    control_messages.send(stream, answer)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends the wait in accept


PATH = {"type": "path", "switches": [[7, ""]], "error": ""}
ADMITTED = {"type": "admitted", "job_id": 1, "incarnation": 7, "worker": 0, "nonce": 1, "port": 9}
ROOM = {"type": "quota", "jobs": 1, "workers": 1, "memory_bytes": 1, "slots": 1}


def refused_by_worker(endpoint: str, peer_version: int) -> str:
    older = "it" if peer_version < VERSION else "this worker"
    return (
        f"rank 0: the switch at {endpoint} (NETFOLD_SWITCH) cannot be joined: it speaks control protocol "
        f"{peer_version}, this worker {OURS}: upgrade netfold where {older} runs"
    )


@pytest.mark.parametrize("peer_version", OTHERS)
@pytest.mark.parametrize(
    "answer",
    [{"type": "refused", "reason": "no"}, PATH, {"type": "greeted"}],
    ids=["refuses", "answers", "says something new"],
)
def test_a_group_refuses_a_switch_of_another_version_and_names_the_upgrade(
    answer: dict[str, Any], peer_version: int
) -> None:
    with fake_switch({**answer, "version": peer_version}) as endpoint, pytest.raises(SwitchError) as raised:
        make_a_group(endpoint)
    assert str(raised.value) == refused_by_worker(endpoint, peer_version)


@pytest.mark.parametrize("peer_version", OTHERS)
def test_a_worker_refuses_an_admission_and_a_grant_of_another_version(peer_version: int) -> None:
    with fake_switch({**ADMITTED, "version": peer_version}) as endpoint, pytest.raises(SwitchError) as raised:
        Membership.join(SwitchAccess(endpoint, None, 0, (0,)), job="0" * 16, timeout_s=5)
    assert str(raised.value) == refused_by_worker(endpoint, peer_version)
    with fake_switch({**ROOM, "version": peer_version}) as endpoint, pytest.raises(SwitchError) as raised:
        query_quota(endpoint, token_file=None, rank=0, timeout_s=5)
    assert str(raised.value) == refused_by_worker(endpoint, peer_version)


def test_a_reply_without_a_version_is_refused() -> None:
    with (
        fake_switch(PATH) as endpoint,
        pytest.raises(SwitchError, match="does not say which control protocol") as raised,
    ):
        make_a_group(endpoint)
    assert OURS in str(raised.value)


def test_a_refusal_of_control_protocol_5_reaches_the_user() -> None:
    # Its reason names both versions; its messages have no version field.
    reason = "this switch speaks control protocol 5, the worker 6: run the same netfold on both sides"
    with fake_switch({"type": "refused", "reason": reason}) as endpoint, pytest.raises(SwitchError) as raised:
        make_a_group(endpoint)
    assert str(raised.value) == f"rank 0: the switch at {endpoint} (NETFOLD_SWITCH) refused: {reason}"


@pytest.mark.parametrize("peer_version", OTHERS)
def test_a_leaf_reports_a_parent_of_another_version(peer_version: int) -> None:
    older = "it" if peer_version < VERSION else "this switch"
    with fake_switch({**PATH, "version": peer_version}) as endpoint, running_switch("--parent", endpoint) as leaf:
        leaf.wait_for(
            re.escape(
                f"the parent switch at {endpoint} cannot be joined: it speaks control protocol {peer_version}, "
                f"this switch {OURS}: upgrade netfold where {older} runs"
            )
        )


def test_unknown_fields_are_ignored() -> None:
    with running_switch() as switch:
        answer = ask(switch.address, {"type": "path", "version": VERSION, "below": [], "colour": "green"})
        assert answer["type"] == "path"
    with fake_switch({**ROOM, "version": VERSION, "colour": "green"}) as endpoint:
        assert query_quota(endpoint, token_file=None, rank=0, timeout_s=5).jobs == 1


def make_a_group(endpoint: str) -> None:
    """Make a group of two ranks at this switch; raise rank 0's SwitchError."""

    def group(rank: int, size: int, folder: str) -> None:
        with Communicator(FileStore(folder), rank, size, options=Options(switch=endpoint), join_timeout_s=5):
            pass

    outcome, _ = run_threads(group, 2)
    if outcome.error == "SwitchError":
        raise SwitchError(outcome.text.split("\nTraceback")[0])
    assert not outcome.error, outcome.text


class OtherVersion(FileStore):
    """A store in which rank 0's values look as if another version of netfold had written them."""

    def set(self, key: str, value: bytes) -> None:
        if key.endswith("job"):
            value = json.dumps({**json.loads(value), "netfold": "999.0"}).encode()
        super().set(key, value)


def test_a_rank_with_another_netfold_version_than_rank_0_is_an_error() -> None:
    def group(rank: int, size: int, folder: str) -> None:
        store = (OtherVersion if rank == 0 else FileStore)(folder)
        with Communicator(store, rank, size, join_timeout_s=5):
            pass

    assert run_threads(group, 2)[1].text.startswith(
        f"rank 1 runs netfold {netfold.__version__}, rank 0 runs 999.0: install the same version on every host of "
        "the job\n"
    )


def test_the_page_on_versions_has_the_versions_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = dict(re.findall(r"^\| (.+?) \| `?(\S+?)`? \|", page, re.MULTILINE))
    assert rows["control protocol"] == str(VERSION)
    assert rows["packet header"] == str(protocol.Header().pack()[2])
