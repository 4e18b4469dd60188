"""Print how far predictions are from measurements, as Markdown or as JSON.

python lab/bench/validation > lab/bench/results/plan.md                      # published sources and the talks' claims
python lab/bench/validation --claims                                     # the claims alone
python lab/bench/validation --runs FILE --cluster NAME --calibrate FILE  # a table of measured steps
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from netfold.page.escape import to_plain
from netfold_plan.cluster import load_cluster
from validation.claims import claims, claims_markdown
from validation.report import runs_markdown, validate
from validation.runs import read_runs
from validation.sources import SOURCES, sources_markdown


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with code 2 and one sentence on stderr for a table of runs that cannot be read or predicted."""
    parser = argparse.ArgumentParser(prog="lab/bench/validation", description="Predictions beside measurements.")
    parser.add_argument("--claims", action="store_true", help="only the talks' claims")
    parser.add_argument("--runs", type=Path, help="a CSV table of measured steps, one row per run")
    parser.add_argument("--cluster", default="dgx-a100", help="where the runs were measured: a preset or a TOML file")
    parser.add_argument("--calibrate", type=Path, help="a CSV table of at most 10 runs of the same target to fit to")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    asked = parser.parse_args(arguments)
    if asked.calibrate and not asked.runs:
        parser.error("--calibrate FILE needs --runs FILE")
    if asked.claims and asked.runs:
        parser.error("--claims and --runs exclude each other")
    try:
        print(_text(asked), end="")
    except ValueError as error:
        parser.error(str(error))


def _text(asked: argparse.Namespace) -> str:
    if asked.runs:
        known = read_runs(asked.calibrate) if asked.calibrate else []
        report = validate(read_runs(asked.runs), load_cluster(asked.cluster), known)
        return _as_json(report) if asked.json else runs_markdown(report)
    found = [] if asked.claims else [(source, source.compare()) for source in SOURCES]
    said = claims()
    if asked.json:
        sources = [{"source": source.name, "rows": cases} for source, cases in found]
        return _as_json({"sources": sources, "claims": [{**vars(claim), "agrees": claim.agrees} for claim in said]})
    return (f"{sources_markdown(found)}\n" if found else "") + claims_markdown(said)


def _as_json(tree: object) -> str:
    """JSON has no infinity: a bound that is infinite becomes null."""
    return json.dumps(to_plain(tree), indent=1) + "\n"


if __name__ == "__main__":
    main()
