"""Measured training steps from a CSV table, with the columns of the published single-node measurements."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netfold_plan.cluster import Cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Transformer
from netfold_plan.step import predict

COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)
# GPT-2's vocabulary. The table does not say whether one tensor rank pads it; the measured times fit only without
# (docs/explanation/plan-model.md).
_VOCABULARY = 50257
# Gradients are summed in 16 bits, and every tensor rank sends all of an activation to the next stage: the measured
# times of data ranks and of stages fit only so.
_GRADIENT_BYTES, _SCATTERED = 2, False
# Predicted memory may be too high by this part. One run close to a device's memory says nothing about all runs.
_MEMORY_ERROR = 0.05


@dataclass(frozen=True)
class Run:
    """line: of the file. job: what the table says; the table does not say what is recomputed."""

    line: int
    model: Transformer
    job: Job
    measured_ms: float

    @property
    def measured_s(self) -> float:
        return self.measured_ms / 1e3

    @property
    def request(self) -> tuple[object, ...]:
        """Equal for runs that differ only in their split."""
        return self.model, self.job.global_batch, self.job.split.ranks


def read_runs(path: Path) -> list[Run]:
    """Read a table; further columns are ignored. Raises ValueError with file and line for a table that is not sound."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, skipinitialspace=True)
            table.fieldnames = [name.strip() for name in table.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in table.fieldnames]
            if missing:
                raise ValueError(f"{path}: has no column {missing[0]!r}; the first line must name {', '.join(COLUMNS)}")
            runs = [_run(path, table.line_num, row) for row in table]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    if not runs:
        raise ValueError(f"{path}: has no runs, only its first line")
    return runs


def _run(path: Path, line: int, row: dict[str, str | None]) -> Run:
    values = []
    for name in COLUMNS:
        try:
            values.append(float(row[name] or ""))
        except ValueError:
            raise ValueError(f"{path}, line {line}: {name} = {row[name]!r} is not a number") from None
        if not 0 < values[-1] < float("inf"):
            raise ValueError(f"{path}, line {line}: {name} = {row[name]} must be above 0")
    gpus, batch, micro, hidden, heads, depth, sequence, tensor, data, pipeline = (round(value) for value in values[:-1])
    split = Split(data=data, tensor=tensor, pipeline=pipeline)
    if split.ranks != gpus:
        raise ValueError(f"{path}, line {line}: {split.text()} is {split.ranks} GPUs, not {gpus}")
    try:
        job = Job(batch, micro, split, precision="f16", gradient_bytes=_GRADIENT_BYTES, scattered=_SCATTERED)
    except ValueError as error:
        raise ValueError(f"{path}, line {line}: {error}") from None
    model = Transformer(f"GPT {hidden}x{depth}", hidden, heads, depth, sequence, _VOCABULARY, pads=False)
    return Run(line, model, job, values[-1])


def recomputed(runs: Sequence[Run], cluster: Cluster) -> str:
    """The recomputation of the runs, by their memory: nothing where every run then fits into a device, else everything.

    A table of many splits has one setting, and leaves out splits that do not fit. Raises ValueError with the line of a
    run that the cluster cannot have.
    """
    for run in runs:
        try:
            found = predict(run.model, cluster, run.job)
        except ValueError as error:
            raise ValueError(f"line {run.line}: {error}") from None
        if found.memory.total > (1 + _MEMORY_ERROR) * found.memory_bytes:
            return "full"
    return "none"
