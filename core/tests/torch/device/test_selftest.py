"""Reports on GPUs of a host without any."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from netfold.cli import app  # noqa: E402
from netfold.torch.device import selftest  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_doctor_reports_that_there_is_no_gpu() -> None:
    ended = CliRunner().invoke(app, ["doctor", "gpu"])
    assert ended.exit_code == 1
    assert ended.output.startswith("no GPU: IPC disabled because torch "), ended.output


def test_explain_prints_the_reason_on_request() -> None:
    asked = CliRunner().invoke(app, ["explain", "all-reduce", "--gpu"])
    assert asked.exit_code == 0 and "IPC disabled because torch" in asked.output
    assert "IPC" not in CliRunner().invoke(app, ["explain", "all-reduce"]).output


def test_two_gpus_are_tried_with_and_without_the_other_one_visible() -> None:
    assert selftest._cases(["GPU-a"]) == [("on one GPU", ["", ""])]
    both, own = selftest._cases(["GPU-a", "GPU-b"])
    assert both[1] == ["GPU-b,GPU-a", "GPU-a,GPU-b"] and own[1] == ["GPU-a", "GPU-b"]


def test_both_ranks_see_a_part_of_a_gpu_as_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    assert selftest._environment("")["CUDA_VISIBLE_DEVICES"] == "MIG-a"
    assert selftest._environment("GPU-b")["CUDA_VISIBLE_DEVICES"] == "GPU-b"


def test_a_dead_rank_is_one_line_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.sys, "executable", "/bin/false")
    assert selftest._try(["", ""]) == ("a rank died without an error message", False)
