"""All figures: measure them one after another, and write figures.json, a CSV file for each, and the page."""

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

from netfold_lab.bench.figures import efficiency, hosts, latency, loss, packets, speedup, tree, wires
from netfold_lab.bench.figures.budget import Share
from netfold_lab.bench.figures.figure import Figure, Measurements
from netfold_lab.bench.figures.page import render
from netfold_lab.bench.runner import BenchError
from netfold_lab.rack import RackError
from netfold_lab.rack.command import why_unavailable
from netfold_lab.rack.processes import uninterrupted
from netfold_train.runs.machine import describe_machine, describe_versions

Say = Callable[[str], None]
Figures = dict[str, Measurements]

# In the order of the page. A new figure is a file and a name here.
FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (speedup, hosts, loss, packets, wires, latency, efficiency, tree)
}
# For all figures together, with start and end. Some figures take a few seconds more than their share.
TOTAL_S, QUICK_S = 1200, 255
DATA, PAGE = "figures.json", "figures.html"
_FORMAT = 1


def run_figures(folder: Path, names: Sequence[str], say: Say, *, total_s: float) -> Figures:
    """Measure the named figures (without names, all) and rewrite their part of `folder`. Return all in the folder.

    total_s: about the time of all figures; each takes its share of it, also if only some are measured.

    The files are valid after every figure. Raises ValueError for an unknown name, RackError if this machine cannot
    measure any figure.
    """
    if unknown := [name for name in names if name not in FIGURES]:
        raise ValueError(f"figure {unknown[0]!r} is not known; there are {', '.join(FIGURES)}")
    wanted = [figure for name, figure in FIGURES.items() if not names or name in names]
    if lack := why_unavailable(loss=False):
        raise RackError(
            f"{lack}; without it none of these can be measured: {', '.join(figure.name for figure in wanted)}"
        )
    figures = read(folder) if (folder / DATA).exists() else {}
    weights = [figure.weight for figure in wanted]
    part = sum(weights) / sum(figure.weight for figure in FIGURES.values())
    for figure, share in zip(wanted, Share(total_s * part).split(weights), strict=True):
        taken, began, load = Measurements(), time.monotonic(), os.getloadavg()[0]
        say(f"measuring: {figure.name}, {figure.title.lower()}; about {share.left_s:.0f} s")
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
    """Read a folder. Raises ValueError if it does not hold what `write` wrote."""
    path = folder / DATA
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}, expected {_FORMAT}")
        return {name: Measurements(**document["figures"][name]) for name in FIGURES if name in document["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no figures: {error}") from None


def write(folder: Path, figures: Mapping[str, Measurements]) -> Path:
    """Write the data, a CSV file for each figure, and the page. Return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / DATA, json.dumps(document_of(figures), indent=1) + "\n")
    for name, taken in figures.items():
        _replace(folder / f"{name}.csv", to_csv(taken))
    _replace(folder / PAGE, render([(FIGURES[name], taken) for name, taken in figures.items()]))
    return folder / PAGE


def document_of(figures: Mapping[str, Measurements]) -> dict[str, Any]:
    return {"format": _FORMAT, "figures": {name: asdict(taken) for name, taken in figures.items()}}


def to_csv(taken: Measurements) -> str:
    """One line for each round, with the columns of all rounds."""
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
    """Replace a file atomically."""
    new = path.with_name(f".{path.name}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
