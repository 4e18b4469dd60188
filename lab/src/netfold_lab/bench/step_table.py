"""Replayed steps, and the models themselves, as text for a terminal. Pure."""

from collections.abc import Sequence
from typing import Any

from netfold.units import aligned
from netfold_lab.bench.program import gradient_buckets
from netfold_lab.bench.step import StepRow
from netfold_lab.bench.table import RATIO_HEADER, ratio_cells
from netfold_plan.model.catalogue import MODELS, find_model

_HEADER = (
    *("model", "backend", "batch", "compute(ms)", "step(ms)", "p5..p95", "exposed(ms)", "efficiency", "samples/s"),
    *("#wrong", *RATIO_HEADER),
)
_MODELS_HEADER = (
    *("model", "parameters", "tensors", "gradients(MB)", "buckets", "GFLOP/sample", "batch", "samples/s"),
    *("compute(ms)", "speed"),
)


def render_steps(rows: Sequence[StepRow]) -> str:
    """Render one line a row; the ratio is the peer's time over the row's. Below, the timer's accuracy."""
    lines = aligned([_HEADER, *(_cells(row) for row in rows)], left=(0, 1, -1))
    lines += [
        f"# {row.model}, {row.backend}: computing alone {_ms(row.alone_ns)} ms; transfers started "
        f"{row.late_ns.median / 1e3:.0f} us late (p95 {row.late_ns.p95 / 1e3:.0f}); "
        f"{row.gradient_bytes / 1e6:.1f} MB of gradients in {row.buckets} buckets"
        for row in rows
        if row.alone_ns is not None and row.late_ns is not None
    ]
    lines += [f"# {row.model}, {row.backend}: {row.refused}" for row in rows if row.refused is not None]
    return "\n".join(lines)


def model_rows() -> list[dict[str, Any]]:
    """Every known model: what it sends in a step, how long one accelerator computes, and the source of that."""
    return [
        {
            "model": model.name,
            "parameters": model.parameters,
            "tensors": len(model.gradients),
            "gradient_bytes": model.gradient_bytes,
            "buckets": len(gradient_buckets(model)),
            "flops": model.flops,
            "batch": model.speed.batch,
            "samples_per_s": model.speed.samples_per_s,
            "compute_s": model.compute_s,
            "derived": model.speed.derived,
            "source": model.speed.source,
        }
        for model in map(find_model, MODELS)
    ]


def render_models() -> str:
    """Render every known model: what it sends in a step, how long one accelerator computes, and the source of that."""
    models = [find_model(name) for name in MODELS]
    cells = [
        (
            model.name,
            f"{model.parameters}",
            f"{len(model.gradients)}",
            f"{model.gradient_bytes / 1e6:.1f}",
            f"{len(gradient_buckets(model))}",
            f"{model.flops / 1e9:.3g}",
            f"{model.speed.batch}",
            f"{model.speed.samples_per_s:.1f}",
            f"{model.compute_s * 1e3:.1f}",
            f"{'derived' if model.speed.derived else 'published'}: {model.speed.source}",
        )
        for model in models
    ]
    lines = aligned([_MODELS_HEADER, *cells], left=(0, -1))
    lines += [
        f"# {model.name}: and two all_to_alls, in which a rank gives {model.exchange_bytes / 1e6:.1f} MB each"
        for model in models
        if model.exchange is not None
    ]
    return "\n".join(lines)


def _cells(row: StepRow) -> tuple[str, ...]:
    step: tuple[str, ...] = ("-",) * 5
    if row.step_ns is not None and row.exposed_ns is not None and row.efficiency is not None:
        step = (
            _ms(row.step_ns.median),
            f"{_ms(row.step_ns.p5)}..{_ms(row.step_ns.p95)}",
            _ms(row.exposed_ns.median),
            f"{row.efficiency.median:.3f}",
            f"{row.samples_per_s:.1f}",
        )
    wrong = "-" if row.wrong is None else str(row.wrong)
    return (row.model, row.backend, str(row.batch), _ms(row.compute_ns), *step, wrong, *ratio_cells(row.ratio))


def _ms(time_ns: float | None) -> str:
    return "-" if time_ns is None else f"{time_ns / 1e6:.1f}"
