"""Before a job: what is wrong with its hosts, its links and its switch, and what to do about it.

`facts` is what one rank knows of its own host; `links` is what pairs of ranks measure, `capacity` what all measure of a
switch; `gather` brings these together over a Communicator, or for this host alone; `rules` makes findings of them, and
`advice` says what switches are worth, pure functions; `render` prints them.
May import: communicator, bootstrap, tuning, switch_protocol. Nothing imports it but train and cli.
Always: it changes nothing, holds nothing on a switch once it has ended, and ends in bounded time; a secret's value is
never a fact.
Tested by `pytest tests/diagnostics`.
"""

from netfold.diagnostics.preflight.advice import advise
from netfold.diagnostics.preflight.capacity import Capacity
from netfold.diagnostics.preflight.facts import Facts, facts_here
from netfold.diagnostics.preflight.gather import PreflightFacts, check_alone, check_ranks
from netfold.diagnostics.preflight.links import PairLink
from netfold.diagnostics.preflight.render import failed, print_report
from netfold.diagnostics.preflight.rules import Finding, Level, apply_rules

__all__ = [
    "Capacity",
    "Facts",
    "Finding",
    "Level",
    "PairLink",
    "PreflightFacts",
    "advise",
    "apply_rules",
    "check_alone",
    "check_ranks",
    "facts_here",
    "failed",
    "print_report",
]
