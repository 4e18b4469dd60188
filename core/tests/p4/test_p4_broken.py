"""P4 pipelines and their control planes that break on purpose, while ranks train. Sums stay right, and groups go on.

Needs root, simple_switch and p4c-bm2-ss.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from load import seconds
from p4_rack import STORE_PORT, Rack, Switch, check, results, wait_for
from p4_rig import NEEDS_PIPELINE, THRIFT_PORT, compile_program

from netfold._native import engine
from netfold_lab.rack.command import run
from netfold_lab.rack.processes import Process

pytestmark = NEEDS_PIPELINE

HOSTS, STEPS = 3, 40
IN_NETWORK, F64 = engine.ALGORITHMS["in_network"], engine.DTYPES["f64"]
# That fit into the pipeline at once.
JOBS = 2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(tmp_path_factory.mktemp("p4"), 32, 1024, JOBS)


@contextlib.contextmanager
def running(folder: Path, program: Path, *, side: bool = False) -> Iterator[tuple[Rack, Switch]]:
    with Rack(folder, [Switch("switch", program, range(HOSTS))], side=side) as rack:
        rack.start_daemon(rack.switches[0])
        yield rack, rack.switches[0]


@pytest.fixture(scope="module")
def by_software(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("software")
    with Rack(folder, [Switch("switch", None, range(HOSTS))]) as rack:
        rack.start_daemon(rack.switches[0])
        return results(folder, rack.start_ranks(folder, STEPS))[0]


def losses(folder: Path) -> list[str]:
    """The sentences of all ranks about the loss of the switch."""
    logs = "".join((folder / f"log{rank}").read_text() for rank in range(HOSTS))
    return re.findall(r"rank \d: the switch at \S+ is gone \(.*", logs)


@pytest.mark.parametrize("side", [True, False], ids=["hosts have another path", "it carries all traffic"])
def test_a_pipeline_that_is_killed_in_a_job_costs_no_sum_and_the_group_returns_to_it(
    tmp_path: Path, program: Path, by_software: dict[str, np.ndarray], side: bool
) -> None:
    with running(tmp_path, program, side=side) as (rack, switch):
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "slowly").touch()
        ranks = rack.start_ranks(folder, STEPS)
        log = folder / "log0"
        wait_for(log, "under way", ranks[0])
        rack.kill_pipeline(switch)
        if side:
            wait_for(log, "all ranks know how to go on", ranks[0])
        rack.start_pipeline(switch)
        wait_for(log, "is gone", ranks[0])
        wait_for(log, "has the group again", ranks[0])
        before = rack.status(switch)["totals"]["results"]
        (folder / "slowly").unlink()
        own = results(folder, ranks)
        check(own, by_software)
        assert len(losses(folder)) == 1, losses(folder)
        assert rack.status(switch)["totals"]["results"] > before
        for each in own:
            assert each["algorithms"][-1] == IN_NETWORK


def test_a_daemon_that_loses_its_connection_to_the_pipeline_ends_its_jobs_and_connects_again(
    tmp_path: Path, program: Path, by_software: dict[str, np.ndarray]
) -> None:
    with running(tmp_path, program) as (rack, switch):
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "slowly").touch()
        ranks = rack.start_ranks(folder, STEPS)
        log = folder / "log0"
        wait_for(log, "under way", ranks[0])
        rule = f"tcp dport {THRIFT_PORT} reject with tcp reset"
        table = f"table inet cut {{\nchain output {{ type filter hook output priority 0; {rule}; }}\n}}\n"
        run(["ip", "netns", "exec", switch.namespace, "nft", "-f", "-"], stdin=table)
        wait_for(log, "all ranks know how to go on", ranks[0])
        (sentence,) = losses(folder)
        lost = rf"the P4 pipeline is lost: the simple_switch at 127\.0\.0\.1:{THRIFT_PORT} cannot be reached: "
        assert re.search(lost, sentence), sentence
        run(["ip", "netns", "exec", switch.namespace, "nft", "delete", "table", "inet", "cut"])
        wait_for(log, "has the group again", ranks[0])
        (folder / "slowly").unlink()
        own = results(folder, ranks)
        check(own, by_software)
        for each in own:
            assert each["algorithms"][-1] == IN_NETWORK
        assert len(losses(folder)) == 1, losses(folder)


def test_a_second_daemon_is_refused_and_costs_the_first_ones_job_nothing(
    tmp_path: Path, program: Path, by_software: dict[str, np.ndarray]
) -> None:
    with running(tmp_path, program) as (rack, switch):
        folder = tmp_path / "job"
        folder.mkdir()
        (folder / "slowly").touch()
        ranks = rack.start_ranks(folder, STEPS)
        wait_for(folder / "log0", "under way", ranks[0])
        command = ["ip", "netns", "exec", switch.namespace, *rack.daemon_command(switch, 7272)]
        second = subprocess.run(command, capture_output=True, text=True, timeout=seconds(60))
        assert second.returncode == 1
        assert re.search(
            rf"the simple_switch at 127\.0\.0\.1:{THRIFT_PORT} has a control plane that is alive \(incarnation "
            rf"{rack.status(switch)['incarnation']:08x}\)",
            " ".join(second.stderr.split()),
        ), second.stderr
        (folder / "slowly").unlink()
        own = results(folder, ranks)
        check(own, by_software)
        assert not losses(folder)
        for each in own:
            np.testing.assert_array_equal(each["algorithms"] == IN_NETWORK, each["dtypes"] != F64)


def test_a_job_too_many_is_refused_with_a_sentence_and_costs_the_others_nothing(tmp_path: Path, program: Path) -> None:
    with running(tmp_path, program) as (rack, switch):

        def start(name: str, number: int) -> tuple[Path, list[Process]]:
            folder = tmp_path / name
            folder.mkdir()
            (folder / "slowly").touch()
            ranks = rack.start_ranks(
                folder, STEPS, hosts=[number % HOSTS, (number + 1) % HOSTS], store_port=STORE_PORT + number
            )
            return folder, ranks

        there = [start(name, number) for number, name in enumerate(["first", "second"])]
        for folder, ranks in there:
            wait_for(folder / "log0", "under way", ranks[0])
        folder, ranks = start("third", 2)
        for rank, process in enumerate(ranks):
            assert process.wait(seconds(60)) == 1
            sentence = (
                f"rank {rank}: the switch at {switch.ip}:7171 (NETFOLD_SWITCH) refused: the pipeline serves 2 jobs"
            )
            assert sentence in (folder / f"log{rank}").read_text()
        for folder, _ in there:
            (folder / "slowly").unlink()
        found = [results(folder, ranks) for folder, ranks in there]
        check(found[1], found[0][0])
        for group in found:
            for each in group:
                np.testing.assert_array_equal(each["algorithms"] == IN_NETWORK, each["dtypes"] != F64)
        folder, ranks = start("fourth", 3)
        wait_for(folder / "log0", "under way", ranks[0])
        (folder / "slowly").unlink()
        check(results(folder, ranks), found[0][0])
