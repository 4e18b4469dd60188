"""Every published table of measurements, and the prediction of each row. A new source is a function and one `Source`.

The rows are in data/calibration.csv and, for one node of A100, in data/a100_single_node_gpt.csv.
"""

from __future__ import annotations

import csv
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from netfold_plan.cluster import load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Transformer
from netfold_plan.step import FITTED, predict
from netfold_plan.step.memory import memory_of, waiting
from netfold_plan.step.traffic import Group, collective_s
from validation.calibrate import fit_shipped
from validation.runs import Run, read_runs
from validation.score import Case, banded_case, score, step_case

DATA = Path(__file__).parent / "data"
# Sources with more rows than this show only their score.
_MOST_SHOWN = 50
# Hidden size, heads and layers by the papers' names (Narayanan et al. 2021; Korthikanti et al. 2022, table 3).
_GPT = {
    "22B": (6144, 64, 48),
    "174.6B": (12288, 96, 96),
    "175B": (12288, 96, 96),
    "529.6B": (20480, 128, 105),
    "530B": (20480, 128, 105),
    "1T": (25600, 160, 128),
}
# Hidden size, heads and layers (llm-foundry, scripts/train/yamls/pretrain).
_MPT = {
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
# Half widths of the bands that count as agreement: memory, bus bandwidth from 16 MiB on, bus bandwidth below.
_MEMORY_BAND, _LARGE_BAND, _SMALL_BAND = 0.05, 0.05, 0.15
# The single-node table has 8 pairs of width and tensor degree with 4 microbatch sizes each; 7 pairs are fitted.
_KINDS_LEFT = 28
# Every seventh run contains all kinds of layer, and the fit takes one second.
_EVERY = 7
# EDSR: the runs that the law is fitted to, and the resolution of the table in images per second.
_KNOWN_RANKS, _IMAGE = 16, 1.0
# The deviation of a measured throughput from run to run. Ten and ninety of a hundred lie this many deviations out.
_REPEATS, _EIGHTY = 0.02, 1.2816


@dataclass(frozen=True)
class Row:
    """One published result. notes: text with `key=value` parts."""

    model: str
    hardware: str
    workers: str
    parallelism: str
    metric: str
    value: float
    notes: str

    def note(self, key: str) -> str:
        """The value of `key=`. Raises ValueError where the notes do not have the key."""
        found = re.search(rf"\b{key}=(\w+)", self.notes)
        if found is None:
            raise ValueError(f"{self.model}, {self.metric}: the notes {self.notes!r} have no {key}=")
        return found[1]

    @property
    def is_zero(self) -> bool:
        return self.parallelism.startswith("ZeRO")

    def number(self, key: str) -> int:
        return int(self.note(key))

    def split(self, *, sequence: bool = False) -> Split:
        """The degrees DP, TP, PP and VP of `parallelism`; a degree is 1 where it is missing."""
        degrees = {kind: int(count) for kind, count in re.findall(r"\b([DTPV]P)(\d+)", self.parallelism)}
        data, tensor, pipeline, interleave = (degrees.get(kind, 1) for kind in ("DP", "TP", "PP", "VP"))
        return Split(data, tensor, pipeline, interleave, sequence)

    def gpt(self) -> Transformer:
        size = self.model.split()[-1]
        return Transformer(f"GPT {size}", *_GPT[size], 2048)


@cache
def _rows() -> list[tuple[str, Row]]:
    """Every row with its source."""
    names = ("model", "hardware", "workers", "parallelism", "metric", "notes")
    with (DATA / "calibration.csv").open(newline="", encoding="utf-8") as file:
        return [
            (row["source"], Row(value=float(row["value"]), **{name: row[name] for name in names}))
            for row in csv.DictReader(file)
        ]


@dataclass(frozen=True)
class Source:
    """begins: the start of the table's first column. fitted: which constants saw some of the source's rows."""

    name: str
    begins: str
    fitted: str
    cases: Callable[[Sequence[Row]], list[Case]]

    def compare(self) -> list[Case]:
        return self.cases([row for source, row in _rows() if source.startswith(self.begins)])


def _single_node(_: Sequence[Row]) -> list[Case]:
    """1,440 splits of GPT on one node of A100; each width and tensor degree by constants fitted to all other ones."""

    def kind(run: Run) -> tuple[int, int]:
        return run.model.hidden, run.job.split.tensor

    runs = read_runs(DATA / "a100_single_node_gpt.csv")
    cluster = load_cluster("dgx-a100")
    cases = []
    for left_out in sorted({kind(run) for run in runs}):
        others = [run for run in runs if kind(run) != left_out][::_EVERY]
        fitted = fit_shipped([(run.model, run.job, run.measured_s) for run in others], cluster, _KINDS_LEFT)
        constants = replace(fitted, spread=FITTED.spread)
        for run in runs:
            if kind(run) == left_out:
                prediction = predict(run.model, cluster, run.job, constants)
                cases.append(step_case(f"line {run.line}", run.measured_s, prediction, run.request))
    return cases


def _megatron_table(row: Row) -> Case:
    """Narayanan et al. 2021, table 2: FLOP/s by a formula that includes recomputation; the step time follows."""
    model, ranks, batch = row.gpt(), int(row.workers), row.number("B")
    # Section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh), with full recomputation.
    h, s, depth = model.hidden, model.sequence, model.depth
    flops = 96.0 * batch * s * depth * h * h * (1 + s / (6 * h) + model.vocabulary / (16 * depth * h))
    split = Split(data=ranks, zero=3) if row.is_zero else row.split()
    # DeepSpeed of early 2021 waited for each gather on the device (github.com/deepspeedai/DeepSpeed, 1188).
    job = Job(batch, row.number("mb"), split, "f16", recomputation="full", gradient_bytes=2, prefetch=False)
    prediction = predict(model, load_cluster("dgx-a100"), job)
    return step_case(f"{row.model}, {ranks}: {split.text()}", flops / (ranks * row.value * 1e12), prediction)


def _recomputation(row: Row) -> Case:
    """Korthikanti et al. 2022, table 5: full recomputation, or selective with sequence parallelism."""
    selective = "selective" in row.notes
    job = Job(
        row.number("B"),
        row.number("mb"),
        row.split(sequence=selective),
        precision="f16",
        recomputation="selective" if selective else "full",
    )
    prediction = predict(row.gpt(), load_cluster("dgx-a100"), job)
    return step_case(f"{row.model}, {row.notes}", row.value, prediction)


def _memory(row: Row) -> Case:
    """Korthikanti et al. 2022, figure 1: activations of the first stage; weights and state of transformer blocks alone.

    The figure shows the paper's formulas (section 4) for activations that are kept. `memory_of` adds one recomputed
    block.
    """
    model = row.gpt()
    selective = "seq-par" in row.notes
    pipeline = int(row.workers) // 8
    interleave = 3 if model.depth % (3 * pipeline) == 0 and 1 < pipeline < model.depth // 2 else 1
    split = Split(tensor=8, pipeline=pipeline, interleave=interleave, sequence=selective)
    micro = 4 if pipeline == 1 else 1
    job = Job(8 * micro * pipeline, micro, split, "f16", recomputation="selective" if selective else "none")
    stages = predict(model, load_cluster("dgx-a100"), job).stages
    if row.metric == "memory_activations":
        found = waiting(0, job.microbatches, job) * stages[0].kept_bytes
    else:
        # A stage without embeddings: the figure leaves them out.
        held = min(range(len(stages)), key=lambda index: stages[index].parameters)
        parts = memory_of(stages[held], held, job.microbatches, job)
        found = parts.weights + parts.gradients + parts.optimizer
    name = f"{row.model}: {row.metric.removeprefix('memory_')}{', selective' if selective else ''}"
    return banded_case(name, "GiB", row.value, found / 2**30, _MEMORY_BAND)


def _weak_scaling(row: Row) -> Case:
    """The figures of Megatron-LM's repository: full recomputation; the batch is one microbatch of each replica."""
    model = Transformer(row.model, row.number("h"), row.number("heads"), row.number("L"), 1024)
    split, v100 = row.split(), "V100" in row.hardware
    micro = 8 if v100 else 16
    job = Job(micro * split.data, micro, split, "f16", recomputation="full", gradient_bytes=2)
    prediction = predict(model, load_cluster("dgx-2" if v100 else "dgx-a100"), job)
    return step_case(f"{row.model}, {row.workers} x {row.hardware}", row.value / 1e3, prediction)


def _turing(row: Row) -> Case:
    """Smith et al. 2022, section 2.4: 530 billion parameters with DeepSpeed's pipeline."""
    job = Job(row.number("B"), 1, row.split(), recomputation="full")
    prediction = predict(row.gpt(), load_cluster("dgx-a100"), job)
    return step_case(f"{row.model}, {row.workers}", row.value, prediction)


def _foundry(row: Row) -> Case:
    """llm-foundry: MPT models of 125 million to 70 billion parameters with FSDP on 8 to 128 A100."""
    ranks, batch, sequence = int(row.workers), row.number("gbs"), row.number("seq")
    model = Transformer(row.model, *_MPT[row.model], sequence, vocabulary=50368, flash=True)
    job = Job(
        batch,
        row.number("mb"),
        Split(data=ranks, zero=3),
        recomputation="full" if row.note("ckpt") == "True" else "none",
        gradient_bytes=2,
    )
    cluster = load_cluster("dgx-a100" if "80gb" in row.hardware else "a100-roce")
    # The table has tokens per second and device.
    measured_s = batch * sequence / (row.value * ranks)
    name = f"{row.model}, {ranks} x {row.hardware}, {sequence} tokens"
    return step_case(name, measured_s, predict(model, cluster, job))


def _bus_bandwidth(row: Row) -> Case:
    """nccl-tests of all_reduce within a node, in GB/s: 2(P-1)/P of the bytes over the time."""
    size, ranks = int(row.model.split()[1]), int(row.workers)
    cluster = load_cluster("dgx-1" if row.hardware == "V100" else "dgx-a100")
    seconds = collective_s("all_reduce", size, Group(ranks), cluster, FITTED)
    busbw = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    name = f"all_reduce of {size} bytes, {ranks} x {row.hardware}"
    return banded_case(name, "GB/s", row.value, busbw, _LARGE_BAND if size >= 16 << 20 else _SMALL_BAND)


def _edsr(rows: Sequence[Row]) -> list[Case]:
    """EDSR on 32 to 512 V100 with three libraries, each from its own runs on 1 to 16."""
    by_library: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if row.metric == "throughput" and row.parallelism.startswith("DP"):
            by_library[row.parallelism].append((int(row.workers), row.value))
    cases = []
    for library, runs in by_library.items():
        law = fit_law([run for run in runs if run[0] <= _KNOWN_RANKS], _IMAGE)
        for ranks, measured in runs:
            if ranks > _KNOWN_RANKS:
                cases.append(
                    banded_case(f"{library}, {ranks}", "img/s", measured, law.samples_per_s(ranks), law.spread)
                )
    return cases


@dataclass(frozen=True)
class Law:
    """Throughput of a data-parallel job whose network is unknown: a rank's time per sample is linear in the doublings.

    Ranks wait for the latest of them, and a reduction's trees and rings get deeper. Both grow with the logarithm of the
    ranks (as the expected largest of n equal deviations does).
    sample_s: time per sample of one rank alone. doubling_s: more for each doubling. spread: half of the 80% band.
    """

    sample_s: float
    doubling_s: float
    spread: float

    def samples_per_s(self, ranks: int) -> float:
        return ranks / (self.sample_s + self.doubling_s * math.log2(ranks))


def fit_law(runs: Sequence[tuple[int, float]], resolution: float) -> Law:
    """Fit a law by weighted least squares.

    runs: ranks, and samples per second of all ranks. resolution: to which the throughput was rounded.
    Raises ValueError for fewer than three sizes.
    """
    sizes = {ranks for ranks, _ in runs}
    if len(sizes) < 3:
        raise ValueError(f"a law needs runs of at least three sizes, not {len(sizes)}")
    ranks, rate = (np.array(each, dtype=float) for each in zip(*runs, strict=True))
    seconds = ranks / rate
    # A rounded number is anywhere within its last digit: a deviation of one over the root of 12.
    deviation = np.hypot(resolution / math.sqrt(12) / rate, _REPEATS) * seconds
    terms = np.stack([np.ones(len(runs)), np.log2(ranks)], axis=1) / deviation[:, None]
    (alone, doubling), *_ = np.linalg.lstsq(terms, seconds / deviation, rcond=None)
    doubling = max(0.0, float(doubling))
    off = np.abs((alone + doubling * np.log2(ranks)) / seconds - 1)
    return Law(float(alone), doubling, _EIGHTY * max(_REPEATS, float(np.sqrt((off**2).sum() / (len(runs) - 2)))))


def _each(case: Callable[[Row], Case]) -> Callable[[Sequence[Row]], list[Case]]:
    """The cases of a source whose rows are predicted one by one."""
    return lambda rows: list(map(case, rows))


def _megatron(*, zero: bool) -> Callable[[Sequence[Row]], list[Case]]:
    return lambda rows: [_megatron_table(row) for row in rows if row.is_zero == zero]


_NONE = "none of its rows"
# A rule and no number, but it was chosen with these rows in sight.
_ONE_RING = "no number; the choice of one ring for ZeRO-3's gathers was made with these rows and the other source's"
_NO_PREFETCH = (
    f"{_ONE_RING}; the assumption that nothing hid it in early 2021 rests on these and on what its makers said since"
)
_MEGATRON = "cli99/llm-analysis figures/megatron-lm-2nd-table-2.png"
_SHIPPED = "all compute constants; here without the width and tensor degree that are predicted"
_LINKS = "collective_s, copy_bytes_per_s and latencies inside nodes"

SOURCES = (
    Source("GPT on one node, 2-8 A100", "none", _SHIPPED, _single_node),
    Source("Megatron-LM, tensor and pipeline, 384-2240 A100", _MEGATRON, _NONE, _megatron(zero=False)),
    Source("Megatron-LM's table, ZeRO-3, 384-2240 A100", _MEGATRON, _NO_PREFETCH, _megatron(zero=True)),
    Source("Korthikanti, table 5, 8-512 A100", "calculon-ai/calculon", _NONE, _each(_recomputation)),
    Source("Megatron-LM's figures, 1-1024 A100 and V100", "NVIDIA/Megatron-LM", _NONE, _each(_weak_scaling)),
    Source("Megatron-Turing, 2240-3360 A100", "cli99/llm-analysis examples", _NONE, _each(_turing)),
    Source("llm-foundry, FSDP, 8-128 A100", "mosaicml/llm-foundry", _ONE_RING, _each(_foundry)),
    Source("Korthikanti, figure 1, memory", "calculon validation.py", _NONE, _each(_memory)),
    Source("vTrain's nccl-tests, 2-8 A100 and V100", "VIA-Research/vTrain", _LINKS, _each(_bus_bandwidth)),
    Source(
        "EDSR, 32-512 V100, from 1-16", "EDSR with MVAPICH2", "two numbers per library, of its first five rows", _edsr
    ),
)


def sources_markdown(found: Sequence[tuple[Source, list[Case]]]) -> str:
    """One table with a row per source, then every row of each small source."""
    lines = [
        "# Predictions beside published measurements",
        "",
        "Made by `python lab/bench/validation`. Errors are parts of the measured value; their mean is of absolute "
        "errors,",
        "and the bias keeps signs. Each source is predicted by constants that saw none of its rows, or as the last",
        "column says.",
        "",
        "| source | rows | mean error | bias | worst | in the 80% band | regret | what was fitted to it |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for source, cases in found:
        of = score(cases)
        regret = "" if of.regret is None else f"{100 * of.regret:.1f}%"
        errors = f"{100 * of.mean_error:.1f}% | {100 * of.bias:+.1f}% | {100 * of.worst_error:.1f}%"
        lines.append(f"| {source.name} | {of.rows} | {errors} | {100 * of.covered:.0f}% | {regret} | {source.fitted} |")
    for source, cases in found:
        if len(cases) > _MOST_SHOWN:
            continue
        lines += ["", f"## {source.name}", "", "| | measured | predicted | error |", "|---|---:|---:|---:|"]
        for case in cases:
            numbers = f"{case.measured:.4g} {case.unit} | {case.predicted:.4g} {case.unit} | {100 * case.error:+.1f}%"
            lines.append(f"| {case.name} | {numbers} |")
    return "\n".join(lines) + "\n"
