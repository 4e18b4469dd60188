"""The best way: a step's time and a rank's memory as bars of parts."""

from __future__ import annotations

from collections.abc import Mapping

from netfold.plan.render.text import time
from netfold.plan.result import parts
from netfold.plan.search import Choice
from netfold.plan.step import Prediction
from netfold.profile.page import units
from netfold.profile.page.escape import escape
from netfold.profile.page.table import Column, table

# A part's name, as the style has it.
_MEMORY = {"weights": "weights", "gradients": "gradients", "optimizer": "state", "activations": "activations"}


def step(best: Choice) -> str:
    found = best.prediction
    each = parts(found)
    return bar(classes(found), found.step_s, "a step's time") + legend(
        {name: f"{name} {time(seconds)}, {units.ratio(seconds / found.step_s)}" for name, seconds in each.items()}
    )


def simulated_table(closed: Prediction, events: Prediction) -> str:
    """The step as events beside its closed form, part by part."""
    here, there = parts(closed), parts(events)
    rows = [(name, here.get(name, 0.0), there.get(name, 0.0)) for name in {**here, **there}]
    columns: tuple[Column[tuple[str, float, float]], ...] = (
        Column("part", lambda row: row[0]),
        Column("closed form", lambda row: row[1], time),
        Column("as events", lambda row: row[2], time),
    )
    return table(
        "played", "The same step, played as events.", columns, [*rows, ("together", closed.step_s, events.step_s)]
    )


def memory(best: Choice) -> str:
    found = best.prediction.memory
    sizes = {name: getattr(found, name) for name in _MEMORY}
    whole = max(best.prediction.memory_bytes, found.total)
    drawn = bar({_MEMORY[name]: size for name, size in sizes.items()}, whole, "a device's memory")
    said = {name: f"{name} {units.size(size)}" for name, size in sizes.items()}
    room = best.prediction.memory_bytes - found.total
    left = f"<p class='quiet'>{units.size(room)} of {units.size(best.prediction.memory_bytes)} stay free.</p>"
    return drawn + legend(said, _MEMORY) + (left if room >= 0 else "")


def classes(found: Prediction) -> dict[str, float]:
    """A step's parts by the names that the style has for them."""
    return {_class(name): seconds for name, seconds in parts(found).items()}


def bar(sizes: Mapping[str, float], whole: float, what: str, *, thin: bool = False) -> str:
    """Parts side by side, each as wide as its part of the whole."""
    drawn = "".join(
        f'<i class="part-{name}" style="width:{100 * size / whole:.3f}%"></i>' for name, size in sizes.items() if size
    )
    said = ", ".join(f"{name} {units.ratio(size / whole)}" for name, size in sizes.items())
    name = "stack thin" if thin else "stack"
    return f'<div class="{name}" role="img" aria-label="{escape(what)}: {escape(said)}">{drawn}</div>'


def legend(said: Mapping[str, str], names: Mapping[str, str] | None = None) -> str:
    """said: by part, what stands beside its colour. names: what the style has for parts that it calls otherwise."""
    keys = "".join(
        f'<span><i class="part-{(names or {}).get(name, _class(name))}"></i>{escape(text)}</span>'
        for name, text in said.items()
    )
    return f'<div class="legend">{keys}</div>'


def _class(name: str) -> str:
    return name.removeprefix("communication, ")
