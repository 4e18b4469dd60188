"""The daemon as control plane of a P4 pipeline: what it programs, and its refusals. A thread stands for simple_switch.

core/tests/p4 runs the same code with a real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from load import seconds
from ranks import RunningSwitch, run_command, running_switch

from netfold._native import protocol
from netfold._native.transport import UdpPort
from netfold.communicator.membership import Membership
from netfold.errors import SwitchError
from netfold.switch import bmv2
from netfold.switch import thrift_client as thrift
from netfold.switch.bmv2 import Bmv2, Host, PipelineError, PipelineJob, PipelineMember, PipelineParent, read_hosts
from netfold.switch.thrift_client import ThriftClient, ThriftError
from netfold.switch_protocol import control_messages
from netfold.switch_protocol.control_client import SwitchAccess
from netfold.switch_protocol.job_tree import levels_by_worker

CONFIG = {
    "register_arrays": [
        *({"name": f"SwitchIngress.values.sum_{value}", "size": 256} for value in range(128)),
        {"name": "SwitchIngress.slot_next", "size": 256},
        {"name": "SwitchIngress.job_results", "size": 2},
        {"name": "SwitchIngress.lease", "size": 2},
    ]
}
LOCAL = {"127.0.0.1": Host(bytes.fromhex("020000000001"), 4)}
Reply = Callable[[str, list[Any]], thrift.Value | None]


def answers(method: str, arguments: list[Any]) -> thrift.Value | None:
    """The results that a simple_switch gives; None for a method without one."""
    if method == "bm_get_config":
        return thrift.string(json.dumps(CONFIG))
    if method == "bm_mc_get_entries":
        return thrift.string('{"mgrps": [{"id": 3}], "l1_handles": [{"handle": 7}]}')
    if method == "bm_counter_read":
        return thrift.record(_1=thrift.i64(0), _2=thrift.i64(5))
    if method in ("bm_mt_add_entry", "bm_mc_mgrp_create", "bm_mc_node_create"):
        return thrift.i32(1)
    return None


class FakeSwitch:
    """A Thrift server that records calls. `reply` gives each result, or raises ThriftError with a code.

    lease: the owner's incarnation, and its count.
    """

    def __init__(self, reply: Reply = answers, port: int = 0) -> None:
        self.reply = reply
        self.calls: list[tuple[str, list[Any]]] = []
        self.lease = [0, 0]
        self._streams: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        self.endpoint = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """End, as a process does that is killed."""
        # A thread in accept() keeps the port until it is woken.
        for each in (self._server, *self._streams):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def disconnect(self) -> None:
        """End all connections."""
        for each in self._streams:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._server.accept()
                self._streams.append(stream)
                threading.Thread(target=self._serve_stream, args=(stream,), daemon=True).start()

    def _serve_stream(self, stream: socket.socket) -> None:
        reader = object.__new__(ThriftClient)
        reader._stream = stream
        with stream, contextlib.suppress(OSError):
            while True:
                head, length = struct.unpack(">II", reader._read(8))
                assert head == 0x80010001
                name, serial = reader._read(length), reader._read(4)
                fields = reader._value(12)
                method = name.decode().partition(":")[2]
                result = self._result(method, [fields[number] for number in sorted(fields)])
                stream.sendall(struct.pack(">II", 0x80010002, length) + name + serial + thrift._packed(result))

    def _result(self, method: str, arguments: list[Any]) -> thrift.Value:
        if arguments[1:2] == [b"SwitchIngress.lease"]:
            if method == "bm_register_read":
                return thrift.record(_0=thrift.i64(self.lease[arguments[2]]))
            self.lease[arguments[2]] = arguments[3]
            return thrift.record()
        self.calls.append((method, arguments))
        try:
            value = self.reply(method, arguments)
            return thrift.record() if value is None else thrift.record(_0=value)
        except ThriftError as error:
            assert error.code is not None
            return thrift.record(_1=thrift.record(_1=thrift.i32(error.code)))


@pytest.fixture
def fake() -> Iterator[FakeSwitch]:
    there = FakeSwitch()
    yield there
    there.close()


def opened(fake: FakeSwitch, incarnation: int = 7) -> Bmv2:
    return Bmv2("127.0.0.1", fake.port, LOCAL, incarnation=incarnation)


def make_job(number: int = 1, window: int = 8) -> PipelineJob:
    return PipelineJob(number, 2, "127.0.0.1", 9, window, [PipelineMember("127.0.0.1", 10, 0)])


def test_an_owner_first_removes_what_the_one_before_left(fake: FakeSwitch) -> None:
    opened(fake).close()
    cleared = [arguments[1] for method, arguments in fake.calls if method == "bm_mt_clear_entries"]
    assert set(cleared) == {
        b"SwitchIngress.check.job",
        b"SwitchIngress.check.member",
        b"SwitchIngress.check.parent",
        b"SwitchEgress.address.address",
        b"SwitchEgress.address.own",
        b"SwitchEgress.address.above",
        b"SwitchIngress.hosts",
    }
    methods = fake.methods()
    assert ("bm_mc_node_destroy", [0, 7]) in fake.calls and ("bm_mc_mgrp_destroy", [0, 3]) in fake.calls
    assert methods.index("bm_mc_node_destroy") < methods.index("bm_mc_mgrp_destroy") < methods.index("bm_mt_add_entry")


def test_the_table_of_jobs_is_written_last_and_cleared_first(fake: FakeSwitch) -> None:
    pipeline = opened(fake)
    fake.calls.clear()
    pipeline.install(make_job())
    method, arguments = fake.calls[-1]
    assert (method, arguments[1], arguments[3]) == (
        "bm_mt_add_entry",
        b"SwitchIngress.check.job",
        b"SwitchIngress.check.set_job",
    )
    slots = [arguments for method, arguments in fake.calls if method == "bm_register_write"][:16]
    assert slots == [[0, b"SwitchIngress.slot_next", slot, slot] for slot in range(16)]
    fake.calls.clear()
    pipeline.remove(1)
    assert fake.calls[0] == ("bm_mt_delete_entry", [0, b"SwitchIngress.check.job", 1])
    pipeline.remove(1)
    pipeline.close()


def test_a_refusal_of_the_pipeline_leaves_nothing_of_the_job(fake: FakeSwitch) -> None:
    def full(method: str, arguments: list[Any]) -> thrift.Value | None:
        if method == "bm_mt_add_entry" and arguments[1] == b"SwitchIngress.check.job":
            raise ThriftError("full", 1)
        return answers(method, arguments)

    pipeline = opened(fake)
    fake.reply = full
    fake.calls.clear()
    with pytest.raises(PipelineError, match="bm_mt_add_entry was refused with code 1"):
        pipeline.install(make_job())
    assert fake.methods()[-5:] == [
        "bm_mt_delete_entry",
        "bm_mt_delete_entry",
        "bm_mc_node_dissociate",
        "bm_mc_node_destroy",
        "bm_mc_mgrp_destroy",
    ]
    fake.reply = answers
    pipeline.install(make_job())
    with pytest.raises(KeyError):
        pipeline.counters(2)
    assert pipeline.counters(1)["contributions"] == 15
    pipeline.close()


def test_jobs_and_slots_are_bounded(fake: FakeSwitch) -> None:
    pipeline = opened(fake)
    pipeline.install(make_job(1, window=64))
    with pytest.raises(PipelineError, match="the pipeline has 256 slots, and no 256 of them in succession are free"):
        pipeline.install(make_job(2, window=128))
    pipeline.install(make_job(2, window=64))
    with pytest.raises(PipelineError, match="the pipeline serves 2 jobs already"):
        pipeline.install(make_job(3, window=8))
    pipeline.close()


def test_another_program_is_refused(fake: FakeSwitch) -> None:
    fake.reply = lambda method, arguments: thrift.string('{"register_arrays": []}')
    with pytest.raises(PipelineError, match=r"the program .* is not core/native/p4/netfold\.p4"):
        opened(fake)


@pytest.mark.parametrize(
    "reply, error",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak Thrift's binary protocol"),
        (struct.pack(">II", 0x80010002, 1 << 27), "does not speak Thrift's binary protocol"),
        (b"", "the connection ended"),
        (struct.pack(">II", 0x80010002, 0) + bytes(4) + b"\x0b\0\0\x7f\xff\xff\xff", "a reply of 2147483647 bytes"),
        (struct.pack(">II", 0x80010002, 0) + bytes(4) + b"\x0f\0\0\x08\x7f\xff\xff\xff", "a list of 2147483647"),
        (struct.pack(">II", 0x80010002, 0) + bytes(4) + b"\x21\0\0", "a value of type 33"),
        (struct.pack(">II", 0x80010003, 0) + bytes(4) + b"\x0b\0\1\0\0\0\3bad\0", "bm_get_config: bad"),
    ],
)
def test_a_peer_that_is_no_thrift_server_is_an_error(reply: bytes, error: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            stream, _ = server.accept()
            with stream:
                stream.recv(100)
                stream.sendall(reply)
                with contextlib.suppress(OSError):  # the client may have gone
                    stream.shutdown(socket.SHUT_WR)
                    stream.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(PipelineError, match=re.escape(error)):
            Bmv2("127.0.0.1", server.getsockname()[1], LOCAL, incarnation=1)


def test_values_of_every_type_arrive_as_they_were_sent(fake: FakeSwitch) -> None:
    client = ThriftClient("127.0.0.1", fake.port, 5)
    sent = thrift.record(
        _1=thrift.boolean(True),
        _2=thrift.i32(-5),
        _3=thrift.i64(-(1 << 40)),
        _4=thrift.strings([b"a", b""]),
        _5=thrift.records([thrift.record(_7=thrift.string("x"))]),
    )
    fake.reply = lambda method, arguments: sent
    assert client.call("standard", "echo", sent) == fake.calls[-1][1][0]
    assert fake.calls[-1] == ("echo", [{1: True, 2: -5, 3: -(1 << 40), 4: [b"a", b""], 5: [{7: b"x"}]}])
    client.close()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"x": {}}', '{"10.0.0.1": {"mac": "02", "port": 1}}', '{"10.0.0.1": {"port": 1}}']
    + [f'{{"10.0.0.1": {{"mac": "02:00:00:00:00:01", "port": {port}}}}}' for port in ("-1", "511", "true", '"1"')],
)
def test_a_bad_file_of_hosts_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_hosts(path)


def test_a_second_control_plane_is_refused_while_the_first_renews_its_lease(fake: FakeSwitch) -> None:
    first, over = opened(fake), threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            first.beat()

    beating = threading.Thread(target=beat)
    beating.start()
    fake.calls.clear()
    try:
        with pytest.raises(PipelineError, match=r"has a control plane that is alive \(incarnation 00000007\)"):
            opened(fake, 8)
    finally:
        over.set()
        beating.join()
    assert fake.lease[0] == 7
    assert set(fake.methods()) == {"bm_get_config"}  # nothing of the first one's was touched
    first.install(make_job())
    first.close()


def test_a_lease_that_is_not_renewed_ends_and_its_owner_learns_it(
    fake: FakeSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(fake)
    first.install(make_job())
    monkeypatch.setattr(bmv2, "LEASE_S", 0.3)
    second = opened(fake, 8)
    with pytest.raises(
        PipelineError, match=r"is no longer this switch's: another control plane has it \(incarn.* 0+8\)"
    ):
        first.beat()
    for use in (lambda: first.install(make_job(2)), lambda: first.counters(1), lambda: first.missing(1, 0)):
        with pytest.raises(PipelineError, match="is no longer this switch's"):
            use()
    fake.calls.clear()
    first.remove(1)
    first.close()
    assert not fake.calls and fake.lease[0] == 8
    second.beat()
    second.close()
    assert fake.lease[0] == 0


def test_an_orderly_end_frees_the_pipeline_at_once(fake: FakeSwitch, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(fake).close()
    monkeypatch.setattr(bmv2, "LEASE_S", 1e6)
    opened(fake, 8).close()


def test_of_two_that_take_a_free_pipeline_at_once_one_has_it(fake: FakeSwitch, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = time.sleep

    def overtake(seconds: float) -> None:
        fake.lease[0] = 9
        settle(seconds)

    monkeypatch.setattr(bmv2.time, "sleep", overtake)
    with pytest.raises(PipelineError, match=r"has a control plane that is alive \(incarnation 00000009\)"):
        opened(fake)
    assert set(fake.methods()) == {"bm_get_config"}


def test_a_leafs_sums_and_its_parents_results_have_entries(fake: FakeSwitch) -> None:
    pipeline = opened(fake)
    fake.calls.clear()
    above = PipelineParent(1, 2, 3, 4, "127.0.0.1", 5, "127.0.0.1", 6)
    pipeline.install(dataclasses.replace(make_job(), parent=above))
    added = [arguments[1] for method, arguments in fake.calls if method == "bm_mt_add_entry"]
    assert added[2:] == [
        b"SwitchIngress.check.parent",
        b"SwitchEgress.address.own",
        b"SwitchEgress.address.above",
        b"SwitchIngress.check.job",
        b"SwitchIngress.check.job",
    ]
    fake.calls.clear()
    pipeline.remove(1)
    assert fake.methods().count("bm_mt_delete_entry") == len(added)
    for absent in ({"ip": "127.0.0.9"}, {"own_ip": "127.0.0.9"}):
        with pytest.raises(PipelineError, match=r"no port of the switch leads to 127\.0\.0\.9"):
            pipeline.install(dataclasses.replace(make_job(), parent=dataclasses.replace(above, **absent)))
    pipeline.install(make_job())
    pipeline.close()


# The daemon.


@pytest.fixture
def hosts_file(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text('{"127.0.0.1": {"mac": "02:00:00:00:00:01", "port": 4}}')
    return path


def options(fake: FakeSwitch, hosts_file: Path) -> list[str]:
    return ["--dataplane", "bmv2", "--pipeline", fake.endpoint, "--hosts", str(hosts_file)]


JOIN: dict[str, Any] = {
    "type": "join",
    "version": control_messages.VERSION,
    "job": "j",
    "rank": 0,
    "ranks": [0],
    "port": 9,
    "profiles": ["hardware"],
}


def ask(address: tuple[str, int], message: dict[str, Any]) -> dict[str, Any]:
    with socket.create_connection(address, 10) as stream:
        control_messages.send(stream, message)
        return control_messages.receive(stream)


def test_a_worker_that_speaks_the_full_protocol_is_told_in_one_sentence(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        switch.wait_for("event=pipeline .*packets carry no MAC, since a pipeline can check none")
        for profiles in ([], None, "hardware", ["other"]):
            answer = ask(switch.address, {**JOIN, "profiles": profiles})
            assert answer["type"] == "refused"
            assert answer["reason"] == (
                "rank 0 speaks the full aggregation protocol only, and this switch is a P4 pipeline with the hardware "
                "profile (--dataplane bmv2): update netfold on the worker, or use a switch with --dataplane user"
            )
        admitted = ask(switch.address, JOIN)
        assert (admitted["type"], admitted["profile"], admitted["payload_bytes"]) == ("admitted", "hardware", 512)


def test_jobs_that_a_pipeline_cannot_serve_are_refused(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        many = ask(switch.address, {**JOIN, "ranks": list(range(33))})
        assert many["reason"] == "this switch is a P4 pipeline, whose jobs have at most 32 workers, not 33"
        fabric = {"provider": "tcp", "name": b"x", "tag": 1}
        over_fabric = ask(switch.address, {**JOIN, "port": None, "fabric": fabric})
        assert "which takes packets over UDP" in over_fabric["reason"]


def join(endpoint: str) -> Membership:
    access = SwitchAccess(endpoint, None, 0, (0,))
    return Membership.join(access, job="1" * 32, timeout_s=10)


def test_a_worker_joins_with_the_pipelines_one_length_of_packets(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        membership = join(switch.endpoint)
        assert membership.hardware
        assert (membership.payload_bytes, membership.window) == (512, 64)
        added = [arguments for method, arguments in fake.calls if method == "bm_mt_add_entry"]
        assert added[-1][1] == b"SwitchIngress.check.job"
        membership.leave("done")
        switch.wait_for(r"job \w+ closed after")
        assert ("bm_mt_delete_entry", [0, b"SwitchIngress.check.job", 1]) in fake.calls


def refused_reason(membership: Membership) -> str:
    with pytest.raises(control_messages.ReplyError) as refusal:
        membership._client.expect("left", time.monotonic() + seconds(20))
    return str(refusal.value)


def test_a_daemon_whose_connection_to_the_pipeline_ends_serves_new_jobs_without_a_restart(
    fake: FakeSwitch, hosts_file: Path
) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        running = join(switch.endpoint)
        fake.calls.clear()
        fake.disconnect()
        reason = refused_reason(running)
        assert re.search(rf"the P4 pipeline is lost: the simple_switch at {fake.endpoint} cannot be reached: ", reason)
        switch.wait_for("event=pipeline .*is there again, and serves jobs")
        added = [arguments[1] for method, arguments in fake.calls if method == "bm_mt_add_entry"]
        assert added == [b"SwitchIngress.hosts"]
        join(switch.endpoint).leave("done")


def test_a_daemon_whose_pipeline_is_gone_refuses_jobs_until_it_is_back(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        running = join(switch.endpoint)
        fake.close()
        refused_reason(running)
        answer = ask(switch.address, JOIN)
        assert re.match(
            "this switch is a P4 pipeline, which is lost: the simple_switch at .* cannot be reached", answer["reason"]
        )
        back = FakeSwitch(port=fake.port)
        try:
            switch.wait_for("event=pipeline .*is there again, and serves jobs")
            join(switch.endpoint).leave("done")
            # The end of a job that was lost touches nothing of the new pipeline's.
            assert back.methods().count("bm_mt_delete_entry") in (0, 3)
        finally:
            back.close()


def test_a_daemon_whose_lease_another_one_took_ends_its_jobs(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        running = join(switch.endpoint)
        fake.lease[:] = [99, 1]
        assert "another control plane has it (incarnation 00000063)" in refused_reason(running)
        fake.lease[:] = [0, 0]
        switch.wait_for("event=pipeline .*is there again, and serves jobs")
        join(switch.endpoint).leave("done")


def test_a_second_daemon_on_a_pipeline_ends_with_a_sentence(fake: FakeSwitch, hosts_file: Path) -> None:
    with running_switch(*options(fake, hosts_file)) as switch:
        running = join(switch.endpoint)
        second = run_command("switch", "--listen", "127.0.0.1:0", *options(fake, hosts_file))
        assert second.returncode == 2
        assert "two would clear each other's jobs: stop that one first" in " ".join(second.stderr.split())
        running.leave("done")
        switch.wait_for(r"job \w+ closed after")


# Trees.


def program_of(values: int) -> Reply:
    others = [each for each in CONFIG["register_arrays"] if "values" not in each["name"]]
    sums = [{"name": f"SwitchIngress.values.sum_{value}", "size": 256} for value in range(values)]
    config = {"register_arrays": [*others, *sums]}
    return lambda method, arguments: (
        thrift.string(json.dumps(config)) if method == "bm_get_config" else answers(method, arguments)
    )


def switch_id(switch: RunningSwitch) -> int:
    path = {"type": "path", "version": control_messages.VERSION, "below": []}
    return int(ask(switch.address, path)["switches"][0][0])


def join_tree(paths: list[list[RunningSwitch]]) -> list[Membership | str]:
    """Join each worker's first switch, all at once; the memberships, or why there is none."""
    trees = levels_by_worker([[switch_id(each) for each in path] for path in paths], range(len(paths)))

    def join_one(rank: int) -> Membership | str:
        access = SwitchAccess(paths[rank][0].endpoint, None, rank, tuple(range(len(paths))))
        try:
            return Membership.join(access, job="1" * 32, tree=trees[rank], timeout_s=20)
        except SwitchError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(join_one, range(len(paths))))


@pytest.mark.parametrize("root_is_pipeline", [True, False])
def test_all_switches_and_workers_of_a_tree_take_the_pipelines_profile_and_length(
    fake: FakeSwitch, hosts_file: Path, root_is_pipeline: bool
) -> None:
    fake.reply = program_of(32)
    pipeline = options(fake, hosts_file)
    with running_switch(*(pipeline if root_is_pipeline else [])) as root:
        parent = ["--parent", root.endpoint]
        with running_switch(*parent, *([] if root_is_pipeline else pipeline)) as one, running_switch(*parent) as other:
            joined = join_tree([[one, root], [other, root], [root]])
            for each in joined:
                assert isinstance(each, Membership), each
                assert (each.hardware, each.payload_bytes, each.window) == (True, 128, 64)
                each.leave("done")


def test_a_tree_in_software_has_the_full_protocol() -> None:
    with running_switch() as root, running_switch("--parent", root.endpoint) as leaf:
        for each in join_tree([[leaf, root], [root]]):
            assert isinstance(each, Membership) and not each.hardware
            each.leave("done")


def test_pipelines_of_one_tree_need_one_length(fake: FakeSwitch, hosts_file: Path) -> None:
    fake.reply = program_of(32)
    second = FakeSwitch(program_of(64))
    try:
        with running_switch(*options(fake, hosts_file)) as root, contextlib.ExitStack() as stack:
            below = "--parent", root.endpoint, *options(second, hosts_file)
            leaf = stack.enter_context(running_switch(*below))
            texts = join_tree([[leaf, root], [root]])
            assert "is a P4 pipeline with 128 bytes of values in a packet, and this one has 256" in str(texts[0])
        with running_switch() as root:
            parent = ["--parent", root.endpoint]
            first = running_switch(*parent, *options(fake, hosts_file))
            with first as one, running_switch(*parent, *options(second, hosts_file)) as other:
                texts = join_tree([[one, root], [other, root]])
                for text in texts:
                    assert "have packets of 128 and 256 bytes of values, and 128 bytes pass on all paths" in str(text)
    finally:
        second.close()


def test_a_worker_of_the_full_protocol_anywhere_in_a_pipelines_tree_is_told(fake: FakeSwitch, hosts_file: Path) -> None:
    # It asks a leaf in software, which learns from its parent what the tree has.
    with running_switch(*options(fake, hosts_file)) as root, running_switch("--parent", root.endpoint) as leaf:
        trees = levels_by_worker([[switch_id(leaf), switch_id(root)]] * 2, [0, 1])
        told = []
        with contextlib.ExitStack() as stack:
            for rank in (0, 1):
                stream = stack.enter_context(socket.create_connection(leaf.address, seconds(20)))
                port = UdpPort(host="127.0.0.1", buffer_bytes=1 << 16)
                fields = {"rank": rank, "tree": trees[rank], "port": port.port, "profiles": ["hardware"] * rank}
                control_messages.send(stream, {**{key: JOIN[key] for key in ("type", "version", "job")}, **fields})
                admitted = control_messages.receive(stream)
                port.connect("127.0.0.1", admitted["port"])
                identity = {key: admitted[key] for key in ("incarnation", "worker", "nonce")}
                hello = {"job": admitted["job_id"], "packet_bytes": 1152 + protocol.HEADER_BYTES, "key": None}
                assert port.hello(**identity, **hello, timeout_ns=int(seconds(5) * 1e9)) is not None
                control_messages.send(stream, {"type": "ready", "payload_bytes": 1152})
                told.append(stream)
            for stream in told:
                assert control_messages.receive(stream)["reason"] == (
                    "a switch of this job's tree is a P4 pipeline with the hardware profile, and rank 0 does not speak "
                    "it: update netfold there"
                )


def test_a_job_that_the_pipeline_refuses_ends_with_the_reason(fake: FakeSwitch, hosts_file: Path) -> None:
    def full(method: str, arguments: list[Any]) -> thrift.Value | None:
        if method == "bm_mt_add_entry" and b"check" in arguments[1]:
            raise ThriftError("full", 1)
        return answers(method, arguments)

    with running_switch(*options(fake, hosts_file)) as switch:
        fake.reply = full
        with pytest.raises(SwitchError, match="bm_mt_add_entry was refused with code 1"):
            join(switch.endpoint)
        fake.reply = answers
        join(switch.endpoint).leave("done")


@pytest.mark.parametrize(
    "words, error",
    [
        (["--dataplane", "bmv2"], "--dataplane bmv2 needs --pipeline and --hosts"),
        (["--pipeline", "127.0.0.1:1"], "--dataplane bmv2 needs --pipeline and --hosts, and no other data plane"),
        (["--dataplane", "fpga"], "--dataplane 'fpga' is not user or bmv2"),
        (["--parent", f"127.0.0.1:1#{'0' * 64}"], "leave out --token-file, --fabric and a --parent with a fingerprint"),
        (["--fabric", "tcp"], "leave out --token-file, --fabric and a --parent with a fingerprint"),
        (["--listen", "127.0.0.2:0"], "127.0.0.2 is not in the file of --hosts"),
    ],
)
def test_options_that_do_not_go_together_are_an_error(
    fake: FakeSwitch, hosts_file: Path, words: list[str], error: str
) -> None:
    whole = options(fake, hosts_file) if words[0] in ("--parent", "--fabric", "--listen") else []
    listen = [] if "--listen" in words else ["--listen", "127.0.0.1:0"]
    done = run_command("switch", *listen, *whole, *words)
    assert done.returncode == 2
    assert error in " ".join(done.stderr.split())
