"""Layers cut within themselves: every rank of the `tensor` axis has a part of each weight and does a part of the work.

Names follow torch, which counts rows and columns of the transposed weight, [inputs, outputs]. *Colwise* (the talk's
row-wise): a rank has some rows of the stored weight [outputs, inputs], needs all of the input and computes some of the
output. *Rowwise* (the talk's column-wise): a rank has some columns of the stored weight, needs some of the input and
computes a summand of the output. Colwise, then rowwise needs nothing between the two (Shoeybi et al. 2019, section 3).

Which layer is cut how is the model's to say (`Model.tensor_plan`), in the styles below or in torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from netfold.train.mesh import Mesh
from netfold.train.model import Model
from netfold.train.parallel.shards import Shards
from netfold.train.parallel.tied import tied_names
from netfold.train.recipe import Parallel, constraints
from netfold.train.recipe.errors import RecipeError


class _Linear(ParallelStyle):
    """What torch's two styles of linear layers are made with here."""

    def __init__(
        self,
        source: Placement | None = None,
        result: Placement | None = None,
        *,
        unit: int = 1,
        units: str = "outputs",
    ) -> None:
        super().__init__(input_layouts=source, output_layouts=result)  # type: ignore[call-arg]
        self.unit, self.units = unit, units


class ColwiseLinear(_Linear, ColwiseParallel):
    """A linear layer's weight and bias cut along the outputs.

    source: how the input comes, `Replicate()` (whole) or `Shard(-1)` (gathered here: an all_gather, and a
    reduce_scatter of its gradient). result: how the output leaves, `Shard(-1)` or `Replicate()` (an all_gather).
    unit: outputs that must stay on one rank together, as a head's do; they are counted as `units`.
    """


class RowwiseLinear(_Linear, RowwiseParallel):
    """A linear layer's weight cut along the inputs; its bias is whole, and added once.

    source: how the input comes, `Shard(-1)` or `Replicate()` (each rank takes its share; an all_gather of its
    gradient). result: how the summands are added up, `Replicate()` (an all_reduce), or `Shard(-1)` or another
    dimension's (a reduce_scatter, and an all_gather of the gradient). unit, units: as in `ColwiseLinear`, where the
    result is cut along the outputs.
    """


class ShardSequence(ParallelStyle):
    """What a module returns, [n, s, ...] and whole on every rank, leaves as this rank's part of the sequence.

    No communication; an all_gather of its gradient. From here on, what acts on each token alone (norms, skips) is done
    once and not on every rank (Korthikanti et al. 2022, section 4.2).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _module, _inputs, output: self._cut(output, device_mesh))
        return module

    @staticmethod
    def check(whole: Tensor, ranks: int) -> None:
        """Raises RecipeError where DTensor would cut unequal parts: what is made of them takes them for equal."""
        if whole.shape[1] % ranks:
            raise RecipeError(
                [
                    f"parallel.sequence: a sequence of {whole.shape[1]} cannot be cut into parallel.tensor = {ranks} "
                    "equal parts; change its length (context) or parallel.tensor"
                ]
            )

    def _cut(self, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        self.check(whole, mesh.size())
        cut = DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
        return cut.to_local()


def cut(model: Model, parallel: Parallel, mesh: Mesh, parts: Shards) -> None:
    """Cut `model`'s layers in place, by its plan, among the ranks of the tensor axis; no communication.

    Weights that are cut become DTensors on `mesh.device_mesh["tensor"]`, of which every rank keeps its own part of what
    it has made, and `parts` learns which that is. Activations are plain tensors still. fully_shard takes such a module
    as it is; for DDP, or for none, `localise` it. Raises ValueError where it cannot be cut so.
    """
    styles = styles_of(model, parallel)
    if mesh.tensor.size == 1:
        return
    axis = mesh.device_mesh["tensor"]
    shared = tied_names(model.module)
    cut_along(model.module, styles, axis)
    for names in shared:
        if any(isinstance(model.module.get_parameter(name), DTensor) for name in names):
            raise ValueError(
                f"parallel.tensor = {mesh.tensor.size}: {names[0]} and {names[1]} are one weight, and would be two "
                "once the layers are cut; use tensor = 1, or a tensor_plan that leaves both layers whole"
            )
    for name, parameter in model.module.named_parameters():
        if isinstance(parameter, DTensor):
            parts.add(name, axis, parameter.placements, parameter.shape)


def styles_of(model: Model, parallel: Parallel) -> Mapping[str, Any]:
    """By the path of each module that is cut, how. Raises ValueError where it cannot be cut so."""
    if said := constraints.sequence(parallel):
        raise RecipeError(said)
    if parallel.tensor == 1:
        return {}
    if model.tensor_plan is None:
        raise ValueError(
            f"parallel.tensor = {parallel.tensor}: this model does not say how its layers are cut "
            "(Model.tensor_plan); use tensor = 1"
        )
    styles = model.tensor_plan(parallel.style, parallel.sequence)
    there = dict(model.module.named_modules())
    for path, style in styles.items():
        if path not in there:
            raise ValueError(f"parallel.tensor = {parallel.tensor}: the model's plan cuts {path!r}, which it has not")
        _check(path, there[path], style, parallel.tensor)
    return styles


@contextlib.contextmanager
def sequences_checked(module: nn.Module, styles: Mapping[str, Any], ranks: int) -> Iterator[None]:
    """Meanwhile what `module` computes whole is held against the cuts it will have. Raises as ShardSequence.check does.

    styles: as of `styles_of`.
    """

    def look(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
        ShardSequence.check(output, ranks)

    cut = [path for path, style in styles.items() if isinstance(style, ShardSequence)]
    hooks = [module.get_submodule(path).register_forward_hook(look) for path in cut]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def cut_along(module: nn.Module, styles: Mapping[str, Any], axis: DeviceMesh) -> None:
    """Cut in place what is inside `module`, along `axis`; no communication."""
    for path, style in styles.items():
        # No rank's weights are sent to the others: all have made the same.
        parallelize_module(module.get_submodule(path), axis, style, src_data_rank=None)


def localise(module: nn.Module) -> None:
    """From now on the parameters of `module` that are DTensors are plain tensors, this rank's parts.

    Optimizers, DDP and clipping then need to know nothing of DTensors. A parameter is one only while the layer that
    has it computes; its gradient is made whole in that layer's backward (that of a norm on a part of the sequence is a
    summand: an all_reduce). DDP given a device mesh does the like, but only where there is more than one data-parallel
    rank, and for the whole module at once: a part of it would be left without.
    """
    for layer in module.modules():
        cut = {name: held for name, held in layer.named_parameters(recurse=False) if isinstance(held, DTensor)}
        for name, held in cut.items():
            layer.register_parameter(name, nn.Parameter(held.to_local().detach(), held.requires_grad))
        if cut:
            lent = _Lent(cut)
            layer.register_forward_pre_hook(lent.lend)
            layer.register_forward_hook(lent.take_back, always_call=True)


class _Lent:
    """A layer's parameters, lent to it as DTensors while it computes."""

    def __init__(self, cut: Mapping[str, DTensor]) -> None:
        self._specs = {
            name: (part.device_mesh, part.placements, part.shape, part.stride()) for name, part in cut.items()
        }
        self._before: dict[str, Any] = {}

    def lend(self, layer: nn.Module, _inputs: Any) -> None:
        for name, (mesh, placements, shape, stride) in self._specs.items():
            # An attribute of the object hides the parameter of this name, which stays registered. There may be one
            # already: a copy in a lower precision (`Precision.lend`).
            self._before[name] = layer.__dict__.get(name)
            layer.__dict__[name] = DTensor.from_local(
                getattr(layer, name), mesh, placements, run_check=False, shape=shape, stride=stride
            )

    def take_back(self, layer: nn.Module, _inputs: Any, _output: Any) -> None:
        for name in self._specs:
            layer.__dict__.pop(name, None)
            if (before := self._before.pop(name, None)) is not None:
                layer.__dict__[name] = before


def _check(path: str, module: nn.Module, style: Any, ranks: int) -> None:
    """Parts must be equal: what is made of them afterwards takes them for that."""
    if not isinstance(module, nn.Linear):
        return
    row, column = isinstance(style, ColwiseParallel), isinstance(style, RowwiseParallel)
    outputs = row or (column and style.output_layouts == (Shard(-1),))
    unit, units = (style.unit, style.units) if isinstance(style, ColwiseLinear | RowwiseLinear) else (1, "outputs")
    for asked, count, what in ((outputs, module.out_features // unit, units), (column, module.in_features, "inputs")):
        if asked and count % ranks:
            raise ValueError(
                f"parallel.tensor = {ranks}: {path} has {count} {what}, of which {ranks} ranks cannot have equally "
                f"many; use a divisor of {count}"
            )
