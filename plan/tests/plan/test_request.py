"""Requests to the planner: files, options, and the texts of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from netfold_plan.model import Layered
from netfold_plan.model.registry import find_model, model_presets, names
from netfold_plan.request import Request, RequestError, parse_request, read_job

JOB = """
model = "megatron-1b7"
cluster = "dgx-a100"

[job]
gpus = 16
batch = 64

[split]
tensor = 2

[price]
gpu_hour = 2.5
currency = "EUR"

[training]
dataset = 1000
epochs = { 32 = 4, 128 = 8 }
"""


def asked(text: str, folder: Path) -> Request:
    file = folder / "job.toml"
    file.write_text(text)
    return parse_request(*read_job(file))


def problems(text: str, folder: Path) -> list[str]:
    with pytest.raises(RequestError) as error:
        asked(text, folder)
    return [problem.replace(f"{folder}/", "") for problem in error.value.problems]


def test_a_request_file_has_model_cluster_job_split_price_and_training(tmp_path: Path) -> None:
    found = asked(JOB, tmp_path)
    assert found.model.name == "megatron-1b7" and found.cluster.name == "dgx-a100" and found.devices == 16
    assert found.job.global_batch == 64 and found.space.tensor == 2 and found.space.pipeline is None
    assert found.prices.gpu_hour == 2.5 and found.prices.currency == "EUR"
    assert found.training.epochs == ((32.0, 4.0), (128.0, 8.0))


def test_all_errors_of_a_file_are_reported_together_with_their_lines(tmp_path: Path) -> None:
    said = problems(JOB.replace("tensor = 2", "tensr = 2").replace("batch = 64", 'batch = "64"'), tmp_path)
    assert said == [
        "job.toml:7: job.batch is '64'; it must be a whole number, at least 1",
        "job.toml:10: split.tensr is not known; did you mean tensor?",
    ]


def test_a_boolean_is_no_number_and_a_table_is_no_string(tmp_path: Path) -> None:
    said = problems(JOB.replace("gpus = 16", "gpus = true").replace("tensor = 2", "recompute = {}"), tmp_path)
    assert said == [
        "job.toml:6: job.gpus is true; it must be a whole number, at least 1",
        "job.toml:10: split.recompute is a table; it must be one of none, selective, full",
    ]


def test_a_missing_key_is_named() -> None:
    with pytest.raises(RequestError) as error:
        parse_request({}, {})
    assert [problem.split(" is missing")[0] for problem in error.value.problems] == [
        "--model",
        "--cluster",
        "--ranks",
        "--batch",
    ]


def test_too_many_devices_and_a_wrong_unit_are_refused_in_a_sentence(tmp_path: Path) -> None:
    assert "dgx-a100 has 4480" in problems(JOB.replace("gpus = 16", "gpus = 9999"), tmp_path)[0]
    (said,) = problems(JOB.replace("batch = 64", 'batch = 64\nbucket = "25 ms"'), tmp_path)
    assert "is a quantity of time, where one of bytes is needed" in said and said.startswith("job.toml:")


def test_a_request_file_may_contain_its_cluster(tmp_path: Path) -> None:
    own = """
[cluster]
device = "a100-80"
[[cluster.tier]]
name = "Ethernet"
devices = 16
latency = "30 us"
rate = "10 Gbit/s"
in_network = true
"""
    found = asked(JOB.replace('cluster = "dgx-a100"\n', "") + own, tmp_path)
    assert found.cluster.tiers[0].bytes_per_s == 1.25e9
    assert found.job.in_network, "a cluster with aggregation uses it by default"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("epochs = { 32 = 4 }", "training.dataset"),
        ("dataset = 10\nepochs = { few = 4 }", "must be samples of a step and epochs"),
        ("dataset = 10\nsamples = 5\nepochs = { 32 = 4 }", "leave one out"),
    ],
)
def test_an_invalid_curve_of_epochs_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    head = JOB.split("[training]")[0]
    assert reason in problems(f"{head}[training]\n{text}\n", tmp_path)[0]


def test_an_invalid_request_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_job(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("gpus = ")
    with pytest.raises(ValueError, match="is not TOML"):
        read_job(tmp_path / "bad.toml")


def test_every_shipped_model_loads_and_names_its_source() -> None:
    for name, said in model_presets().items():
        assert find_model(name).parameters > 1e6 and said["source"]


def test_catalogue_models_are_accepted_by_name_and_use_published_speeds_on_request() -> None:
    assert find_model("resnet50") == Layered("resnet50")
    assert find_model("vgg16:measured=true") == Layered("vgg16", measured=True)
    with pytest.raises(ValueError, match="its only key is measured=true"):
        find_model("resnet50:hidden=3")
    assert len(set(names())) == len(names()) and "bert-large" in names()


def test_a_model_is_given_by_name_or_by_dimensions() -> None:
    size: dict[str, Any] = vars(find_model("gpt:hidden=64,layers=2,heads=4,sequence=32,vocabulary=100"))
    assert (size["hidden"], size["depth"], size["heads"], size["sequence"], size["vocabulary"]) == (64, 2, 4, 32, 100)
    assert vars(find_model("bert-large:sequence=128"))["sequence"] == 128


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("gtp3-175b", "did you mean gpt3-175b?"),
        ("gpt:hiden=64", "did you mean hidden?"),
        ("gpt:hidden=64", "has no layers and no heads"),
        ("gpt:hidden=64,layers=2,heads=5", "is not a multiple of 5 heads"),
        ("gpt:hidden=6k,layers=2,heads=2", "hidden is '6k'"),
        ("gpt:hidden", "has no value"),
        ("gpt:hidden=1,hidden=2", "has hidden twice"),
    ],
)
def test_an_impossible_model_is_refused_in_a_sentence(said: str, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        find_model(said)
    assert reason in str(error.value)


def test_the_documented_job_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "plan" / "index.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```toml\n")[1:]]
    found = asked("".join(blocks), tmp_path)
    assert found.devices == 64 and found.failures is not None and len(found.training.epochs) == 3
