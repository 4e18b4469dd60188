"""An editable install finds the packages of the checkout, and no other folder of the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from load import seconds

ROOT = Path(__file__).resolve().parents[2]

PRINT_PATHS = """
import importlib.util, json, pkgutil, sys
import netfold, netfold_lab, netfold_plan, netfold_train
specs = []
for package in (netfold, netfold_plan, netfold_train, netfold_lab):
    inner = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    names = [package.__name__, *(name for _, name, is_package in inner if is_package)]
    specs += [importlib.util.find_spec(name) for name in names]
paths = {spec.name: list(spec.submodule_search_locations) for spec in specs}
found = importlib.util.find_spec("netfold_train.tests")
print(json.dumps({"paths": {"sys": sys.path, **paths}, "tests": str(found and found.submodule_search_locations)}))
"""


def test_neither_the_root_of_the_checkout_nor_a_folder_above_it_is_a_search_path(tmp_path: Path) -> None:
    # -I: without PYTHONPATH and the working directory.
    command = [sys.executable, "-I", "-c", PRINT_PATHS]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(60))
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout)
    assert "netfold_train.recipe" in printed["paths"]
    for name, paths in printed["paths"].items():
        wrong = [path for path in paths if ROOT.is_relative_to(Path(path).resolve())]
        assert not wrong, f"{name} is searched in {wrong}"
    assert printed["tests"] == "None"
