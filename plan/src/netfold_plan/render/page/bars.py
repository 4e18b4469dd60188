"""Bars of parts: a step's time, a rank's memory, and the steps of several choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from netfold import units
from netfold.page.chart import legend, stack
from netfold.page.escape import escape
from netfold_plan.render.text import time
from netfold_plan.result import parts
from netfold_plan.search import PredictedJob

_INKS = {
    "computing": "computing",
    "communication, tensor": "1",
    "communication, pipeline": "2",
    "communication, data": "0",
    "communication, tables": "5",
    "bubble": "bubble",
    "optimizer": "7",
    "weights": "0",
    "gradients": "1",
    "optimizer state": "7",
    "activations": "3",
}


def step_bar(best: PredictedJob) -> str:
    """A step's time by parts."""
    whole = best.prediction.step_s
    texts = {name: f"{name} {time(each)}, {units.ratio(each / whole)}" for name, each in parts(best.prediction).items()}
    return stack(parts(best.prediction), whole, _INKS, "a step's time") + _legend(texts)


def memory_bar(best: PredictedJob) -> str:
    """A device's memory by parts."""
    memory, available = best.prediction.memory, best.prediction.memory_bytes
    sizes = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "activations": memory.activations,
    }
    drawn = stack(sizes, max(available, memory.total), _INKS, "a device's memory")
    free = available - memory.total
    left = f'<p class="quiet">{units.size(free)} of {units.size(available)} stay free.</p>' if free >= 0 else ""
    return drawn + _legend({name: f"{name} {units.size(size)}" for name, size in sizes.items()}) + left


def step_bars(choices: Sequence[tuple[str, PredictedJob]]) -> str:
    """A bar for each (name, choice), as long as its step takes."""
    longest = max(choice.prediction.step_s for _, choice in choices)
    rows = "".join(
        f'<div class="row"><span class="name">{escape(name)}</span>'
        f"{stack(parts(choice.prediction), longest, _INKS, name, thin=True)}"
        f'<span class="end">{time(choice.prediction.step_s)}</span></div>'
        for name, choice in choices
    )
    names = {name: name for _, choice in choices for name in parts(choice.prediction)}
    return f'<div class="stacks">{rows}</div>{_legend(names)}'


def _legend(texts: Mapping[str, str]) -> str:
    """texts: by part."""
    return legend({text: f"ink-{_INKS[name]}" for name, text in texts.items()})
