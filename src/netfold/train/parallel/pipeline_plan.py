"""How a chain is to go over the ranks of a pipeline: which stages, of which layers, in how many microbatches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from netfold.train.examples import Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Chain, Model
from netfold.train.parallel.layer_timing import LayerTimings, time_layers
from netfold.train.parallel.stages import Cut, cut
from netfold.train.precision import Precision
from netfold.train.recipe import Parallel, Recipe
from netfold.train.recipe.schedules import SPLIT_BACKWARD, stages_a_rank
from netfold.train.recipe.split import split


class Plan:
    """Made while every rank still holds every layer."""

    def __init__(self, model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None) -> None:
        """Measures the layers on a microbatch of the first examples. Collective over the world.

        Raises ValueError, on every rank, where the recipe asks for what cannot be.
        """
        parallel = recipe.parallel
        check_chain(model, parallel)
        chain = model.module
        assert isinstance(chain, Chain)
        shares = split(recipe, parallel.pipeline * mesh.data.size * parallel.tensor)
        self.microbatches, self.samples = shares.microbatches, shares.samples
        if examples is None:
            raise ValueError(
                f"parallel.pipeline is {parallel.pipeline}, but no examples were given: parallelise must have some, to "
                "measure the layers on"
            )
        precision = Precision(recipe.training.precision)
        self.measured: LayerTimings = time_layers(_lowered(model, precision), examples, self.samples, mesh, precision)
        self.cut: Cut = cut(self.measured.costs_ns, shares.stages)
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


def check_chain(model: Model, parallel: Parallel) -> None:
    """ValueError where `model` cannot be cut into the stages that are asked for."""
    chain = model.module
    if not isinstance(chain, Chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, but the model is a {type(chain).__name__}, which cannot be "
            "cut: make it a netfold.train.Chain of layers"
        )
    each = stages_a_rank(parallel)
    if parallel.pipeline * each > len(chain):
        raise ValueError(
            f"parallel.pipeline is {parallel.pipeline}, which with parallel.schedule = {parallel.schedule!r} makes "
            f"{parallel.pipeline * each} stages, but the model has {len(chain)} layers: make it {len(chain) // each} "
            "or less"
        )
