"""What a run reached, in one sentence, beside what a trivial predictor reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from netfold.train.examples import Metric


def metric_words(metric: Metric) -> dict[str, Any]:
    """All of a metric but how it is computed."""
    return {name: getattr(metric, name) for name in ("name", "unit", "better", "baseline", "baseline_is")}


def with_unit(value: float, unit: str) -> str:
    """Four digits: differences are small beside the values."""
    return f"{value:.4g} {unit}".rstrip()


def result(metric: Mapping[str, Any], value: float | None) -> str:
    """`psnr 28.41 dB, 0.31 dB better than bicubic (28.1 dB)`. metric: `metric_words`; value: None where it is not a
    number."""
    base = f"{metric['baseline_is']} ({with_unit(metric['baseline'], metric['unit'])})"
    if value is None or value != value:
        return f"{metric['name']} is not a number; {base} is to be beaten"
    gain = (value - metric["baseline"]) * (1 if metric["better"] == "higher" else -1)
    how = "as good as" if gain == 0 else f"{abs(gain):.3g} {metric['unit']}".rstrip()
    how += "" if gain == 0 else " better than" if gain > 0 else " worse than"
    return f"{metric['name']} {with_unit(value, metric['unit'])}, {how} {base}"
