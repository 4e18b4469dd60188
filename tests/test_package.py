"""An installed package has one version, and the files that its code reads."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import load
import pytest
from sources import PACKAGES, ROOT, SOURCES

import netfold

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECTS = {package: tomllib.loads((ROOT / package / "pyproject.toml").read_text()) for package in PACKAGES}
VERSION = PROJECTS["core"]["project"]["version"]


def test_all_packages_have_one_version_and_need_each_other_at_it() -> None:
    assert {project["project"]["version"] for project in PROJECTS.values()} == {VERSION}
    assert netfold.__version__ == VERSION, "the installed package is of another version: make build"
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == VERSION, "CHANGELOG.md opens with another version"
    for project in PROJECTS.values():
        extras = project["project"].get("optional-dependencies", {}).values()
        for needed in [*project["project"]["dependencies"], *(each for extra in extras for each in extra)]:
            assert not needed.startswith("netfold") or needed.endswith(f"=={VERSION}"), needed
    written = re.compile(rf"""__version__ *= *["']|["']{re.escape(VERSION)}["']""")
    sources = [file for folder in SOURCES for file in folder.rglob("*.py")]
    sources += [*(ROOT / "core" / "native").rglob("*.[ch]pp"), ROOT / "core" / "CMakeLists.txt"]
    assert [str(file) for file in sources if written.search(file.read_text())] == []


def test_the_command_prints_the_version() -> None:
    command = [sys.executable, "-c", "from netfold.cli import main; main()", "--version"]
    answer = load.run(command, 60)
    assert (answer.returncode, answer.stdout) == (0, f"netfold {netfold.__version__}\n"), answer.stderr


def test_no_file_that_code_reads_is_left_out_of_a_wheel() -> None:
    """A wheel has the files of its package that git does not ignore."""
    for project in PROJECTS.values():
        assert "exclude" not in project["tool"]["scikit-build"]["wheel"]
    read = [file for folder in SOURCES for kind in ("css", "js", "toml", "csv") for file in folder.rglob(f"*.{kind}")]
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
    assert load.shipped_names() == sorted(
        file.stem for file in (ROOT / "train/src/netfold_train/recipes").glob("*.toml")
    )
    assert load.find_shipped(Path("gpt")).samefile(ROOT / "train/src/netfold_train/recipes" / "gpt.toml")
    # A file of that name has precedence; a name with a folder or a suffix is a path.
    (tmp_path / "gpt").touch()
    assert load.find_shipped(Path("gpt")) == Path("gpt")
    for path in ("gtp", "edsr.toml", "recipes/edsr"):
        assert load.find_shipped(Path(path)) == Path(path)
