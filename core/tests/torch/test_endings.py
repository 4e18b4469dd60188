"""Processes that end in every way, their last data, and children by fork: how the ranks of `ending_script.py` end."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import load
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("torch_endings")]

Ends = dict[str, list[tuple[int, str]]]

# The exit code of both ranks, and a text in the output of both; "": they print nothing.
EXPECTED = {
    "returned": (0, ""),
    "destroyed": (0, ""),
    "exited_with_a_pending_operation": (3, ""),
    "raised_with_a_pending_operation": (1, "ZeroDivisionError: planted\n"),
    "left_by_os_exit": (5, ""),
    "terminated": (-signal.SIGTERM, ""),
    "terminated_with_a_handler": (4, ""),
    "destroyed_in_a_handler": (6, ""),
    "used_at_exit": (0, "used\n"),
    "used_at_exit_after_netfold_ended": (0, "this group was closed\n"),
    "daemon_threads_go_on": (0, ""),
    "a_thread_goes_on": (0, "used\n"),
    "callbacks_go_on": (0, ""),
    "replaced_by_exec": (0, ""),
    "last_message_arrives": (0, ""),
    "last_small_message_arrives": (0, ""),
    "last_sum_arrives": (0, ""),
    "a_child_uses_the_group": (0, "RuntimeError: this group was made before a fork; make a new one in the child\n"),
    "children_end_in_every_way": (0, "0 \n7 \n8 \n-9 \n0 \n0 \n9 \n"),
    "a_child_makes_a_world_of_its_own": (0, "0 works\n"),
    "data_loaders_and_pools_fork": (0, ""),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    script = Path(__file__).with_name("ending_script.py")
    ended = load.run([sys.executable, script, tmp_path_factory.mktemp("ends")], 120, check=True)
    found: Ends = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_both_ranks_end_as_expected(name: str, ends: Ends) -> None:
    code, text = EXPECTED[name]
    for found, said in ends[name]:
        assert found == code, f"exit code {found}: {said}"
        assert said.endswith(text) if text else not said, said
        assert "nothing was raised" not in said and "Exception ignored" not in said, said
