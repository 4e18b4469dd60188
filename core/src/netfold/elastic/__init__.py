"""Jobs whose ranks come and go: a lost rank costs a step and not a restart, and new ranks join at a step's boundary.

`members` is the entry, over `communicator`; `change` has its results. `standing` is a process's state, which its
training thread and `service`, at its listener, share. `agreement` decides who goes on, as a state machine that
`negotiation` runs over the members' listeners, by `messages`. `heartbeat` ends a generation whose member sends nothing
more. A newcomer finds members by `newest`, and asks them by `joining`. `policy` divides the data. With torch: `State`
and `World`, of `netfold.elastic.torch`, which is loaded when one of them is first used.
May import: communicator, bootstrap, `netfold.options`, `netfold.errors`. Never torch.

Always: a generation has one successor; a step is applied by all members or by none; a minority never goes on alone; a
wait has a deadline.

Tests: `.venv/bin/pytest core/tests/elastic`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netfold.elastic.change import Change, Lost, TooFewLeft, Vote
from netfold.elastic.members import Members
from netfold.elastic.policy import Policy

if TYPE_CHECKING:
    from netfold.elastic.torch import State as State
    from netfold.elastic.torch import World as World

__all__ = ["Change", "Lost", "Members", "Policy", "State", "TooFewLeft", "Vote", "World"]


def __getattr__(name: str) -> Any:
    if name in ("State", "World"):
        from netfold.elastic import torch  # loaded when it is used: members alone need no torch

        return getattr(torch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
