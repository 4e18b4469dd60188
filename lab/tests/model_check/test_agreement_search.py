"""The search over the agreement on the next members: production holds in every order, and each mutant fails."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from changed import change, execute

from netfold.elastic import agreement as production
from netfold_lab.model_check.agreement import (
    FALSE_STEP,
    LOST_STEP,
    MINORITY,
    STUCK,
    TWO,
    AgreementScope,
    search_agreement,
    sentence,
)
from netfold_lab.model_check.scopes import AGREEMENT_QUICK

pytestmark = pytest.mark.native

HALVES = AGREEMENT_QUICK["members-halves"]
DEATHS = AgreementScope(deaths=2)
LATE = AgreementScope(suspicions=1)
ON_ONE_HOST = AgreementScope(deaths=2, one_host=True)
OUTBID = AgreementScope(members=2, deaths=1, suspicions=1, one_host=True)


@dataclass(frozen=True)
class Mutant:
    """The text in agreement.py, its replacement, the scope that shows the fault, and the promise that breaks."""

    text: str
    instead: str
    scope: AgreementScope
    breaks: str


MUTANTS = {
    "a-minority-decides": Mutant("return 2 * len(ranks) > self.size or", "return True or", DEATHS, MINORITY),
    "either-half-decides": Mutant("== self.size and 0 in ranks)", "== self.size)", HALVES, MINORITY),
    "what-may-be-decided-is-forgotten": Mutant("        return latest.accepted\n", "        return None\n", LATE, TWO),
    "the-lowest-ballot-counts": Mutant("latest = max(", "latest = min(", LATE, TWO),
    "promises-are-not-kept": Mutant("or request.ballot < self.promised:", "or False:", LATE, TWO),
    "passed-steps-are-repeated": Mutant("done = max((report.done", "done = min((report.done", DEATHS, LOST_STEP),
    "voted-counts-as-passed": Mutant(
        "done = max((report.done for", "done = max((report.done + report.voted for", DEATHS, FALSE_STEP
    ),
    "a-dead-member-is-waited-for": Mutant(
        "        return not self._is_quorum(came) and not self._awaited(came)\n",
        "        return False\n",
        ON_ONE_HOST,
        STUCK,
    ),
    "an-outbid-leader-goes-on": Mutant(
        "            if reply.promised > self.ballot != NO_BALLOT:\n                self._give_up()\n",
        "",
        OUTBID,
        STUCK,
    ),
}


@pytest.mark.parametrize("name", AGREEMENT_QUICK)
def test_one_decision_in_every_order_of_events(name: str) -> None:
    scope = AGREEMENT_QUICK[name]
    report = search_agreement(scope)
    print(sentence(scope, report))
    assert (report.broken, report.exhausted) == ("", True)
    assert report.decisions > 1


@pytest.mark.parametrize("name", MUTANTS)
def test_an_agreement_without_a_rule_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    report = search_agreement(mutant.scope, _changed(mutant))
    print(f"{name}: {sentence(mutant.scope, report)}\n  {'; '.join(report.trace)}")
    assert report.broken == mutant.breaks


def _changed(mutant: Mutant) -> Any:
    """The class of the changed source; its messages stay production's."""
    source = change(Path(production.__file__).read_text(), mutant.text, mutant.instead, "agreement.py")
    return execute(production, source, "def decide_from(")["Agreement"]
