"""The standing set of measurements, `make bench`: every goal of goals.py beside what was measured.

Results are kept by section in FOLDER/*.json, and rendered from there. A run of some sections replaces only those.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from netfold.extras import MissingExtraError
from netfold_lab.bench.backends import MPIS, parse_backends
from netfold_lab.bench.config import BenchEnvironment
from netfold_lab.bench.extras import DDP_PLACES, WAITING_PLACES, ddp_verdicts, waiting_verdicts
from netfold_lab.bench.goals import SECTIONS, Goal, all_goals, places, trials_at
from netfold_lab.bench.link_probe import LinkMeasurement, lower_bound_s, probe_rack
from netfold_lab.bench.mpi_peers import PeerMissingError, launch_mpi
from netfold_lab.bench.report import Row, describe_run, make_rows, total_wrong
from netfold_lab.bench.rules import Verdict, evaluate_goal, render_verdicts, unmeasured
from netfold_lab.bench.runner import BenchError, Runner, start_runner
from netfold_lab.bench.table import describe_breakdown
from netfold_lab.rack import RackError
from netfold_lab.rack.command import why_unavailable
from netfold_train.runs.machine import in_words

Say = Callable[[str], None]

# Other documents link to the in-network results by this name.
_FILES = {"in-network": "suite"}


@dataclass
class Section:
    verdicts: list[Verdict] = field(default_factory=list)  # one a goal
    notes: list[str] = field(default_factory=list)  # sentences below the table
    runs: list[dict[str, Any]] = field(default_factory=list)  # everything measured
    bad: int = 0  # failures, and runs with a wrong element; a missed goal is no failure


def run_suite(names: Sequence[str], folder: Path, say: Say, *, quick: bool) -> int:
    """Measure the named sections (all, where none is named) and rewrite their part of the results in `folder`.

    Returns how many measurements failed or had a wrong element. Raises ValueError for an unknown section.
    """
    if unknown := [name for name in names if name not in SECTIONS]:
        raise ValueError(f"section {unknown[0]!r} is not known; there are {', '.join(SECTIONS)}")
    wanted = [name for name in SECTIONS if not names or name in names]
    sections = {name: Section() for name in wanted}
    goals = [goal for goal in all_goals(quick) if goal.section in wanted]
    absent = _absent_peers(sections, say)
    wire = _probe(goals, sections, say)
    for place in places(goals):
        say(f"measuring: {describe_place(place)}")
        _run_stage(place, [goal for goal in goals if goal.place == place], sections, absent, wire, quick, say)
    for name, verdicts_of, extra_places in (
        ("waiting", waiting_verdicts, WAITING_PLACES),
        ("ddp", ddp_verdicts, DDP_PLACES),
    ):
        if name in sections:
            say(f"measuring: {name}")
            _run_extra(sections[name], verdicts_of, extra_places, absent, quick)
    _write(sections, folder, say)
    return sum(section.bad for section in sections.values())


def describe_place(place: BenchEnvironment) -> str:
    where = f"a rack of {place.workers} hosts, {place.rack_rate}" if place.rack_rate else f"{place.workers} ranks here"
    return where + (", with a switch" if place.switch else "")


def _absent_peers(sections: dict[str, Section], say: Say) -> list[str]:
    """Return the MPIs that are not installed, and note them in every section that compares with MPIs."""
    absent = []
    for name in MPIS:
        try:
            launch_mpi(name, 1, [])
        except (MissingExtraError, PeerMissingError) as lack:
            say(str(lack))
            absent += [f"mpi:{name}", f"mpi:{name}:out"]
            for section in ("all-reduce", "shared", "small", "waiting"):
                if section in sections:
                    sections[section].notes.append(f"{lack}.")
    return absent


def _probe(goals: Sequence[Goal], sections: dict[str, Section], say: Say) -> LinkMeasurement | None:
    rates = {goal.place.rack_rate for goal in goals if goal.against_limit and goal.place.rack_rate is not None}
    if not rates or why_unavailable(loss=False):
        return None
    (rate,) = rates
    try:
        wire = probe_rack(rate)
    except (RackError, RuntimeError) as error:
        say(str(error))
        sections["hosts"].bad += 1
        return None
    sections["hosts"].notes.append(
        f"The limit is 2 log2 P half round trips and 2 (P-1)/P of the bytes at {wire.payload_bits / 1e6:.0f} Mbit/s, "
        f"what headers leave of {wire.rate_bits / 1e6:.0f} ({wire.mss} of {wire.mss + 66} bytes). Measured: a round "
        f"trip of {wire.round_trip_s * 1e6:.0f} us, one TCP stream {wire.stream_bits / 1e6:.0f} Mbit/s."
    )
    return wire


def _run_stage(
    place: BenchEnvironment,
    goals: Sequence[Goal],
    sections: dict[str, Section],
    absent: Sequence[str],
    wire: LinkMeasurement | None,
    quick: bool,
    say: Say,
) -> None:
    """Run all trials of one place in one set of processes. An error is the verdict on the goals not yet measured."""
    left = list(goals)
    try:
        if place.rack_rate is not None and (lack := why_unavailable(loss=False)):
            raise RackError(lack)
        stage = trials_at(place, goals, quick, absent)
        worlds = [name.world for trials in stage for name in parse_backends(trials.backends)]
        with start_runner(place, worlds) as runner:
            for trials in stage:
                rows = make_rows(place, trials, runner.measure(trials))
                document = describe_run(runner.describe(), trials, rows)
                for goal in [goal for goal in left if _key(goal) == (trials.collective, trials.sizes[0])]:
                    least_s = lower_bound_s(wire, *_key(goal), place.workers) if wire else None
                    by_backend = {row.backend: row for row in rows}
                    sections[goal.section].verdicts.append(evaluate_goal(goal, by_backend, least_s))
                    left.remove(goal)
                    _keep(sections[goal.section], document, rows)
    except (RackError, BenchError) as error:
        failed = isinstance(error, BenchError)
        if failed:
            say(str(error))
        for goal in left:
            sections[goal.section].verdicts.append(unmeasured(goal, str(error)))
            sections[goal.section].bad += failed


def _key(goal: Goal) -> tuple[str, int]:
    return goal.collective, goal.size_bytes


def _keep(section: Section, document: dict[str, Any], rows: Sequence[Row]) -> None:
    """Add a run to a section, once: it may serve several of the section's goals."""
    if document in section.runs:
        return
    section.runs.append(document)
    section.bad += total_wrong(rows) > 0
    section.notes += [
        f"{row.backend}, {document['place']['workers']} ranks, one call of {row.size_bytes} B: "
        f"{describe_breakdown(row.breakdown)}."
        for row in rows
        if row.breakdown is not None and row.breakdown.python_ns is not None
    ]


def _run_extra(
    section: Section,
    verdicts_of: Callable[[Runner, list[str], bool], list[Verdict]],
    extra_places: dict[BenchEnvironment, list[str]],
    absent: Sequence[str],
    quick: bool,
) -> None:
    for place, backends in extra_places.items():
        installed = [backend for backend in backends if backend not in absent]
        try:
            with start_runner(place, [name.world for name in parse_backends(installed)]) as runner:
                verdicts = verdicts_of(runner, installed, quick)
                section.verdicts += verdicts
                section.bad += any(verdict.why for verdict in verdicts)
                section.runs.append(runner.describe())
        except BenchError as error:
            section.notes.append(f"{describe_place(place)}: not measured: {error}")
            section.bad += 1


def _write(sections: dict[str, Section], folder: Path, say: Say) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem in ("collectives", "suite"):
        measured = {name: asdict(one) for name, one in sections.items() if _FILES.get(name, "collectives") == stem}
        if not measured:
            continue
        path = folder / f"{stem}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        whole = {**(kept if isinstance(kept, dict) else {}), **measured}
        whole = {name: whole[name] for name in SECTIONS if name in whole}
        path.write_text(json.dumps(whole) + "\n")
        text = render_markdown(whole)
        path.with_suffix(".md").write_text(text)
        say(text)


def render_markdown(whole: dict[str, Any]) -> str:
    """Render a table for each section, from the JSON alone."""
    lines = []
    for name, section in whole.items():
        lines += [f"## {name}: {SECTIONS[name]}", ""]
        lines += render_verdicts([Verdict(**verdict) for verdict in section["verdicts"]])
        lines += ["", *(f"- {note.splitlines()[0]}" for note in section["notes"])]
        if section["runs"]:
            lines += [f"- {_measured_on(section['runs'])}"]
        lines.append("")
    lines.append(
        "Ratios are the other time over the backend's, paired by round, with their 5th and 95th percentile; f32, sum. "
        "How to read this: docs/how-to/benchmarks.md."
    )
    return "\n".join(lines) + "\n"


def _measured_on(runs: list[dict[str, Any]]) -> str:
    machine = runs[0]["machine"]
    loads = [load for run in runs for load in run["machine"]["load"]]
    versions: dict[str, str] = {}
    for run in runs:
        versions |= run["versions"]
    # Every place had its ranks started once.
    launches = len({json.dumps(run["place"]) for run in runs})
    return (
        f"{launches} launch{'es' if launches > 1 else ''}, TCP congestion control {machine['tcp_congestion_control']}; "
        f"{in_words(machine, (min(loads), max(loads)), versions)}."
    )
