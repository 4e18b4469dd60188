"""Check a job's hosts, links and switches before the job runs, and name a remedy for each problem.

`facts` collects one rank's facts about its host. In `links` pairs of ranks measure their link, in `capacity` all ranks
measure a switch. `gather` gathers the results over a Communicator, or for this host alone. `rules` turns them into
findings, and `advice` estimates the gain of switches; both are pure functions. `render` prints the report.
May import: communicator, bootstrap, tuning, switch_protocol. Only train and cli import this package.
Always: it changes nothing, leaves nothing allocated on a switch, and ends in bounded time; the facts hold no secret's
value.
Tested by `pytest core/tests/diagnostics`.
"""

from netfold.diagnostics.preflight.advice import advise
from netfold.diagnostics.preflight.gather import PreflightFacts, check_alone, check_ranks
from netfold.diagnostics.preflight.render import failed, print_report
from netfold.diagnostics.preflight.rules import apply_rules

__all__ = ["PreflightFacts", "advise", "apply_rules", "check_alone", "check_ranks", "failed", "print_report"]
