"""Compare two installed versions of netfold: the same `netfold bench` of each, launch by launch in turns.

    .venv/bin/python lab/bench/before_after.py BEFORE/bin/python AFTER/bin/python

Both environments keep their own netfold and torch. A launch starts new ranks and runs every size of one place. Places
with a rack need root.
"""

from __future__ import annotations

import json
import statistics
import subprocess

import driver

from netfold_lab.bench.spread import paired_ratios

GOAL = 0.97
DEADLINE_S = 600
SIDES = ("--backend", "netfold", "--backend", "netfold:ring")
SIZES = ("-b", "4", "-e", "64M", "-f", "4096")  # 4 bytes, 16 KB, 64 MB
# Name: options of `netfold bench all-reduce`.
PLACES = {
    "one host, 2 ranks": (*SIDES, "--ranks", "2", *SIZES, "-n", "15"),
    "one host, 2 ranks, 1 MB": (*SIDES, "--ranks", "2", "-b", "1M", "-e", "1M", "-n", "40"),
    "one host, 4 ranks": (*SIDES, "--ranks", "4", *SIZES, "-n", "10"),
    "rack, 4 hosts, 1 Gbit/s, switch": (
        *("--backend", "netfold:in_network", "--backend", "netfold:ring", "--ranks", "4", "--rack-rate", "1gbit"),
        *("-b", "1M", "-e", "16M", "-f", "16", "-n", "8"),
    ),
}


def launch(python: str, place: str) -> tuple[dict[tuple[str, int], float], str]:
    """Median nanoseconds by side and bytes, and the commit."""
    command = [python, "-m", "netfold.cli", "bench", "all-reduce", *PLACES[place], "-w", "3", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    times = {(row["backend"], row["size_bytes"]): row["time_ns"]["median"] for row in found["rows"]}
    return times, found["versions"]["commit"]


def before_after(before: str, after: str, launches: int = 5, only: str = "") -> str:
    """Before and after"""
    rows = []
    for place in PLACES:
        if only not in place:
            continue
        # By number, because both may be one environment.
        found = driver.take_turns((0, 1), launches, lambda which: launch((before, after)[which], place), warmups=0)  # noqa: B023
        commits = [found[which][0][1] for which in (0, 1)]
        for side, size in found[0][0][0]:
            times = [[of[side, size] for of, _ in found[which]] for which in (0, 1)]
            ratios = paired_ratios(*times)
            middle = statistics.median(ratios)
            around = f"{middle:.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            rows.append([place, side, size, around, "yes" if middle >= GOAL else "**no**"])
    return f"""`all_reduce` of {commits[0]} beside {commits[1]}: the median time of a launch before over that of the
launch after that ran beside it, f32; above 1 the later is quicker. {launches} launches; the version that goes first
changes with every launch. Goal: at least {GOAL}.

{driver.table("place | side | bytes | ratio, median (least..most) | met", rows)}"""


if __name__ == "__main__":
    driver.run(before_after)
