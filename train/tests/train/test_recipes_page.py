"""docs/reference/train/recipes.md agrees with the code: its recipe, the plan that --explain prints, every key.

python train/tests/train/test_recipes_page.py     # puts the plan that is printed now into the page
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from netfold_train.dry_run.explain import explain
from netfold_train.dry_run.render import print_plan
from netfold_train.dry_run.validate import validate_recipe
from netfold_train.recipe import Recipe
from netfold_train.recipe.load import load
from netfold_train.recipe.split import ranks_asked

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "train" / "recipes.md"
PLAN = re.compile(r"```text\n(.*?)```", re.DOTALL)


def plan_of(page: str) -> str:
    """The output of --explain for the page's recipe."""
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.toml"
        file.write_text(recipe)
        asked, _ = load(file)
    console = Console(file=io.StringIO(), width=100)
    print_plan(explain(asked, validate_recipe(asked, ranks_asked(asked.parallel))), console)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def keys() -> dict[str, Any]:
    """Every key with its default; Ellipsis if it is required."""
    found = {}
    for name, section in Recipe.model_fields.items():
        kinds = (section.annotation, *get_args(section.annotation))
        (kind,) = (each for each in kinds if hasattr(each, "model_fields"))
        for key, field in kind.model_fields.items():
            found[f"{name}.{key}"] = ... if field.is_required() else field.default
    return found


def as_toml(value: Any) -> str:
    if value is ...:
        return "must be given"
    if value is None:
        return "-"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str | Path):
        return f'`"{value}"`'
    return f"`{list(value)}`" if isinstance(value, tuple) else f"`{value!r}`"


def test_every_key_is_on_the_page_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert {key: default for key, default, _ in rows} == {key: as_toml(value) for key, value in keys().items()}
    assert [key for key, _, _ in rows] == list(keys())


def test_the_plan_in_the_docs_is_the_printed_plan() -> None:
    page = PAGE.read_text()
    (printed,) = PLAN.findall(page)
    assert printed == plan_of(page), "python train/tests/train/test_recipes_page.py puts the new plan into the page"


if __name__ == "__main__":
    text = PAGE.read_text()
    plan = plan_of(text)
    PAGE.write_text(PLAN.sub(lambda _: f"```text\n{plan}```", text))
