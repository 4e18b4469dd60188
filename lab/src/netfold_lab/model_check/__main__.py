"""`python -m netfold_lab.model_check`: search the named scopes or one of your own, or show a trace step by step."""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from netfold_lab.model_check import (
    HELLO_WORKERS,
    Scope,
    agreement,
    draw,
    gap_detector,
    generations,
    parent_sender,
    recovery,
    replay,
    search,
    search_validation,
    sentence,
    switch_watch,
)
from netfold_lab.model_check.scopes import (
    AGREEMENT_LARGE,
    AGREEMENT_QUICK,
    GENERATIONS_LARGE,
    GENERATIONS_QUICK,
    LARGE,
    QUICK,
    RECOVERY_LARGE,
    RECOVERY_QUICK,
)
from netfold_plan.sim import diagram


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each scope, and the trace of a broken promise.

    Return 1 where a promise is broken or a scope was not exhausted.
    """
    parser = argparse.ArgumentParser(prog="python -m netfold_lab.model_check", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the scopes that CI searches")
    parser.add_argument("--all", action="store_true", help="those, and the scopes that take longer")
    for field in fields(Scope):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, metavar="X")
    parser.add_argument("--replay", metavar="STEPS", help='a trace to show, as "call 0; 1.1/0>0"')
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the trace into FILE")
    options = vars(parser.parse_args(arguments))
    quick, everything = options.pop("quick"), options.pop("all")
    steps, svg = options.pop("replay"), options.pop("svg")
    scope = Scope(**options)
    scopes = {**QUICK, **LARGE} if everything else QUICK if quick else {"scope": scope}
    try:
        if steps is not None:
            show(scope, [step.strip() for step in steps.split(";") if step.strip()], svg)
            return 0
        found = [_search(name, each, svg) for name, each in scopes.items()]
        if quick or everything:
            found += [_show_report(*each) for each in _searches_of_parts(everything)]
        return max(found)
    except ValueError as wrong:
        parser.error(str(wrong))


def _search(name: str, scope: Scope, svg: Path | None) -> int:
    report = search(scope)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name}: {sentence(scope, report)}, peak memory so far {peak_mb:.0f} MB", flush=True)
    if report.broken:
        print(f'  {scope.command()} --replay "{"; ".join(report.trace)}"')
        show(scope, report.trace, svg)
    return int(bool(report.broken) or not report.exhausted)


def _searches_of_parts(everything: bool) -> Iterator[tuple[str, str, Any]]:
    """Run the searches of single parts; yield the name, the report in one line, and the report."""
    hellos = search_validation()
    found = f"BROKEN: {hellos.broken}" if hellos.broken else "exhausted"
    line = f"{HELLO_WORKERS} workers, {hellos.packets} hellos: {found}; {hellos.states:,} states, "
    yield "hellos", f"{line}{hellos.transitions:,} transitions, depth {hellos.depth}", hellos
    arrivals = gap_detector.search_arrivals(gap_detector.PACKETS + (2 if everything else 0))
    yield "arrivals", gap_detector.sentence(arrivals), arrivals
    watch = switch_watch.search_switch_watch()
    yield "watch", switch_watch.sentence(watch), watch
    for name, sender in {**parent_sender.QUICK, **(parent_sender.LARGE if everything else {})}.items():
        sent = parent_sender.search_parent_sender(sender)
        yield name, parent_sender.sentence(sender, sent), sent
    for name, scope in {**RECOVERY_QUICK, **(RECOVERY_LARGE if everything else {})}.items():
        recovered = recovery.search_recovery(scope)
        yield name, recovery.sentence(scope, recovered), recovered
    for name, members in {**AGREEMENT_QUICK, **(AGREEMENT_LARGE if everything else {})}.items():
        agreed = agreement.search_agreement(members)
        yield name, agreement.sentence(members, agreed), agreed
    for name, job in {**GENERATIONS_QUICK, **(GENERATIONS_LARGE if everything else {})}.items():
        gone_on = generations.search_generations(job)
        yield name, generations.sentence(job, gone_on), gone_on


def _show_report(name: str, line: str, report: Any) -> int:
    print(f"{name}: {line}", flush=True)
    if report.broken:
        print(f"  {'; '.join(report.trace)}")
    return int(bool(report.broken) or not report.exhausted)


def show(scope: Scope, steps: Sequence[str], svg: Path | None = None) -> None:
    """Print a trace as a sequence diagram; `svg`: also draw it into that file."""
    lines = draw(scope, replay(scope, steps))
    print(diagram.text(lines, scope.workers, len(scope.below)))
    if svg is not None:
        svg.write_text(diagram.svg(lines, scope.workers, len(scope.below)))


if __name__ == "__main__":
    sys.exit(main())
