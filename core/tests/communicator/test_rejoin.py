"""The waits until a group asks for a lost switch again: those of the recovery machine, without a clock."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from netfold.communicator import recovery_machine as machine

REJOIN_S = 5.0


def waits(actions: list[Any], what: str) -> list[float]:
    return [each.seconds for each in actions if isinstance(each, machine.Wait) and each.what == what]


class Group:
    """One rank, whose every try to join succeeds."""

    def __init__(self) -> None:
        path = MagicMock()
        path.freeze.return_value = 0, 0, b"", True
        path.promise.return_value = True
        self.machine = machine.RecoveryMachine(0, [0], path, 1, 4, rejoin_s=REJOIN_S)
        self.generation = 1

    def lose(self) -> float:
        """The switch is lost; returns the seconds until it is asked again."""
        (seconds,) = waits(self.machine.handle_loss(self.generation, "lost"), "again")
        return seconds

    def rejoin(self) -> float:
        """Join it again; returns the seconds after which the path counts as good."""
        tries = self.machine._attempts
        assert self.machine.handle_timer("again", tries) == [machine.FindTree()]
        self.machine.handle_tree([MagicMock()])
        self.generation += 1
        (seconds,) = waits(self.machine.handle_joined(self.generation, 4, ""), "good")
        return seconds


def test_a_switch_that_is_lost_again_and_again_is_asked_ever_later() -> None:
    group = Group()
    waited = []
    for _ in range(7):
        waited.append(group.lose())
        group.rejoin()
    assert waited == [5, 10, 20, 40, 80, 80, 80]


@pytest.mark.parametrize("stays", [True, False])
def test_a_switch_that_stays_is_asked_soon_again_after_a_later_loss(stays: bool) -> None:
    group = Group()
    for _ in range(3):
        group.lose()
        assert group.rejoin() == 16 * REJOIN_S
    attempt = group.machine._attempts
    # A timer of an earlier membership says nothing about this one.
    group.machine.handle_timer("good", attempt if stays else attempt - 1)
    assert group.lose() == (5 if stays else 40)
