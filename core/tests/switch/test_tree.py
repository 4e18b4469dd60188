"""Trees of switches, with real daemons: their sums, and the end of one of them."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts import apart
from load import seconds
from ranks import Outcome, RunningSwitch, private, run_command, run_threads, running_switch, values

from netfold import Communicator, FileStore, Options
from netfold._native import engine, protocol
from netfold._native.transport import UdpPort
from netfold.communicator import membership
from netfold.switch.status_table import fetch_status
from netfold.switch_protocol import control_messages

SOON_S = 3.0
BY_SWITCH = "all_reduce=in_network"

Tree = dict[str, RunningSwitch]


@contextlib.contextmanager
def running_tree(*edges: str) -> Iterator[Tree]:
    """Switches by name: "root", then "leaf<root" for one below it."""
    with contextlib.ExitStack() as stack:
        tree: Tree = {}
        for edge in edges:
            name, _, parent = edge.partition("<")
            options = ("--parent", tree[parent].endpoint) if parent else ()
            tree[name] = stack.enter_context(running_switch(*options))
        yield tree


def join(rank: int, size: int, folder: str, endpoint: str, rejoin_s: float = 0, **how: Any) -> Communicator:
    times = {"timeout_s": 20.0, "join_timeout_s": 20.0, **how}
    options = Options(switch=endpoint, transport="tcp", rejoin_s=rejoin_s, algorithm=BY_SWITCH)
    return Communicator(FileStore(folder), rank, size, options=options, **times)


def numbers(rank: int, count: int = 50_000) -> Any:
    """Floats whose sum depends on the order in which they are added."""
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def add(rank: int, size: int, folder: str, homes: list[str]) -> bytes:
    with join(rank, size, folder, homes[rank]) as group:
        buffer = numbers(rank)
        group.all_reduce(buffer)
        return buffer.tobytes()


def summed(*ranks: Any) -> Any:
    """One switch: f32, in order."""
    terms = [numbers(each) if isinstance(each, int) else each for each in ranks]
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def two_racks(tree: Tree, size: int = 8) -> list[str]:
    return [tree["left" if rank < size // 2 else "right"].endpoint for rank in range(size)]


TWO_RACKS = ("root", "left<root", "right<root")


def test_two_racks_add_the_sums_of_their_leaves_in_order() -> None:
    with running_tree(*TWO_RACKS) as tree:
        found = values(run_threads(add, 8, two_racks(tree)))
        assert found == [summed(summed(0, 1, 2, 3), summed(4, 5, 6, 7)).tobytes()] * 8
        for name in tree:
            tree[name].wait_for(r"job \w+ closed after")
        chunks = {name: re.findall(r": (\d+) chunks from (\d+) contributions", tree[name].log())[0] for name in tree}
        assert {int(results) for results, _ in chunks.values()} == {int(chunks["root"][0])}
        assert int(chunks["root"][1]) == 2 * int(chunks["root"][0]), "a leaf sends its sum, and not its workers' parts"


def test_a_tree_of_three_levels_with_workers_at_each_is_correct() -> None:
    with running_tree("root", "middle<root", "left<middle", "right<root") as tree:
        order = ["left", "right", "left", "middle", "right", "root", "middle", "left"]
        found = values(run_threads(add, 8, [tree[name].endpoint for name in order]))
        # Each switch reduces its children in the order of their lowest rank.
        middle = summed(summed(0, 2, 7), 3, 6)
        assert found == [summed(middle, summed(1, 4), 5).tobytes()] * 8


def add_with_memory(rank: int, size: int, folder: str, homes: list[str]) -> tuple[bytes, tuple[int, ...]]:
    options = Options(switch=homes[rank], probe="off", algorithm="all_reduce=hierarchical:in_network")
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = np.arange(50_000, dtype=np.float64) * (rank + 1)
        group.all_reduce(buffer)
        assert group.group.membership is None or group.group.membership.workers == (0, 2, 4)
        return buffer.tobytes(), group.group.table.workers(group.group.topology)


def test_one_rank_of_each_host_joins_whatever_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*apart((0, 0, 1, 1, 2, 2)))
    with running_tree(*TWO_RACKS) as tree:
        homes = [tree["left" if rank < 2 else "right"].endpoint for rank in range(6)]
        found = values(run_threads(add_with_memory, 6, homes))
        assert found == [((np.arange(50_000) * 21.0).tobytes(), (0, 2, 4))] * 6
        tree["root"].wait_for(r"the switch of rank 2 and 1 more of 3 joined from " + re.escape(tree["right"].endpoint))


def test_a_job_below_one_leaf_does_not_use_the_parent() -> None:
    def either(rank: int, size: int, folder: str, homes: list[str], local: str) -> bytes:
        if rank < 4:
            return add(rank, 4, f"{folder}/tree", homes)
        return add(rank - 4, 2, f"{folder}/local", [local, local])

    with running_tree(*TWO_RACKS) as tree:
        homes = two_racks(tree, 4)
        found = values(run_threads(either, 6, homes, tree["right"].endpoint))
        assert found[:4] == [summed(summed(0, 1), summed(2, 3)).tobytes()] * 4
        assert found[4:] == [summed(0, 1).tobytes()] * 2
        assert len(tree["right"].wait_for(r"job \w+ closed after", count=2)) == 2
        assert len(tree["root"].wait_for(r"job \w+ closed after")) == 1


def add_as_integers(rank: int, size: int, folder: str, homes: list[str] | None) -> bytes:
    algorithm = BY_SWITCH if homes else "auto"
    options = Options(switch=homes[rank] if homes else None, transport="tcp", wire_dtype="i32", algorithm=algorithm)
    with Communicator(FileStore(folder), rank, size, options=options, timeout_s=20, join_timeout_s=20) as group:
        buffer = numbers(rank, 20_000) * np.float32(10.0) ** (rank - 3)
        group.all_reduce(buffer)
        return buffer.tobytes()


def test_integer_sums_have_the_same_bits_whatever_the_tree() -> None:
    with running_tree("root", "middle<root", "left<middle", "right<root") as tree:
        shapes = {
            "none": None,
            "one switch": ["root"] * 6,
            "two racks": ["left"] * 3 + ["right"] * 3,
            "mixed": ["right", "left", "right", "left", "root", "middle"],
            "a leaf of one": ["left"] + ["right"] * 5,
        }
        found = {
            name: values(run_threads(add_as_integers, 6, homes and [tree[each].endpoint for each in homes]))
            for name, homes in shapes.items()
        }
    assert len(set(found["none"])) == 1
    assert all(each == found["none"] for each in found.values()), {name: found[name] == found["none"] for name in found}


def call_and_say(
    rank: int, size: int, folder: str, homes: list[str], calls: list[Callable[[Communicator], None]], timeout_s: float
) -> tuple[str, int | None, str, float]:
    with join(rank, size, folder, homes[rank], timeout_s=timeout_s) as group:
        began = time.monotonic()
        try:
            for _ in range(1_000_000):
                calls[rank](group)
        except Exception as error:
            return type(error).__name__, getattr(error, "rank", None), str(error), time.monotonic() - began
    return "", None, "", 0.0


def all_reduce(count: int) -> Callable[[Communicator], None]:
    return lambda group: group.all_reduce(np.ones(count, np.float32))


def test_ranks_of_different_leaves_that_disagree_learn_which_rank_differs() -> None:
    calls = [all_reduce(100)] * 2 + [all_reduce(101)] * 2
    with running_tree(*TWO_RACKS) as tree:
        found = values(run_threads(call_and_say, 4, two_racks(tree, 4), calls, 20.0))
        for rank, (error, named, text, took_s) in enumerate(found):
            assert error in ("Mismatch", "PeerLost"), (rank, error, text)
            assert named in ((2, 3) if rank < 2 else (0, 1)), (rank, text)
            assert took_s < seconds(SOON_S)
        for error, named, text, _ in found:
            if error == "Mismatch":
                assert re.search(rf"rank {named} is in all_reduce #1 of 10[01] f32", text), text
        assert {error for error, *_ in found[:2]} | {error for error, *_ in found[2:]} >= {"Mismatch"}


@pytest.mark.parametrize("late", [1, 6])
def test_a_straggler_is_named_across_the_tree(late: int) -> None:
    over = threading.Barrier(8)

    def absent(group: Communicator) -> None:
        over.wait(seconds(20))
        raise RuntimeError("it was late")

    def call(group: Communicator) -> None:
        try:
            group.all_reduce(np.ones(1000, np.float32))
        finally:
            over.wait(seconds(20))

    calls = [absent if rank == late else call for rank in range(8)]
    with running_tree("root", "middle<root", "left<middle", "right<root") as tree:
        homes = [tree["left" if rank < 4 else "right"].endpoint for rank in range(8)]
        found = values(run_threads(call_and_say, 8, homes, calls, 1.0))
    others = [found[rank] for rank in range(8) if rank != late]
    assert all(named == late for _, named, _, _ in others), others
    assert any(f"the switch still waits for rank {late}. Did every rank" in text for _, _, text, _ in others), others


def test_a_rank_that_leaves_is_named_in_the_other_rack() -> None:
    def go(group: Communicator) -> None:
        group.all_reduce(np.ones(1000, np.float32))
        raise RuntimeError("gone")

    calls = [all_reduce(1000)] * 7 + [go]
    with running_tree(*TWO_RACKS) as tree:
        found = values(run_threads(call_and_say, 8, two_racks(tree), calls, 20.0))
    assert found[7][0] == "RuntimeError"
    for error, named, text, took_s in found[:7]:
        assert (error, named) == ("PeerLost", 7), text
        assert took_s < seconds(SOON_S)


@pytest.mark.parametrize("dies", ["left", "root"])
def test_a_dead_switch_costs_its_jobs_no_step_and_does_not_affect_other_jobs(
    dies: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One job uses the tree, and one only the right leaf. A dead leaf's ranks go on below its parent."""

    def either(rank: int, size: int, folder: str, homes: list[str], local: str) -> tuple[int, str | None, bool]:
        here, of, home = (rank, 4, homes[rank]) if rank < 4 else (rank - 4, 2, local)
        with join(here, of, f"{folder}/{of}", home, rejoin_s=0.2) as group:
            for turns in itertools.count(1):
                buffer = np.full(100_000, here + 1.0, np.float32)
                group.all_reduce(buffer)
                assert (buffer == of * (of + 1) / 2).all()
                # All ranks stop at the same turn.
                flags = np.array([float(over.is_set())], np.float32)
                group.all_reduce(flags)
                if flags[0] > 0:
                    membership = group.group.membership
                    in_network = group.group.events()["algorithm"][-1] == engine.ALGORITHMS["in_network"]
                    return turns, membership and membership.endpoint, in_network
            raise AssertionError("unreachable")

    over = threading.Event()
    with running_tree(*TWO_RACKS) as tree:

        def kill() -> None:
            tree["right"].wait_for(r"event=started", count=2)
            time.sleep(0.5)
            tree[dies].process.send_signal(signal.SIGKILL)
            if dies == "left":
                tree["root"].wait_for(r"event=started", count=2, timeout_s=20)
            time.sleep(1.0)
            over.set()

        killer = threading.Thread(target=kill)
        killer.start()
        found = values(run_threads(either, 6, two_racks(tree, 4), tree["right"].endpoint, timeout_s=60))
        killer.join()
        gone, root, right = tree[dies].endpoint, tree["root"].endpoint, tree["right"].endpoint
    assert len({turns for turns, *_ in found[:4]}) == 1 and found[0][0] > 3
    if dies == "left":
        assert [each for _, *each in found[:4]] == [[root, True]] * 2 + [[right, True]] * 2
    else:
        assert [each for _, *each in found[:4]] == [[None, False]] * 4
    assert [each for _, *each in found[4:]] == [[right, True]] * 2
    lost = [record.getMessage() for record in caplog.records if "No step is lost" in record.getMessage()]
    assert len(lost) == 1 and f"the switch at {gone} is gone" in lost[0], lost


def test_after_a_leafs_death_its_ranks_join_its_parent() -> None:
    def twice(rank: int, size: int, folder: str, homes: list[str], dead: threading.Event) -> tuple[bytes, str]:
        first = add(rank, size, f"{folder}/first", homes)
        dead.wait(seconds(10))
        with join(rank, size, f"{folder}/second", homes[rank]) as group:
            buffer = numbers(rank)
            group.all_reduce(buffer)
            assert group.group.membership is not None
            assert first == summed(summed(0, 1), summed(2, 3)).tobytes()
            return buffer.tobytes(), group.group.membership.endpoint

    dead = threading.Event()
    with running_tree(*TWO_RACKS) as tree:

        def kill() -> None:
            for each in tree.values():
                each.wait_for(r"job \w+ closed after")
            tree["left"].process.send_signal(signal.SIGKILL)
            tree["left"].process.wait()
            dead.set()

        killer = threading.Thread(target=kill)
        killer.start()
        found = values(run_threads(twice, 4, two_racks(tree, 4), dead))
        killer.join()
        assert [each for each, _ in found] == [summed(0, 1, summed(2, 3)).tobytes()] * 4
        root, right = tree["root"].endpoint, tree["right"].endpoint
        assert [endpoint for _, endpoint in found] == [root, root, right, right]


# --- invalid parents ---


def refused_start(*options: str) -> tuple[int, str]:
    done = run_command("switch", "--listen", "127.0.0.1:0", *options)
    return done.returncode, done.stderr


def test_a_cycle_of_parents_is_refused_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with running_switch("--parent", f"127.0.0.1:{port}") as below:
        below.wait_for(r"event=parent")
        code, text = refused_start("--listen", f"127.0.0.1:{port}", "--parent", below.endpoint)
        assert code == 2
        assert f"the parent switch at {below.endpoint} refused:" in text
        assert "the parents of these switches go in a circle" in text


def test_a_switch_that_names_itself_as_its_parent_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, text = refused_start("--listen", f"127.0.0.1:{port}", "--parent", f"127.0.0.1:{port}")
    assert code == 2
    assert "go in a circle" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--parent", "nowhere"), "--parent is 'nowhere'; expected host:port"),
        (("--parent-token-file", "/dev/null"), "--parent-token-file needs --parent"),
        (
            ("--parent", "127.0.0.1:1", "--parent-token-file", "/dev/null"),
            "--parent-token-file needs a fingerprint in --parent",
        ),
    ],
)
def test_invalid_parent_options_are_refused(options: tuple[str, ...], says: str) -> None:
    code, text = refused_start(*options)
    assert (code, says in text) == (2, True), text


def test_a_missing_parent_is_reported_only_to_jobs_that_need_it() -> None:
    with running_switch("--parent", "127.0.0.1:1") as left, running_switch() as right:
        left.wait_for(r"the parent switch at 127\.0\.0\.1:1 cannot be reached: Connection refused; until it is there")
        assert values(run_threads(add, 2, [left.endpoint] * 2)) == [summed(0, 1).tobytes()] * 2
        for rank, outcome in enumerate(run_threads(add, 2, [left.endpoint, right.endpoint])):
            assert outcome.error == "SwitchError"
            assert f"rank {rank}: " in outcome.text
            assert "the switches of this group's ranks have no common parent" in outcome.text
            assert f"rank 0's is {left.endpoint} (the parent switch at 127.0.0.1:1 cannot be reached" in outcome.text
            assert f"rank 1's is {right.endpoint}" in outcome.text


def test_a_parent_that_refuses_the_job_is_quoted_to_every_rank() -> None:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(running_switch("--max-workers", "1"))
        homes = [stack.enter_context(running_switch("--parent", root.endpoint)).endpoint for _ in range(2)]
        found = run_threads(add, 4, [homes[0], homes[0], homes[1], homes[1]])
    for outcome in found:
        assert outcome.error == "SwitchError"
        assert f"the parent switch at {root.endpoint} refused: a job has at most 1 workers here" in outcome.text


def test_a_leaf_joins_with_its_own_token_over_tls_and_without_one_it_is_refused(tmp_path: Path) -> None:
    token = "c" * 31 + "3"
    tokens = private(tmp_path / "tokens", f"leaves {token}\n")
    ours = private(tmp_path / "token", token + "\n")
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(running_switch("--token-file", tokens))
        link = ("--parent", root.endpoint, "--parent-token-file", ours)
        left, right = (stack.enter_context(running_switch(*link)) for _ in range(2))
        homes = [left.endpoint, right.endpoint]
        assert values(run_threads(add, 2, homes)) == [summed(0, 1).tobytes()] * 2
        assert ours not in left.log() and token not in left.log() + right.log() + root.log()
        without = stack.enter_context(running_switch("--parent", root.endpoint))
        for outcome in run_threads(add, 2, [left.endpoint, without.endpoint]):
            assert outcome.error == "SwitchError"
            assert "refused: this switch requires a token, and none came" in outcome.text
        other = root.endpoint.partition("#")[0] + "#" + "0" * 64
        misled = stack.enter_context(running_switch("--parent", other))
        misled.wait_for(r"is another switch: its certificate's fingerprint is")


def test_a_leaf_with_absent_ranks_is_reported_to_all_ranks() -> None:
    def some(rank: int, size: int, folder: str, homes: list[str]) -> None:
        if rank != 3:
            join(rank, size, folder, homes[rank], join_timeout_s=3.0)
            return
        # This rank agrees on the tree, and then does not join.
        real = membership.Membership.join
        absent = threading.current_thread()

        def never(*arguments: Any, **words: Any) -> Any:
            if threading.current_thread() is absent:
                time.sleep(5)
                raise membership.SwitchError("it never joined")
            return real(*arguments, **words)

        membership.Membership.join = never  # type: ignore[method-assign]
        try:
            join(rank, size, folder, homes[rank], join_timeout_s=3.0)
        finally:
            membership.Membership.join = real  # type: ignore[method-assign]

    with running_tree(*TWO_RACKS) as tree:
        found: list[Outcome] = run_threads(some, 4, two_racks(tree, 4))
    for outcome in found[:3]:
        assert outcome.error == "SwitchError"
        assert re.search(r"rank 3 did not join within \d s", outcome.text), outcome.text


# --- the operator's view ---


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[tuple[Tree, str]]:
    with running_tree("root") as tree, socket.create_server(("127.0.0.1", 0)) as server:
        metrics = f"127.0.0.1:{server.getsockname()[1]}"
        server.close()
        with running_switch("--parent", tree["root"].endpoint, "--metrics", metrics) as leaf:
            yield {**tree, "leaf": leaf}, metrics


def test_status_metrics_and_log_show_the_link_to_the_parent(shown: tuple[Tree, str]) -> None:
    tree, metrics = shown
    host, _, port = metrics.rpartition(":")
    looked = threading.Barrier(3)
    root = tree["root"].endpoint

    def hold(rank: int, size: int, folder: str, homes: list[str]) -> None:
        with join(rank, size, folder, homes[rank]) as group:
            group.all_reduce(np.ones(10_000, np.float32))
            looked.wait(seconds(60))
            looked.wait(seconds(60))

    def look() -> None:
        looked.wait(seconds(60))
        status = fetch_status((host, int(port)))
        assert status["parent"] == {"endpoint": root, "jobs": 1, "last_error": ""}
        (job,) = status["jobs"]
        assert job["parent"] == root
        assert job["counters"]["sums_sent"] == job["counters"]["results"] > 0
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=seconds(5)) as page:
            text = page.read().decode()
        assert re.search(rf'netfold_switch_parent_jobs{{parent="{re.escape(root)}"}} 1\.0', text), text
        assert re.search(r'netfold_switch_job_packets_total{.*kind="sum".*} [1-9]', text), text
        view = run_command("switch", "status", metrics, "--once")
        assert view.returncode == 0 and f"below {root}" in view.stdout, view
        looked.wait(seconds(60))

    watcher = threading.Thread(target=look)
    watcher.start()
    values(run_threads(hold, 2, [tree["leaf"].endpoint, root]))
    watcher.join()
    assert re.search(rf"event=started .*parent={re.escape(root)}", tree["leaf"].log())


# --- a parent is trusted with sums, and with no more ---


def serve_as_parent(server: socket.socket, start: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer one path request and one join; start the job with what `start` makes of the leaf's `ready`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("127.0.0.1", 0))
        for _ in range(3):
            with server.accept()[0] as stream:
                asked = control_messages.receive(stream)
                if asked["type"] == "path":
                    path = {"version": control_messages.VERSION, "switches": [[77, ""]], "error": ""}
                    control_messages.send(stream, {"type": "path", **path})
                    continue
                admitted = {"job_id": 5, "incarnation": 77, "worker": 0, "nonce": 9, "port": port.getsockname()[1]}
                control_messages.send(stream, {"type": "admitted", "version": control_messages.VERSION, **admitted})
                port.settimeout(seconds(5))
                hello, leaf = port.recvfrom(1 << 16)
                port.sendto(hello, leaf)
                control_messages.send(stream, start(control_messages.receive(stream)))
                with contextlib.suppress(OSError, EOFError):
                    control_messages.receive(stream)
                return


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (lambda ready: {"window": 2 * ready["window"]}, r"start with window \d+ x \d+ bytes"),
        (lambda ready: {"payload_bytes": 8 + ready["payload_bytes"]}, r"start with window \d+ x \d+ bytes"),
        (lambda ready: {"type": "left", "ranks": [7, 8]}, "left of 2 ranks, and it has 1"),
    ],
    ids=["window", "payload", "left"],
)
def test_a_parent_that_starts_more_than_was_offered_ends_the_job(
    start: Callable[[dict[str, Any]], dict[str, Any]], says: str
) -> None:
    def make_start(ready: dict[str, Any]) -> dict[str, Any]:
        usual = {"type": "start", "epoch": 1, "payload_bytes": ready["payload_bytes"], "window": ready["window"]}
        return {**usual, **start(ready)}

    with socket.create_server(("127.0.0.1", 0)) as server:
        parent = threading.Thread(target=serve_as_parent, args=(server, make_start), daemon=True)
        parent.start()
        with running_switch("--parent", f"127.0.0.1:{server.getsockname()[1]}") as leaf:
            with socket.create_connection(leaf.address, 10) as stream:
                control_messages.send(stream, {"type": "path", "version": control_messages.VERSION, "below": []})
                (me, _), (above, _) = control_messages.receive(stream)["switches"]
            with socket.create_connection(leaf.address, 10) as stream:
                port = UdpPort(host="127.0.0.1", buffer_bytes=1 << 20)
                join = {"version": control_messages.VERSION, "job": "j", "name": "", "rank": 0, "port": port.port}
                tree = [[me, [[0, 0]]], [above, [[0, 0, me, 1], [1, 1]]]]
                control_messages.send(
                    stream, {"type": "join", **join, "tree": tree, "window_bytes": 1 << 20, "timeout_s": 10}
                )
                admitted = control_messages.receive(stream)
                port.connect("127.0.0.1", admitted["port"])
                assert port.hello(
                    job=admitted["job_id"],
                    incarnation=admitted["incarnation"],
                    worker=admitted["worker"],
                    nonce=admitted["nonce"],
                    packet_bytes=1408 + protocol.HEADER_BYTES,
                    key=None,
                    timeout_ns=5_000_000_000,
                )
                control_messages.send(stream, {"type": "ready", "payload_bytes": 1408})
                refused = control_messages.receive(stream)
            assert refused["type"] == "refused"
            assert re.search(says, refused["reason"]), refused
            parent.join(seconds(10))
