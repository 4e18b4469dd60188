"""The search over SwitchWatch: production holds with answers in every order, and each mutant fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from changed import change, execute

from netfold.communicator import switch_watch as production
from netfold_lab.model_check.switch_watch import search_switch_watch, sentence

pytestmark = pytest.mark.native

ANSWERS = "a switch that answers counts as lost"
SILENT = "a switch that does not answer does not count as lost"
CUT = "a path that lets no packets through is not detected"
FORMER = "a reply about an earlier chunk is taken for the current chunk's"
TWO = "a query is sent while another is open"

# The text in switch_watch.py, its replacement, and the promise that breaks.
MUTANTS = {
    "a-pause-counts": ("min(now - self._last_tick, TICK_S)", "now - self._last_tick", ANSWERS),
    "one-answer-is-enough": ("self._bad_answers >= 2 and", "self._bad_answers >= 1 and", ANSWERS),
    "no-time-for-the-path": (" and waited >= PATH_S:", ":", ANSWERS),
    "answers-are-waited-for-too-long": (
        "if waited >= ANSWER_S else None",
        "if waited >= 2 * ANSWER_S else None",
        SILENT,
    ),
    "nobody-asks-whether-it-is-there": (
        "self._next_ask = self._time + ALIVE_S",
        "self._next_ask = self._time + 10 * ALIVE_S",
        CUT,
    ),
    "former-chunks-answers-count": (" or asked.chunk != self._chunk:", ":", FORMER),
    "another-ranks-delay-is-the-paths": (
        "        if self._bad_answers == 0:\n            self._since = self._time\n",
        "",
        ANSWERS,
    ),
    "good-answers-are-forgotten": (
        "self._rank in missing else 0",
        "self._rank in missing else self._bad_answers",
        ANSWERS,
    ),
    "former-chunks-count": (
        "self._chunk, self._since, self._bad_answers, self.stragglers = chunk, self._time, 0, ()",
        "self._chunk, self._since, self.stragglers = chunk, self._time, ()",
        ANSWERS,
    ),
    "a-cut-to-the-switch": ("not missing or self._rank in missing", "not missing", CUT),
    "a-cut-from-the-switch": ("not missing or self._rank in missing", "self._rank in missing", CUT),
    "two-questions": (
        'return Lost(f"it has not answered for {waited:.1f} s") if waited >= ANSWER_S else None',
        'if waited >= ANSWER_S:\n                return Lost("no answer")',
        TWO,
    ),
}


def test_a_switch_counts_as_lost_exactly_when_it_is_unusable() -> None:
    report = search_switch_watch()
    print(sentence(report))
    assert report.broken == ""
    assert report.losses > 0


@pytest.mark.parametrize("name", MUTANTS)
def test_a_watch_without_a_part_is_caught(name: str) -> None:
    text, instead, breaks = MUTANTS[name]
    report = search_switch_watch(_mutant(text, instead))
    print(f"{name}: {sentence(report)}")
    assert report.broken == breaks
    assert report.trace


def _mutant(text: str, instead: str) -> Any:
    """Return the class of the changed source; its question and loss types stay production's."""
    source = change(Path(production.__file__).read_text(), text, instead, "switch_watch.py")
    return execute(production, source, "class SwitchWatch:")["SwitchWatch"]
