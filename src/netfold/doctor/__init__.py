"""What is wrong, seen from outside.

`page` finds the status pages of this machine's processes and reads them; `job` says what each rank of a hung job is
doing, and who keeps the others; `watch` looks at a running job many times a second, `top` shows what that gives;
`fabric` asks libfabric what there is, and tries it. May import: the native floor, for names and libfabric.

Always: it only reads; a process that hangs, is stopped or is dying need not answer.

Tests: `.venv/bin/pytest tests/doctor`
"""

from netfold.doctor.job import Verdict, diagnose
from netfold.doctor.page import Counters, Rank, Transfer, find_ranks
from netfold.doctor.top import View
from netfold.doctor.watch import Line, Picture, Slowest, Watch, behind

__all__ = [
    "Counters",
    "Line",
    "Picture",
    "Rank",
    "Slowest",
    "Transfer",
    "Verdict",
    "View",
    "Watch",
    "behind",
    "diagnose",
    "find_ranks",
]
