"""Frameworks that refuse the name `netfold`. If a test here fails, the example needs its workaround no more."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.ecosystem

REFUSED = "Your assigned backend netfold is not available, please use gloo"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)


def test_accelerate_on_a_cpu_makes_groups_of_gloo_and_mpi_alone() -> None:
    accelerate = pytest.importorskip("accelerate")
    backend = accelerate.InitProcessGroupKwargs(backend="netfold")
    with pytest.raises(ValueError, match=REFUSED):
        accelerate.Accelerator(cpu=True, kwargs_handlers=[backend])


def test_the_hf_trainer_on_a_cpu_refuses_as_accelerate_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with pytest.raises(ValueError, match=REFUSED):
        print(transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, ddp_backend="netfold").device)
