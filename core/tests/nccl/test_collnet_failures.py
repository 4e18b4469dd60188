"""CollNet where something is wrong: a switch that dies, refuses or is absent, a rank that dies or cannot take part."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from ctypes import c_void_p
from pathlib import Path

import numpy as np
import pytest
from load import seconds
from nccl.collnet_loader import CollNet, contribution, expected, joined
from nccl.loader import REMOTE_ERROR, WARN, NcclError, Plugin
from nccl.test_collnet import BY_SWITCH, ENV, TOKEN, comm_of_all
from ranks import Outcome, private, run_ranks, running_switch, stop, two_leaves, values
from switch.mortal_switch import MortalSwitch

from netfold import FileStore

pytestmark = pytest.mark.native


def warnings_of(plugin: CollNet) -> list[str]:
    return [text for level, text in plugin.log if level == WARN]


# --- the loss of the switch ---


def stream(rank: int, size: int, folder: str, seed: int, counts: tuple[int, ...], at_once: int) -> list[str]:
    """Operations of all kinds, `at_once` under way; checks each result, and then overwrites it."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    under_way: list[tuple[c_void_p | None, np.ndarray, np.ndarray, int]] = []

    def take() -> None:
        request, into, wanted, index = under_way.pop(0)
        plugin.wait(request)
        assert np.array_equal(into, wanted), f"operation {index} of {counts}"
        into.view(np.uint8).fill(0xA5)

    keep = []
    for index, count in enumerate(counts):
        if len(under_way) == at_once:
            take()
        kind = random.Random(f"{seed} {index}").choice(["all_reduce", "all_reduce", "all_gather", "reduce_scatter"])
        block = 4 * count
        ours = contribution(rank, count, "int32", index)
        if kind == "all_reduce":
            into, wanted = np.zeros_like(ours), expected(size, count, "int32", index)
            request = plugin.all_reduce(comm, ours, into)
        elif kind == "all_gather":
            into = np.zeros(size * count, np.int32)
            wanted = np.concatenate([contribution(each, count, "int32", index) for each in range(size)])
            request = plugin.all_gather(comm, ours, into, block, (0, size * block))
        else:
            ours = contribution(rank, size * count, "int32", index)
            into = np.zeros(count, np.int32)
            wanted = expected(size, size * count, "int32", index)[rank * count : (rank + 1) * count]
            request = plugin.reduce_scatter(comm, ours, into, block, (0, size * block))
        keep.append(ours)
        under_way.append((request, into, wanted, index))
    while under_way:
        take()
    plugin.close(comm)
    return warnings_of(plugin) + passed_on(plugin)


def passed_on(plugin: CollNet) -> list[str]:
    return [text for _, text in plugin.log if text.startswith("rank 0 passed on ")]


PASSED_ON: list[int] = []


def lost_while(seed: int, size: int, counts: tuple[int, ...]) -> MortalSwitch:
    """A switch of small chunks that dies in the middle; each worker never gets some results of the last window."""
    draw = random.Random(-seed - 1)
    chunks = sum(-(-4 * count // 64) for count in counts)
    loss, first = draw.choice([0.0, 0.1, 0.5]), draw.randrange(1, chunks + 1)
    number = draw.getrandbits(32)

    def answers(worker: int, chunk: int) -> bool:
        return chunk < first or random.Random(f"{number} {worker} {chunk}").random() >= loss

    lives_for = draw.randrange(1, chunks + 1)
    return MortalSwitch(lives_for=lives_for, answers=answers, stalls_at=1, window=draw.choice([4, 16]))


SEEDS = range(int(os.environ.get("LOST_SWITCH_FIRST", "0")), int(os.environ.get("LOST_SWITCH_LAST", "24")))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_switch_that_dies_at_any_moment_costs_no_operation(seed: int) -> None:
    """Repeat one seed: LOST_SWITCH_FIRST=7 LOST_SWITCH_LAST=8 pytest FILE -k any_moment."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4])
    counts = tuple(draw.choice([1, 7, 16, 100, 500, 2000]) for _ in range(draw.randrange(2, 12)))
    at_once = draw.choice([1, 3, 12])
    with lost_while(seed, size, counts) as switch:
        env = {**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}
        found = values(run_ranks(stream, size, seed, counts, at_once, env=env))
        assert switch.joins == size and switch.dead.is_set()
    for rank, texts in enumerate(found):
        if rank == 0 and texts:
            PASSED_ON.append(int(texts.pop().split()[4]))
        for text in texts:
            assert text.startswith(f"the switch at {switch.endpoint} is gone (") and "no operation is lost" in text
        assert len(texts) <= 1, "one line a cause"


def test_the_seeds_above_had_results_that_only_some_ranks_had() -> None:
    if not PASSED_ON:
        pytest.skip("needs the results of the seeds above, which were not selected")
    assert len(PASSED_ON) >= 0.4 * len(SEEDS), "switches died in the middle of operations"
    assert sum(PASSED_ON) >= len(SEEDS) // 2


def sums_until_killed(
    rank: int, size: int, folder: str, pid: int, count: int, leaves: tuple[str, ...] = ()
) -> tuple[int, list[str]]:
    """Rank 0 kills a switch in the middle of a stream of sums over `count` comms; the number of right sums.

    leaves: switches of the ranks, in turns.
    """
    if leaves:
        os.environ["NETFOLD_SWITCH"] = leaves[rank % len(leaves)]
    plugin = CollNet()
    comms = [comm_of_all(plugin, rank, size, folder, str(number)) for number in range(count)]
    inputs = [contribution(rank, 300_000 // count, "float32", seed) for seed in range(60)]
    into = [np.zeros_like(each) for each in inputs]
    requests: list[c_void_p | None] = []
    right = 0
    for i in range(len(inputs) + 8):
        if i < len(inputs):
            requests.append(plugin.all_reduce(comms[i % count], inputs[i], into[i]))
        if i == 20 and rank == 0:
            os.kill(pid, signal.SIGKILL)
        if i >= 8:
            plugin.wait(requests[i - 8])
            right += np.array_equal(into[i - 8], expected(size, inputs[i - 8].size, "float32", i - 8))
    for comm in comms:
        plugin.close(comm)
    return right, warnings_of(plugin)


@pytest.mark.parametrize(
    ("size", "algorithm", "count"), [(4, "in_network", 1), (4, "in_network", 3), (4, "split", 1), (8, "auto", 1)]
)
def test_a_real_switch_that_is_killed_costs_no_sum(size: int, algorithm: str, count: int) -> None:
    with running_switch() as switch:
        env = {**ENV, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_ALGORITHM": f"all_reduce={algorithm}"}
        found = values(run_ranks(sums_until_killed, size, switch.process.pid, count, env=env, timeout_s=90))
    for right, texts in found:
        assert right == 60
        assert [text.startswith(f"the switch at {switch.endpoint} is gone (") for text in texts] == [True] * count


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["root", "leaf of rank 0", "leaf of rank 1"])
def test_a_switch_of_a_tree_that_is_killed_costs_no_sum(victim: int) -> None:
    with two_leaves() as switches:
        leaves = tuple(switch.endpoint for switch in switches[1:])
        pid = switches[victim].process.pid
        found = values(run_ranks(sums_until_killed, 5, pid, 1, leaves, env=BY_SWITCH, timeout_s=90))
        for right, texts in found:
            assert right == 60
            assert len(texts) == 1 and texts[0].startswith(f"the switch at {switches[victim].endpoint} is gone ("), (
                texts
            )


def sums_without_answers(rank: int, size: int, folder: str, pid: int) -> list[str]:
    """The switch's process stops: nothing tells the ranks, but that it does not answer."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    ours = contribution(rank, 10_000, "float32")
    into = np.zeros_like(ours)
    plugin.wait(plugin.all_reduce(comm, ours, into))
    store = FileStore(folder)
    store.set(f"first/{rank}", b"")
    for each in range(size):
        store.get(f"first/{each}", 30)
    if rank == 0:
        stop(pid)
        store.set("stopped", b"")
    store.get("stopped", 30)
    plugin.wait(plugin.all_reduce(comm, ours, into), quiet_s=40)
    assert np.array_equal(into, expected(size, 10_000, "float32"))
    plugin.close(comm)
    return warnings_of(plugin)


def test_a_switch_that_does_not_answer_is_lost() -> None:
    with running_switch() as switch:
        env = {**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}
        try:
            found = values(run_ranks(sums_without_answers, 3, switch.process.pid, env=env, timeout_s=90))
        finally:
            os.kill(switch.process.pid, signal.SIGCONT)
    assert all(len(texts) == 1 and "no operation is lost" in texts[0] for texts in found), found


def sums_while_cut(rank: int, size: int, folder: str) -> list[str]:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    store = FileStore(folder)
    for seed in range(40):
        ours = contribution(rank, 2_000, "int32", seed)
        into = np.zeros_like(ours)
        plugin.wait(plugin.all_reduce(comm, ours, into))
        assert np.array_equal(into, expected(size, 2_000, "int32", seed))
        if seed == 10 and rank == 0:
            store.set("cut", b"")
    plugin.close(comm)
    return warnings_of(plugin)


def test_one_rank_that_loses_the_switch_takes_all_ranks_off_it(tmp_path: Path) -> None:
    with MortalSwitch() as switch:
        env = {**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}
        results: list[list[Outcome]] = []
        ranks = threading.Thread(target=lambda: results.append(run_ranks(sums_while_cut, 3, env=env)))
        ranks.start()
        deadline = time.monotonic() + seconds(30)
        while switch.complete < 500:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        switch.cut(1)
        ranks.join()
        found = values(results[0])
        assert not switch.dead.is_set()
    assert all(len(texts) == 1 and "no operation is lost" in texts[0] for texts in found), found


# --- a switch that cannot be used ---


def refused(rank: int, size: int, folder: str, env_of_rank: dict[int, dict[str, str]]) -> tuple[list[str], float]:
    """All ranks go on without CollNet; the one line of each rank's log, and the seconds that took."""
    os.environ.update(env_of_rank.get(rank, {}))
    plugin = CollNet()
    began = time.monotonic()
    assert joined(plugin, rank, size, folder) is None
    return warnings_of(plugin), time.monotonic() - began


def refusals(env: dict[str, str], env_of_rank: dict[int, dict[str, str]], quiet_s: float = 5) -> list[str]:
    texts = []
    for warnings, took in values(run_ranks(refused, 3, env_of_rank, env={**ENV, **env})):
        assert len(warnings) == 1, warnings
        assert warnings[0].startswith("CollNet is not used, and NCCL's own algorithms are: "), warnings
        assert took < seconds(quiet_s)
        texts.append(warnings[0])
    return texts


def test_without_a_switch_at_the_address_nccl_goes_on_without_it() -> None:
    texts = refusals({"NETFOLD_SWITCH": "127.0.0.1:1"}, {})
    assert len(set(texts)) == 1 and ": rank " in texts[0] and "127.0.0.1:1" in texts[0], texts


def required(rank: int, size: int, folder: str) -> list[str]:
    """The warnings of a network whose listen, connect, send and receive fail once CollNet was refused."""
    network, plugin = Plugin(), CollNet()  # both write to the log of the second
    handle, listener = network.listen()
    to = network.connect(handle)
    of = network.accept(listener)
    into = np.zeros(4, np.uint8)
    network.wait(network.send(to, into), network.receive(of, [into]))
    assert joined(plugin, rank, size, folder) is None
    for call in (
        network.listen,
        lambda: network.connect(handle),
        lambda: network.send(to, into),
        lambda: network.receive(of, [into]),
    ):
        with pytest.raises(NcclError) as error:
            call()
        assert error.value.code == REMOTE_ERROR
    network.close(to, of)
    network.close_listen(listener)
    return warnings_of(plugin)


def test_a_switch_that_is_required_and_absent_stops_the_network() -> None:
    """NCCL takes any error of CollNet as a reason to go on without it, and an error of its network as the end."""
    env = {**ENV, "NETFOLD_SWITCH": "127.0.0.1:1", "NETFOLD_NCCL_REQUIRE_SWITCH": "1"}
    for why, *errors in values(run_ranks(required, 2, env=env)):
        assert why.startswith("CollNet is not used, and NETFOLD_NCCL_REQUIRE_SWITCH=1 requires it: rank "), why
        assert len(errors) == 4
        assert all("without the switch 127.0.0.1:1, which NETFOLD_NCCL_REQUIRE_SWITCH=1" in text for text in errors)


def test_a_switch_that_is_full_refuses_all_ranks() -> None:
    with running_switch("--max-workers", "2") as switch:
        texts = refusals({"NETFOLD_SWITCH": switch.endpoint}, {})
    assert "at most 2" in texts[0] or "limit" in texts[0], texts


def test_a_rank_without_a_token_or_with_another_fingerprint_keeps_all_off_the_switch(tmp_path: Path) -> None:
    tokens = private(tmp_path / "tokens", f"vision {TOKEN}\n")
    good = {"NETFOLD_TOKEN_FILE": private(tmp_path / "token", TOKEN)}
    with running_switch("--token-file", tokens) as switch:
        good["NETFOLD_SWITCH"] = switch.endpoint
        absent = refusals(good, {1: {"NETFOLD_TOKEN_FILE": str(tmp_path / "absent")}})
        assert all("rank 1: " in text and "absent" in text for text in absent), absent
        address, _, _ = switch.endpoint.partition("#")
        foreign = refusals(good, {2: {"NETFOLD_SWITCH": f"{address}#{'0' * 64}"}}, quiet_s=25)
        assert all("rank 2: " in text and "fingerprint" in text for text in foreign), foreign
        found = values(run_ranks(with_tokens, 3, env={**ENV, **good, "NETFOLD_SECURITY": "encrypt"}))
        assert all("CollNet uses the switch" in text for text in found)
        switch.wait_for("event=started .*encrypted=yes")
        assert TOKEN not in " ".join(absent + foreign) + switch.log()


def with_tokens(rank: int, size: int, folder: str) -> str:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    for seed in range(4):
        ours = contribution(rank, 700_000, "float32", seed)
        plugin.wait(plugin.all_reduce(comm, ours, ours))
        assert np.array_equal(ours, expected(size, 700_000, "float32", seed))
    plugin.close(comm)
    return plugin.log[-1][1]


def test_switches_without_a_common_parent_are_used_by_no_rank() -> None:
    with running_switch() as one, running_switch() as other:
        texts = refusals({"NETFOLD_SWITCH": one.endpoint}, {2: {"NETFOLD_SWITCH": other.endpoint}})
        assert len(set(texts)) == 1
        assert "rank 0: the switches of the ranks have no common parent: " in texts[0]
        assert f"rank 0's is {one.endpoint}" in texts[0] and f"rank 2's is {other.endpoint}" in texts[0]


def test_a_switch_above_without_keys_is_not_used_where_packets_must_have_them(tmp_path: Path) -> None:
    tokens = private(tmp_path / "tokens", f"vision {TOKEN}\n")
    with running_switch() as root, running_switch("--parent", root.endpoint, "--token-file", tokens) as leaf:
        env = {"NETFOLD_SWITCH": leaf.endpoint, "NETFOLD_TOKEN_FILE": private(tmp_path / "token", TOKEN)}
        texts = refusals({**env, "NETFOLD_SECURITY": "authenticate"}, {})
        assert f"the switch at {root.endpoint} has no keys, and NETFOLD_SECURITY=authenticate" in texts[0], texts


def test_a_wrong_setting_of_one_rank_keeps_all_off_the_switch() -> None:
    with running_switch() as switch:
        env = {"NETFOLD_SWITCH": switch.endpoint}
        texts = refusals(env, {0: {"NETFOLD_ALGORITHM": "hierarchical"}})
        assert all("rank 0: NETFOLD_ALGORITHM=hierarchical" in text for text in texts), texts
        texts = refusals(env, {1: {"NETFOLD_SWITCH": f"{switch.endpoint},{switch.endpoint}"}})
        assert all("rank 1: " in text and "names several switches" in text for text in texts), texts
        texts = refusals({**env, "NETFOLD_SECURITY": "encrypt"}, {})
        assert all("encrypt" in text for text in texts), "the switch has no certificate"
        texts = refusals(env, {0: {"NETFOLD_SWITCH": "nowhere"}})
        assert all("rank 0: " in text and "NETFOLD_SWITCH" in text for text in texts), texts


def other_algorithms(rank: int, size: int, folder: str) -> None:
    os.environ["NETFOLD_ALGORITHM"] = ["in_network", "ring", "all_reduce=split"][rank]
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    ours = contribution(rank, 100_000, "float32")
    into = np.zeros_like(ours)
    plugin.wait(plugin.all_reduce(comm, ours, into))
    assert np.array_equal(into, expected(size, 100_000, "float32"))
    plugin.close(comm)


def test_the_algorithm_of_rank_0_is_that_of_all() -> None:
    with running_switch() as switch:
        values(run_ranks(other_algorithms, 3, env={**ENV, "NETFOLD_SWITCH": switch.endpoint}))


def one_without_the_plugin(rank: int, size: int, folder: str) -> list[str]:
    """Rank 2's handle is what another plugin writes."""
    if rank == 2:
        FileStore(folder).set("collnet /2", bytes(128))
        return []
    plugin = CollNet()
    assert joined(plugin, rank, size, folder) is None
    return warnings_of(plugin)


def test_a_rank_without_the_plugin_keeps_all_off_the_switch() -> None:
    with running_switch() as switch:
        found = values(run_ranks(one_without_the_plugin, 3, env={**ENV, "NETFOLD_SWITCH": switch.endpoint}))
    for texts in found[:2]:
        assert len(texts) == 1 and "rank 2" in texts[0] and "every rank must use it" in texts[0], found


# --- ranks ---


def dies(rank: int, size: int, folder: str, victim: int, kind: str) -> tuple[str, int, float]:
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    ours = contribution(rank, 50_000, "float32")
    first = np.zeros_like(ours)
    plugin.wait(plugin.all_reduce(comm, ours, first))
    store = FileStore(folder)
    store.set(f"first/{rank}", b"")
    for each in range(size):
        store.get(f"first/{each}", 30)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    into = [np.zeros_like(ours) for _ in range(4)]
    requests = [plugin.all_reduce(comm, ours, each) for each in into]
    with pytest.raises(NcclError) as failed:
        plugin.wait(*requests, quiet_s=20)
    took = time.monotonic() - began
    with pytest.raises(NcclError):
        plugin.test(requests[-1])  # type: ignore[arg-type]
    assert len(warnings_of(plugin)) == 1, plugin.log
    plugin.close(comm)
    return str(failed.value), failed.value.code, took


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("algorithm", ["in_network", "ring"])
def test_a_rank_that_dies_fails_the_operations_of_all_others(victim: int, algorithm: str) -> None:
    with running_switch() as switch:
        env = {**ENV, "NETFOLD_ALGORITHM": algorithm, "NETFOLD_SWITCH": switch.endpoint, "NETFOLD_RECONNECT_S": "1"}
        outcomes = run_ranks(dies, 4, victim, algorithm, env=env, dies=[victim])
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert not outcome.error, outcome
        text, code, took = outcome.value
        assert code == REMOTE_ERROR
        assert f"rank {victim}" in text, text
        assert took < seconds(10)


def closes_early(rank: int, size: int, folder: str) -> None:
    """Rank 0 closes as soon as its own results are there, while the others ask for theirs later."""
    plugin = CollNet()
    comm = comm_of_all(plugin, rank, size, folder)
    ours = contribution(rank, 20_000, "float32")
    into = np.zeros_like(ours)
    request = plugin.all_reduce(comm, ours, into)
    if rank > 0:
        time.sleep(0.3)
    plugin.wait(request)
    assert np.array_equal(into, expected(size, 20_000, "float32"))
    plugin.close(comm)
    assert not warnings_of(plugin)


def test_a_rank_that_closes_first_harms_no_other() -> None:
    with running_switch() as switch:
        values(run_ranks(closes_early, 3, env={**BY_SWITCH, "NETFOLD_SWITCH": switch.endpoint}))
