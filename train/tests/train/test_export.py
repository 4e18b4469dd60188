"""`netfold train export`: a checkpoint's weights as safetensors. One process; the checkpoints are written alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from surviving import toy_model, toy_recipe
from torch.distributed.checkpoint.state_dict_saver import save
from typer.testing import CliRunner

from netfold.cli import app
from netfold_train.checkpoint import export
from netfold_train.checkpoint.atomic import AtomicCheckpointWriter, Position
from netfold_train.checkpoint.state import model_tensors


def written(run: Path, steps: tuple[int, ...] = (3,), more: dict[str, torch.Tensor] | None = None) -> torch.nn.Module:
    """A run's folder with checkpoints of the toy model; returns the model of the last one."""
    (run / "checkpoints").mkdir(parents=True)
    for step in steps:
        torch.manual_seed(step)
        module = toy_model().module
        tensors = model_tensors([module], dict(module.named_parameters())) | (more or {})
        position = Position(step, 8 * step, {}, toy_recipe().model_dump(mode="json"))
        save(tensors, storage_writer=AtomicCheckpointWriter(run / "checkpoints", position, 9), no_dist=True)
    return module


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_export_is_the_newest_complete_checkpoint_and_loads_into_the_model(tmp_path: Path) -> None:
    module = written(tmp_path / "run", (3, 6))
    (tmp_path / "run" / "checkpoints" / "step-000009.part").mkdir()
    ended = CliRunner().invoke(app, ["train", "export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    assert "9 tensors of step 6" in ended.output, ended.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "recipe.json"]
    assert same(load_file(tmp_path / "out" / "model.safetensors"), module.state_dict())
    made = toy_model().module
    load_model(made, tmp_path / "out" / "model.safetensors")
    assert same(made.state_dict(), module.state_dict())
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert recipe["model"] == {"name": "toy"}


def test_an_export_may_be_of_an_older_checkpoint_and_another_type(tmp_path: Path) -> None:
    written(tmp_path / "run", (3, 6))
    done = export.export(tmp_path / "run" / "checkpoints" / "step-000003", tmp_path / "deep" / "out", torch.bfloat16)
    assert "of step 3" in done
    found = load_file(tmp_path / "deep" / "out" / "model.safetensors")
    torch.manual_seed(3)
    module = toy_model().module
    for name, weight in module.named_parameters():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], weight.bfloat16()), name
    for name, buffer in module.named_buffers():
        assert torch.equal(found[name], buffer) and found[name].dtype == buffer.dtype, name


def test_a_large_export_is_divided_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = written(tmp_path / "run")
    monkeypatch.setattr(export, "SHARD_BYTES", 200)  # Less than the largest tensor, and more than two small ones.
    done = export.export(tmp_path / "run", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (
        files[0] == f"model-00001-of-{len(files):05d}.safetensors"
        and done.endswith(f" MB in {len(files)} files")
        and len(files) > 2
    )
    assert index["metadata"]["total_size"] == sum(
        each.numel() * each.element_size() for each in module.state_dict().values()
    )
    found: dict[str, Any] = {}
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert dict.fromkeys(held, file) == {k: v for k, v in index["weight_map"].items() if v == file}
        assert len(held) == 1 or sum(each.numel() * each.element_size() for each in held.values()) <= 200
        found |= held
    assert same(found, module.state_dict())


def test_averages_are_exported_where_the_checkpoint_has_them(tmp_path: Path) -> None:
    averages = {name: weight.detach() + 1 for name, weight in toy_model().module.named_parameters()}
    del averages["layers.last.bias"]  # Frozen.
    module = written(tmp_path / "run", more={f"ema.{name}.average": each for name, each in averages.items()})
    export.export(tmp_path / "run", tmp_path / "out", ema=True)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), {**module.state_dict(), **averages})


def test_an_export_that_cannot_be_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "run")
    (tmp_path / "there").mkdir()
    damaged = tmp_path / "damaged"
    written(damaged)
    (damaged / "checkpoints" / "step-000003" / "__0_0.distcp").write_bytes(b"short")
    for run, out, options, sentence in (
        (tmp_path / "none", "out", [], "none does not exist"),
        (tmp_path / "there", "out", [], "there holds no complete checkpoint"),
        (tmp_path / "run", "there", [], "there exists; give a new folder"),
        (tmp_path / "run", "out", ["--ema"], "has no averages of weights: the run was without training.ema"),
        (damaged, "out", [], "step-000003 is damaged: __0_0.distcp has 5 bytes, not"),
    ):
        ended = CliRunner().invoke(app, ["train", "export", str(run), str(tmp_path / out), *options])
        assert ended.exit_code == 2 and sentence in " ".join(ended.output.split()), ended.output
        assert not list(tmp_path.glob("out*"))
