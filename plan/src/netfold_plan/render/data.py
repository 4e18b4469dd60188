"""A result as JSON: seconds, bytes, ratios from 0 to 1."""

from __future__ import annotations

import json
from typing import Any

from netfold.page.escape import is_known, pick, to_plain
from netfold_plan.model import Traced
from netfold_plan.render.parts import as_object as parts_object
from netfold_plan.result import Result, parts, reason
from netfold_plan.search import PredictedJob, describe_split


def as_json(answer: Result) -> str:
    return json.dumps(as_object(answer), indent=2, allow_nan=False)


def as_object(answer: Result) -> dict[str, Any]:
    """Everything that the text and the page show."""
    asked = answer.request
    found: dict[str, Any] = {
        "model": pick(asked.model, "name", "parameters")
        | (parts_object(asked.model, asked.job.bucket_bytes) if isinstance(asked.model, Traced) else {}),
        **pick(asked, "cluster", "devices"),
        **pick(answer, "tried", "fitting"),
        "best": choice_object(answer.best),
        "efficiency": answer.efficiency,
        "best_few": [choice_object(choice) | {"reason": reason(choice, answer.best)} for choice in answer.best_few],
        "front": [choice_object(choice) for choice in answer.front],
        "sensitivity": [
            pick(gain, "what", "factor", "step_s", "kept_s")
            | {"split": describe_split(gain.choice.job), "sentence": gain.sentence()}
            for gain in answer.gains
        ],
        "aggregators": [
            pick(offer, "what", "c", "cores", "step_s", "saved")
            | {"now_s": offer.base_s, "split": describe_split(offer.choice.job)}
            for offer in answer.aggregator_gains
        ],
        "curves": {
            scaling: [
                pick(point, "devices", "batch", "why", "efficiency", "training_s") | _best(point.choice)
                for point in points
            ]
            for scaling, points in answer.curves.items()
        },
        "comparisons": {
            text: [pick(each, "name", "factor", "why") | _best(each.choice) for each in variants]
            for text, variants in answer.comparisons.items()
        },
        "notes": answer.notes,
        "failures": answer.failure_impact,
        "simulated": None
        if answer.simulated is None
        else {"step_s": answer.simulated.prediction.step_s, "parts_s": parts(answer.simulated.prediction)},
        **pick(answer, "step_cost", "training_s", "training_cost"),
    }
    as_plain: dict[str, Any] = to_plain(found)
    return as_plain


def choice_object(choice: PredictedJob) -> dict[str, Any]:
    found = choice.prediction
    return {
        "split": describe_split(choice.job),
        "job": choice.job,
        **pick(found, "step_s", "low_s", "high_s"),
        "parts_s": parts(found),
        "memory": {"total": found.memory.total, "of": found.memory_bytes, "parts": found.memory}
        if is_known(found.memory_bytes)
        else None,
        **pick(found, "fits", "samples_per_s", "mfu", "limit"),
    }


def _best(choice: PredictedJob | None) -> dict[str, Any]:
    return {} if choice is None else {"best": choice_object(choice)}
