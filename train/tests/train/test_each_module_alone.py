"""Every module of the package can be imported first: none needs an earlier import of another."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

import netfold_train

ROOT = Path(netfold_train.__file__).parent

pytestmark = pytest.mark.torch


def test_any_module_may_be_imported_first() -> None:
    parts = (path.relative_to(ROOT.parent).with_suffix("").parts for path in sorted(ROOT.rglob("*.py")))
    names = [".".join(each).removesuffix(".__init__") for each in parts]
    # Third-party packages are loaded once for all cases.
    for name in names:
        import_module(name)
    failed = []
    for name in names:
        child = os.fork()
        if child == 0:
            for known in [each for each in sys.modules if each.startswith("netfold_train")]:
                del sys.modules[known]
            try:
                import_module(name)
            except BaseException as error:
                os.write(2, f"{name}: {error}\n".encode())
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            failed.append(name)
    assert not failed
