"""Turn a run into findings, by calling the modules of this package in order."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from netfold import units
from netfold.profile.clock_sync import ClockSync, synchronise_clocks
from netfold.profile.columns import columns_of, submissions
from netfold.profile.findings import BUCKETS, ClockOffset, Findings, ranks_text
from netfold.profile.matching import Matching, match
from netfold.profile.overlap import RankOverlap, find_overlap, mean_overlap, step_times
from netfold.profile.run import Run
from netfold.profile.stragglers import WaitTimes, find_stragglers
from netfold.profile.summary import assign_rows, sized, summarise


def analyse(run: Run, buckets: Sequence[int] = BUCKETS) -> Findings:
    """Compute all findings but advice, which `netfold.tuning.advice` adds by a cost model. Does not change the run.

    buckets: upper bounds of sizes, ascending; ValueError otherwise.
    Cost: about 600 bytes and a few microseconds for each record.
    """
    columns = columns_of(run)
    matching = match(run, columns)
    columns = sized(columns, matching.groups)
    places = assign_rows(columns, buckets)
    clocks = synchronise_clocks(run, columns, matching.groups)
    waits = find_stragglers(run, columns, matching.groups, clocks)
    exposures = [find_overlap(trace) for trace in run.traces]
    exposed = [each.of_operations(trace) for each, trace in zip(exposures, run.traces, strict=True)]
    abouts = [trace.metadata for trace in run.traces]
    found = Findings(
        title=title_of(run),
        size=max((about.size for about in abouts), default=0),
        ranks=[about.rank for about in abouts],
        sources=sorted({about.source for about in abouts}),
        backends=sorted({group.backend for about in abouts for group in about.groups.values()}),
        rows=summarise(run, columns, places, buckets, exposed, waits.skew_s),
        overall=mean_overlap(run, exposures),
        steps=step_times(run, exposures),
        stragglers=waits.ranks,
        clocks=clocks.offsets(run),
        advice=[],
        coverage_gaps=[],
        lost=sum(about.lost for about in abouts),
        versions={name: text for about in reversed(abouts) for name, text in about.versions.items()},
        hosts=list(dict.fromkeys(about.host for about in abouts)),
        registrations={about.rank: about.registrations for about in abouts if about.registrations},
        submissions=submissions(run),
    )
    reported = dict.fromkeys(text for about in abouts for text in about.coverage_gaps)
    gaps = [
        *([run.left_out] if run.left_out else []),
        *reported,
        *found.limitations(),
        *_gaps(run, found.clocks, matching, clocks, exposures),
        *_hidden(waits),
    ]
    return replace(found, coverage_gaps=gaps)


def _hidden(waits: WaitTimes) -> list[str]:
    """The operations whose last rank the error of the clocks hides."""
    if not waits.unnamed:
        return []
    return [
        f"in {waits.unnamed:,} of {waits.operations:,} operations the last ranks of two hosts began within the error "
        f"of the hosts' clocks ({units.seconds(waits.error_s)}, the median), and none is named; ranks of one host are "
        "compared exactly"
    ]


def title_of(run: Run) -> str:
    """The job's command, or the folder if unknown."""
    command = run.description.get("command")
    if isinstance(command, list):
        return shlex.join(map(str, command))
    return str(command or run.folder)


def _gaps(
    run: Run, offsets: Sequence[ClockOffset], matching: Matching, clocks: ClockSync, exposures: Sequence[RankOverlap]
) -> list[str]:
    """The gaps that the analysis found."""
    gaps = [
        f"{count} records {reason} are not used for stragglers, skew and clocks"
        for reason, count in matching.left_out.items()
    ]
    if clocks.contradiction_ns:
        gaps.append(
            f"the ranks' clocks contradict one another by {clocks.contradiction_ns / 1e6:.3g} ms and more, with "
            f"an allowed drift of {clocks.drift * 1e6:.0f} ppm: a clock was stepped, or two machines have one name; "
            f"stragglers and skew leave out {100 * clocks.contradicted.mean():.0f}% of the run"
        )
    unbounded = [each.rank for each in offsets if each.bound_ns is None]
    if unbounded and not clocks.contradiction_ns:
        gaps.append(f"nothing bounds the clock error of {ranks_text(unbounded)}: not compared with the first rank")
    unwatched = [trace.metadata.rank for trace in run.traces if len(trace.progress) < 2]
    if unwatched:
        gaps.append(f"the training thread of {ranks_text(unwatched)} was not watched: exposed time there is not known")
    for trace, exposure in zip(run.traces, exposures, strict=True):
        communication = 0.0 if exposure.communicated is None else exposure.communicated[-1]
        if exposure.exposed is not None and communication and exposure.unwatched_s > 0.01 * communication:
            gaps.append(
                f"the training thread of rank {trace.metadata.rank} was not watched during "
                f"{100 * exposure.unwatched_s / communication:.0f}% of its communication, which counts as exposed"
            )
    return gaps
