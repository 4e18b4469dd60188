"""The keys of a recipe, with their meanings, defaults and bounds.

A recipe is TOML (`netfold train recipe.toml`) or made in Python (`Recipe(model={"name": "gpt"}, ...)`). The checks in
this package need no model, data or torch; `dry_run/validate.py` makes the checks that do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Conflict = tuple[str, str, str]
"""Two keys whose values exclude each other, and what to do."""


class Section(BaseModel):
    """A table of the file. An unknown key is an error, and a recipe is immutable.

    Values are not converted: "4" and true are not integers, and infinity is not a rate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Factory(BaseModel):
    """An object that a named factory makes: one of netfold's names, or "module:factory".

    All other keys of the table are the factory's keyword arguments, and are checked against its signature.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Training(Section):
    """The length of training, and its arithmetic. Give `steps` or `epochs`."""

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    batch: PositiveInt = 32
    """Samples per optimizer step: of the whole job, or of each data-parallel rank if scaling is weak."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: the ranks divide one batch. weak: the batch grows with the number of ranks."""
    accumulate: PositiveInt = 1
    """Parts into which a rank cuts its share of a batch. The last part sends the gradients."""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """The type of computation. Weights are kept in f32. f16 scales its losses."""
    clip: PositiveFloat | None = None
    """The largest norm of all gradients together."""
    recompute: Literal["none", "all", "selective"] = "none"
    """Activations to compute again in the backward pass, block by block, to save memory: all, or all but the results of
    matrix products, convolutions and attention."""
    compile: bool = False
    """Compile each block of the model by torch.compile; the first steps take longer."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Evaluate with a moving average of the weights, which decays by this factor a step, such as 0.999."""
    evaluate_every: PositiveInt | None = None
    """Steps between evaluations of the held-out examples. Without it there is one evaluation, at the end."""
    seed: int = 0
    initial: Annotated[Path, Field(strict=False)] | None = None
    """First weights: of a run's folder (its newest checkpoint), or of a file or folder of safetensors. A run that
    continues from its own checkpoint does not read them."""
    initial_except: list[str] = []
    """Beginnings of names that `initial` leaves out, such as a new head: those weights are random."""

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs, and not both")
        return self


class Optimizer(Section):
    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "adamw"
    lr: PositiveFloat = 1e-3
    momentum: Share = 0.9
    """sgd and lars."""
    # Not strict: TOML has lists, and text for paths.
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """adam, adamw and lamb."""
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    decay: Literal["weights", "all"] = "weights"
    """The parameters that weight_decay acts on. weights: all but norms, biases and embeddings."""
    trust: PositiveFloat = 1e-3
    """lars: the trust coefficient (You, Gitman, Ginsburg 2017)."""


class Schedule(Section):
    """The learning rate as a function of the step alone."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """wsd: warm-up, a stable rate, a linear decay (Hu et al. 2024, MiniCPM)."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly."""
    final: Share = 0.0
    """The share of the rate that is left after the last step, unless the shape is constant."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """wsd: the share of the steps, at the end, over which the rate falls."""
    reference_batch: PositiveInt | None = None
    """The batch that `lr` was found for: the rate is multiplied by batch / reference_batch (Goyal et al. 2017)."""


class Parallel(Section):
    """Ranks as a mesh: pipeline x data x tensor. Their product is the number of ranks."""

    data: PositiveInt | None = None
    """Without it: the number of ranks divided by pipeline x tensor."""
    zero: Literal[0, 1, 2, 3] = 0
    """Data-parallel ranks split: 1 and 2 the optimizer's state and gradients, 3 weights too (Rajbhandari 2020)."""
    shard: PositiveInt | None = None
    """Data-parallel ranks among which zero divides, in runs of this many; the runs average (HSDP). Without it: all."""
    bucket_mb: PositiveFloat | None = None
    """MiB of gradients that are sent together. Without it: 64."""
    batch_norm: PositiveInt = 1
    """Data-parallel ranks that normalise together, in runs of this many. 1: each rank by itself."""
    pipeline: PositiveInt = 1
    microbatches: PositiveInt | None = None
    """Without it: the number of ranks of the pipeline."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] = "1f1b"
    """zero-bubble: ZB-H1. zero-bubble-v: ZB-V, whose first and last stage share a rank (Qi et al. 2023)."""
    interleave: PositiveInt = 2
    """Stages per rank if the schedule is interleaved, zero-bubble or zero-bubble-v (which needs 2)."""
    tensor: PositiveInt = 1
    style: Literal["alternating", "colwise", "rowwise"] = "alternating"
    """The cut of linear layers' weights, in torch's names. alternating: one all-reduce every two layers."""
    context: PositiveInt = 1
    """Data-parallel ranks that share samples, in runs of this many, and have an equal part of each sequence."""
    sequence: bool = False
    """Cut activations along the sequence between the layers that `tensor` cuts."""
    embeddings: Literal["replicated", "table_wise", "row_wise"] = "replicated"
    """Embedding tables on every rank, divided among the data-parallel ranks as whole tables, or each cut by rows."""
    experts: Literal["replicated", "sharded"] = "replicated"
    """Experts (gpt-moe) on every rank, or divided among the data-parallel ranks, which then exchange tokens."""


class DiLoCo(Section):
    """Low-communication data parallel (DiLoCo, Douillard 2023).

    Sites train independently for `every` steps, then the mean of their changes is used as a gradient. lr 1 and
    momentum 0 is local SGD: the weights are averaged.
    """

    every: PositiveInt
    """Steps of a round. Evaluations and checkpoints are at ends of rounds: their `every` must be a multiple."""
    sites: PositiveInt | None = None
    """Runs of data-parallel ranks. In a site they average gradients in every step. Without it: each is a site."""
    lr: PositiveFloat = 0.7
    momentum: Share = 0.9
    fragments: PositiveInt = 1
    """Parts of the weights, sent after different steps of a round (Streaming DiLoCo, Douillard 2025)."""
    overlap: Annotated[int, Field(ge=0)] = 0
    """Steps for which training goes on while a fragment is sent."""
    wire: Literal["f32", "bf16", "i8"] = "f32"
    """The number format in which changes are sent. i8: rounding errors are added to the next round's changes."""


class Checkpoint(Section):
    every: PositiveInt | Literal["auto", "end"] = "auto"
    """Steps. auto: a tenth of the run, 10 to 500 steps. end: only at the end, so a restart begins at step 0."""
    keep: PositiveInt = 2
    asynchronous: bool = True
    """Write beside training, from a copy in memory."""


class FaultTolerance(Section):
    """The policy for each kind of failure."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """The number of times that all ranks are started again after one was lost (if netfold starts them itself). elastic:
    the number of ranks that are started in the place of lost ones."""
    elastic: bool = False
    """A lost rank costs one step: the other ranks go on, and a new rank takes its place. Only for data parallelism with
    whole weights on each rank."""
    min_ranks: PositiveInt = 1
    """elastic: the fewest ranks that go on."""
    grace_s: PositiveFloat = 30.0
    """Seconds after SIGTERM within which the ranks write a checkpoint and leave."""
    non_finite: Literal["stop", "skip", "rewind"] = "stop"
    """A loss or gradient that is not finite: stop, leave the step out, or go back to the last checkpoint."""
    non_finite_limit: PositiveInt = 10
    """This many in a row end the job under any policy."""
    straggler: Literal["warn", "stop"] = "warn"
    straggler_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """A rank is named if it computes this many times as long as the median rank."""
    disk_full: Literal["warn", "stop"] = "warn"
    """warn: train on without this checkpoint; the earlier ones stay."""
    corrupt_checkpoint: Literal["previous", "stop"] = "previous"
    missing_data: Literal["stop", "skip"] = "stop"
    """skip: take another example in place of one that cannot be read."""


class Report(Section):
    every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    profile: bool = True
    """Record the communication of some steps for the run's page."""


class Device(Section):
    kind: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where torch finds one, else the CPU. A rank takes the GPU of its number on its host."""


class Run(Section):
    folder: Annotated[Path, Field(strict=False)] = Path("runs")
    """The folder in which each run makes its own."""
    name: str | None = None
    """Without it: the name of the recipe's file, or of the model."""
    resume: Literal["auto", "changed", "never"] = "auto"
    """auto: an unfinished run of this name continues from its checkpoint. changed: also if optimizer, schedule, length
    or batch have changed, which auto refuses."""
    backend: str = "netfold"
    """Of torch.distributed; "cpu:netfold,cuda:nccl" takes another one for tensors of GPUs."""
    threads: PositiveInt = 1
    """torch's threads, per rank."""
    loaders: PositiveInt = 1
    """Threads that make a rank's next batch, each a part of it: for pictures that take long to decode."""
    check: bool = True
    """Check links, limits and versions before training (netfold doctor check)."""
    timeout_s: PositiveFloat = 300.0
    """The longest time that a rank waits for other ranks in one operation."""


class Recipe(Section):
    """A whole job. See the sections for keys and defaults."""

    # A factory's option may be infinite: recipe.json then has Infinity, which Python reads as JSON.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    model: Factory
    data: Factory
    training: Training
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    parallel: Parallel = Parallel()
    diloco: DiLoCo | None = None
    checkpoint: Checkpoint = Checkpoint()
    fault_tolerance: FaultTolerance = FaultTolerance()
    report: Report = Report()
    device: Device = Device()
    run: Run = Run()

    def checkpoint_every(self, steps: int) -> int | None:
        """Steps between the checkpoints of a run of `steps`; None if there is only one, at the end."""
        every = self.checkpoint.every
        if every == "end":
            return None
        if every != "auto":
            return every
        interval = min(max(steps // 10, 10), 500)
        # Data-parallel ranks hold the same weights only between rounds.
        return interval if self.diloco is None else -(-interval // self.diloco.every) * self.diloco.every

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        found = []
        for key, other, advice in self._conflicts():
            value, others = (json.dumps(attrgetter(each)(self)) for each in (key, other))
            found.append(f"{key} = {value} does not go with {other} = {others}: {advice}")
        if found:
            raise ValueError("\n".join(found))
        return self

    def _beside(self, other: str, why: str, allowed: Mapping[str, object]) -> Iterator[Conflict]:
        """A conflict for each key that has another value than the only one that `other` allows."""
        for key, only in allowed.items():
            if attrgetter(key)(self) != only:
                yield key, other, f"{why}; set {json.dumps(only)}, or leave {other.rpartition('.')[2]} out"

    def _elastic_conflicts(self) -> Iterator[Conflict]:
        elastic = "fault_tolerance.elastic"
        parts = {"pipeline": 1, "tensor": 1, "zero": 0, "embeddings": "replicated", "experts": "replicated"}
        whole = {f"parallel.{key}": only for key, only in parts.items()}
        yield from self._beside(elastic, "a lost rank would take its part of the state along", whole)
        alone = {"parallel.context": 1, "parallel.batch_norm": 1}
        yield from self._beside(elastic, "ranks that compute together would be divided when one is lost", alone)
        if self.diloco is not None:
            yield "diloco.every", elastic, "sites hold different weights; leave one of the two out"
        if "netfold" not in self.run.backend:
            yield "run.backend", elastic, "no other backend goes on without a rank; take netfold"

    def _diloco_conflicts(self, diloco: DiLoCo) -> Iterator[Conflict]:
        if self.parallel.context > 1:
            yield "parallel.context", "diloco.every", "a sequence would be cut between sites; set context = 1"
        if self.training.ema is not None:
            advice = "ranks hold different weights within a round; leave one of the two out"
            yield "training.ema", "diloco.every", advice
        parts = {"zero": 0, "batch_norm": 1, "embeddings": "replicated", "experts": "replicated"}
        whole = {f"parallel.{key}": only for key, only in parts.items()} | {"training.precision": "f32"}
        why = "sites train independently, in f32, with whole weights on each data-parallel rank"
        yield from self._beside("diloco.every", why, whole)
        for key in ("training.evaluate_every", "checkpoint.every"):
            steps = attrgetter(key)(self)
            if isinstance(steps, int) and steps % diloco.every:
                advice = "in the middle of a round sites hold different weights"
                yield key, "diloco.every", f"{advice}; set a multiple of {diloco.every}"
        room = diloco.every - diloco.overlap
        if room < 1:
            advice = f"a fragment must arrive in the round in which it is sent; set at most {diloco.every - 1}"
            yield "diloco.overlap", "diloco.every", advice
        elif diloco.fragments > room:
            advice = f"each needs its own step of a round, before the last {diloco.overlap}; set at most {room}"
            yield "diloco.fragments", "diloco.every", advice
        if diloco.wire != "f32" and "netfold" not in self.run.backend:
            advice = "no backend but netfold sends other numbers than a tensor's; set wire = 'f32'"
            yield "diloco.wire", "run.backend", advice

    def _pipeline_conflicts(self) -> Iterator[Conflict]:
        parallel, accumulate = self.parallel, self.training.accumulate
        ranks, schedule = parallel.pipeline, parallel.schedule
        microbatches = parallel.microbatches or ranks
        if accumulate > 1:
            parts = accumulate * microbatches
            advice = f"a pipeline cuts a batch into microbatches; leave it out, set parallel.microbatches = {parts}"
            yield "training.accumulate", "parallel.pipeline", advice
        if schedule in ("zero-bubble", "zero-bubble-v"):
            late = "the schedule averages all gradients, and {} have one owner"
            for key, only, why in (
                ("training.recompute", "none", "torch cannot divide the backward pass of recomputed blocks"),
                ("parallel.zero", 0, "FSDP would miss gradients that are computed later"),
                ("parallel.embeddings", "replicated", late.format("tables")),
                ("parallel.experts", "replicated", late.format("experts")),
            ):
                if attrgetter(key)(self) != only:
                    yield "parallel.schedule", key, f"{why}; take 'interleaved', or set {json.dumps(only)}"
        if schedule == "zero-bubble-v" and parallel.interleave != 2:
            yield "parallel.interleave", "parallel.schedule", "it needs 2; leave it out, or take 'zero-bubble'"
        if schedule == "1f1b" and microbatches < ranks:
            advice = f"it needs at least one for each of {ranks} stages; set {ranks} or more, or take 'gpipe'"
            yield "parallel.microbatches", "parallel.schedule", advice
        rounds = max(1, microbatches // ranks)
        if schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
            advice = f"{ranks} ranks cannot divide them; set {ranks * rounds} or {ranks * (rounds + 1)}"
            yield "parallel.microbatches", "parallel.schedule", advice

    def _conflicts(self) -> Iterator[Conflict]:
        """Numbers of ranks are checked by `split`."""
        parallel = self.parallel
        if parallel.zero and parallel.bucket_mb is not None:
            advice = "a layer's gradients are sent together, whatever their size; leave one of the two out"
            yield "parallel.bucket_mb", "parallel.zero", advice
        if parallel.shard is not None and not parallel.zero:
            yield "parallel.shard", "parallel.zero", "nothing is divided; set zero = 1, 2 or 3"
        if parallel.embeddings != "replicated" and parallel.zero:
            yield "parallel.embeddings", "parallel.zero", "both divide the tables; set zero = 0"
        if parallel.sequence and parallel.tensor == 1:
            yield "parallel.sequence", "parallel.tensor", "nothing is cut; set tensor = 2 or more"
        elif parallel.sequence and parallel.style != "alternating":
            advice = 'the sequence is cut between pairs of layers; set style = "alternating"'
            yield "parallel.sequence", "parallel.style", advice
        if parallel.context > 1 and parallel.sequence:
            yield "parallel.context", "parallel.sequence", "both cut sequences; leave one of the two out"
        if self.fault_tolerance.non_finite == "rewind" and self.checkpoint.every == "end":
            advice = "there are no checkpoints to go back to; set checkpoint.every to a number of steps"
            yield "fault_tolerance.non_finite", "checkpoint.every", advice
        if self.fault_tolerance.elastic:
            yield from self._elastic_conflicts()
        elif self.fault_tolerance.min_ranks > 1:
            advice = "without it no rank goes on; set elastic = true"
            yield "fault_tolerance.min_ranks", "fault_tolerance.elastic", advice
        if parallel.pipeline > 1:
            yield from self._pipeline_conflicts()
        if self.diloco is not None:
            yield from self._diloco_conflicts(self.diloco)
