"""The check of the hosts before training: its messages, and the jobs that it refuses."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from surviving import toy_recipe

from netfold_train.preflight import preflight


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits under `ulimit -n 200`. Other tests of this process may have as many open files."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (200, 200))


@pytest.mark.usefixtures("one_rank", "few_files")
def test_hosts_on_which_training_would_fail_are_named_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert not preflight(toy_recipe())
    said = capsys.readouterr().err
    assert "200 files may be open" in said and "ulimit -n 4096" in said
    last = "training would fail on these hosts, for the reasons above; run.check = false skips this check"
    assert said.splitlines()[-1] == f"netfold train: {last}"
