"""What the page says in sentences: the headline, the numbers below it, what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from netfold.profile.findings import Findings, Straggler, submissions_text
from netfold.profile.page import units
from netfold.profile.page.escape import is_known

_MOST_NAMED = 16


def headline(findings: Findings) -> str:
    """How much of the time is communication, how much of that is exposed, and who is slowest."""
    overall = findings.overall
    if not findings.rows or overall.wall_s <= 0:
        return "No operation was recorded."
    if overall.communication_s is None:
        return (
            f"How long communication took is not known: {units.count(_submitted(findings))} operations were seen as "
            "submitted only."
        )
    communication = units.ratio(overall.communication_s / overall.wall_s)
    said = f"{communication} of the time was communication"
    if overall.exposed_s is not None:
        said += f", {units.ratio(overall.exposed_s / overall.wall_s)} was exposed"
    late = worst_straggler(findings.stragglers)
    if late is not None:
        said += f"; the others waited longest for rank {late.rank}"
    return said + "."


def summary(findings: Findings) -> str:
    """The headline once more, with the numbers that it is made of."""
    overall = findings.overall
    if not findings.rows or overall.wall_s <= 0:
        return "The ranks left records, and no operation is in them: what follows is what they say of themselves."
    if overall.communication_s is None:
        return (
            f"In {units.seconds(overall.wall_s)} of the profile operations were submitted to a device; what ran there, "
            "and when, is not in the records."
        )
    said = [
        f"Of {units.seconds(overall.wall_s)} of the profile, at least one operation was under way for "
        f"{units.seconds(overall.communication_s)}, the mean over ranks."
    ]
    if findings.submissions:
        said.append(f"That leaves out {units.count(_submitted(findings))} operations that were seen as submitted only.")
    if overall.exposed_s is None:
        said.append("How much of that was exposed is not known: nobody watched the training thread.")
    else:
        said.append(f"For {units.seconds(overall.exposed_s)} of that the training thread did not compute meanwhile.")
    late = worst_straggler(findings.stragglers)
    if late is not None:
        said.append(
            f"Rank {late.rank} ({late.host}) was the last to begin in {units.count(late.last)} of "
            f"{units.count(late.operations)} operations; each other rank waited {units.seconds(late.waited_for_s)} "
            f"for it."
        )
    elif len(findings.ranks) > 1:
        said.append("No rank kept the others waiting, or their starts could not be compared.")
    return " ".join(said)


def facts(findings: Findings) -> list[tuple[str, str]]:
    """A number each, and what it is; none of a run without operations."""
    if not findings.rows:
        return []
    overall = findings.overall
    late = worst_straggler(findings.stragglers)
    submitted = [(units.count(_submitted(findings)), "operations submitted to a device: their times are not known")]
    if overall.communication_s is None:
        return submitted
    found = [(units.seconds(overall.communication_s), f"communication of {units.seconds(overall.wall_s)}, a rank's")]
    if overall.exposed_s is None:
        found.append(("not known", "exposed: nobody watched the training thread"))
    else:
        found.append((units.seconds(overall.exposed_s), "exposed, the training thread did not compute meanwhile"))
    if overall.overlap_ratio is not None and is_known(overall.overlap_ratio):
        found.append((units.ratio(overall.overlap_ratio), "of communication hidden behind computing"))
    if late is not None:
        waited = units.seconds(late.waited_for_s)
        found.append((f"rank {late.rank}", f"the slowest, on {late.host}: the others waited {waited} for it"))
    return found + (submitted if findings.submissions else [])


def worst_straggler(lateness: Sequence[Straggler]) -> Straggler | None:
    """Whom the others waited for longest; None where nobody waited."""
    late = max(lateness, key=lambda each: each.waited_for_s, default=None)
    return late if late is not None and late.waited_for_s > 0 else None


def _submitted(findings: Findings) -> int:
    return sum(findings.submissions.values())


def limitations(findings: Findings) -> list[str]:
    """What is not in the records and makes them say less than they seem to."""
    said = [f"{text}." for text in [submissions_text(findings.submissions)] if text]
    absent = sorted(set(range(findings.size)) - set(findings.ranks))
    if absent:
        named = ", ".join(map(str, absent[:_MOST_NAMED])) + (", ..." if len(absent) > _MOST_NAMED else "")
        said.append(
            f"{len(absent)} of {findings.size} ranks left no records: {named}. All means are over the other ranks."
        )
    if findings.lost > 0:
        said.append(
            f"{units.count(findings.lost)} operations were lost: they came faster than they could be written, and are "
            f"in no number here."
        )
    return said
