"""Inject faults into real switches and DDP ranks in a rack of network namespaces; check every sum. Needs root.

    python lab/tests/chaos [--schedules 20] [--seconds 30] [--first 0] [--write]   # make chaos SCHEDULES=20 SECONDS=30
    python lab/tests/chaos --seed N [--seconds 30]                                 # one again;  make chaos SEED=N

Schedule N is made from the seed N: its job, its faults and their times. A failed schedule prints the command that
repeats it. The exit code is 1 after a failure, and 2 where this machine cannot run any schedule.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import arena
import places
from report import Row, commit, table, write
from schedule import KIND_OF, draw
from verdict import problems

from netfold_lab.rack.command import RackError, why_unavailable


def main() -> int:
    parser = argparse.ArgumentParser(description="Run seeded schedules of faults against a real job.")
    parser.add_argument("--schedules", type=int, default=20, help="how many (20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of faults, each (30)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--kinds", nargs="*", default=(), choices=list(KIND_OF), help="faults of these kinds alone")
    parser.add_argument("--write", action="store_true", help="add the rows to lab/bench/results/chaos.md")
    parser.add_argument("--keep", type=Path, help="keep logs and steps of failed schedules in this folder")
    parser.add_argument("--for-s", type=float, default=float("inf"), help="begin no schedule after so many seconds")
    options = parser.parse_args()
    lack = why_unavailable(loss=True, delay=True)
    if lack is not None:
        print(lack, file=sys.stderr)
        return 2
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.schedules)
    rows: list[Row] = []
    began, at = time.monotonic(), commit()
    try:
        with tempfile.TemporaryDirectory(prefix="netfold-chaos-") as folder:
            places.warm_up(Path(folder))
            for seed in seeds:
                if time.monotonic() - began > options.for_s:
                    break
                rows.append(one(seed, options.seconds, tuple(options.kinds), options.keep))
    finally:  # also where a run is interrupted
        print(table(rows))
        if options.write and rows:
            write(rows, at)
    return int(any(row.problems for row in rows))


def one(seed: int, seconds: float, kinds: tuple[str, ...], keep: Path | None) -> Row:
    """Run a schedule, and print it and what became of it."""
    schedule = draw(seed, seconds, kinds=kinds)
    print(schedule, flush=True)
    with tempfile.TemporaryDirectory(prefix="netfold-chaos-") as folder:
        try:
            record = arena.run(schedule, Path(folder))
            found = problems(schedule, record)
        except (arena.StartError, arena.HostileError, RackError) as error:
            record, found = None, [f"not run: {error}"]
        if found and keep is not None:
            shutil.copytree(folder, keep / f"seed-{seed}", dirs_exist_ok=True)
    for problem in found:
        print(f"  FAILED {problem}")
    if found:
        again = f"make chaos SEED={seed} SECONDS={seconds:g}"
        print(f"  again: {again}   or: python lab/tests/chaos --seed {seed} --seconds {seconds:g}")
    row = Row.of(schedule, record, found, os.getloadavg()[0])
    print(f"  {row.summary}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
