"""What a job is to do, as one file: every key of a recipe, with its meaning, its default and its bounds.

A recipe is TOML (`netfold train recipe.toml`) or made in Python (`Recipe(model={"name": "gpt"}, ...)`). Here is only
what can be said of it without a model, data or torch; what needs those is checked by `validate.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A table of the file. A key that is not known is an error, and a recipe never changes once it is made.

    Nothing is taken for something else: "4" and true are no whole numbers, infinity is no rate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Factory(BaseModel):
    """A thing made by name: one that netfold brings, or "module:factory" of one's own.

    All other keys of the table are the factory's keyword arguments, and are held against its signature.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Training(Section):
    """How much is learnt from, and in which arithmetic. Give `steps` or `epochs`."""

    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    batch: PositiveInt = 32
    """Samples to one step of the optimizer: of the whole job, or of each data-parallel rank where scaling is weak."""
    scaling: Literal["strong", "weak"] = "strong"
    """strong: more ranks share one batch. weak: the batch grows with them."""
    accumulate: PositiveInt = 1
    """Parts in which a rank goes through its share of a batch; gradients travel with the last one."""
    precision: Literal["f32", "bf16", "f16"] = "f32"
    """What is computed in; weights are kept in f32 beside it. f16 scales its losses."""
    clip: PositiveFloat | None = None
    """The largest norm that all gradients together may have."""
    evaluate_every: PositiveInt | None = None
    """Steps between looks at the held-out examples; without, at the end alone."""
    seed: int = 0

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either steps or epochs, and not both")
        return self


class Optimizer(Section):
    name: Literal["sgd", "adam", "adamw", "lars", "lamb"] = "adamw"
    lr: PositiveFloat = 1e-3
    momentum: Share = 0.9
    """Of sgd and lars."""
    # Not strict: TOML has lists, and text for paths.
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.999)
    """Of adam, adamw and lamb."""
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    decay: Literal["weights", "all"] = "weights"
    """What weight_decay acts on. weights: not on norms, biases and embeddings."""
    trust: PositiveFloat = 1e-3
    """lars: the trust coefficient (You, Gitman, Ginsburg 2017)."""


class Schedule(Section):
    """The learning rate as a function of the step alone."""

    shape: Literal["constant", "linear", "cosine"] = "cosine"
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises in a line."""
    final: Share = 0.0
    """What is left of the rate when the last step is done, where the shape is not constant."""
    reference_batch: PositiveInt | None = None
    """The batch that `lr` was found for: the rate is multiplied by batch / reference_batch (Goyal et al. 2017)."""


class Parallel(Section):
    """Ranks as a mesh: pipeline x data x tensor. Their product is the number of ranks."""

    data: PositiveInt | None = None
    """Without: as many as there are ranks for."""
    zero: Literal[0, 1, 2, 3] = 0
    """Data-parallel ranks share out: 1 the optimizer's state, 2 gradients too, 3 weights too (Rajbhandari 2020)."""
    bucket_mb: PositiveFloat | Literal["auto"] = "auto"
    """Gradients that travel together. auto: a few sizes are tried over the first steps."""
    batch_norm: PositiveInt = 1
    """Data-parallel ranks that normalise together, in runs of this many; 1: each for itself."""
    pipeline: PositiveInt = 1
    microbatches: PositiveInt | None = None
    """Without: as many as the pipeline has ranks."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] = "1f1b"
    """zero-bubble: ZB-H1; zero-bubble-v: ZB-V, whose first and last stage share a rank (Qi et al. 2023)."""
    interleave: PositiveInt = 2
    """Stages a rank holds where the schedule is interleaved, zero-bubble or zero-bubble-v (there always 2)."""
    tensor: PositiveInt = 1
    style: Literal["alternating", "colwise", "rowwise"] = "alternating"
    """How a linear layer's weights are cut, in torch's names: colwise, rowwise, or in turn (one all-reduce every two
    layers).
    """
    sequence: bool = False
    """Between the layers cut by `tensor`, activations are cut along the sequence."""
    embeddings: Literal["replicated", "table_wise", "row_wise"] = "replicated"
    """Embedding tables: on every rank, whole ones shared out, or each cut by rows; among the data-parallel ranks."""


class DiLoCo(Section):
    """Low-communication data parallel: ranks train apart for `every` steps, then the mean of what they learnt is
    taken as a gradient (DiLoCo, Douillard 2023). lr 1 and momentum 0 is local SGD: models are averaged."""

    every: PositiveInt
    """Looks at held-out examples and checkpoints are taken at ends of rounds: their `every` must be a multiple."""
    lr: PositiveFloat = 0.7
    momentum: Share = 0.9


class Checkpoint(Section):
    every: PositiveInt | Literal["auto", "end"] = "auto"
    """Steps. auto: a tenth of the run, 10 to 500 steps. end: none before the end, so a restart begins at step 0."""
    keep: PositiveInt = 2
    asynchronous: bool = True
    """Written beside training, from a copy in memory."""


class FaultTolerance(Section):
    """What is done when something goes wrong."""

    restarts: Annotated[int, Field(ge=0)] = 3
    """How often all ranks are started anew after one was lost (where netfold starts them itself)."""
    grace_s: PositiveFloat = 30.0
    """After SIGTERM: within this time a checkpoint is written, then the ranks leave."""
    non_finite: Literal["stop", "skip", "rewind"] = "stop"
    """A loss or gradient that is not a number: stop, leave the step out, or go back to the last checkpoint."""
    non_finite_limit: PositiveInt = 10
    """So many in a row end the job under any policy."""
    straggler: Literal["warn", "stop"] = "warn"
    straggler_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """A rank that computes so many times as long as the median one is named."""
    disk_full: Literal["warn", "stop"] = "warn"
    """warn: train on without this checkpoint; the earlier ones stay."""
    corrupt_checkpoint: Literal["previous", "stop"] = "previous"
    missing_data: Literal["stop", "skip"] = "stop"
    """skip: another example is taken in place of one that cannot be read."""


class Report(Section):
    every: PositiveInt = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = True
    wandb: bool = False
    mlflow: bool = False
    profile: bool = True
    """Record the communication of a stretch of steps for the run's page."""


class Run(Section):
    folder: Annotated[Path, Field(strict=False)] = Path("runs")
    """Each run makes a folder of its own in it."""
    name: str | None = None
    """Without: the recipe's file name."""
    resume: Literal["auto", "changed", "never"] = "auto"
    """auto: a run of this name that has a checkpoint goes on from it. changed: also with another optimizer's settings,
    schedule, length or batch, which auto refuses."""
    backend: str = "netfold"
    threads: PositiveInt = 1
    """torch's, a rank."""
    check: bool = True
    """Look at links, limits and versions before training (netfold doctor check)."""
    timeout_s: PositiveFloat = 300.0
    """The longest that a rank waits for others in one operation."""


class Recipe(Section):
    """A whole job. See the sections for keys and defaults."""

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
    run: Run = Run()

    def checkpoint_every(self, steps: int) -> int | None:
        """Steps between the checkpoints of a run of `steps`; None where there is one at the end alone."""
        every = self.checkpoint.every
        if every == "end":
            return None
        if every != "auto":
            return every
        interval = min(max(steps // 10, 10), 500)
        # Between rounds there is one model.
        return interval if self.diloco is None else -(-interval // self.diloco.every) * self.diloco.every

    @model_validator(mode="after")
    def _apart(self) -> Recipe:
        if self.diloco is None:
            return self
        for key, value, alone in (
            ("parallel.zero", self.parallel.zero, 0),
            ("parallel.batch_norm", self.parallel.batch_norm, 1),
            ("parallel.embeddings", self.parallel.embeddings, "replicated"),
        ):
            if value != alone:
                raise ValueError(
                    f"{key} is {value!r}, which data-parallel ranks share in every step, but with [diloco] they train "
                    f"apart; {alone!r} would do, or leave [diloco] out"
                )
        if self.training.precision != "f32":
            raise ValueError(
                f"training.precision is {self.training.precision!r}, but with [diloco] weights themselves are "
                f"averaged, "
                "which are f32; 'f32' would do"
            )
        every = self.diloco.every
        for key, steps in (
            ("training.evaluate_every", self.training.evaluate_every),
            ("checkpoint.every", self.checkpoint.every),
        ):
            if isinstance(steps, int) and steps % every:
                raise ValueError(
                    f"{key} is {steps}, in the middle of a round of diloco.every = {every} steps, where data-parallel "
                    f"ranks hold different weights; a multiple of {every} would do"
                )
        return self
