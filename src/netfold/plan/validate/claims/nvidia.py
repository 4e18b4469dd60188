"""The talk on scaling out training (NVIDIA, Hot Chips 2020)."""

from __future__ import annotations

from dataclasses import replace

from netfold.plan.cluster import load_cluster
from netfold.plan.job import Job, Split
from netfold.plan.model import Chain, Link, Product
from netfold.plan.step import predict
from netfold.plan.validate.claims.claim import Claim, ClaimJob, near

_TALK = "seeds/002, NVIDIA, scaling out, 2020"
# As N grows: large enough that its limit shows.
_STAGES = 256
_RESNET = ClaimJob("resnet50", "dgx-1", 1, 256, {"precision": "f16", "optimizer": "momentum"}, {"micro_batch": 256})
# The microbatch of 1,024 on fewer, too: a larger one would fit beside a split state, and not beside a whole one.
_UPDATED = ClaimJob(
    "bert-large:sequence=128", "dgx-a100", 1024, 4096, {"precision": "f16", "overlap": True}, {"micro_batch": 4}
)


def claims() -> list[Claim]:
    return [*_bubbles(), _distributed_optimizer(), *_memory()]


def _bubbles() -> list[Claim]:
    said = (
        (
            "A naive pipeline's idle slots",
            "Idle bubbles: 67%: 12/18 step-slots. For N workers: (N-1)/N idle slots",
            67.0,
            3,
            1,
        ),
        ("Idle slots, K=N", "As N grows: K = N -> 50% idle slots", 50.0, _STAGES, _STAGES),
        ("Idle slots, K=4N", "As N grows: K = 4N -> 20% idle slots", 20.0, _STAGES, 4 * _STAGES),
    )
    # To the talk's digits.
    return [
        Claim(
            name,
            _TALK,
            words,
            percent,
            100 * _idle(stages, microbatches),
            "%",
            percent - 0.5,
            percent + 0.5,
            f"equal layers on dgx-a100, {stages} stages, {microbatches} microbatch{'es' if microbatches > 1 else ''}",
        )
        for name, words, percent, stages, microbatches in said
    ]


def _idle(stages: int, microbatches: int) -> float:
    layer = Link("layer", (Product(4096, 4096, 4096),), 4096 * 4096, changed=0.0, kept=1.0, handed=1.0)
    model = Chain("equal layers", (layer,) * stages)
    found = predict(model, load_cluster("dgx-a100"), Job(microbatches, 1, Split(pipeline=stages)))
    return found.bubble_s / (found.bubble_s + found.compute_s)


def _distributed_optimizer() -> Claim:
    gains = {}
    for gpus in (8, 128, _UPDATED.gpus):
        whole, part = (
            replace(_UPDATED, gpus=gpus, split={**_UPDATED.split, "zero": level}).best().prediction for level in (0, 1)
        )
        gains[gpus] = whole.step_s / part.step_s
    saved_ms = 1e3 * (whole.optimizer_s - part.optimizer_s)
    gathered_ms = 1e3 * (part.exposed_s["data"] - whole.exposed_s["data"])
    return Claim(
        "The distributed optimizer's gain",
        _TALK,
        "At larger scales optimizer (weight update) can start dominating time. Solution: distributed optimizer",
        None,
        gains[_UPDATED.gpus],
        "x",
        gains[8],
        float("inf"),
        f"{_UPDATED.text}; ZeRO-1 against none",
        ", ".join(f"{gain:.2f}x on {gpus:,}" for gpus, gain in gains.items())
        + f"; the last update takes {saved_ms:.1f} ms less, and gathering what it updated {gathered_ms:.1f} ms more, "
        "with nothing beside it; the talk has no number, only that the update stays as long while all else shrinks, "
        "and does not say what the gather hides behind",
    )


def _memory() -> list[Claim]:
    memory = _RESNET.best().prediction.memory
    held = memory.total - memory.activations
    total, activations = near(15.0), near(12.0)
    return [
        Claim(
            "ResNet-50 at batch 256, all",
            _TALK,
            "R50 training in fp16 at batch size 256: requires ~15 GB of memory",
            15.0,
            memory.total / 1e9,
            "GB",
            *total,
            _RESNET.text,
            f"{memory.activations / 1e9:.1f} GB of activations, {held / 1e9:.1f} of weights, gradients and state; what "
            "else a framework takes (its context, convolutions' workspace, its allocator's gaps) is not counted, and "
            "the talk does not say what its other 3 GB are",
        ),
        Claim(
            "ResNet-50 at batch 256, activations",
            _TALK,
            "~12 GB of that is for activations",
            12.0,
            memory.activations / 1e9,
            "GB",
            *activations,
            _RESNET.text,
            "outputs of convolutions and norms; torch keeps 11.2 GB for the same backward pass",
        ),
    ]
