"""What is wrong, seen from outside.

`page` finds the status pages of this machine's processes and reads them; `job` says what each rank of a hung job is
doing, and who keeps the others. May import: the native engine, for names.

Always: it only reads; a process that hangs, is stopped or is dying need not answer.

Tests: `.venv/bin/pytest tests/doctor`
"""

from netfold.doctor.job import Verdict, diagnose
from netfold.doctor.page import Rank, Transfer, find_ranks

__all__ = ["Rank", "Transfer", "Verdict", "diagnose", "find_ranks"]
