"""A torch module as the planner takes it: traced without memory; and `netfold plan trace`, which shows what was seen."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netfold.plan.model import Traced


def module_model(said: str, inputs: Sequence[str]) -> Traced:
    """The model of `package.module:factory`, traced with inputs of these shapes.

    Raises ValueError, a line a problem, where it cannot be made or traced; without torch and pydantic.
    """
    if any(importlib.util.find_spec(module) is None for module in ("torch", "pydantic")):
        raise ValueError("--module needs torch and pydantic: pip install 'netfold[train]'")

    from netfold.train.trace import asked_input, asked_module, traced

    # A module:factory of one's own is looked for here, as `python -m` does.
    sys.path.insert(0, "")
    return traced(asked_module(said), [asked_input(each) for each in inputs], said)
