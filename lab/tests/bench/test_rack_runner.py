"""Single all_reduces in a rack: groups of some hosts, changes between two runs, and failures."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from netfold_lab.bench.mpi_peers import find_mpi
from netfold_lab.bench.rack_runner import Configuration, set_congestion_control, set_loss, start_rack_runner
from netfold_lab.bench.runner import BenchError
from netfold_lab.rack import Rack
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.names import host_namespace
from netfold_train.runs.machine import congestion_controls

LACK = why_unavailable(loss=True)
pytestmark = [
    pytest.mark.rack,
    pytest.mark.torch,
    pytest.mark.skipif(LACK is not None, reason=str(LACK)),
]
SWITCH = {"switch": "nearest", "algorithm": "all_reduce=in_network"}
DEADLINE_S = 120
SIZE = 1 << 18


def test_configurations_on_a_subset_of_hosts_are_correct_and_use_their_options() -> None:
    with Rack(3, "1gbit", mtu=9000) as rack:
        rack.start_switch(lambda line: None)
        with start_rack_runner(rack, DEADLINE_S) as runner:
            configurations = [
                *(Configuration(f"switch {workers}", workers, SWITCH) for workers in (2, 3)),
                *(Configuration(f"{payload} bytes", 3, SWITCH, payload) for payload in (512, 1024)),
                Configuration("ring", 3, {"algorithm": "all_reduce=ring"}),
                Configuration("gloo", 2),
            ]
            runner.open(configurations)
            found = {
                configuration.label: runner.turn(configuration, SIZE, 7, calls=2) for configuration in configurations
            }
    assert all((turn.wrong, len(turn.took_s)) == (0, 2) and min(turn.took_s) > 0 for turn in found.values())
    # A header of 48 bytes per packet; a path of MTU 9000 would have given packets of 8880.
    assert found["512 bytes"].sent_bytes == SIZE // 512 * (512 + 48)
    assert found["1024 bytes"].sent_bytes == SIZE // 1024 * (1024 + 48)
    ring, switch, gloo = (found[label].sent_bytes for label in ("ring", "switch 3", "gloo"))
    assert ring is not None and switch is not None and gloo is None
    again = found["switch 3"].again  # retransmitted packets, on a machine that replied late
    assert 4 / 3 * SIZE < ring < 1.4 * SIZE and SIZE < switch < 1.01 * SIZE + 8880 * (1 + again)


def test_sums_of_normal_values_are_measured_by_their_error() -> None:
    with Rack(2, "1gbit") as rack:
        rack.start_switch(lambda line: None)
        with start_rack_runner(rack, DEADLINE_S) as runner:
            configurations = [Configuration(wire, 2, {**SWITCH, "wire_dtype": wire}) for wire in ("f32", "bf16", "i8")]
            runner.open(configurations)
            found = [runner.turn(configuration, SIZE, 0, values="normal") for configuration in configurations]
            # i8 keeps only a few whole numbers: wrong elements are counted on every rank.
            whole = runner.turn(configurations[2], SIZE, 0)
    assert [turn.wrong for turn in found] == [0, 0, 0]
    f32, bf16, i8 = (turn.error for turn in found)
    assert f32 is not None and bf16 is not None and i8 is not None
    assert f32 < 1e-6 < 1e-4 < bf16 < 1e-2 < i8 < 0.1
    assert whole.wrong > SIZE // 4


def test_the_last_loss_and_congestion_control_are_in_force() -> None:
    if "cubic" not in congestion_controls():
        pytest.skip("this kernel has no cubic")
    other = next(each for each in congestion_controls() if each != "cubic")
    with Rack(3, "200mbit", "1%") as rack:
        set_loss(rack, 0)
        rack.start_switch(lambda line: None)
        with start_rack_runner(rack, DEADLINE_S) as runner:
            set_congestion_control(rack, "cubic")
            switch, gloo = Configuration("switch", 3, SWITCH), Configuration("gloo", 3)
            runner.open([gloo])
            set_congestion_control(rack, other)
            runner.open([switch, Configuration("gloo again", 3)])
            clean = runner.turn(switch, 1 << 20, 0)
            set_loss(rack, 0.05)
            lossy = runner.turn(switch, 1 << 20, 1)
            set_loss(rack, 0)
            listed = [
                subprocess.run(
                    ["ip", "netns", "exec", host_namespace(rack.rack_id, host), "ss", "-tin"],
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                for host in range(3)
            ]
    # A connection to each of the two others, at every host.
    assert [len(re.findall(r"\bcubic\b", said)) for said in listed] == [2, 2, 2]
    assert (clean.wrong, lossy.wrong) == (0, 0)
    # Each host sends 745 packets, and 37 of them are lost; a busy machine repeats a few that were only late.
    assert lossy.again > 50 and clean.again < lossy.again / 2


def pid_of(rack: Rack, host: int, world: str) -> int:
    """Return the process of this host's rank in this world, not of its launcher."""
    inside = ["ip", "netns", "pids", host_namespace(rack.rack_id, host)]
    pids = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.split()
    start = [sys.executable, "-m", "netfold_lab.bench.rank", world]
    return next(int(pid) for pid in pids if Path("/proc", pid, "cmdline").read_text().split("\0")[:4] == start)


def cpu_s(pid: int) -> float:
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def test_the_ranks_of_an_mpi_are_correct_and_sleep_during_gloos_turn() -> None:
    if not (mpi := find_mpi()):
        pytest.skip("no MPI is here (make bench-peers)")
    with Rack(3, "100mbit") as rack, start_rack_runner(rack, DEADLINE_S, mpi) as runner:
        few, all_of_them, gloo = (
            Configuration("two", 2, mpi=mpi),
            Configuration("three", 3, mpi=mpi),
            Configuration("gloo", 3),
        )
        runner.open([few, gloo, all_of_them])
        found = [
            runner.turn(configuration, 1 << 20, number, calls=2)
            for number, configuration in enumerate((few, all_of_them, few))
        ]
        errors = runner.turn(all_of_them, SIZE, 0, values="normal")
        shared = {os.stat(f"/proc/{pid_of(rack, host, mpi)}/root/dev/shm").st_dev for host in range(3)}
        rank = pid_of(rack, 1, mpi)
        used_s, began = cpu_s(rank), time.monotonic()
        beside = runner.turn(gloo, 1 << 20, 0, calls=8)
        used_s, took_s = cpu_s(rank) - used_s, time.monotonic() - began
    assert [turn.wrong for turn in (*found, errors, beside)] == [0] * 5
    assert errors.error is not None and 0 < errors.error < 1e-6
    # No all_reduce sends less than a ring: a much shorter time than the link's would mean shared memory.
    assert found[1].median_s > 0.8 * 4 / 3 * (1 << 20) * 8 / 100e6
    assert mpi in runner.runner.versions and "torch" in runner.runner.versions
    assert used_s < 0.1 * took_s
    # Each host has a /dev/shm of its own, different from the machine's, where shared memory would outlive the ranks.
    assert len(shared | {os.stat("/dev/shm").st_dev}) == 4


def test_a_killed_rank_of_an_mpi_is_an_error() -> None:
    if not (mpi := find_mpi()):
        pytest.skip("no MPI is here (make bench-peers)")
    with (
        Rack(2, "1gbit") as rack,
        pytest.raises(BenchError, match=f"{mpi} (ended with exit code|rank . failed)"),
        start_rack_runner(rack, DEADLINE_S, mpi) as runner,
    ):
        configuration = Configuration("MPI", 2, mpi=mpi)
        runner.open([configuration])
        os.kill(pid_of(rack, 1, mpi), signal.SIGKILL)
        runner.turn(configuration, SIZE, 0)


def test_an_impossible_configuration_is_an_error_with_the_reason() -> None:
    with (
        Rack(2, "1gbit") as rack,
        pytest.raises(BenchError, match=r"wrong: .*no_such"),
        start_rack_runner(rack, DEADLINE_S) as runner,
    ):
        runner.open([Configuration("wrong", 2, {"algorithm": "no_such"})])


def test_a_killed_rank_and_a_passed_deadline_are_errors() -> None:
    with Rack(2, "1gbit") as rack:
        with (
            pytest.raises(BenchError, match="rank 1 ended with exit code"),
            start_rack_runner(rack, DEADLINE_S) as runner,
        ):
            configuration = Configuration("gloo", 2)
            runner.open([configuration])
            inside = ["ip", "netns", "pids", host_namespace(rack.rack_id, 1)]
            for pid in subprocess.run(inside, capture_output=True, text=True, check=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            runner.turn(configuration, SIZE, 0)
        with pytest.raises(BenchError, match=r"had not ended after 0\.1 s"), start_rack_runner(rack, 0.1):
            pass
