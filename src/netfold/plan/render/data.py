"""A result as JSON: seconds, bytes, ratios from 0 to 1."""

from __future__ import annotations

import json
import math
from typing import Any

from netfold.page.escape import to_plain
from netfold.plan.model import Traced
from netfold.plan.render.parts import as_object as parts_object
from netfold.plan.result import Result, parts
from netfold.plan.search import PredictedJob, describe_split
from netfold.plan.variants.scaling_curve import ScalingPoint


def as_json(answer: Result) -> str:
    return json.dumps(as_object(answer), indent=2, allow_nan=False)


def as_object(answer: Result) -> dict[str, Any]:
    """Everything that the text and the page show."""
    asked = answer.request
    found: dict[str, Any] = {
        "model": {"name": asked.model.name, "parameters": asked.model.parameters}
        | (parts_object(asked.model, asked.job.bucket_bytes) if isinstance(asked.model, Traced) else {}),
        "cluster": asked.cluster,
        "devices": asked.devices,
        "tried": answer.tried,
        "fitting": answer.fitting,
        "best": choice_object(answer.best),
        "efficiency": answer.efficiency,
        "best_few": [choice_object(way.choice) | {"reason": way.reason} for way in answer.best_few],
        "front": [choice_object(choice) for choice in answer.front],
        "sensitivity": [
            {
                "what": gain.what,
                "factor": gain.factor,
                "step_s": gain.step_s,
                "kept_s": gain.kept_s,
                "split": describe_split(gain.choice.job),
                "sentence": gain.sentence(),
            }
            for gain in answer.gains
        ],
        "aggregators": [
            {
                "what": offer.what,
                "c": offer.c,
                "cores": offer.cores,
                "now_s": offer.base_s,
                "step_s": offer.step_s,
                "saved": offer.saved,
                "split": describe_split(offer.choice.job),
            }
            for offer in answer.aggregator_gains
        ],
        "curves": {scaling: [_point(point) for point in points] for scaling, points in answer.curves.items()},
        "comparisons": {
            text: [
                {"name": each.name, "factor": each.factor, "why": each.why}
                | ({} if each.choice is None else {"best": choice_object(each.choice)})
                for each in variants
            ]
            for text, variants in answer.comparisons.items()
        },
        "notes": answer.notes,
        "failures": answer.failure_impact,
        "simulated": None
        if answer.simulated is None
        else {"step_s": answer.simulated.prediction.step_s, "parts_s": parts(answer.simulated.prediction)},
        "step_cost": answer.step_cost,
        "training_s": answer.training_s,
        "training_cost": answer.training_cost,
    }
    as_plain: dict[str, Any] = to_plain(found)
    return as_plain


def choice_object(choice: PredictedJob) -> dict[str, Any]:
    found = choice.prediction
    return {
        "split": describe_split(choice.job),
        "job": choice.job,
        "step_s": found.step_s,
        "low_s": found.low_s,
        "high_s": found.high_s,
        "parts_s": parts(found),
        "memory": {"total": found.memory.total, "of": found.memory_bytes, "parts": found.memory}
        if math.isfinite(found.memory_bytes)
        else None,
        "fits": found.fits,
        "samples_per_s": found.samples_per_s,
        "mfu": found.mfu,
        "limit": found.limit,
    }


def _point(point: ScalingPoint) -> dict[str, Any]:
    said: dict[str, Any] = {"devices": point.devices, "batch": point.batch, "why": point.why}
    said |= {"efficiency": point.efficiency, "training_s": point.training_s}
    return said | ({} if point.choice is None else {"best": choice_object(point.choice)})
