"""The page's sentences: the headline, the numbers below it, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from netfold import units
from netfold.page.escape import is_known
from netfold.profile.findings import Findings, Straggler


def headline(findings: Findings) -> str:
    """The share of communication, the exposed share, and the slowest rank."""
    overall = findings.overall
    if not findings.rows or overall.wall_s <= 0:
        return "No operation was recorded."
    if overall.communication_s is None:
        return (
            f"How long communication took is not known: of {_submitted(findings)} operations only the submission was "
            "recorded."
        )
    found = f"{units.ratio(overall.communication_s / overall.wall_s)} of the time was communication"
    if overall.exposed_s is not None:
        found += f", {units.ratio(overall.exposed_s / overall.wall_s)} was exposed"
    late = worst_straggler(findings.stragglers)
    return f"{found}{'' if late is None else f'; ranks waited longest for rank {late.rank}'}."


def ranks(findings: Findings) -> str:
    """The ranks, hosts, backends and sources of the profile, on one line."""
    lists = {"hosts": findings.hosts, "backends": findings.backends, "recorded by": findings.sources}
    parts = [f"{units.plural(len(findings.ranks), 'rank')} of a job of {findings.size}"]
    return "; ".join(parts + [f"{name}: {', '.join(values)}" for name, values in lists.items() if values])


def summary(findings: Findings) -> str:
    """The headline with its numbers in seconds."""
    overall = findings.overall
    if not findings.rows or overall.wall_s <= 0:
        return "The ranks left records without operations; the rest of the page shows what these records contain."
    wall = units.seconds(overall.wall_s)
    if overall.communication_s is None:
        return (
            f"In {wall} of the profile operations were submitted to a device. The records do not contain what ran on "
            "the device, and when."
        )
    found = [
        f"Of {wall} of the profile, at least one operation was under way for "
        f"{units.seconds(overall.communication_s)}, the mean over ranks."
    ]
    if findings.submissions:
        found.append(
            f"This does not include {_submitted(findings)} operations of which only the submission was recorded."
        )
    if overall.exposed_s is None:
        found.append("How much of that was exposed is not known: the training thread was not watched.")
    else:
        found.append(f"For {units.seconds(overall.exposed_s)} of that time the training thread did not compute.")
    late = worst_straggler(findings.stragglers)
    if late is not None:
        found.append(
            f"Rank {late.rank} ({late.host}) was the last to begin in {units.count(late.delays)} of "
            f"{units.count(late.compared)} operations; {late.waiting_ranks} waited {units.seconds(late.delay_s)} for "
            "it, the mean over them."
        )
    elif len(findings.ranks) > 1:
        found.append("No rank kept other ranks waiting, or their starts could not be compared.")
    return " ".join(found)


def facts(findings: Findings) -> list[tuple[str, str]]:
    """(number, meaning); empty for a run without operations."""
    if not findings.rows:
        return []
    overall, late = findings.overall, worst_straggler(findings.stragglers)
    submitted = [(_submitted(findings), "operations submitted to a device: their times are not known")]
    if overall.communication_s is None:
        return submitted
    found = [(units.seconds(overall.communication_s), f"communication of {units.seconds(overall.wall_s)}, a rank's")]
    if overall.exposed_s is None:
        found.append(("not known", "exposed: the training thread was not watched"))
    else:
        found.append((units.seconds(overall.exposed_s), "exposed: the training thread did not compute meanwhile"))
    if is_known(overall.overlap_ratio):
        found.append((units.ratio(overall.overlap_ratio or 0.0), "of communication hidden behind computing"))
    if late is not None:
        waited = units.seconds(late.delay_s)
        found.append((f"rank {late.rank}", f"the slowest, on {late.host}: {late.waiting_ranks} waited {waited} for it"))
    return found + (submitted if findings.submissions else [])


def worst_straggler(lateness: Sequence[Straggler]) -> Straggler | None:
    """The rank with the longest waits for it; None if no rank waited."""
    late = max(lateness, key=lambda each: each.delay_s, default=None)
    return late if late is not None and late.delay_s > 0 else None


def _submitted(findings: Findings) -> str:
    return units.count(sum(findings.submissions.values()))
