"""The best way: a step's time and a rank's memory as bars of parts."""

from __future__ import annotations

from collections.abc import Mapping

from netfold.plan.answer import parts
from netfold.plan.search import Choice
from netfold.plan.show.text import time
from netfold.plan.step import Prediction
from netfold.profile.page import units
from netfold.profile.page.plain import escape

# A part's name, as the style has it.
_MEMORY = {"weights": "weights", "gradients": "gradients", "optimizer": "state", "activations": "activations"}


def step(best: Choice) -> str:
    found = best.prediction
    each = parts(found)
    return bar(classes(found), found.step_s, "a step's time") + _legend(
        {name: f"{name} {time(seconds)}, {units.ratio(seconds / found.step_s)}" for name, seconds in each.items()}
    )


def memory(best: Choice) -> str:
    found = best.prediction.memory
    sizes = {name: getattr(found, name) for name in _MEMORY}
    whole = max(best.prediction.memory_bytes, found.total)
    drawn = bar({_MEMORY[name]: size for name, size in sizes.items()}, whole, "a device's memory")
    said = {name: f"{name} {units.size(size)}" for name, size in sizes.items()}
    room = best.prediction.memory_bytes - found.total
    left = f"<p class='quiet'>{units.size(room)} of {units.size(best.prediction.memory_bytes)} stay free.</p>"
    return drawn + _legend(said, _MEMORY) + (left if room >= 0 else "")


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


def _class(name: str) -> str:
    return name.removeprefix("communication, ")


def _legend(said: Mapping[str, str], names: Mapping[str, str] | None = None) -> str:
    keys = "".join(
        f'<span><i class="part-{(names or {}).get(name, _class(name))}"></i>{escape(text)}</span>'
        for name, text in said.items()
    )
    return f'<div class="legend">{keys}</div>'
