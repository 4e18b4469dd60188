"""A plan's result as one HTML file.

    bars     parts of a step and of a rank's memory      splits    choices, other clusters, more hardware
    scaling  curves over the number of devices

The `<script type="application/json" id="answer">` has the whole result.
"""

from __future__ import annotations

from netfold import units
from netfold.page.escape import escape, is_known, items
from netfold.page.layout import render_layout
from netfold_plan.model import Measured
from netfold_plan.render.data import as_object
from netfold_plan.render.page.bars import memory_bar, step_bar
from netfold_plan.render.page.scaling import scaling
from netfold_plan.render.page.splits import best_few, comparisons, front, gains, simulated_table
from netfold_plan.render.text import describe_aggregators, describe_request, failures, money, rate, time
from netfold_plan.result import Result
from netfold_plan.search import describe_split

__all__ = ["render_page"]


def render_page(answer: Result) -> str:
    """Return the page, of at most about 100 KB."""
    asked, best = answer.request, answer.best
    found = best.prediction
    searched = ""
    if answer.tried > 1:
        searched = f", the fastest of {answer.fitting:,} splits that fit, of {answer.tried:,} tried"
    measured = "All of it is predicted, nothing measured."
    if isinstance(asked.model, Measured):
        measured = "Computing was measured; all else is predicted."
    notes = "".join(f'<p class="quiet">Note: {escape(note)}.</p>' for note in answer.notes)
    events = "" if answer.simulated is None else simulated_table(found, answer.simulated.prediction)
    return render_layout(
        title=f"netfold plan: {asked.model.name} on {asked.devices:,} devices",
        headline=f"A step takes {time(found.step_s)}: {rate(found.samples_per_s)} samples per second.",
        opening=f"""<p class="command">{escape(describe_request(answer))}</p>
<p>{escape(f"Split: {describe_split(best.job)}{searched}. What limits it: {found.limit}. {measured}")}</p>
{notes}""",
        facts=_facts(answer),
        sections=[
            ("step", "Where a step's time goes", step_bar(best)),
            ("events", "The step as events", events),
            ("memory", "Memory of the rank that needs most", memory_bar(best) if is_known(found.memory_bytes) else ""),
            ("ways", "Ways to split it", best_few(answer)),
            ("less", "Less memory for more time", front(answer)),
            ("scaling", "Scaling out", scaling(answer)),
            ("compared", "Elsewhere", comparisons(answer)),
            ("more", "What more would buy", gains(answer)),
            ("aggregators", "What one more aggregator would buy", items(describe_aggregators(answer))),
            ("sources", "The cluster", _cluster(answer)),
        ],
        data=("answer", as_object(answer)),
    )


def _facts(answer: Result) -> list[tuple[str, str]]:
    found, asked = answer.best.prediction, answer.request
    facts = [(time(found.step_s), f"a step; about 80 of 100 lie between {time(found.low_s)} and {time(found.high_s)}")]
    if is_known(found.mfu):
        facts.append((units.ratio(found.mfu), "of the devices' peak goes into the model (MFU)"))
    if is_known(found.memory_bytes):
        facts.append((units.size(found.memory.total), f"of {units.size(found.memory_bytes)} per device"))
    if answer.best.job.split.data > 1:
        facts.append((units.ratio(answer.efficiency), "data-parallel efficiency, against a replica alone"))
    if answer.training_s is not None and answer.training_cost is not None:
        facts.append((units.seconds(answer.training_s), money(answer.training_cost, asked.prices)))
    if answer.failure_impact is not None:
        facts.append((units.ratio(answer.failure_impact.goodput), failures(answer)))
    return facts


def _cluster(answer: Result) -> str:
    cluster = answer.request.cluster
    tiers = items(
        ", ".join(
            [
                f"{tier.name}: joins {tier.devices:,} devices, {units.rate(tier.bytes_per_s)} each way a device",
                units.seconds(tier.latency_s) + (", its switches add" if tier.in_network else ""),
                *(each.text() for each in tier.aggregators),
            ]
        )
        for tier in cluster.tiers
    )
    return tiers + (f"<p>Its figures come from:</p>{items(cluster.sources)}" if cluster.sources else "")
