"""A few representative tests of PyTorch's own suite; `make conformance` runs all of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import load
import pytest

pytestmark = pytest.mark.torch

SUITE = Path(__file__).with_name("suite.py")
TESTS = (
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_object_default_pg",
    "test_all_reduce_sum_complex",
    "test_barrier_timeout_global",
    "test_ddp_buffer_hook_allreduce",
    "test_gather_object",
    "test_irecv",
    "test_monitored_barrier_gloo",
    "test_new_subgroups_by_enumeration_negative_input_rank",
    "test_reduce_min",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
)


@pytest.mark.jobs
def test_a_sample_of_torchs_suite_passes() -> None:
    pytest.importorskip("expecttest", reason="PyTorch's suite imports it")
    ended = load.run([sys.executable, SUITE, "netfold", "2", "gloo", *TESTS], 150)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [row["test"] for row in rows] == list(TESTS), ended.stderr[-2000:]
    assert not [row for row in rows if row["outcome"] == "failed"]
    assert sum(row["outcome"] == "passed" for row in rows) >= 10
