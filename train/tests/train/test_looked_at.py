"""A run of two ranks with all callbacks: the contents of its folder, and its pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import parse
from made import everything
from ranks import run_ranks, values
from torch.nn import functional

from netfold_train.zoo.data.super_resolution import Pair, mosaic

EDSR: dict[str, Any] = {
    "model": {"name": "netfold_train.zoo.models.edsr:edsr", "features": 4, "blocks": 1},
    "data": {"name": "photos", "patch": 24},
    "training": {"steps": 12, "batch": 16, "evaluate_every": 6},
    "optimizer": {"name": "adam", "lr": 1e-3},
    "run": {"name": "edsr"},
}
RANKS = 2


def _runs(rank: int, size: int, folder: str, table: dict[str, Any], runs: str) -> Any:
    """The folder, the outcome's metric, and on rank 0 the difference of its picture from that of one rank alone."""
    import torch.distributed as dist

    from netfold_train import Recipe, Trainer
    from netfold_train.callbacks.run_folder import run_folder
    from netfold_train.callbacks.selection import make_callbacks
    from netfold_train.evaluate import render

    torch.set_num_threads(1)
    dist.init_process_group("netfold", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        recipe = Recipe.model_validate({**table, "run": {**table["run"], "folder": runs}})
        chosen = run_folder(recipe)
        trainer = Trainer(recipe, callbacks=make_callbacks(recipe, chosen, rank))
        outcome = trainer.fit()
        pictures = trainer.data.pictures
        assert pictures is not None
        # 36 tiles in batches of 5 per rank: the last batch is padded.
        panels = render(trainer.replica, pictures, trainer.mesh, 5)
        far = -1
        if rank == 0:
            with torch.no_grad():
                numbers = range(len(pictures.examples))
                alone = pictures.panels(trainer.replica.modules[0](*pictures.examples.batch(numbers, numbers).inputs))
            far = int((panels[2].pixels.int() - alone[2].pixels.int()).abs().max())
        return str(chosen), outcome.metric, far, len(panels)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    runs = tmp_path_factory.mktemp("runs")
    found = values(run_ranks(_runs, RANKS, EDSR, str(runs), timeout_s=240))
    return Path(found[0][0]), found


def test_all_ranks_agree_on_the_folder(left: tuple[Path, list[Any]]) -> None:
    folder, found = left
    assert {each[0] for each in found} == {str(folder)} and folder.name == "edsr"
    (start,) = json.loads((folder / "environment.json").read_text())["starts"]
    assert [rank["rank"] for rank in start["ranks"]] == list(range(RANKS))


def test_the_metrics_file_has_the_metric_of_the_outcome_and_exposed_shares(left: tuple[Path, list[Any]]) -> None:
    from netfold_train.runs.metrics import read_metrics

    folder, found = left
    metrics = read_metrics(folder)
    assert metrics.is_finished and [line["step"] for line in metrics.steps] == list(range(1, 13))
    assert [line["step"] for line in metrics.evaluations] == [6, 12]
    assert metrics.evaluations[-1]["values"]["psnr"] == found[0][1]
    assert all(0.0 <= line["exposed"] <= 1.0 for line in metrics.steps if "exposed" in line)
    assert metrics.notes == []


def test_every_rank_records_steps_for_the_page(left: tuple[Path, list[Any]]) -> None:
    from netfold.profile.run import read_run

    folder, _ = left
    run = read_run(folder / "profile")
    assert [trace.metadata.rank for trace in run.traces] == list(range(RANKS))
    # Of 12 steps, recording starts at the end of the third.
    assert [len(trace.steps) for trace in run.traces] == [9] * RANKS
    assert all(len(trace.operations) for trace in run.traces)
    assert "9 steps were recorded" in (folder / "report.html").read_text()
    findings = json.loads(parse((folder / "profile.html").read_text()).one("script", id="findings").text)
    assert findings["ranks"] == [0, 1] and {row["operation"] for row in findings["rows"]} == {"all_reduce"}
    spans_s = [(trace.steps["ended_ns"][-1] - trace.steps["began_ns"][0]) / 1e9 for trace in run.traces]
    assert 0 < findings["overall"]["wall_s"] < 1.05 * sum(spans_s) / RANKS


def test_the_picture_of_two_ranks_is_equal_to_that_of_one_rank(left: tuple[Path, list[Any]]) -> None:
    folder, found = left
    # Batches of another size may round differently, by one step of 255.
    assert 0 <= found[0][2] <= 1 and [each[3] for each in found] == [4, 0]
    panels = json.loads((folder / "pictures" / "pictures.json").read_text())["panels"]
    assert [panel["title"] for panel in panels] == ["low resolution", "bicubic", "network", "truth"]
    assert (folder / "report.html").read_text().count("data:image/png") == 4


@pytest.mark.parametrize(("scale", "patch", "height", "width"), [(2, 24, 150, 225), (3, 12, 20, 31), (4, 10, 11, 64)])
def test_the_mosaic_puts_each_tile_where_it_was_cut(scale: int, patch: int, height: int, width: int) -> None:
    # A distinct value in every pixel.
    low = torch.arange(3 * height * width, dtype=torch.float32).view(3, height, width) / (3 * height * width)
    truth = functional.interpolate(low[None], scale_factor=scale, mode="bilinear")[0]
    found = mosaic(Pair(low, truth), scale, patch)
    repeated, bicubic, network, shown = found.panels(everything(found.examples).target)
    assert torch.equal(network.pixels, shown.pixels) and network.said == "100.00 dB"
    assert repeated.pixels.shape == bicubic.pixels.shape == shown.pixels.shape
    # The mosaic is the middle of the photograph.
    rows, columns = shown.pixels.shape[1:]
    top, left_ = (truth.shape[1] - rows) // 2 // scale * scale, (truth.shape[2] - columns) // 2 // scale * scale
    middle = truth[:, top : top + rows, left_ : left_ + columns].mul(255).round().to(torch.uint8)
    assert torch.equal(shown.pixels, middle)


def test_the_bicubic_panel_is_the_enlargement_that_the_baseline_measures() -> None:
    low = torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(3))
    truth = functional.interpolate(low[None], scale_factor=2, mode="bicubic", antialias=True)[0].clamp(0, 1)
    found = mosaic(Pair(low, truth), 2, 24)
    _, bicubic, _, shown = found.panels(everything(found.examples).target)
    assert torch.equal(bicubic.pixels, shown.pixels)
