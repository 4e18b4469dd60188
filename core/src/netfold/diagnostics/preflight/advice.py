"""Estimate the gain of a job's switches, and of one more: a pure function, by the cost model's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from netfold.diagnostics.preflight.gather import PreflightFacts
from netfold.diagnostics.preflight.rules import Finding, Level
from netfold.diagnostics.preflight.wording import rate_of
from netfold.tuning import DEFAULT_LINKS, Topology, ring_bytes_per_s
from netfold.tuning.cost import Case, split_rate, switch_part

# One more switch is advised only if the predicted time is below this part of the current time.
_WORTH = 0.97


def advise(gathered: PreflightFacts) -> Iterator[Finding]:
    """Estimate the gain for a large all_reduce.

    Yields nothing if the link was not measured, or for fewer than three hosts: each of two hosts sends as many bytes in
    a ring as through a switch.
    """
    hosts = len(set(gathered.nodes))
    link = gathered.link_bytes_per_s
    if hosts < 3 or link == 0 or any(each.error for each in gathered.capacities):
        return
    network = replace(DEFAULT_LINKS.network, bytes_per_s=link)
    rates = tuple(each.bytes_per_s for each in gathered.capacities)

    def case(switches: int, rates: tuple[float, ...]) -> Case:
        links = replace(DEFAULT_LINKS, network=network, switches=rates)
        return Case(0, Topology.apart(hosts), links, switches)

    ring = ring_bytes_per_s(hosts, link)
    if not rates:
        spare = case(1, ())
        what = (
            f"one spare host behind a link like the others' ({rate_of(link)}) as a switch: a large all_reduce of "
            f"{hosts} hosts would take {ring / split_rate(spare):.0%} of a ring's time, {switch_part(spare):.0%} "
            "through it"
        )
        yield Finding(Level.NOTE, "no switch", what, "`netfold switch` there, and its address in NETFOLD_SWITCH")
        return
    now, more = case(len(rates), rates), case(len(rates) + 1, (*rates, max(rates)))
    of_link = ", ".join(f"{rate * hosts / link:.2g}" for rate in rates)
    what = (
        f"c = {of_link} of a host's link ({rate_of(link)}): a large all_reduce of {hosts} hosts takes "
        f"{ring / split_rate(now):.0%} of a ring's time, {switch_part(now):.0%} through the switch"
    )
    gain = split_rate(now) / split_rate(more)
    remedy = f"one more like it: {gain:.0%} of the time now" if gain < _WORTH else "one more would buy nothing"
    yield Finding(Level.NOTE, ", ".join(f"switch {each.endpoint}" for each in gathered.capacities), what, remedy)
