"""Compare two installed versions of netfold: the same `netfold bench` of each, launch by launch in turns.

    python bench/before_after.py BEFORE/bin/python AFTER/bin/python [--launches 5] [--place NAME ...] [--write]

Both environments keep their own netfold and torch. A launch starts new ranks and runs every size of one place; the
versions take turns, and the one that goes first changes with every launch. A ratio is the median time of a launch
before over the median time of the launch after that ran beside it: above 1, the version after is quicker. The table
shows the median of the ratios over the launches, with the smallest and the largest. `--write` rewrites
bench/results/before_after.md. Places with a rack need root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "before_after.md"
GOAL = 0.97
DEADLINE_S = 600
SIZES = ("-b", "4", "-e", "64M", "-f", "4096")  # 4 bytes, 16 KB, 64 MB
# Name: what `netfold bench all-reduce` is told.
PLACES = {
    "one host, 2 ranks": ("--backend", "netfold", "--backend", "netfold:ring", "--ranks", "2", *SIZES, "-n", "15"),
    "one host, 2 ranks, 1 MB": (
        *("--backend", "netfold", "--backend", "netfold:ring", "--ranks", "2", "-b", "1M", "-e", "1M", "-n", "40"),
    ),
    "one host, 4 ranks": ("--backend", "netfold", "--backend", "netfold:ring", "--ranks", "4", *SIZES, "-n", "10"),
    "rack, 4 hosts, 1 Gbit/s, switch": (
        *("--backend", "netfold:in_network", "--backend", "netfold:ring", "--ranks", "4", "--rack-rate", "1gbit"),
        *("-b", "1M", "-e", "16M", "-f", "16", "-n", "8"),
    ),
}


def launch(python: str, place: str) -> tuple[dict[tuple[str, int], float], str]:
    """Median nanoseconds by side and bytes, and the commit."""
    command = [python, "-m", "netfold.cli", "bench", "all-reduce", *PLACES[place], "-w", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout)
    return {(row["backend"], row["size_bytes"]): row["time_ns"]["median"] for row in found["rows"]}, found["versions"][
        "commit"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--place", action="append", choices=list(PLACES))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    pythons = {"before": asked.before, "after": asked.after}
    commits: dict[str, str] = {}
    ratios: dict[tuple[str, str, int], list[float]] = {}
    load_before = os.getloadavg()[0]
    for place in asked.place or PLACES:
        for turn in range(asked.launches):
            times = {}
            for version in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                times[version], commits[version] = launch(pythons[version], place)
            for (side, size), was in times["before"].items():
                ratios.setdefault((place, side, size), []).append(was / times["after"][side, size])
            print(f"{place}: launch {turn + 1} of {asked.launches}", file=sys.stderr, flush=True)
    lines = [
        "# Before and after",
        "",
        f"`all_reduce` of {commits['before']} beside {commits['after']}: time before over time after, f32, so above 1",
        "the later is quicker. `bench/before_after.py` says how; goal: at least 0.97.",
        "",
        "| place | side | bytes | ratio, median (least..most) | launches | met |",
        "|---|---|---:|---|---:|---|",
    ]
    for (place, side, size), found in ratios.items():
        middle = statistics.median(found)
        lines.append(
            f"| {place} | {side} | {size} | {middle:.2f} ({min(found):.2f}..{max(found):.2f}) | {len(found)} "
            f"| {'yes' if middle >= GOAL else '**no**'} |"
        )
    lines += [
        "",
        f"{os.cpu_count()} cores, load {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the end.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if asked.write:
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
