"""An answer as one HTML file, a sheet as a profile's.

    split    the best way: where its time and memory go    scaling   curves over devices
    ways     the best few, and time against memory         others    other networks and clusters, what more would buy

Tables and charts are a profile's, too. `<script type="application/json" id="answer">` carries the answer whole.
"""

from __future__ import annotations

from pathlib import Path

from netfold.plan.model import Measured
from netfold.plan.render.data import as_object
from netfold.plan.render.page.candidates import best_few, front
from netfold.plan.render.page.others import aggregators, comparisons, gains
from netfold.plan.render.page.scaling import scaling
from netfold.plan.render.page.split import memory, simulated_table, step
from netfold.plan.render.text import describe_request as said
from netfold.plan.render.text import duration, failures, memory_is_known, money, rate, time, utilisation_is_known
from netfold.plan.result import Result
from netfold.plan.search import describe_split
from netfold.profile.page import units
from netfold.profile.page.escape import escape
from netfold.profile.page.layout import render_layout

__all__ = ["render_page"]


def render_page(answer: Result) -> str:
    """Some 100 KB at most."""
    asked, job = answer.request, answer.best.job
    notes = "".join(f'<p class="quiet">Note: {escape(note)}.</p>' for note in answer.notes)
    return render_layout(
        title=f"netfold plan: {asked.model.name} on {asked.devices:,} devices",
        headline=_headline(answer),
        opening=f"""<p class="command">{escape(said(answer))}</p>
<p>Split: {escape(describe_split(job))}{_searched(answer)}. What limits it: {escape(answer.best.prediction.limit)}.
{_measured(answer)}</p>
{notes}""",
        facts=_facts(answer),
        sections=[
            ("step", "Where a step's time goes", step(answer.best)),
            ("events", "The step as events", _played(answer)),
            ("memory", "Memory of the rank that needs most", memory(answer.best) if memory_is_known(answer) else ""),
            ("ways", "Ways to split it", best_few(answer)),
            ("less", "Less memory for more time", front(answer)),
            ("scaling", "Scaling out", scaling(answer)),
            ("compared", "Elsewhere", comparisons(answer)),
            ("more", "What more would buy", gains(answer)),
            ("aggregators", "What one more aggregator would buy", aggregators(answer)),
            ("sources", "The cluster", _cluster(answer)),
        ],
        data=("answer", as_object(answer)),
        style=Path(__file__).with_name("style.css"),
    )


def _headline(answer: Result) -> str:
    found = answer.best.prediction
    return f"A step takes {time(found.step_s)}: {rate(found.samples_per_s)} samples a second."


def _played(answer: Result) -> str:
    return "" if answer.simulated is None else simulated_table(answer.best.prediction, answer.simulated.prediction)


def _searched(answer: Result) -> str:
    if answer.tried == 1:
        return ""
    return f", the fastest of {answer.fitting:,} ways that fit, of {answer.tried:,} tried"


def _measured(answer: Result) -> str:
    if isinstance(answer.request.model, Measured):
        return "What a rank computes was measured; all else is predicted."
    return "All of it is predicted, nothing measured."


def _facts(answer: Result) -> list[tuple[str, str]]:
    found, asked = answer.best.prediction, answer.request
    said = [
        (time(found.step_s), f"a step; about 80 of 100 lie between {time(found.low_s)} and {time(found.high_s)}"),
    ]
    if utilisation_is_known(answer):
        said.append((units.ratio(found.mfu), "of the devices' peak goes into the model (MFU)"))
    if memory_is_known(answer):
        said.append((units.size(found.memory.total), f"of {units.size(found.memory_bytes)} a device"))
    if answer.best.job.split.data > 1:
        said.append((units.ratio(answer.efficiency), "scaling efficiency, against a replica alone"))
    if answer.training_s is not None and answer.training_cost is not None:
        said.append((duration(answer.training_s), money(answer.training_cost, asked.prices)))
    if answer.failure_impact is not None:
        said.append((units.ratio(answer.failure_impact.goodput), failures(answer)))
    return said


def _cluster(answer: Result) -> str:
    cluster = answer.request.cluster
    tiers = "".join(
        f"<li>{escape(tier.name)}: joins {tier.devices:,} devices, {units.rate(tier.bytes_per_s)} each way a device, "
        f"{units.seconds(tier.latency_s)}{', its switches add' if tier.in_network else ''}"
        f"{''.join(f', {escape(each.text())}' for each in tier.aggregators)}</li>"
        for tier in cluster.tiers
    )
    sources = "".join(f"<li>{escape(source)}</li>" for source in cluster.sources)
    said = f"<p>Its figures come from:</p><ul>{sources}</ul>" if sources else ""
    return f"<ul>{tiers}</ul>{said}"
