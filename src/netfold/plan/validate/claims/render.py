"""Claims as a table: in Markdown, and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from netfold.plan.validate.claims.claim import NEAR, Claim

_COLUMNS = 112


def claims_markdown(found: Sequence[Claim]) -> str:
    """A row a claim, then what was asked for each and what there is to say."""
    near = f"{100 * NEAR:.0f}%"
    came_out = sum(claim.comes_out for claim in found)
    lines = [
        "## The talks' claims",
        "",
        f"{came_out} of {len(found)} come out: what is gained or lost is within {near} of what the talk says, a flat",
        f"curve stays within {near}, a bound is kept, slots are the talk's to its digits. Nothing was fitted to them;",
        "what was asked is below.",
        "",
        "| claim | the talk | predicted | comes out | |",
        "|---|---:|---:|---|---|",
    ]
    for claim in found:
        cells = (claim.name, _said(claim), _predicted(claim), _band(claim), verdict(claim))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for claim in found:
        lines.append(f'- **{claim.name}** ({claim.talk}): "{claim.words}". Asked: {claim.asked}.{_why(claim)}')
    return "\n".join(lines) + "\n"


def claims_text(found: Sequence[Claim]) -> str:
    """For a terminal: a claim's numbers, then what was asked for it and what there is to say."""
    lines = ["the talks' claims"]
    for claim in found:
        lines.append(f"  {claim.name}: {_said(claim)}, predicted {_predicted(claim)}: {verdict(claim)}")
        for text in filter(None, (f"asked: {claim.asked}", claim.why)):
            lines += textwrap.wrap(text, _COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def verdict(claim: Claim) -> str:
    return "comes out" if claim.comes_out else "does not"


def _said(claim: Claim) -> str:
    if claim.said is None:
        return "no number"
    bound = "> " if claim.high == float("inf") else ""
    return bound + _quantity(claim.said, claim.unit)


def _band(claim: Claim) -> str:
    if claim.high == float("inf"):
        return f"above {_quantity(claim.low, claim.unit)}"
    return f"from {_quantity(claim.low, claim.unit)} to {_quantity(claim.high, claim.unit)}"


def _predicted(claim: Claim) -> str:
    return _quantity(claim.predicted, claim.unit)


def _quantity(value: float, unit: str) -> str:
    shown = f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return shown + unit if unit in ("%", "x") else f"{shown} {unit}"


def _why(claim: Claim) -> str:
    return f" {claim.why[0].upper()}{claim.why[1:]}." if claim.why else ""
