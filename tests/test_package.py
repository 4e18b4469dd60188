"""An installed package has one version, and the files that its code reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import load
import pytest

import netfold

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_in_pyproject_alone() -> None:
    version = PROJECT["project"]["version"]
    assert netfold.__version__ == version, "the installed package is of another version: make build"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == version, "CHANGELOG.md opens with another version"
    written = re.compile(rf"""__version__ *= *["']|["']{re.escape(version)}["']""")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "core" / "native").rglob("*.[ch]pp"), ROOT / "CMakeLists.txt"]
    assert [str(file) for file in sources if written.search(file.read_text())] == []


def test_the_command_prints_the_version() -> None:
    command = [sys.executable, "-c", "from netfold.cli import main; main()", "--version"]
    answer = load.run(command, 60)
    assert (answer.returncode, answer.stdout) == (0, f"netfold {netfold.__version__}\n"), answer.stderr


def test_a_wheel_holds_the_recipes_and_every_file_that_pages_and_plans_read() -> None:
    packages = PROJECT["tool"]["scikit-build"]["wheel"]["packages"]
    python = {"netfold": "core/src/netfold", "netfold_lab.demo": "examples/netfold_lab.demo"}
    assert packages == {**python, "netfold/train/recipes": "train/src/netfold_train/recipes"}
    (editable,) = PROJECT["tool"]["scikit-build"]["overrides"]
    assert editable["wheel"]["packages"] == python
    assert "exclude" not in PROJECT["tool"]["scikit-build"]["wheel"]
    # Files that git ignores are left out of a wheel: none that the code reads may be among them.
    read = [file for kind in ("css", "js", "toml", "csv") for file in (ROOT / "src").rglob(f"*.{kind}")]
    read += (ROOT / "train/src/netfold_train/recipes").glob("*.toml")
    assert read
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    if shutil.which("git") is None:
        pytest.skip("git is not here")
    ignored = subprocess.run(["git", "check-ignore", *map(str, read)], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout == ""


def test_a_recipe_that_comes_with_netfold_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from netfold_train.recipe import load

    monkeypatch.chdir(tmp_path)
    assert load.shipped_names() == sorted(file.stem for file in (ROOT / "train/src/netfold_train/recipes").glob("*.toml"))
    assert load.find_shipped(Path("gpt")).samefile(ROOT / "train/src/netfold_train/recipes" / "gpt.toml")
    # A file of that name has precedence; a name with a folder or a suffix is a path.
    (tmp_path / "gpt").touch()
    assert load.find_shipped(Path("gpt")) == Path("gpt")
    for path in ("gtp", "edsr.toml", "recipes/edsr"):
        assert load.find_shipped(Path(path)) == Path(path)
