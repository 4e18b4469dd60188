"""A check over a real group, and alone; the switch is asked and keeps nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks, running_switch, values

pytestmark = pytest.mark.native


def _check(rank: int, size: int, folder: str, endpoint: str) -> object:
    os.environ["NETFOLD_SWITCH"] = endpoint
    os.environ["NETFOLD_JOIN_TOKEN"] = "a secret that nobody should see"
    from netfold.check import check_ranks, judge
    from netfold.communicator import Communicator, Options
    from netfold.communicator.store import FileStore

    options = Options(switch="", transport="tcp")
    with Communicator(FileStore(f"{folder}/store"), rank, size, options=options) as communicator:
        gathered = check_ranks(communicator, Path(folder))
        return gathered, judge(gathered)


def test_every_rank_sees_every_link_and_the_switch() -> None:
    with running_switch() as switch:
        found = values(run_ranks(_check, 4, switch.endpoint))
        # It was asked by four, and joined by none.
        assert not [line for line in switch.log().splitlines() if "joined" in line]
    gathered, findings = found[0]
    assert all(each == found[0] for each in found)
    assert [facts.rank for facts in gathered.facts] == [0, 1, 2, 3]
    assert [(link.one, link.other) for link in gathered.links] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for link in gathered.links:
        assert 0 < link.latency_s < 0.1
        assert min(link.there_bytes_per_s, link.back_bytes_per_s) > 1e6
        assert abs(link.clock_s) <= link.latency_s + 1e-3  # one clock
    (room,) = gathered.facts[0].switches
    assert not room.error and room.jobs > 0 and room.workers >= 4 and room.memory_bytes > 0
    assert "do not share memory" in " ".join(finding.what for finding in findings)
    assert gathered.facts[1].environment["NETFOLD_JOIN_TOKEN"] == "set"


def test_a_fabric_that_this_host_has_not_is_found_before_the_job() -> None:
    environment = {**os.environ, "NETFOLD_TRANSPORT": "fabric:nosuch"}
    command = [sys.executable, "-m", "netfold.cli", "doctor", "check", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1, run.stderr
    finding = json.loads(run.stdout)["findings"][0]
    assert finding["what"].startswith("NETFOLD_TRANSPORT=fabric:nosuch: "), finding
    assert finding["level"] == "fails"


def test_ranks_that_do_not_come_together_are_told_why_in_a_sentence() -> None:
    environment = {**os.environ, "NETFOLD_TRANSPORT": "fabric:nosuch", "RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = subprocess.run(
        [sys.executable, "-m", "netfold.cli", "doctor", "check"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("netfold doctor check: rank 0 cannot use the fabric 'nosuch'"), run.stderr


def test_alone_it_says_that_nothing_listens_where_the_switch_should_be() -> None:
    environment = {**os.environ, "NETFOLD_SWITCH": "127.0.0.1:9"}
    command = [sys.executable, "-m", "netfold.cli", "doctor", "check", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1, run.stderr
    said = json.loads(run.stdout)
    assert "nothing listens there" in said["findings"][0]["what"]
    assert said["findings"][0]["level"] == "fails"
