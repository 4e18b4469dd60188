"""What a profile suggests, in sentences with numbers. What the cost model says would be is marked as a prediction.

A prediction is made of the profile's own operations: `observed` finds the link that they show, the formulas say what an
operation of each size would take by another algorithm or wire, and what is saved is that part of the time which an
operation took once all had begun; waiting for late ranks stays. Where no link can be found the reason is said instead.
The thresholds below are what is worth a sentence; each sentence has the number that passed it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from netfold import units
from netfold.plan.profile_link import NO_LINE, Fitted, ObservedGroup, fit, observe_groups
from netfold.profile.columns import Bools, Floats
from netfold.profile.findings import MB, Advice, Findings, Row, Straggler, submissions_text
from netfold.profile.run import Run
from netfold.tuning.cost import FORMULAS, predict

# Of all operations' time: a row below this is not worth a sentence.
_WORTH_A_ROW = 0.05
# Of a rank's communication: what the others waited for a straggler.
_WORTH_A_WAIT = 0.02
# Of all such waiting, in a job of two: one of them is always the last.
_MOSTLY = 0.75
# Of a row's own time: what it waited behind others.
_WORTH_A_QUEUE = 0.25
# Of an operation's time: what another way would save.
_WORTH_A_CHANGE = 0.1
# A step's messages of a small bucket; and what they may be fused to (DDP's default bucket).
_MANY_MESSAGES, _FUSED_BYTES = 8, 25 * MB
_SMALL_BYTES = 128 << 10
# Of what is sent, at a common path's packets; of all look-ups.
_WORTH_A_LOSS, _PACKET_BYTES = 0.001, 1500
_WORTH_A_MISS, _LEAST_MISSES = 0.1, 10


def advise(run: Run, findings: Findings) -> list[Advice]:
    """findings: what `netfold.profile.analyse` made of `run`. Those that say most of the time come first."""
    advice = [Advice(text, False) for text in [submissions_text(findings.submissions)] if text]
    rows = [row for row in findings.rows if not row.submitted_only]
    if not rows:
        return advice
    top = max(rows, key=_total_s)
    advice.append(_where(top, findings))
    advice += _stragglers(findings)
    groups = observe_groups(run)
    # Small messages tell how busy hosts are, as much as a link: what large ones take is found without them.
    links = [fit(each, _SMALL_BYTES) for each in groups]
    known = [(each, link) for each, link in zip(groups, links, strict=True) if isinstance(link, Fitted)]
    reductions = [row for row in rows if row.operation == "all_reduce" and _share(row) >= _WORTH_A_ROW]
    large = [row for row in reductions if row.bytes > _SMALL_BYTES * row.count]
    for row in large:
        advice += _faster_ways(row, known, len(findings.ranks))
    of_all = [(each, link) for each in groups if isinstance(link := fit(each), Fitted)]
    advice += _small_messages(findings, of_all)
    if large and not known:
        reason = links[0] if links else "no operation that all ranks of a group recorded, and that makes them meet"
        advice.append(Advice(f"what a switch or a narrower wire would bring is not predicted: {reason}", False))
    for row in rows:
        advice += _queueing(row) + _losses(row) + _registration(row)
    return advice


def _total_s(row: Row) -> float:
    return row.total_s or 0.0


def _share(row: Row) -> float:
    """0 where no time is known."""
    return row.share or 0.0


def _name(row: Row) -> str:
    return f"{row.operation} of {units.size_range(row.above_bytes, row.to_bytes)}"


def _where(top: Row, findings: Findings) -> Advice:
    text = f"{100 * _share(top):.0f}% of the operations' time ({units.seconds(_total_s(top))} a rank) is {_name(top)}"
    if top.exposed_s is not None and findings.overall.exposed_s:
        part = 100 * top.exposed_s / findings.overall.exposed_s
        text += f"; {units.seconds(top.exposed_s)} of it is exposed, {part:.0f}% of all that computing does not hide"
    return Advice(text, False)


def _stragglers(findings: Findings) -> list[Advice]:
    """The rank that the others waited for most, if that is twice its share of all such waiting."""
    late: Straggler | None = max(findings.stragglers, key=lambda each: each.waited_for_s, default=None)
    waited = sum(each.waited_for_s for each in findings.stragglers)
    # Of operations that overlap each is waited for by itself, so the whole is all their times, and not the clock's.
    took = sum(map(_total_s, findings.rows))
    if late is None or waited == 0 or took <= 0:
        return []
    often = late.last / late.operations
    part = late.waited_for_s / took
    if late.waited_for_s < min(_MOSTLY, 2 / len(findings.ranks)) * waited or part < _WORTH_A_WAIT:
        return []
    text = (
        f"rank {late.rank} ({late.host}) was last in {100 * often:.0f}% of {late.operations} operations; the others "
        f"waited {units.seconds(late.waited_for_s)} each for it, over all operations: what it does before (its data, "
        "its cores) makes them wait, not the network"
    )
    return [Advice(text, False)]


@dataclass(frozen=True)
class _Way:
    words: str
    algorithm: str
    wire: str
    switch: bool


def _faster_ways(row: Row, known: list[tuple[ObservedGroup, Fitted]], ranks: int) -> list[Advice]:
    """Of the group with most of the row's time: a sentence for each way that would save a tenth and more."""
    advice = []
    for observed, fitted in known:
        mine = _of_row(row, observed) & (observed.size > _SMALL_BYTES)
        if not mine.any():
            continue
        for way in _ways(observed, mine):
            before = _predicted(observed, fitted, mine, None)
            after = _predicted(observed, fitted, mine, way)
            # What the formulas say of the ratio, of the time that it took: so much of a rank's time would be saved. The
            # pure time of the group's ranks is that of all of them; a rank that is not in it saves nothing.
            saved = float((observed.pure_s[mine] * (1 - after / before)).sum()) * observed.topology.ranks / ranks
            took_s = _total_s(row)
            if saved < _WORTH_A_CHANGE * took_s:
                continue
            before_s, after_s = units.seconds(took_s), units.seconds(took_s - saved)
            change = f"{-100 * saved / took_s:+.0f}%"
            text = f"{_name(row)} {way.words}: {after_s} a rank in place of {before_s} ({change}), "
            text += f"by the cost model {fitted.text()}"
            if row.exposed_s is not None and row.exposed_s < saved:
                text += (
                    f"; computing hides all but {units.seconds(row.exposed_s)} of it now, which is all that can be won"
                )
            advice.append(Advice(text, True))
        break
    return advice


def _of_row(row: Row, observed: ObservedGroup) -> Bools:
    """[n] which operations of the group are in the row, and have a formula of a link."""
    to_bytes = np.inf if row.to_bytes is None else row.to_bytes
    inside = (observed.size > row.above_bytes) & (observed.size <= to_bytes)
    known = [name for kind, name in FORMULAS if kind == row.operation and name not in NO_LINE]
    mine: Bools = inside & (observed.kind == row.operation) & np.isin(observed.algorithm, known)
    return mine


def _ways(observed: ObservedGroup, mine: Bools) -> list[_Way]:
    algorithms, wires = set(observed.algorithm[mine].tolist()), set(observed.wire[mine].tolist())
    ways = []
    if "in_network" not in algorithms:
        between = "hierarchical" if observed.topology.has_levels else "in_network"
        ways.append(_Way("through a switch with a port a host (NETFOLD_SWITCH)", between, "auto", True))
    if wires == {"f32"} and all(FORMULAS["all_reduce", name].narrow for name in algorithms):
        ways.append(
            _Way("with bf16 on the wire (NETFOLD_WIRE_DTYPE; see docs/explanation/numbers.md)", "", "bf16", False)
        )
    return ways


def _predicted(observed: ObservedGroup, fitted: Fitted, mine: Bools, way: _Way | None) -> Floats:
    """[n] seconds of the chosen operations, as they ran or by another way."""
    cells = list(
        zip(
            observed.kind[mine].tolist(),
            observed.algorithm[mine].tolist(),
            observed.size[mine].tolist(),
            observed.wire[mine].tolist(),
            strict=True,
        )
    )
    times = {}
    for cell in set(cells):
        kind, algorithm, size, wire = cell
        if way is not None:
            algorithm, wire = way.algorithm or algorithm, wire if way.wire == "auto" else way.wire
        switch = int(way is not None and way.switch)
        links = replace(fitted.links, switches=(fitted.links.network.bytes_per_s,)) if switch else fitted.links
        times[cell] = predict(kind, algorithm, size, observed.topology, links, wire, switch=switch)
    return np.array([times[cell] for cell in cells])


def _small_messages(findings: Findings, known: list[tuple[ObservedGroup, Fitted]]) -> list[Advice]:
    """Of the small bucket's reductions: how many a step has, and what one of all of them would take."""
    if findings.steps is None:
        return []
    advice = []
    for row in findings.rows:
        a_step = row.count / findings.steps.count
        if row.operation != "all_reduce" or row.to_bytes is None or row.to_bytes > _SMALL_BYTES:
            continue
        if a_step < _MANY_MESSAGES or _share(row) < _WORTH_A_ROW:
            continue
        size = row.bytes / row.count
        fused = min(_FUSED_BYTES, size * a_step)
        messages = a_step * size / fused if fused else 1.0
        text = (
            f"a step has {a_step:.0f} {_name(row)}, of {units.size(size)} on average; where they need not be known one "
            f"by one, fused they would be {units.size(fused)} a message (DDP's bucket_cap_mb, HOROVOD_FUSION_THRESHOLD)"
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
                text += f": {after} a step in place of {before} by {usual}, by the cost model {fitted.text()}"
                advice.append(Advice(text, True))
                break
        else:
            advice.append(Advice(text, False))
    return advice


def _queueing(row: Row) -> list[Advice]:
    took_s, queue_s = _total_s(row), row.queue_s or 0.0
    if _share(row) < _WORTH_A_ROW or queue_s < _WORTH_A_QUEUE * took_s:
        return []
    text = (
        f"{_name(row)} waited {units.seconds(queue_s)} a rank behind other operations before they started, where "
        f"they took {units.seconds(took_s)}: whatever shortens those shortens this too"
    )
    return [Advice(text, False)]


def _losses(row: Row) -> list[Advice]:
    if not row.retransmissions or not row.wire_bytes:
        return []
    again = row.retransmissions * _PACKET_BYTES / row.wire_bytes
    if again < _WORTH_A_LOSS:
        return []
    text = (
        f"{_name(row)} sent {row.retransmissions:.0f} packets a rank again, {100 * again:.2g}% of what it sent at "
        f"{_PACKET_BYTES} bytes each: the path loses them"
    )
    return [Advice(text, False)]


def _registration(row: Row) -> list[Advice]:
    hits, misses = row.registration_hits or 0.0, row.registration_misses or 0.0
    if misses < _LEAST_MISSES or misses < _WORTH_A_MISS * (hits + misses):
        return []
    text = (
        f"{_name(row)} found its buffer not registered {misses:.0f} times a rank of {hits + misses:.0f}: buffers that "
        "stay where they are (DDP's buckets, netfold.empty) are registered once"
    )
    return [Advice(text, False)]
