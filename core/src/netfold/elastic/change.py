"""The results of votes and changes, and the error of a job that cannot go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netfold.errors import NetfoldError


class TooFewLeft(NetfoldError):  # noqa: N818 - named after the event, as the errors of netfold.errors
    """The members of a job that this one reaches are too few to go on, or none of them has the state."""


@dataclass(frozen=True)
class Vote:
    """The result of the vote of a step, the same on every member."""

    done: int
    """The steps that have passed, this one included."""
    changes: bool
    """The generation changes at this boundary: apply the step, then call `Members.change`, with no operation between.
    """


@dataclass(frozen=True)
class Lost:
    """A member of the former generation that is not in the new one."""

    rank: int
    """In the former generation."""
    where: str
    """host:port of its process."""
    why: str


@dataclass(frozen=True)
class Change:
    """A new generation, from one member's point of view."""

    generation: int
    rank: int
    size: int
    done: int
    """The steps that the state of every member counts; of a lacking one, once it was sent."""
    apply: bool = False
    """This member voted for step done - 1 without learning the result. The vote has passed: apply the step now.
    False: a step under way on this member has not passed, and is to be run again."""
    former: tuple[int, ...] = ()
    """By new rank: its rank in the former generation; -1 for a newcomer."""
    lost: tuple[Lost, ...] = ()
    new: tuple[int, ...] = ()
    """New ranks of newcomers."""
    lacking: Mapping[int, int] = field(default_factory=dict)
    """By new rank that lacks the state: the new rank that sends it. Members that have it take turns."""
    left: bool = False
    """This member has left the job by its own wish, and is in no group."""
    reason: str = ""
