"""`python -m netfold_plan.sim`: replay one seeded run, or search many seeds for a failure."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from netfold_plan.sim import diagram
from netfold_plan.sim.scenario import Scenario
from netfold_plan.sim.simulation import Record, SimulationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each run; return 1 where a promise is broken, with the seed and the replay command."""
    parser = argparse.ArgumentParser(prog="python -m netfold_plan.sim", description=__doc__)
    for field in fields(Scenario):
        default = field.default
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(default), default=default, metavar="X")
    parser.add_argument("--runs", type=int, default=1, help="this many runs, with consecutive seeds")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument(
        "--no-compare", action="store_true", help="do not compare machines with their copies; for large windows"
    )
    parser.add_argument("--diagram", action="store_true", help="draw the run as a sequence diagram")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the (last) run as a sequence diagram into FILE")
    options = vars(parser.parse_args(arguments))
    runs, trace, compare = options.pop("runs"), options.pop("trace"), not options.pop("no_compare")
    draw, svg = options.pop("diagram"), options.pop("svg")
    try:
        first = Scenario(**options)
        for seed in range(first.seed, first.seed + runs):
            lines: list[diagram.Line] = []

            def watch(record: Record, lines: list[diagram.Line] = lines) -> None:
                lines.append(diagram.line_of(record))
                if trace:
                    print(record)

            simulation = replace(first, seed=seed).simulation(
                compare_machines=compare, watch=watch if trace or draw or svg else None
            )
            try:
                summary = simulation.run()
            finally:  # also draw a run that breaks a promise
                if draw:
                    print(diagram.text(lines, first.workers, len(first.below)))
                if svg:
                    svg.write_text(diagram.svg(lines, first.workers, len(first.below)))
            print(f"seed {seed}: {summary}", flush=True)
    except ValueError as wrong:
        parser.error(str(wrong))
    except SimulationError as broken:
        print(f"seed {seed}: FAILED: {broken}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
