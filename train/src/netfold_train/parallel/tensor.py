"""Tensor parallelism: every rank of the `tensor` axis holds a part of each weight and does a part of the work.

Names follow torch, which counts rows and columns of the transposed weight, [inputs, outputs]. *Colwise* (the talk's
row-wise): a rank has some rows of the stored weight [outputs, inputs], needs the whole input and computes a part of the
output. *Rowwise* (the talk's column-wise): a rank has some columns of the stored weight, needs a part of the input and
computes a summand of the output. A colwise layer before a rowwise layer needs no communication between the two
(Shoeybi et al. 2019, section 3).

The model says how each layer is cut (`Model.tensor_plan`), in torch's styles. A colwise layer cuts weight and bias; a
rowwise layer's bias is whole, and added once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

from netfold_train.models.model import Model, tied_names
from netfold_train.parallel.mesh import Mesh
from netfold_train.recipe import Parallel
from netfold_train.recipe.errors import RecipeError


def in_units(style: ParallelStyle, outputs: int, name: str) -> ParallelStyle:
    """Let `style` cut a linear layer's outputs only between units of so many `outputs`, such as heads.

    name: of the units, for errors.
    """
    style.unit = outputs, name  # type: ignore[attr-defined]
    return style


def cut(model: Model, parallel: Parallel, mesh: Mesh) -> None:
    """Cut `model`'s layers in place, by its plan, among the ranks of the tensor axis; no communication.

    A weight that is cut becomes a DTensor on `mesh.device_mesh["tensor"]`: every rank keeps its own part of the weight
    that it has made. Activations stay plain tensors. fully_shard accepts such a module, and DDP does not. Raises
    ValueError if the model cannot be cut so.
    """
    styles = styles_of(model, parallel)
    if mesh.tensor.size == 1:
        return
    check_sequences(model.module, styles, mesh.tensor.size)
    axis = mesh.device_mesh["tensor"]
    shared = tied_names(model.module)
    cut_along(model.module, styles, axis)
    for names in shared:
        if any(isinstance(model.module.get_parameter(name), DTensor) for name in names):
            raise ValueError(
                f"parallel.tensor = {mesh.tensor.size}: {names[0]} and {names[1]} are one weight, which a cut would "
                "make two; use tensor = 1, or a tensor_plan that leaves both layers whole"
            )


def styles_of(model: Model, parallel: Parallel) -> Mapping[str, Any]:
    """The style of each module that is cut, by the module's path. Raises ValueError if it cannot be cut so."""
    if parallel.tensor == 1:
        return {}
    if model.tensor_plan is None:
        raise ValueError(
            f"parallel.tensor = {parallel.tensor}: this model has no plan to cut its layers "
            "(Model.tensor_plan); use tensor = 1"
        )
    styles = model.tensor_plan(parallel.style, parallel.sequence)
    there = dict(model.module.named_modules())
    for path, style in styles.items():
        if path not in there:
            raise ValueError(
                f"parallel.tensor = {parallel.tensor}: the model's plan cuts {path!r}, which does not exist"
            )
        _check(path, there[path], style, parallel.tensor)
    return styles


def check_sequences(module: nn.Module, styles: Mapping[str, Any], ranks: int) -> None:
    """From now on a pass raises RecipeError if a module's output cannot be cut equally along the sequence.

    module: the whole. styles: of `styles_of`. The local tensors must be equal in size, but DTensor would cut any.
    """

    def check(_module: nn.Module, _inputs: Any, whole: Tensor) -> None:
        if whole.shape[1] % ranks:
            raise RecipeError(
                [
                    f"parallel.sequence: a sequence of {whole.shape[1]} cannot be cut into parallel.tensor = {ranks} "
                    "equal parts; change its length (context) or parallel.tensor"
                ]
            )

    for path, style in styles.items():
        if isinstance(style, PrepareModuleOutput) and style.desired_output_layouts == (Shard(1),):
            module.get_submodule(path).register_forward_hook(check)


def cut_along(module: nn.Module, styles: Mapping[str, Any], axis: DeviceMesh) -> None:
    """Cut the modules inside `module` in place, along `axis`; no communication."""
    for path, style in styles.items():
        # All ranks have made the same weights, so none are sent.
        parallelize_module(module.get_submodule(path), axis, style, src_data_rank=None)


def _check(path: str, module: nn.Module, style: Any, ranks: int) -> None:
    """Raise ValueError if the parts would be unequal: the local tensors must be equal in size."""
    if not isinstance(module, nn.Linear):
        return
    rowwise = isinstance(style, RowwiseParallel)
    outputs = isinstance(style, ColwiseParallel) or (rowwise and style.output_layouts == (Shard(-1),))
    unit, units = getattr(style, "unit", (1, "outputs"))
    for asked, count, what in ((outputs, module.out_features // unit, units), (rowwise, module.in_features, "inputs")):
        if asked and count % ranks:
            raise ValueError(
                f"parallel.tensor = {ranks}: {path} has {count} {what}, which {ranks} ranks cannot divide equally; "
                f"use a divisor of {count}"
            )
