"""A missing package is reported in one sentence with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import load
import pytest
from absent import without
from packaging.requirements import Requirement

from netfold.cli import main
from netfold.extras import EXTRAS, VERBS, MissingExtraError, command, missing_extra, need

ROOT = Path(__file__).parent.parent
NAMES = ("netfold", "netfold-plan", "netfold-train", "netfold-lab")
DISTRIBUTIONS = {"PIL": "pillow", "skimage": "scikit-image"}


def ran(folder: Path, gone: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return load.run([sys.executable, *arguments], 120, env=without(folder, *gone.split(",")), cwd=ROOT)


NOT_HERE = "not installed here: pip install 'netfold[{}]'".format


@pytest.mark.parametrize(
    ("gone", "arguments", "sentence"),
    [
        ("torch", "train train/src/netfold_train/recipes/edsr.toml", "netfold train needs torch, " + NOT_HERE("train")),
        ("torch,skimage", "demo", "netfold demo needs torch and skimage, " + NOT_HERE("lab")),
        ("torch", "bench all-reduce --backend netfold", "a backend of torch needs torch, " + NOT_HERE("torch")),
        ("torch", "bench model vgg16 --backend gloo", "a backend of torch needs torch, " + NOT_HERE("torch")),
        ("torch", "bench accuracy --quick", "netfold bench accuracy needs torch, " + NOT_HERE("torch")),
        ("torch", "plan trace own:thing", "netfold plan trace: a module needs torch, " + NOT_HERE("train")),
    ],
    ids=lambda value: value.replace(" ", "-"),
)
def test_a_command_without_its_extra_says_so_in_one_line(
    gone: str, arguments: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("netfold.extras.find_spec", lambda name: None if name in gone.split(",") else find_spec(name))
    monkeypatch.setattr(sys, "argv", ["netfold", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert sentence in line


def test_a_command_that_meets_a_missing_package_says_so_in_one_line(tmp_path: Path) -> None:
    run = ran(tmp_path, "torch", "-m", "netfold.cli", "doctor", "gpu")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "netfold: the package torch is not installed: pip install 'netfold[torch]'\n"


@pytest.mark.parametrize("module", ["netfold.torch", "netfold.horovod.torch"])
def test_modules_that_need_torch_name_the_command_that_installs_it(module: str, tmp_path: Path) -> None:
    run = ran(tmp_path, "torch", "-c", f"import {module}")
    assert run.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: {module} needs torch, which is not installed: pip install 'netfold[torch]'"
    )


def test_without_torch_a_switch_and_a_communicator_are_there(tmp_path: Path) -> None:
    script = "import netfold, netfold.horovod, netfold.switch, numpy; print(netfold.empty(3).shape)"
    run = ran(tmp_path, "torch,mpi4py,pandas", "-c", script)
    assert (run.returncode, run.stdout) == (0, "(3,)\n"), run.stderr


def test_every_package_is_brought_by_the_extra_that_is_named() -> None:
    """An extra of netfold brings another package of the repository, with that one's requirements."""
    requirements = {name: importlib.metadata.requires(name) or [] for name in NAMES}

    def brought(name: str, extra: str) -> list[Requirement]:
        found = []
        for text in requirements[name]:
            needed = Requirement(text)
            wanted = "extra ==" in text and needed.marker.evaluate({"extra": extra}) if needed.marker else True
            if wanted or ("extra ==" not in text):
                found.append(needed)
                if needed.name in requirements and needed.name != name:
                    for other in [*needed.extras, ""]:
                        found += brought(needed.name, other)
        return found

    for module, extra in EXTRAS.items():
        names = {needed.name for needed in brought("netfold", extra)}
        assert DISTRIBUTIONS.get(module, module) in names, (module, extra, names)
    for verb, extra in VERBS.items():
        assert f"netfold-{extra}" in {needed.name for needed in brought("netfold", extra)}, verb


def test_other_import_errors_are_not_about_extras() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'torch.foo'", name="torch.foo")) is None
    assert missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert missing_extra(ValueError("torch")) is None
    assert command("wandb") == "pip install wandb"
    need("this test", ["sys"], "train")
    with pytest.raises(MissingExtraError, match=r"this test needs no_1, no_2 and no_3, not installed here: pip"):
        need("this test", ["no_1", "no_2", "no_3"], "train")


ABSENT_PACKAGES = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **wanted: [] if wanted["group"].startswith("netfold.") else found(**wanted)
from netfold.cli import main
sys.argv = ["netfold", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_whose_package_is_absent_says_what_to_install(verb: str) -> None:
    answer = load.run([sys.executable, "-c", ABSENT_PACKAGES, verb, "--option", "word"], 60)
    extra = VERBS[verb]
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == (
        f"netfold: netfold {verb} needs the package netfold-{extra}, not installed here: "
        f"pip install 'netfold[{extra}]'\n"
    )
    told = load.run([sys.executable, "-c", ABSENT_PACKAGES, "--help"], 60).stdout
    assert re.search(rf"^  {verb} +Not installed: pip install 'netfold\[{extra}\]'", told, re.M)
