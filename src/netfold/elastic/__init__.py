"""Jobs whose ranks come and go: a lost rank costs a step and not a restart, and new ranks join at a step's boundary.

`members` is the entry, over `communicator`; `change` has its results. `standing` is a process's state, which its
training thread and `service`, at its listener, share. `agreement` decides who goes on, as a state machine that
`negotiation` runs over the members' listeners, by `messages`. A newcomer finds members by `newest`, and asks them by
`joining`.
May import: communicator, bootstrap, `netfold.options`, `netfold.errors`. Never torch.

Always: a generation has one successor; a step is applied by all members or by none; a minority never goes on alone; a
wait has a deadline.

Tests: `.venv/bin/pytest tests/elastic`
"""

from netfold.elastic.change import Change, Lost, TooFewLeft, Vote
from netfold.elastic.members import Members

__all__ = ["Change", "Lost", "Members", "TooFewLeft", "Vote"]
