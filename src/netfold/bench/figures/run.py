"""Measures figures one after the other, and keeps what was found: figures.json, a CSV each, and the page."""

import csv
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from netfold.bench.figures import chart, page
from netfold.bench.figures.budget import Budget
from netfold.bench.figures.catalogue import FIGURES
from netfold.bench.figures.figure import Measurements
from netfold.bench.machine import describe_machine, describe_versions
from netfold.bench.runner import BenchError
from netfold.rack import RackError
from netfold.rack.command import why_unavailable
from netfold.rack.processes import uninterrupted

Say = Callable[[str], None]
Figures = dict[str, Measurements]

# For all figures together, starting and ending included; some are over their time by a few seconds.
TOTAL_S, QUICK_S = 1200, 255
DATA, PAGE = "figures.json", "figures.html"
_FORMAT = 1


def run_figures(folder: Path, names: Sequence[str], say: Say, *, total_s: float) -> Figures:
    """Measure the named figures (all, where none is named) and rewrite their part of `folder`.

    total_s: about what all take together; a few take no more of it than they would among all.

    What is on disk is whole after every figure. Returns all that the folder holds. Raises ValueError for a name that is
    none, RackError where no figure can be measured here, chart.MissingError without matplotlib.
    """
    if unknown := [name for name in names if name not in FIGURES]:
        raise ValueError(f"figure {unknown[0]!r} is not known; there are {', '.join(FIGURES)}")
    wanted = [figure for name, figure in FIGURES.items() if not names or name in names]
    chart.require()
    if lack := why_unavailable(loss=False):
        raise RackError(f"{lack}; without it none of these can be drawn: {', '.join(figure.name for figure in wanted)}")
    figures = read(folder) if (folder / DATA).exists() else {}
    weights = {figure.name: figure.weight for figure in wanted}
    part = sum(weights.values()) / sum(figure.weight for figure in FIGURES.values())
    budget = Budget(total_s * part, weights)
    for figure in wanted:
        share, taken, began, load = budget.begin(figure.name), Measurements(), time.monotonic(), os.getloadavg()[0]
        say(f"measuring: {figure.name}, {figure.title.lower()}; some {share.left_s:.0f} s")
        try:
            figure.measure(share, taken)
        except (BenchError, RackError) as error:
            taken = Measurements(lack=str(error), circumstances=taken.circumstances)
            say(f"{figure.name}: {error}")
        taken.circumstances |= _circumstances(taken, load, time.monotonic() - began)
        figures[figure.name] = taken
        with uninterrupted():
            write(folder, figures)
    return figures


def read(folder: Path) -> Figures:
    """What a folder holds. Raises ValueError where that is not what `write` wrote."""
    path = folder / DATA
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}, expected {_FORMAT}")
        return {name: Measurements(**document["figures"][name]) for name in FIGURES if name in document["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no figures: {error}") from None


def write(folder: Path, figures: Mapping[str, Measurements]) -> Path:
    """The data, a CSV for each figure, and the page, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / DATA, json.dumps(document_of(figures), indent=1) + "\n")
    for name, taken in figures.items():
        _replace(folder / f"{name}.csv", to_csv(taken))
    _replace(folder / PAGE, page.render(figures))
    return folder / PAGE


def document_of(figures: Mapping[str, Measurements]) -> dict[str, Any]:
    return {"format": _FORMAT, "figures": {name: asdict(taken) for name, taken in figures.items()}}


def to_csv(taken: Measurements) -> str:
    """A line a round; columns are all that any of its rounds has."""
    columns = list(dict.fromkeys(column for row in taken.rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(taken.rows)
    return text.getvalue()


def _circumstances(taken: Measurements, load: float, seconds: float) -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(taken.circumstances.get("versions", {})),
        "load": [load, os.getloadavg()[0]],
        "seconds": round(seconds),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
    }


def _replace(path: Path, text: str) -> None:
    """Never half a file, whatever ends us."""
    unseen = path.with_name(f".{path.name}")
    unseen.write_text(text, encoding="utf-8")
    unseen.replace(path)
