"""From a whole model to this rank's part of it. One file a kind; here is the order they are put together.

tensor and tables cut layers, pipeline takes a run of layers, then zero or data says how ranks that hold the same share
the work on it.
"""

from __future__ import annotations

from netfold.train.examples import Examples
from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.parallel import embeddings, tensor
from netfold.train.parallel.batch_norm import convert_batch_norm
from netfold.train.parallel.pipeline import Pipelined
from netfold.train.parallel.pipeline_plan import Plan
from netfold.train.parallel.shards import Shards
from netfold.train.parallel.unpipelined import Unpipelined
from netfold.train.parallel.zero import zero_level
from netfold.train.recipe import Recipe
from netfold.train.replica import Replica


def parallelise(model: Model, recipe: Recipe, mesh: Mesh, examples: Examples | None = None) -> Replica:
    """This rank's part of `model`, which every rank has made whole and alike. Collective over the world.

    Takes the model over: its modules are cut in place. `examples` are what it will be trained on: a pipeline measures
    its layers on the first of them.
    """
    if recipe.parallel.batch_norm > 1:
        convert_batch_norm(model.module, recipe.parallel.batch_norm, mesh)
    parts = Shards()
    tensor.cut(model, recipe.parallel, mesh, parts)
    embeddings.shard_embeddings(model, recipe, mesh, parts)
    if zero_level(recipe, mesh) < 2:
        tensor.localise(model.module)
    if mesh.pipeline.size > 1:
        return Pipelined(model, recipe, mesh, parts, Plan(model, recipe, mesh, examples))
    return Unpipelined(model, recipe, mesh, parts)
