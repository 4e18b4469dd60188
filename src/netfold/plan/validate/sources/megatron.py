"""Megatron-LM's own tables: GPT on V100 and A100, from 1 device to 3360, and what its ranks hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from netfold.plan.cluster import Cluster, load_cluster
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer
from netfold.plan.step import predict
from netfold.plan.step.memory import memory_of, waiting
from netfold.plan.validate.score import Compared
from netfold.plan.validate.sources.table import Case, Published, of_time

# By their papers' names: hidden, heads, layers (Narayanan et al. 2021; Korthikanti et al. 2022, table 3).
_MODELS = {
    "22B": (6144, 64, 48),
    "174.6B": (12288, 96, 96),
    "175B": (12288, 96, 96),
    "529.6B": (20480, 128, 105),
    "530B": (20480, 128, 105),
    "1T": (25600, 160, 128),
}
_TOKENS = 2048
# The band of a quantity that is arithmetic and no time.
_EXACT = 0.05


def _model(name: str) -> Transformer:
    size = name.split()[-1]
    return Transformer(f"GPT {size}", *_MODELS[size], _TOKENS)


def throughputs(rows: Sequence[Published]) -> list[Case]:
    """Narayanan et al. 2021, table 2: FLOP/s by a formula that counts recomputation; steps follow from it."""
    cases = []
    for row in rows:
        model, ranks, batch = _model(row.model), int(row.workers), int(re.findall(r"B=(\d+)", row.notes)[0])
        # Section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh), all of it recomputed.
        h, s, depth = model.hidden, model.sequence, model.depth
        work = 96.0 * batch * s * depth * h * h * (1 + s / (6 * h) + model.vocabulary / (16 * depth * h))
        measured = work / (ranks * row.value * 1e12)
        micro = int(re.findall(r"mb=(\d+)", row.notes)[0])
        if row.parallelism.startswith("ZeRO"):
            split = Split(data=ranks, zero=3)
        else:
            split = Split(row.degree("DP"), row.degree("TP"), row.degree("PP"))
        # DeepSpeed of early 2021: each of its gathers waited for the device (github.com/deepspeedai/DeepSpeed, 1188).
        job = Job(batch, micro, split, precision="f16", recomputation="full", gradient_bytes=2, prefetch=False)
        cases.append(of_time(f"{row.model}, {ranks}: {split.text()}", measured, predict(model, _dgx_a100(), job)))
    return cases


def pipelined(rows: Sequence[Published]) -> list[Case]:
    return [case for row, case in zip(rows, throughputs(rows), strict=True) if not row.parallelism.startswith("ZeRO")]


def zero(rows: Sequence[Published]) -> list[Case]:
    return [case for row, case in zip(rows, throughputs(rows), strict=True) if row.parallelism.startswith("ZeRO")]


def recomputing(rows: Sequence[Published]) -> list[Case]:
    """Korthikanti et al. 2022, table 5: recomputation of everything, or of attention with sequence parallelism."""
    cases = []
    for row in rows:
        model, selective = _model(row.model), "selective" in row.notes
        split = Split(
            row.degree("DP"), row.degree("TP"), row.degree("PP"), interleave=row.degree("VP"), sequence=selective
        )
        batch, micro = (int(re.findall(rf"\b{key}=(\d+)", row.notes)[0]) for key in ("B", "mb"))
        job = Job(batch, micro, split, precision="f16", recomputation="selective" if selective else "full")
        cases.append(of_time(f"{row.model}, {row.notes}", row.value, predict(model, _dgx_a100(), job)))
    return cases


def memory(rows: Sequence[Published]) -> list[Case]:
    """Korthikanti et al. 2022, figure 1: activations of the first stage; weights and their state of blocks alone.

    The figure is of the paper's formulas (section 4), for activations that are kept: without those of one block that is
    recomputed, which `memory_of` has on top.
    """
    cases = []
    for row in rows:
        model = _model(row.model)
        small = "seq-par" in row.notes
        pipeline = int(row.workers) // 8
        interleave = 3 if model.depth % (3 * pipeline) == 0 and 1 < pipeline < model.depth // 2 else 1
        split = Split(tensor=8, pipeline=pipeline, interleave=interleave, sequence=small)
        micro = 4 if pipeline == 1 else 1
        batch = 8 * micro * pipeline
        job = Job(batch, micro, split, "f16", recomputation="selective" if small else "none")
        stages = predict(model, _dgx_a100(), job).stages
        if row.metric == "memory_activations":
            found = waiting(0, job.microbatches, job) * stages[0].kept_bytes
        else:
            # A stage without embeddings, which the figure leaves out.
            held = min(range(len(stages)), key=lambda index: stages[index].parameters)
            parts = memory_of(stages[held], held, job.microbatches, job)
            found = parts.weights + parts.gradients + parts.optimizer
        size = found / 2**30
        cases.append(
            Case(
                f"{row.model}: {row.metric.removeprefix('memory_')}{', selective' if small else ''}",
                "GiB",
                Compared(None, row.value, size, size * (1 - _EXACT), size * (1 + _EXACT)),
            )
        )
    return cases


def scaling(rows: Sequence[Published]) -> list[Case]:
    """The repository's figures of weak scaling, all recomputed; the batch is one microbatch of each replica."""
    cases = []
    for row in rows:
        model = Transformer(row.model, row.number("h"), row.number("heads"), row.number("L"), 1024)
        split = Split(row.degree("DP"), row.degree("TP"))
        micro = 8 if "V100" in row.hardware else 16
        job = Job(micro * split.data, micro, split, "f16", recomputation="full", gradient_bytes=2)
        cluster = load_cluster("dgx-2") if "V100" in row.hardware else _dgx_a100()
        name = f"{row.model}, {row.workers} x {row.hardware}"
        cases.append(of_time(name, row.value / 1e3, predict(model, cluster, job)))
    return cases


def turing(rows: Sequence[Published]) -> list[Case]:
    """Smith et al. 2022, section 2.4: 530 billion parameters with DeepSpeed's pipeline."""
    cases = []
    for row in rows:
        model = _model("MT-NLG 530B")
        split = Split(row.degree("DP"), row.degree("TP"), row.degree("PP"))
        job = Job(row.number("B"), 1, split, recomputation="full")
        cases.append(of_time(f"{row.model}, {row.workers}", row.value, predict(model, _dgx_a100(), job)))
    return cases


def _dgx_a100() -> Cluster:
    return load_cluster("dgx-a100")
