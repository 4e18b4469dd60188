"""What is wrong, seen from outside.

`status_segment` finds the status pages of this machine's processes and reads them; `job` says what each rank of a hung
job is doing, and who keeps the others; `sampler` looks at a running job many times a second, `top` shows what that
gives; `fabric` asks libfabric what there is, and tries it. May import: the native engine, for names and libfabric.
`preflight` checks hosts, links and switches before a job: it forms a group, and nothing else here does.

Always: it only reads; a process that hangs, is stopped or is dying need not answer.

Tests: `.venv/bin/pytest tests/diagnostics`
"""

from netfold.diagnostics.job import Verdict, diagnose
from netfold.diagnostics.sampler import RankRates, Sampler, Slowest, Snapshot, ranks_behind
from netfold.diagnostics.status_segment import Counters, Rank, Transfer, find_ranks
from netfold.diagnostics.top import View

__all__ = [
    "Counters",
    "Rank",
    "RankRates",
    "Sampler",
    "Slowest",
    "Snapshot",
    "Transfer",
    "Verdict",
    "View",
    "diagnose",
    "find_ranks",
    "ranks_behind",
]
