"""The search over an elastic job's generations: production holds in every order, and each mutant fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
from changed import change, execute

from netfold.elastic import agreement, joining, service, standing
from netfold_lab.model_check.agreement import LOST_STEP, MINORITY, TWO, UNEVEN
from netfold_lab.model_check.generation_process import PRODUCTION, GenerationsScope, Parts
from netfold_lab.model_check.generations import (
    FOREIGN,
    NO_STATE,
    OUTNUMBERED,
    STAYS,
    TWO_JOBS,
    WITHOUT,
    search_generations,
    sentence,
)
from netfold_lab.model_check.scopes import GENERATIONS_QUICK

pytestmark = pytest.mark.native

TWO_NEWCOMERS = GenerationsScope(members=1, newcomers=2)

# The module, the part of `Parts` that it makes, and the first text of what is defined anew.
AGREEMENT = agreement, "agreement", "def decide_from(", "Agreement"
STANDING = standing, "standing", "class Standing:", "Standing"
SERVICE = service, "service", "class Service:", "Service"
JOINING = joining, "all_have_ended", "def all_have_ended(", "all_have_ended"


@dataclass(frozen=True)
class Mutant:
    """The text in a file, its replacement, the scope that shows the fault, and the promise that breaks."""

    of: tuple[ModuleType, str, str, str]
    text: str
    instead: str
    scope: GenerationsScope | str
    breaks: str

    @property
    def parts(self) -> Parts:
        module, part, first, name = self.of
        assert module.__file__ is not None
        file = Path(module.__file__)
        source = change(file.read_text(), self.text, self.instead, file.name)
        return replace(PRODUCTION, **{part: execute(module, source, first)[name]})


DEATHS = "two-deaths"
HALVES, PAIR = "halves", "pair"

MUTANTS = {
    "a-leaver-stays": Mutant(AGREEMENT, "not in ended and not report.leaves", "not in ended", "leaves", STAYS),
    "a-member-without-the-state-goes-on": Mutant(
        AGREEMENT,
        "        if report.clean and report.done == done:\n",
        "        if report.done == done:\n",
        "lacks",
        WITHOUT,
    ),
    "newcomers-outnumber-members": Mutant(
        AGREEMENT, "free = len(members) if", "free = MAX_NEWCOMERS if", TWO_NEWCOMERS, OUTNUMBERED
    ),
    "passed-steps-are-repeated": Mutant(
        AGREEMENT, "done = max((report.done", "done = min((report.done", DEATHS, LOST_STEP
    ),
    "a-decided-step-is-not-counted": Mutant(STANDING, "        self.done = decision.done\n", "", DEATHS, UNEVEN),
    "messages-of-a-later-generation-count": Mutant(
        SERVICE, "if generation > standing.generation or negotiation", "if negotiation", DEATHS, FOREIGN
    ),
    "an-ended-generation-is-forgotten": Mutant(
        SERVICE, "            if generation in standing.past:\n", "            if False:\n", DEATHS, WITHOUT
    ),
    "a-process-is-taken-back-into-its-own-generation": Mutant(
        SERVICE, "generation > after and ", "", "comes-back", WITHOUT
    ),
    "both-halves-decide": Mutant(
        AGREEMENT,
        "return 2 * len(ranks) > self.size or (2 * len(ranks) == self.size and 0 in ranks)",
        "return 2 * len(ranks) >= self.size",
        HALVES,
        MINORITY,
    ),
    "one-member-decides": Mutant(
        AGREEMENT,
        "return 2 * len(ranks) > self.size or (2 * len(ranks) == self.size and 0 in ranks)",
        "return bool(ranks)",
        PAIR,
        TWO,
    ),
    "a-member-accepts-two-leaders": Mutant(
        AGREEMENT,
        "isinstance(request, Decide) or request.ballot < self.promised",
        "isinstance(request, Decide)",
        PAIR,
        TWO,
    ),
    "an-accepted-decision-is-not-kept": Mutant(
        AGREEMENT, "self.proposal = inherited or decide_from(", "self.proposal = decide_from(", PAIR, TWO
    ),
    "listed-members-are-all": Mutant(JOINING, "newest.is_whole and ", "", "store-holds-a-part", TWO_JOBS),
    "the-store-is-read-once": Mutant(JOINING, " and read() == newest", "", "begins-again-or-not", TWO_JOBS),
    "one-member-that-ended-is-enough": Mutant(
        JOINING, "set(newest.handles) <= set(ended)", "set(newest.handles) & set(ended)", "begins-again", TWO_JOBS
    ),
}

# Rules of members.py, which the search states itself.
RULES = {
    "the-store-is-not-asked": ({"asks_the_store": False}, "newcomer", TWO),
    "newcomers-are-published-late": ({"publishes_first": False}, "newcomer", TWO),
    "newcomers-are-asked-before-members": ({"asks_in_order": False}, "begins-again-or-not", TWO_JOBS),
    "a-job-goes-on-without-any-state": ({"needs_the_state": False}, "none-has-it", NO_STATE),
}


@pytest.mark.parametrize("name", GENERATIONS_QUICK)
def test_a_job_goes_on_in_every_order_of_events(name: str) -> None:
    scope = GENERATIONS_QUICK[name]
    report = search_generations(scope)
    print(sentence(scope, report))
    assert (report.broken, report.exhausted) == ("", True), report.trace
    assert report.decisions > 1


@pytest.mark.parametrize("name", [*MUTANTS, *RULES])
def test_a_job_without_a_rule_is_caught(name: str) -> None:
    if name in MUTANTS:
        mutant = MUTANTS[name]
        parts, scope, breaks = mutant.parts, mutant.scope, mutant.breaks
    else:
        rules, scope, breaks = RULES[name]
        parts = replace(PRODUCTION, **rules)
    searched = scope if isinstance(scope, GenerationsScope) else GENERATIONS_QUICK[f"generations-{scope}"]
    report = search_generations(searched, parts)
    print(f"{name}: {sentence(searched, report)}\n  {'; '.join(report.trace)}")
    assert report.broken == breaks
