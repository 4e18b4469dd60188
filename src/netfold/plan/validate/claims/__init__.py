"""The talks' headline claims, each beside what the planner says to the same question.

What is asked is what anybody could ask: a preset, a model by name, a split. No constant is fitted to a claim. A talk is
a file and a line here.
"""

from __future__ import annotations

from netfold.plan.validate.claims import aws, edsr, nvidia, sharp, switchml
from netfold.plan.validate.claims.claim import Claim
from netfold.plan.validate.claims.render import claims_markdown, claims_text


def claims() -> list[Claim]:
    """All of them, talk by talk."""
    return [claim for talk in (aws, sharp, nvidia, switchml, edsr) for claim in talk.claims()]


__all__ = ["Claim", "claims", "claims_markdown", "claims_text"]
