"""How a chain is to go over the ranks of a pipeline: which stages, of which layers, in how many microbatches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from netfold.train.examples import Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.parallel.costs import Measured, measured
from netfold.train.parallel.stages import Cut, cut
from netfold.train.precision import Precision
from netfold.train.recipe import Recipe

SEVERAL_A_RANK = ("interleaved", "zero-bubble", "zero-bubble-v")
SPLIT_BACKWARD = ("zero-bubble", "zero-bubble-v")


def stages_of(rank: int, ranks: int, each: int, schedule: str) -> tuple[int, ...]:
    """Which stages a rank of the pipeline holds, of ranks x each: every ranks-th, or there and back again."""
    if schedule == "zero-bubble-v":
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * each, ranks))


class Plan:
    """Made while every rank still holds every layer."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None) -> None:
        """Measures the layers on a microbatch of the first examples. Collective over the world.

        Raises ValueError, on every rank, where the recipe asks for what cannot be.
        """
        parallel = recipe.parallel
        chain = model.module
        if not isinstance(chain, Chain):
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but the model is a {type(chain).__name__}, which cannot be "
                "cut: make it a netfold.train.Chain of layers"
            )
        self.microbatches = parallel.microbatches or parallel.pipeline
        self.samples = _samples_a_part(recipe, mesh, self.microbatches)
        count = parallel.pipeline * (parallel.interleave if parallel.schedule in SEVERAL_A_RANK else 1)
        if count > len(chain):
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, which with parallel.schedule = {parallel.schedule!r} makes "
                f"{count} stages, but the model has {len(chain)} layers: make it {_most(recipe, len(chain))} or less"
            )
        if examples is None:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but no examples were given: parallelise must have some, to "
                "measure the layers on"
            )
        precision = Precision(recipe.training.precision)
        self.measured: Measured = measured(_lowered(model, precision), examples, self.samples, mesh, precision)
        self.cut: Cut = cut(self.measured.costs_ns, count)
        self.reason = self.cut.described(list(chain.layers))
        if parallel.schedule in SPLIT_BACKWARD:
            self._check_that_inputs_are_met(list(chain.layers), parallel.schedule)

    def _check_that_inputs_are_met(self, names: Sequence[str], schedule: str) -> None:
        # torch computes the gradients of a stage's weights from where their paths meet those of its inputs' gradients,
        # and leaves out, silently, what meets none on its way to an output. The first stage's are computed in one go.
        for stage in range(1, len(self.cut)):
            layers = self.cut.layers(stage)
            met = [crossing.requires_grad for crossing in self.measured.crossings[layers[0]]]
            for layer in layers:
                met = [
                    any(one and before for one, before in zip(reach, met, strict=True))
                    for reach in self.measured.reaches[layer]
                ]
            for crossing, is_met in zip(self.measured.crossings[layers[-1] + 1], met, strict=True):
                if crossing.requires_grad and not is_met:
                    raise ValueError(
                        f"parallel.schedule is {schedule!r}, but a stage ({names[layers[0]]} to {names[layers[-1]]}) "
                        "returns a tensor that depends on its weights alone, whose gradients torch would leave out: "
                        "take 'interleaved'"
                    )


def _lowered(model: Model, precision: Precision) -> Model:
    """As it will compute; the model itself stays as it is, for the stages to lower."""
    if precision.name == "f32":
        return model
    module = copy.deepcopy(model.module)
    precision.lower(module)
    return replace(model, module=module)


def _samples_a_part(recipe: Recipe, mesh: Mesh, microbatches: int) -> int:
    """Of a microbatch. ValueError where the recipe's numbers do not go together."""
    parallel, training = recipe.parallel, recipe.training
    if training.accumulate > 1:
        raise ValueError(
            f"training.accumulate is {training.accumulate}, but a pipeline goes through a batch in microbatches: "
            f"leave it out and set parallel.microbatches = {microbatches * training.accumulate}"
        )
    if parallel.schedule in SPLIT_BACKWARD and parallel.zero >= 2:
        raise ValueError(
            f"parallel.schedule is {parallel.schedule!r}, which cannot go with parallel.zero = {parallel.zero}: FSDP "
            "would miss gradients that are computed apart; make it 1, or take 'interleaved'"
        )
    if parallel.schedule in SPLIT_BACKWARD and parallel.tables != "replicated":
        raise ValueError(
            f"parallel.schedule is {parallel.schedule!r}, under which all gradients are averaged, but "
            f"parallel.tables = {parallel.tables!r} leaves tables to their owners: take 'interleaved'"
        )
    if parallel.schedule == "zero-bubble-v" and parallel.interleave != 2:
        raise ValueError(
            f"parallel.interleave is {parallel.interleave}, but parallel.schedule = 'zero-bubble-v' is made for 2: "
            "leave it out, or take 'zero-bubble'"
        )
    stages = parallel.pipeline
    if parallel.schedule == "1f1b" and microbatches < stages:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = '1f1b' cannot do with {stages} "
            f"stages: make it {stages} or more, or take 'gpipe'"
        )
    rounds = max(1, microbatches // stages)
    if parallel.schedule in ("interleaved", "zero-bubble") and microbatches % rounds:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which parallel.schedule = {parallel.schedule!r} cannot share "
            f"out over {stages} ranks: make it {stages * rounds} or {stages * (rounds + 1)}"
        )
    shares = 1 if training.scaling == "weak" else mesh.data.size
    held = training.batch // shares
    if held == 0 or held % microbatches:
        raise ValueError(
            f"parallel.microbatches is {microbatches}, which does not divide the {held} samples that a pipeline takes "
            f"a step: make training.batch a multiple of {shares * microbatches}"
        )
    return held // microbatches


def _most(recipe: Recipe, layers: int) -> int:
    each = recipe.parallel.interleave if recipe.parallel.schedule in SEVERAL_A_RANK else 1
    return layers // each
