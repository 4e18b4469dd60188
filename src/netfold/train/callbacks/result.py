"""The result of a run in one sentence, compared with a trivial predictor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from netfold.train.examples import Metric


def metric_words(metric: Metric) -> dict[str, Any]:
    """The fields of a metric, without its function."""
    return {name: getattr(metric, name) for name in ("name", "unit", "better", "baseline", "baseline_is")}


def with_unit(value: float, unit: str) -> str:
    """Four digits, because differences are small compared with the values."""
    return f"{value:.4g} {unit}".rstrip()


def result(metric: Mapping[str, Any], value: float | None) -> str:
    """`psnr 28.41 dB, 0.31 dB better than 28.1 dB (bicubic)`. metric: `metric_words`. value: None for NaN."""
    name, unit, baseline = metric["name"], metric["unit"], metric["baseline"]
    base = f"{with_unit(baseline, unit)} ({metric['baseline_is']})"
    if value is None or math.isnan(value):
        return f"{name} is not a number; the baseline is {base}"
    gain = (value - baseline) * (1 if metric["better"] == "higher" else -1)
    if gain == 0:
        return f"{name} {with_unit(value, unit)}, no better than {base}"
    far = f"{abs(gain):.3g} {unit}".rstrip()
    return f"{name} {with_unit(value, unit)}, {far} {'better' if gain > 0 else 'worse'} than {base}"
