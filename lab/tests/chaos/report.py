"""The table of a run, on the screen and in lab/bench/results/chaos.md."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from schedule import Schedule
from verdict import Record

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "lab" / "bench" / "results" / "chaos.md"
HEAD = (
    "| seed | job | faults | steps | switch lost, back | longest step (s) | dead rank named after (s) | load "
    "| verdict |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Row:
    """steps: of the slowest rank. named_s: the last rank's error after another was killed. load: at the end."""

    seed: int
    job: str
    faults: tuple[str, ...]
    steps: int
    fallbacks: int
    returns: int
    longest_s: float
    named_s: float | None
    load: float
    problems: tuple[str, ...]

    @classmethod
    def of(cls, schedule: Schedule, record: Record | None, problems: Sequence[str], load: float) -> Row:
        steps = [] if record is None else [log.steps for log in record.ranks]
        named_s = None
        if record is not None and record.killed_s is not None:
            named_s = max((log.failure.said_s - record.killed_s for log in record.ranks if log.failure), default=None)
        return cls(
            schedule.seed,
            f"{schedule.shape.name}, {'tokens' if schedule.authenticated else 'open'}",
            tuple(fault.kind for fault in schedule.faults),
            min(map(len, steps), default=0),
            0 if record is None else record.fallbacks,
            0 if record is None else record.returns,
            max((step.ended_s - step.began_s for each in steps for step in each), default=0.0),
            named_s,
            load,
            tuple(problems),
        )

    @property
    def summary(self) -> str:
        named = "" if self.named_s is None else f", the dead rank named after {self.named_s:.1f} s"
        verdict = f"{len(self.problems)} problems" if self.problems else "passed"
        switch = f"switch lost {self.fallbacks} times and back {self.returns}"
        return (
            f"{verdict}: {self.steps} steps, {switch}, the longest {self.longest_s:.1f} s{named}, load {self.load:.0f}"
        )

    @property
    def line(self) -> str:
        faults = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in Counter(self.faults).items())
        named = "" if self.named_s is None else f"{self.named_s:.1f}"
        verdict = "; ".join(problem.splitlines()[0] for problem in self.problems) or "passed"
        cells = (self.seed, self.job, faults, self.steps, f"{self.fallbacks}, {self.returns}")
        cells = (*cells, f"{self.longest_s:.1f}", named, f"{self.load:.0f}", verdict)
        return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def table(rows: Sequence[Row]) -> str:
    failed = [row.seed for row in rows if row.problems]
    kinds = Counter(problem.split(":")[0] for row in rows for problem in row.problems)
    steps = sum(row.steps for row in rows)
    faults = sum(len(row.faults) for row in rows)
    counted = ", ".join(
        f"{kinds[kind]} {kind}" for kind in ("wrong sum", "hang", "lost step", "unnamed", "grown", "log")
    )
    total = f"{len(rows)} schedules, {faults} faults, {steps} steps: {counted}; {len(failed)} failed"
    lost, back = sum(row.fallbacks for row in rows), sum(row.returns for row in rows)
    total += f"; a switch was lost {lost} times, and {back} times the group went back"
    return total + (f" (seeds {', '.join(map(str, failed))})" if failed else "")


def commit() -> str:
    """The commit that is checked out, to be asked before a run."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return asked.stdout.strip()


def write(rows: Sequence[Row], commit: str) -> None:
    """Add a section with these rows to the results."""
    cores = len(os.sched_getaffinity(0))
    about = f"{date.today()}, commit {commit}, {cores} cores, Linux {platform.release()}"
    text = RESULTS.read_text() if RESULTS.exists() else TOP
    RESULTS.write_text(f"{text}\n## {about}\n\n{table(rows)}\n\n{HEAD}" + "".join(f"{row.line}\n" for row in rows))


TOP = """# Faults on the real thing

`make chaos` runs seeded schedules of faults against switch daemons and DDP ranks in a rack of network namespaces, with
links of 1 Gbit/s and 50 us. Every element of every sum and gradient is compared with what it must be. `lab/tests/chaos`
has the faults and the verdict. The machine's load average is in the table, since bounds on time grow with the load.

A schedule passes with no wrong sum, no step beyond its deadline, no lost step, the dead rank named by every other rank,
and with descriptors and memory flat. `make chaos SEED=N` runs the schedule of a row again, at the commit that is named.
"""
