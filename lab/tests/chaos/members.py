"""Faults on the members of an elastic job, which are real processes on this machine; no root. `make chaos` runs this.

    python lab/tests/chaos/members.py [--schedules 20] [--seconds 30] [--first 0]
    python lab/tests/chaos/members.py --seed N

Schedule N is made from the seed N (tests/members_chaos.py). The exit code is 1 after a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))

from members_chaos import run_chaos

HEAD = "| seed | faults | generations | steps | s | load | verdict |\n|---|---|---|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run seeded faults against the members of an elastic job.")
    parser.add_argument("--schedules", type=int, default=20, help="how many (20)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of faults, each (30)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seed", type=int, help="this one alone")
    options = parser.parse_args()
    failed = 0
    print(HEAD)
    for seed in [options.seed] if options.seed is not None else range(options.first, options.first + options.schedules):
        began, cells, verdict = time.monotonic(), "- | - | -", "passed"
        try:
            with tempfile.TemporaryDirectory(prefix="netfold-chaos-") as folder:
                faults, generations, steps = run_chaos(Path(folder), seed, options.seconds)
            kinds = Counter(fault.partition(" ")[0] for fault in faults)
            cells = f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items())} | {generations} | {steps}"
        except AssertionError as error:
            failed += 1
            verdict = f"failed; again: make chaos SEED={seed}"
            print(error, file=sys.stderr)
        print(
            f"| {seed} | {cells} | {time.monotonic() - began:.0f} | {os.getloadavg()[0]:.0f} | {verdict} |", flush=True
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
