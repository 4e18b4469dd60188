"""A traced module, part by part, as text and as an object for JSON. Pure."""

from __future__ import annotations

from typing import Any

from netfold import units
from netfold.page.escape import pick
from netfold_plan.model import Part, Traced
from netfold_plan.render.text import table

# Sizes are of weights, gradients and activations in f32.
_ITEM_BYTES = 4


def render_parts(model: Traced, bucket_bytes: float) -> str:
    """One line per part, in order of execution; then DDP's buckets, in the order in which they are sent."""
    rows = [["part", "parameters", "forward", "backward", "kept", "handed in"]]
    rows += [
        [
            part.name,
            f"{part.parameters:,}",
            _flops(part.forward.flops),
            _flops(part.backward.flops),
            units.size(part.kept.bytes(_ITEM_BYTES)),
            units.size(part.received.bytes(_ITEM_BYTES)),
        ]
        for part in model.parts
    ]
    forward, backward = (sum(getattr(part, way).flops for part in model.parts) for way in ("forward", "backward"))
    kept = sum(part.kept.bytes(_ITEM_BYTES) for part in model.parts)
    total = ["together", f"{model.parameters:,.0f}", _flops(forward), _flops(backward), units.size(kept), ""]
    title = f"{model.name}, {units.big(model.parameters)} parameters; {model.samples} samples, in f32"
    buckets = [["bucket", "", "gradients complete with"]]
    blocks = model.blocks
    buckets += [
        [str(number), units.size(bucket.elements * _ITEM_BYTES), model.parts[blocks[bucket.layer].start].name]
        for number, bucket in enumerate(model.buckets(bucket_bytes, _ITEM_BYTES), 1)
    ]
    notes = [f"note: {note}" for note in model.notes]
    travel = "DDP's buckets, in the order in which they are sent"
    tables = table(title, [*rows, total], left=(0,)), "", table(travel, buckets, left=(0, -1))
    return "\n".join([*tables, *notes])


def as_object(model: Traced, bucket_bytes: float) -> dict[str, Any]:
    """Of all traced samples together; bytes in f32."""
    return {
        **pick(model, "name", "samples", "parameters"),
        "flops_a_sample": model.flops,
        "parts": [_part(part) for part in model.parts],
        "blocks": [[block.start, block.stop] for block in model.blocks],
        "buckets": [
            {"bytes": bucket.elements * _ITEM_BYTES, "block": bucket.layer}
            for bucket in model.buckets(bucket_bytes, _ITEM_BYTES)
        ],
        "notes": list(model.notes),
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        **pick(part, "name", "parameters"),
        "forward_flops": part.forward.flops,
        "backward_flops": part.backward.flops,
        "forward_kernels": part.forward.count,
        "backward_kernels": part.backward.count,
        "kept_bytes": part.kept.bytes(_ITEM_BYTES),
        "received_bytes": part.received.bytes(_ITEM_BYTES),
        "received_tensors": part.tensors,
    }


def _flops(count: float) -> str:
    for size, name in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:,.0f} FLOP" if count else ""
