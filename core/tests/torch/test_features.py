"""Features of torch.distributed work over netfold where they work over gloo (`probe.py`), with explained exceptions.

This file tests the features without another test; `make test-torch` runs all of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import load
import pytest

pytestmark = pytest.mark.torch

PROBE = Path(__file__).with_name("probe.py")
FEATURES = (
    "boxed_operators",
    "batch_isend_irecv",
    "wait_with_a_timeout",
    "wait_with_a_timeout_for_a_message",
    "group_attributes",
    "split_group",
    "split_group_of_one_part",
    "device_id",
    "backend_by_device",
    "abort",
    "set_timeout",
    "debug_detail",
    "window",
    "ddp_hook_fp16_of_cpp",
    "sequence_numbers",
    "flight_recorder",
    "flight_recorder_states",
    "flight_recorder_analyser",
    "profiler_events_of_the_backend",
    "profiler_events_of_operators",
    "comm_debug_mode",
    "hooks_before_and_after",
    "nan_check",
)


def results(backend: str, *features: str) -> dict[str, str]:
    ended = load.run(
        [sys.executable, PROBE, backend, "--deadline-factor", "3", *features],
        900,
        env={name: text for name, text in os.environ.items() if not name.startswith("NETFOLD_")},
    )
    assert ended.returncode in (0, 1), ended.stderr[-2000:]
    found: dict[str, str] = json.loads(ended.stdout)
    return found


def lost(features: tuple[str, ...]) -> dict[str, str]:
    """The features that fail over netfold without an explanation, and work over gloo."""
    import torch
    from probe_explained import explained

    failed = {
        feature: text
        for feature, text in results("netfold", *features).items()
        if text != "ok" and not text.startswith("absent") and not explained(feature, torch.__version__)
    }
    if not failed:
        return {}
    gloo = results("gloo", *failed)
    return {feature: text for feature, text in failed.items() if gloo[feature] == "ok"}


def test_features_used_only_by_torch_work_where_they_work_over_gloo() -> None:
    assert lost(FEATURES) == {}


@pytest.mark.soak
def test_every_feature_works_where_it_works_over_gloo() -> None:
    assert lost(()) == {}


def test_a_failing_feature_is_reported_with_the_first_ranks_error() -> None:
    found = results("no-such-backend", "all_reduce")
    assert "no-such-backend" in found["all_reduce"].lower(), found


def test_explanations_are_of_features_that_exist() -> None:
    from probe_explained import EXPLAINED

    ended = load.run([sys.executable, PROBE, "--list"], 60)
    names = ended.stdout.split()
    assert set(EXPLAINED) | set(FEATURES) <= set(names)
    assert len(names) == len(set(names)) > 52
