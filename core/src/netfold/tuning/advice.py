"""Advice from a profile, in sentences with numbers; results of the cost model are marked as predictions.

A prediction uses the profile's own operations. `profile_link` finds the link that they show, and the formulas give the
time by another algorithm or wire format. The saving applies to the time after all ranks have begun; waiting for late
ranks stays. Where no link can be found, the advice gives the reason. The thresholds below select the sentences, and
each sentence has the number that passed its threshold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from netfold import units
from netfold.profile.columns import Bools, Floats
from netfold.profile.findings import MB, Advice, Findings, Row, Straggler
from netfold.profile.run import Run
from netfold.tuning.cost import FORMULAS, predict
from netfold.tuning.profile_link import NO_LINE, SMALL_BYTES, Fitted, ObservedGroup, fit, observe_groups

# The least part of all operations' time of a row with advice.
_WORTH_A_ROW = 0.05
# The least part of a rank's communication that other ranks waited for a straggler.
_WORTH_A_WAIT = 0.02
# The least part of all such waiting in a job of two ranks, where one is always last.
_MOSTLY = 0.75
# The least part of an operation's time that another algorithm or format must save.
_WORTH_A_CHANGE = 0.1
# The least small messages per step, and the size to fuse them to (DDP's default bucket).
_MANY_MESSAGES, _FUSED_BYTES = 8, 25 * MB
# The least part of packets sent again, at a common path's packet size. The least part of look-ups that miss.
_WORTH_A_LOSS, _PACKET_BYTES = 0.001, 1500
_WORTH_A_MISS, _LEAST_MISSES = 0.1, 10


def advise(run: Run, findings: Findings) -> Findings:
    """Add advice to the findings of `netfold.profile.analyse` for `run`, and to their gaps what is not predicted.

    Each sentence names something to change or to look at. What is only observed stands in the tables.
    """
    rows = [row for row in findings.rows if not row.submitted_only]
    if not rows:
        return findings
    advice = list(_stragglers(findings))
    groups = observe_groups(run)
    links = [fit(each, SMALL_BYTES) for each in groups]
    known = [(each, link) for each, link in zip(groups, links, strict=True) if isinstance(link, Fitted)]
    reductions = [row for row in rows if row.operation == "all_reduce" and _share(row) >= _WORTH_A_ROW]
    large = [row for row in reductions if row.bytes > SMALL_BYTES * row.count]
    for row in large:
        advice += _faster_options(row, known, len(findings.ranks))
    of_all = [(each, link) for each in groups if isinstance(link := fit(each), Fitted)]
    advice += _small_messages(findings, of_all)
    gaps = list(findings.coverage_gaps)
    if large and not known:
        reason = links[0] if links else "no operation was recorded by all ranks of a group and synchronises them"
        gaps.append(f"the gain by a switch or a narrower wire format is not predicted: {reason}")
    for row in rows:
        advice += [*_losses(row), *_registration(row)]
    return replace(findings, advice=advice, coverage_gaps=gaps)


def _total_s(row: Row) -> float:
    return row.total_s or 0.0


def _share(row: Row) -> float:
    """0 where the time is unknown."""
    return row.share or 0.0


def _name(row: Row) -> str:
    return f"{row.operation} of {units.size_range(row.above_bytes, row.to_bytes)}"


def _stragglers(findings: Findings) -> Iterator[Advice]:
    """The rank that other ranks waited for most, if that is at least twice its share of all such waiting."""
    late: Straggler | None = max(findings.stragglers, key=lambda each: each.delay_s, default=None)
    waited = sum(each.delay_s for each in findings.stragglers)
    # Overlapping operations are waited for separately, so the whole is the sum of their times and not the wall time.
    took = sum(map(_total_s, findings.rows))
    if late is None or waited == 0 or took <= 0:
        return
    often = late.delays / late.compared
    part = late.delay_s / took
    if late.delay_s >= min(_MOSTLY, 2 / len(findings.ranks)) * waited and part >= _WORTH_A_WAIT:
        yield Advice(
            f"rank {late.rank} ({late.host}) was last in {100 * often:.0f}% of {late.compared} operations; "
            f"{late.waiting_ranks} waited {units.seconds(late.delay_s)} for it over all operations, the mean over "
            "them: its work before them (data, cores) causes the wait, not the network"
        )


@dataclass(frozen=True)
class _Option:
    words: str
    algorithm: str
    wire: str
    switch: bool


def _faster_options(row: Row, known: list[tuple[ObservedGroup, Fitted]], ranks: int) -> Iterator[Advice]:
    """For the group with most of the row's time: a sentence per option that would save at least a tenth."""
    for observed, fitted in known:
        mine = _of_row(row, observed) & (observed.size > SMALL_BYTES)
        if not mine.any():
            continue
        for option in _options(observed, mine):
            before = _predicted(observed, fitted, mine, None)
            after = _predicted(observed, fitted, mine, option)
            # The predicted ratio applies to the measured time. The pure time is that of every rank of the group; a rank
            # outside the group saves nothing.
            saved = float((observed.pure_s[mine] * (1 - after / before)).sum()) * observed.topology.ranks / ranks
            took_s = _total_s(row)
            if saved < _WORTH_A_CHANGE * took_s:
                continue
            before_s, after_s = units.seconds(took_s), units.seconds(took_s - saved)
            change = f"{-100 * saved / took_s:+.0f}%"
            text = f"{_name(row)} {option.words}: {after_s} per rank in place of {before_s} ({change}), "
            text += f"by the cost model {fitted.text()}"
            if row.exposed_s is not None and row.exposed_s < saved:
                text += f"; computing hides all but {units.seconds(row.exposed_s)} of it now, so no more can be saved"
            yield Advice(text, prediction=True)
        break


def _of_row(row: Row, observed: ObservedGroup) -> Bools:
    """[n] the operations of the group that are in the row and have a linear formula."""
    to_bytes = np.inf if row.to_bytes is None else row.to_bytes
    inside = (observed.size > row.above_bytes) & (observed.size <= to_bytes)
    known = [name for kind, name in FORMULAS if kind == row.operation and name not in NO_LINE]
    mine: Bools = inside & (observed.kind == row.operation) & np.isin(observed.algorithm, known)
    return mine


def _options(observed: ObservedGroup, mine: Bools) -> list[_Option]:
    algorithms, wires = set(observed.algorithm[mine].tolist()), set(observed.wire[mine].tolist())
    options = []
    if "in_network" not in algorithms:
        between = "hierarchical" if observed.topology.has_levels else "in_network"
        options.append(_Option("through a switch with a port per host (NETFOLD_SWITCH)", between, "auto", True))
    if wires == {"f32"} and all(FORMULAS["all_reduce", name].narrow for name in algorithms):
        options.append(_Option("with bf16 on the wire (NETFOLD_WIRE_DTYPE)", "", "bf16", False))
    return options


def _predicted(observed: ObservedGroup, fitted: Fitted, mine: Bools, option: _Option | None) -> Floats:
    """[n] seconds of the chosen operations, as they ran (None) or with an option."""
    cells = observed.cells(mine)
    times = {}
    for cell in set(cells):
        kind, algorithm, wire, size = cell
        if option is not None:
            algorithm, wire = option.algorithm or algorithm, wire if option.wire == "auto" else option.wire
        switch = int(option is not None and option.switch)
        links = replace(fitted.links, switches=(fitted.links.network.bytes_per_s,)) if switch else fitted.links
        times[cell] = predict(kind, algorithm, size, observed.topology, links, wire, switch=switch)
    return np.array([times[cell] for cell in cells])


def _small_messages(findings: Findings, known: list[tuple[ObservedGroup, Fitted]]) -> Iterator[Advice]:
    """Small reductions: how many a step has, and the time of fused ones."""
    if findings.steps is None:
        return
    for row in findings.rows:
        a_step = row.count / findings.steps.count
        if row.operation != "all_reduce" or row.to_bytes is None or row.to_bytes > SMALL_BYTES:
            continue
        if a_step < _MANY_MESSAGES or _share(row) < _WORTH_A_ROW:
            continue
        size = row.bytes / row.count
        fused = min(_FUSED_BYTES, size * a_step)
        messages = a_step * size / fused if fused else 1.0
        text = (
            f"a step has {a_step:.0f} {_name(row)}, of {units.size(size)} on average; fused, where their results can "
            f"wait, messages would have {units.size(fused)} (DDP's bucket_cap_mb, HOROVOD_FUSION_THRESHOLD)"
        )
        for observed, fitted in known:
            mine = _of_row(row, observed)
            if mine.any():
                algorithms = observed.algorithm[mine].tolist()
                usual = max(set(algorithms), key=algorithms.count)
                now, then = (
                    predict(row.operation, usual, each, observed.topology, fitted.links) for each in (size, fused)
                )
                before, after = units.seconds(a_step * now), units.seconds(messages * then)
                text += f": {after} per step in place of {before} by {usual}, by the cost model {fitted.text()}"
                yield Advice(text, prediction=True)
                break
        else:
            yield Advice(text)


def _losses(row: Row) -> Iterator[Advice]:
    again = (row.retransmissions or 0.0) * _PACKET_BYTES / (row.wire_bytes or math.inf)
    if again >= _WORTH_A_LOSS:
        yield Advice(
            f"{_name(row)} sent {row.retransmissions:.0f} packets per rank again, {100 * again:.2g}% of all at "
            f"{_PACKET_BYTES} bytes each: look for drops on the path (`netfold doctor check`, `ethtool -S`)"
        )


def _registration(row: Row) -> Iterator[Advice]:
    hits, misses = row.registration_hits or 0.0, row.registration_misses or 0.0
    if misses >= _LEAST_MISSES and misses >= _WORTH_A_MISS * (hits + misses):
        yield Advice(
            f"{_name(row)} found its buffer unregistered {misses:.0f} times a rank of {hits + misses:.0f}: buffers "
            "that keep their address (DDP's buckets, netfold.empty) are registered once"
        )
