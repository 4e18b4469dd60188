"""PyTorch's own suite for process groups over gloo and over netfold: passed tests, and differences.

    python core/tests/conformance [--world-size 2 --world-size 3 ...] [--write] [TEST ...]     # or: make conformance

Every run is a process of its own (suite.py), with folders of its own, and starts again behind a test that took it down.
Exit code 1 when a test passes over gloo, does not pass over netfold, and is not explained below.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SUITE = Path(__file__).with_name("suite.py")
RESULTS = Path(__file__).parents[3] / "lab" / "bench" / "results" / "conformance.md"
# A whole run of the suite takes about two minutes.
RUN_TIMEOUT_S = 1800.0
# What netfold need not pass, with the reason.
EXPLAINED: dict[str, str] = {
    "test_barrier_timeout_arg": "asks for gloo's own words ('Timed out waiting 1ms'); netfold's error says more",
    "test_ddp_logging_data_cpu": (
        "from 2.14 on torch calls every backend that is not its own `custom` (ProcessGroup::getBackendName)"
    ),
}

Rows = dict[str, dict[str, Any]]


def run(backend: str, world_size: int, chosen_as: str, tests: list[str]) -> Rows:
    """The outcome of each test."""
    rows: Rows = {}
    names = tests or listed(world_size, chosen_as)
    while names:
        process = subprocess.Popen(
            [sys.executable, str(SUITE), backend, str(world_size), chosen_as, *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            rows[row["test"]] = row
        process.wait(RUN_TIMEOUT_S)
        left = [name for name in names if name not in rows]
        if left:  # the run ended in the middle of this one
            why = f"exit code {process.returncode}"
            rows[left[0]] = {"test": left[0], "outcome": "died", "why": why, "seconds": 0}
        names = left[1:]
    return rows


def listed(world_size: int, chosen_as: str) -> list[str]:
    ended = subprocess.run(
        [sys.executable, str(SUITE), "gloo", str(world_size), chosen_as, "--list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return ended.stdout.split()


def count(rows: Rows, outcome: str) -> int:
    return sum(row["outcome"] == outcome for row in rows.values())


def differences(gloo: Rows, netfold: Rows) -> list[str]:
    return [test for test, row in gloo.items() if netfold[test]["outcome"] != row["outcome"]]


def unexplained(gloo: Rows, netfold: Rows) -> list[str]:
    """Return the tests that pass only over gloo, without an explanation."""
    return [test for test in differences(gloo, netfold) if gloo[test]["outcome"] == "passed" and test not in EXPLAINED]


def reason(row: dict[str, Any]) -> str:
    """Return the most informative line of a failure."""
    lines = [line.strip() for line in row["why"].splitlines() if "Error" in line or "terminated" in line]
    return (lines[-1] if lines else row["why"].strip())[:160]


def report(found: dict[tuple[int, str], tuple[Rows, Rows]]) -> str:
    out = [
        "# Conformance",
        "",
        "PyTorch's own suite for process groups (`torch/testing/_internal/distributed/distributed_test.py` in the",
        f"wheel, torch {torch_version()}), CPU, over gloo and over netfold: `make conformance`. What is extended from",
        "outside, and why, stands at the top of `core/tests/conformance/suite.py`. Skipped is what needs a GPU, what",
        "torch itself skips, and what asks for another number of ranks. The suite asks `all_to_all` on CPU of mpi",
        "alone; it is asked of both here.",
        "",
        "| ranks | chosen as | tests | skipped | pass over gloo | pass over netfold | gloo only | netfold only |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    details = []
    for (world_size, chosen_as), (gloo, netfold) in found.items():
        differ = differences(gloo, netfold)
        lost = [test for test in differ if gloo[test]["outcome"] == "passed"]
        won = [test for test in differ if netfold[test]["outcome"] == "passed"]
        out.append(
            f"| {world_size} | {chosen_as} | {len(gloo)} | {count(gloo, 'skipped')} | {count(gloo, 'passed')} | "
            f"{count(netfold, 'passed')} | {len(lost)} | {len(won)} |"
        )
        for test in differ:
            loser = netfold if gloo[test]["outcome"] == "passed" else gloo
            words = EXPLAINED.get(test, reason(loser[test]))
            details.append(
                f"| {world_size} | `{test}` | {gloo[test]['outcome']} | {netfold[test]['outcome']} | {words} |"
            )
    out += ["", "## Differences", ""]
    if details:
        out += ["| ranks | test | gloo | netfold | why |", "|---:|---|---|---|---|", *details]
    else:
        out.append("None.")
    return "\n".join(out) + "\n"


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, action="append", choices=(2, 3, 4, 8))
    parser.add_argument("--write", action="store_true", help=f"rewrite {RESULTS.name}")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the counts there: an object a row of the table"
    )
    parser.add_argument("tests", nargs="*", metavar="TEST")
    asked = parser.parse_args()
    found = {}
    for world_size in asked.world_size or [2, 3, 4]:
        for chosen_as in ("gloo", "mpi"):
            names = [name for name in listed(world_size, chosen_as) if chosen_as == "gloo" or "all_to_all" in name]
            names = [name for name in names if not asked.tests or name in asked.tests]
            if names:
                print(f"{world_size} ranks, {len(names)} tests chosen as for {chosen_as}", file=sys.stderr)
                both = (run("gloo", world_size, chosen_as, names), run("netfold", world_size, chosen_as, names))
                found[world_size, chosen_as] = both
    text = report(found)
    print(text)
    if asked.write:
        RESULTS.write_text(text)
    lost = {where: unexplained(*both) for where, both in found.items()}
    if asked.json:
        counts = [
            {
                "world_size": world_size,
                "chosen_as": chosen_as,
                "tests": len(gloo),
                "gloo": count(gloo, "passed"),
                "netfold": count(netfold, "passed"),
                "lost": lost[world_size, chosen_as],
            }
            for (world_size, chosen_as), (gloo, netfold) in found.items()
        ]
        asked.json.write_text(json.dumps(counts, indent=1) + "\n")
    return 1 if any(lost.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
