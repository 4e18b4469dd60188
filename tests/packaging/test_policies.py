"""SECURITY.md, CONTRIBUTING.md and NOTICE: what they point to is there, and licenses are quoted that ask for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from sources import PACKAGES, ROOT

PAGES = ["SECURITY.md", "CONTRIBUTING.md", "docs/reference/versions.md", "README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_has_a_target(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), f"{page} points to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page} points to {target}, which has {slugs}"


def test_make_targets_in_contributing_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    told = re.findall(r"(?:`|^    )make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert told and set(told) <= set(targets), set(told) - set(targets)


def test_the_package_carries_its_license_and_the_notice() -> None:
    for package in PACKAGES:
        project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
        assert project["license-files"] == ["LICENSE", "NOTICE"]
        for name in project["license-files"]:
            assert (ROOT / package / name).read_text() == (ROOT / name).read_text()


def words(text: str) -> str:
    return " ".join(re.sub(r"(?m)^ \*", " ", text).split())


def test_the_notice_has_the_licenses_of_what_is_compiled_in() -> None:
    notice = words((ROOT / "NOTICE").read_text())
    nanobind = importlib.util.find_spec("nanobind")
    assert nanobind is not None and nanobind.origin is not None, "the group dev of pyproject.toml has nanobind"
    files = importlib.metadata.files("nanobind") or []
    (license_text,) = [file.read_text() for file in files if file.name == "LICENSE"]
    assert words(license_text) in notice, "nanobind's license has changed"
    header = Path(nanobind.origin).parent / "ext/robin_map/include/tsl/robin_map.h"
    comment = header.read_text().split("*/", 1)[0].removeprefix("/**")
    assert words(comment) in notice, "robin_map's license has changed"
