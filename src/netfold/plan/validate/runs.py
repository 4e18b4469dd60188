"""Measured training steps from a table: a row a run, with the columns of published single-node measurements."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netfold.plan.cluster import Cluster
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer
from netfold.plan.step import predict

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
# GPT-2's words. Whether a single tensor rank pads them the table does not say; the times say that it does not
# (docs/explanation/plan-model.md).
_WORDS = 50257
# Gradients are added up as they are, in 16 bits; the times over data-parallel ranks say so.
_GRADIENT_BYTES = 2
# Between stages each tensor rank sends all that they hold alike; the times say so.
_SCATTERED = False
# Of predicted memory, what it may be too high by: one run that is near a device's memory says nothing of all.
_MEMORY_ERROR = 0.05


@dataclass(frozen=True)
class Run:
    """line: of the file. job: as far as the table says; what it recomputes the table does not say."""

    line: int
    model: Transformer
    job: Job
    measured_ms: float

    @property
    def gpus(self) -> int:
        return self.job.split.ranks

    @property
    def request(self) -> tuple[object, ...]:
        """Runs that differ only in how they are split have this in common."""
        return self.model, self.job.global_batch, self.gpus


def read_runs(path: Path) -> list[Run]:
    """Further columns are left alone. Raises ValueError, in a sentence with file and line, for what is not sound."""
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
            raise ValueError(f"{path}, line {line}: {name} = {row[name]!r} is no number") from None
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
    model = Transformer(f"GPT {hidden}x{depth}", hidden, heads, depth, sequence, _WORDS, pads=False)
    return Run(line, model, job, values[-1])


def recomputed(runs: Sequence[Run], cluster: Cluster) -> str:
    """What runs recompute, as far as memory says: nothing where each of them fits into a device so, else everything.

    Who measures many splits has one setting for all, and leaves out those that do not fit. Raises ValueError, in a
    sentence with its line, for a run that the cluster cannot have.
    """
    for run in runs:
        try:
            found = predict(run.model, cluster, run.job)
        except ValueError as error:
            raise ValueError(f"line {run.line}: {error}") from None
        if found.memory.total > (1 + _MEMORY_ERROR) * found.memory_bytes:
            return "full"
    return "none"
