"""`netfold._native_dev`: an editable build has it, no wheel has it, and without it each user prints a sentence."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from netfold.extras import MissingExtraError
from netfold_lab.model_check import Scope, replay, search, search_validation
from netfold_lab.model_check.__main__ import main
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.delay_links import DelayLinks
from netfold_lab.rack.topology import End

ROOT = Path(__file__).parents[2]
ABSENT = "needs netfold._native_dev, which no wheel has: run `make build` in a checkout of netfold"


@pytest.fixture
def no_development_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "netfold._native_dev", None)


@pytest.mark.parametrize(("state", "built"), [("editable", "ON"), ("wheel", "OFF")])
def test_only_an_editable_build_has_the_development_module(state: str, built: str) -> None:
    settings = pytest.importorskip(
        "scikit_build_core.settings.skbuild_read_settings", reason="the group dev of pyproject.toml has it"
    )
    reader = settings.SettingsReader.from_file(ROOT / "core" / "pyproject.toml", state=state)
    assert reader.settings.cmake.define["NETFOLD_DEV"] == built


def test_cmake_builds_the_development_components_only_where_asked() -> None:
    text = (ROOT / "core" / "native" / "CMakeLists.txt").read_text()
    conditional = "".join(re.findall(r"^if\(NETFOLD_DEV\)\n(.*?)^endif\(\)", text, re.M | re.S))
    for name in ("component(model_check", "component(delay_link", "extension(_native_dev"):
        assert name in conditional and text.count(name) == 1, name


def test_of_the_package_only_extras_names_the_development_module() -> None:
    sources = (ROOT / "core/src/netfold").rglob("*.py")
    assert [source.name for source in sources if "_native_dev" in source.read_text()] == ["extras.py"]


def test_the_runtime_module_has_nothing_of_the_development_module() -> None:
    import netfold._native
    import netfold._native_dev

    names = {"model_check", "delay_link"}
    assert names <= set(dir(netfold._native_dev))
    assert not names & set(dir(netfold._native))


@pytest.mark.usefixtures("no_development_module")
def test_the_model_check_without_the_development_module_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    for action in (lambda: search(Scope()), search_validation, lambda: replay(Scope(), [])):
        with pytest.raises(MissingExtraError, match=f"model_check {ABSENT}"):
            action()
    with pytest.raises(SystemExit):
        main(["--quick"])
    assert ABSENT in capsys.readouterr().err


@pytest.mark.usefixtures("no_development_module")
def test_a_link_with_delay_without_the_development_module_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingExtraError, match=f"a link with delay {ABSENT}"):
        DelayLinks().add(End("one", "eth0"), End("other", "eth0"), 1000)
    # On a machine that has everything else that a rack needs.
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr("os.path.exists", lambda path: True)
    assert why_unavailable(loss=False, delay=True) == f"a link with delay {ABSENT}; without it leave --delay out"
    assert why_unavailable(loss=False) is None
