"""MosaicML's llm-foundry: MPT models of 125 million to 70 billion parameters with FSDP on 8 to 128 A100."""

from __future__ import annotations

from collections.abc import Sequence

from netfold.plan.cluster import load_cluster
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer
from netfold.plan.step import predict
from netfold.plan.validate.sources.table import Case, Published, of_time

# Hidden, heads, layers (llm-foundry, scripts/train/yamls/pretrain).
_MODELS = {
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 16, 24),
    "MPT-760m": (1536, 12, 24),
    "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}
_WORDS = 50368


def tokens(rows: Sequence[Published]) -> list[Case]:
    """Seconds a step, from tokens a second and device."""
    cases = []
    for row in rows:
        ranks, batch, sequence = int(row.workers), row.number("gbs"), row.number("seq")
        model = Transformer(row.model, *_MODELS[row.model], sequence, _WORDS, flash=True)
        job = Job(
            batch,
            row.number("mb"),
            Split(data=ranks, zero=3),
            recomputation="full" if row.note("ckpt") == "True" else "none",
            gradient_bytes=2,
        )
        cluster = load_cluster("dgx-a100" if "80gb" in row.hardware else "a100-roce")
        measured = batch * sequence / (row.value * ranks)
        name = f"{row.model}, {ranks} x {row.hardware}, {sequence} tokens"
        cases.append(of_time(name, measured, predict(model, cluster, job)))
    return cases
