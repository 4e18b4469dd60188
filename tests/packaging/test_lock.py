"""requirements-dev.txt, the lock that `make` installs from: all that pyproject.toml asks for, by hash, no index."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sources import PACKAGES, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LOCK = (ROOT / "requirements-dev.txt").read_text()
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> list[Requirement]:
    return [Requirement(line.rstrip("\\ ")) for line in re.findall(r"^[A-Za-z0-9].*$", LOCK, re.M)]


def wanted() -> list[Requirement]:
    texts = list(TOOLS["dependency-groups"]["dev"])
    for package in PACKAGES:
        read = tomllib.loads((ROOT / package / "pyproject.toml").read_text())
        extras = read["project"].get("optional-dependencies", {}).values()
        texts += [*read["project"]["dependencies"], *read["build-system"]["requires"]]
        texts += [text for extra in extras for text in extra]
    return [needed for text in texts if not (needed := Requirement(text)).name.startswith("netfold")]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_lock_satisfies_pyproject(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    locked = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate(environment):
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and canonicalize_name(pin.name) not in locked, pin
            locked[canonicalize_name(pin.name)] = specifier.version
    for requirement in wanted():
        if requirement.name == "torch" or (requirement.marker and not requirement.marker.evaluate(environment)):
            continue
        version = locked.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements-dev.txt: make lock"
        assert version in requirement.specifier, f"{requirement} is locked at {version}: make lock"


def test_every_package_of_the_lock_has_a_hash_and_no_address() -> None:
    packages = re.split(r"\n(?=[A-Za-z0-9])", LOCK)[1:]
    assert len(packages) == len(pins())
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package
    assert "://" not in LOCK and "--index" not in LOCK and "--find-links" not in LOCK


def test_torch_and_its_cuda_libraries_stay_out_of_the_lock() -> None:
    names = {canonicalize_name(pin.name) for pin in pins()}
    assert not {name for name in names if name == "torch" or name.startswith(("nvidia-", "cuda-"))}
    (pinned,) = re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    (described,) = TOOLS["tool"]["uv"]["dependency-metadata"]
    assert (described["name"], described["version"]) == ("torch", pinned), "[tool.uv] describes another torch"
