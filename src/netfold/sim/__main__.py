"""`python -m netfold.sim`: replay one seeded run, or hunt through many seeds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from netfold.sim.scenario import Scenario
from netfold.sim.simulation import Record, SimulationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a run; 1 when a promise was broken, with the seed and how to replay it."""
    parser = argparse.ArgumentParser(prog="python -m netfold.sim", description=__doc__)
    for field in fields(Scenario):
        default = field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default, metavar="X")
    parser.add_argument("--runs", type=int, default=1, help="this many runs, with consecutive seeds")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument(
        "--no-compare", action="store_true", help="do not hold machines against their copies; for large windows"
    )
    options = vars(parser.parse_args(arguments))
    runs, trace, compare = options.pop("runs"), options.pop("trace"), not options.pop("no_compare")
    try:
        first = Scenario(**options)
        for seed in range(first.seed, first.seed + runs):
            simulation = replace(first, seed=seed).simulation(
                compare_machines=compare, watch=_print_record if trace else None
            )
            print(f"seed {seed}: {simulation.run()}", flush=True)
    except ValueError as wrong:
        parser.error(str(wrong))
    except SimulationError as broken:
        print(f"seed {seed}: FAILED: {broken}", file=sys.stderr)
        return 1
    return 0


def _print_record(record: Record) -> None:
    print(record)


if __name__ == "__main__":
    sys.exit(main())
