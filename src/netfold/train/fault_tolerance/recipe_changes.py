"""What a recipe changes of what is learnt, between the checkpoint and the run that goes on from it."""

from __future__ import annotations

from typing import Any

from netfold.train.recipe import Recipe

_TRAINING = ("steps", "epochs", "batch", "scaling", "clip")


def changed(then: Recipe, now: Recipe) -> tuple[list[str], list[str]]:
    """Keys of [optimizer], [schedule], [diloco] and [training] that differ, each as "key is NEW and was OLD": those
    that change steps which the run would have taken, and those that only make it longer or shorter."""
    steps: list[str] = []
    length: list[str] = []
    both = [("training", key) for key in _TRAINING]
    both += [
        (section, key) for section in ("optimizer", "schedule") for key in type(getattr(now, section)).model_fields
    ]
    if then.diloco is not None and now.diloco is not None:
        both += [("diloco", key) for key in type(now.diloco).model_fields]
    for section, key in both:
        old, new = (getattr(getattr(recipe, section), key) for recipe in (then, now))
        if old == new:
            continue
        is_length = section == "training" and key in ("steps", "epochs")
        # A constant rate does not depend on where the end is.
        flat = then.schedule.shape == now.schedule.shape == "constant"
        (length if is_length and flat else steps).append(f"{section}.{key} is {_shown(new)} and was {_shown(old)}")
    return steps, length


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)
