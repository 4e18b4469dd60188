"""A wrong recipe is an error in one sentence with its line, before a process starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from netfold_plan.request.key_lines import key_lines, line_of
from netfold_train.recipe.errors import RecipeError
from netfold_train.recipe.load import load
from netfold_train.recipe.split import split

RECIPE = """\
[model]
name = "gpt"

[data]
name = "source"

[training]
steps = 10
batch = 16
"""


def said(tmp_path: Path, text: str, *settings: str) -> list[str]:
    """The sentences of the error, without the file's folder."""
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(RecipeError) as error:
        load(file, settings)
    return [problem.replace(f"{tmp_path}/", "") for problem in error.value.problems]


def uneven(tmp_path: Path, ranks: int, *settings: str) -> list[str]:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    with pytest.raises(RecipeError) as error:
        recipe, source = load(file, settings)
        try:
            split(recipe, ranks)
        except RecipeError as uneven:
            raise RecipeError(source.placed(uneven)) from None
    return [problem.replace(f"{tmp_path}/", "") for problem in error.value.problems]


@pytest.mark.parametrize(
    ("added", "sentence"),
    [
        ("precison = 'bf16'", "mine.toml:10: training.precison is not a key of [training]; did you mean precision?"),
        ("epochs = 2", "mine.toml:7: training: give either steps or epochs, and not both"),
        ("clip = 0", "mine.toml:10: training.clip is 0; it must be greater than 0"),
        ("clip = inf", "mine.toml:10: training.clip is inf; it must be a finite number"),
        ("accumulate = '4'", "mine.toml:10: training.accumulate is '4'; it must be a valid integer"),
        ("accumulate = true", "mine.toml:10: training.accumulate is true; it must be a valid integer"),
        ("accumulate = 2.0", "mine.toml:10: training.accumulate is 2.0; it must be a valid integer"),
        (
            "precision = 'fp16'",
            "mine.toml:10: training.precision is 'fp16'; it must be 'f32', 'bf16' or 'f16'",
        ),
        (
            "[parallel]\nbucket_mb = -1",
            "mine.toml:11: parallel.bucket_mb is -1; it must be greater than 0",
        ),
        ("[optimiser]\nlr = 1", "mine.toml:10: optimiser is not a key of a recipe; did you mean optimizer?"),
        ("[parallel.zero]\nstage = 1", "mine.toml:10: parallel.zero is a table; it must be 0, 1, 2 or 3"),
        (
            "[fault_tolerance]\nrestarts = -1",
            "mine.toml:11: fault_tolerance.restarts is -1; it must be greater than or equal to 0",
        ),
        ("[report]\nprofile = 'no'", "mine.toml:11: report.profile is 'no'; it must be a valid boolean"),
        ("[run]\nfolder = 3", "mine.toml:11: run.folder is 3; it must be a valid path"),
        ("[diloco]\nlr = 1", "mine.toml:10: diloco.every is missing, and has no default"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_with_its_line_and_a_correction(
    tmp_path: Path, added: str, sentence: str
) -> None:
    assert said(tmp_path, f"{RECIPE}{added}\n") == [sentence]


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    text = RECIPE.replace("16", "0").replace('[data]\nname = "source"\n', "")
    assert said(tmp_path, text, "parallel.zero=4", "schedule.final=2") == [
        "mine.toml: data is missing, and has no default",
        "mine.toml:7: training.batch is 0; it must be greater than 0",
        "--set schedule.final=2: schedule.final is 2; it must be less than or equal to 1",
        "--set parallel.zero=4: parallel.zero is 4; it must be 0, 1, 2 or 3",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[model]\nname = gpt\n", "mine.toml:2: this is not TOML: Invalid value; see toml.io"),
        ("[model]\nname\n", "mine.toml:2: this is not TOML: Expected '=' after a key in a key/value pair"),
        ("[model]\n[data]\n[model]\n", "mine.toml:3: this is not TOML: Cannot declare ('model',) twice"),
        ("a = 1\na = 2\n", "mine.toml:2: this is not TOML: Cannot overwrite a value"),
    ],
)
def test_text_that_is_not_toml_is_an_error_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    (found,) = said(tmp_path, text)
    assert found.startswith(sentence)


def test_text_that_is_not_json_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text('{"model":\n{"name": gpt}}\n\n')
    with pytest.raises(RecipeError, match=r"recipe.json:2: this is not JSON: Expecting value$"):
        load(file)


def test_the_error_of_a_missing_file_lists_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "gpt.toml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=r"gtp\.toml: there is no such file; in that folder there is .*gpt\.toml$"):
        load(tmp_path / "gtp.toml")
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_settings_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    settings = ["training.steps=", "training.epochs=2", "parallel.schedule=gpipe", "optimizer.betas=[0, 0.5]"]
    recipe, _ = load(file, [*settings, "model.width=64", "diloco.every=5", "run.folder=/x/y", 'model.name="bert"'])
    assert (recipe.training.steps, recipe.training.epochs, recipe.parallel.schedule) == (None, 2, "gpipe")
    assert recipe.model.name == "bert" and recipe.model.options == {"width": 64}
    assert recipe.optimizer.betas == (0.0, 0.5) and recipe.diloco is not None and recipe.run.folder == Path("/x/y")
    # The run has the file's name, unless the recipe sets one.
    assert recipe.run.name == "mine" and load(file, ["run.name=other"])[0].run.name == "other"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("parallel", "--set parallel: write section.key=value, such as parallel.pipeline=4"),
        ("training.steps.x=1", "--set training.steps.x=1: training.steps is a value, and has no keys"),
        ("optimizer.betas=[1", "--set optimizer.betas=[1: the value is not TOML"),
        ("model.x=1\ny=2", "give each setting its own --set"),
        (
            "schedul.shape=linear",
            "--set schedul.shape=linear: schedul is not a key of a recipe; did you mean schedule?",
        ),
    ],
)
def test_an_error_of_a_setting_quotes_the_setting(tmp_path: Path, setting: str, sentence: str) -> None:
    (found,) = said(tmp_path, RECIPE, setting)
    assert sentence in found


@pytest.mark.parametrize(
    ("ranks", "settings", "sentence"),
    [
        (
            12,
            ["parallel.pipeline=2", "parallel.data=4"],
            "--set parallel.pipeline=2: parallel.pipeline 2 x parallel.data 4 x parallel.tensor 1 is 8, but there are "
            "12 ranks; set parallel.data = 6, or start 8",
        ),
        (
            7,
            ["parallel.tensor=2"],
            "--set parallel.tensor=2: parallel.pipeline 1 x parallel.tensor 2 is 2, but there are 7 ranks, which is "
            "not a multiple of it; start 6 or 8",
        ),
        (
            4,
            ["parallel.pipeline=2", "parallel.microbatches=3"],
            "mine.toml:9: training.batch is 16, which does not divide by parallel.data 2 x parallel.microbatches 3 = "
            "6; set 12 or 18",
        ),
        (
            2,
            ["training.accumulate=3"],
            "mine.toml:9: training.batch is 16, which does not divide by parallel.data 2 x "
            "training.accumulate 3 = 6; set 12 or 18",
        ),
        (
            2,
            ["parallel.pipeline=2", "training.accumulate=2"],
            "--set training.accumulate=2: training.accumulate = 2 does not go with parallel.pipeline = 2: a pipeline "
            "cuts a batch into microbatches; leave it out, set parallel.microbatches = 4",
        ),
        (
            4,
            ["parallel.pipeline=4", "parallel.microbatches=2"],
            '--set parallel.microbatches=2: parallel.microbatches = 2 does not go with parallel.schedule = "1f1b": it '
            "needs at least one for each of 4 stages; set 4 or more, or take 'gpipe'",
        ),
        (
            2,
            ["parallel.zero=3", "parallel.bucket_mb=4.0"],
            "--set parallel.bucket_mb=4.0: parallel.bucket_mb = 4.0 does not go with parallel.zero = 3: a layer's "
            "gradients are sent together, whatever their size; leave one of the two out",
        ),
        (
            2,
            ["parallel.sequence=true"],
            "--set parallel.sequence=true: parallel.sequence = true does not go with parallel.tensor = 1: nothing is "
            "cut; set tensor = 2 or more",
        ),
        (
            2,
            ["parallel.sequence=true", "parallel.tensor=2", "parallel.style=colwise"],
            '--set parallel.sequence=true: parallel.sequence = true does not go with parallel.style = "colwise": the '
            'sequence is cut between pairs of layers; set style = "alternating"',
        ),
        (
            2,
            ["parallel.embeddings=row_wise", "parallel.zero=1"],
            '--set parallel.embeddings=row_wise: parallel.embeddings = "row_wise" does not go with parallel.zero = 1: '
            "both divide the tables; set zero = 0",
        ),
        (3, [], "mine.toml:9: training.batch is 16, which does not divide by parallel.data 3; set 15 or 18"),
        (
            4,
            ["parallel.batch_norm=3"],
            "--set parallel.batch_norm=3: parallel.batch_norm is 3, which does not divide the 4 "
            "data-parallel ranks (parallel.data); set one of 1, 2, 4",
        ),
    ],
)
def test_ranks_and_samples_that_do_not_divide_are_an_error(
    tmp_path: Path, ranks: int, settings: list[str], sentence: str
) -> None:
    assert uneven(tmp_path, ranks, *settings) == [sentence]


def test_ranks_and_samples_are_divided(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RECIPE)
    recipe, _ = load(file, ["parallel.pipeline=2", "parallel.tensor=2", "parallel.schedule=interleaved"])
    shares = split(recipe, 8)
    assert (shares.pipeline, shares.data, shares.tensor, shares.stages, shares.microbatches) == (2, 2, 2, 4, 2)
    assert shares.ranks == 8 and shares.batch == 16 and shares.samples == 4
    # Weak scaling: the batch is that of each data-parallel rank.
    shares = split(load(file, ["training.scaling=weak", "training.accumulate=2"])[0], 3)
    assert (shares.data, shares.batch, shares.samples) == (3, 48, 8)


def test_the_line_of_a_key_is_found_in_every_form_of_toml() -> None:
    text = (
        "# name = 1\n"
        '[model] # [data]\n"na.me" = """\nsteps = 3\n[x]\n"""\n'
        "list = [1, # ]\n  { y = 2 },\n]\nafter = '''\n'''\n"
        "[ a . 'b' ]\nc.d = 1\n[[many]]\nx = {p = 1, q = '='}\n"
    )
    found = key_lines(text)
    assert found == {
        ("model",): 2,
        ("model", "na.me"): 3,
        ("model", "list"): 7,
        ("model", "after"): 10,
        ("a", "b"): 12,
        ("a", "b", "c"): 13,
        ("a", "b", "c", "d"): 13,
        ("many",): 14,
        ("many", "x"): 15,
    }
    assert line_of(("many", "x", "q"), found) == 15 and line_of(("a",), found) is None


def test_every_shipped_recipe_can_be_read() -> None:
    recipes = sorted((Path(__file__).parents[3] / "train/src/netfold_train/recipes").glob("*.toml"))
    assert recipes
    for file in recipes:
        assert re.fullmatch(r"[a-z0-9-]+", load(file)[0].run.name or "")
