"""From a whole model to this rank's part of it. One file a kind; here is the order they are put together.

tensor and tables cut layers, pipeline takes a run of layers, then zero or data says how ranks that hold the same share
the work on it.
"""

from __future__ import annotations

from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.parallel.batch_norm import convert_batch_norm
from netfold.train.parallel.whole import Whole
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


def parallelise(model: Model, recipe: Recipe, mesh: Mesh) -> Replica:
    """This rank's part of `model`, which every rank has made whole and alike. Collective over the world.

    Takes the model over: its modules are cut in place.
    """
    if recipe.parallel.batch_norm > 1:
        convert_batch_norm(model.module, recipe.parallel.batch_norm, mesh)
    return Whole(model, recipe, mesh)
