"""ZeRO (Rajbhandari et al. 2020): data-parallel ranks share out what each of them would hold whole.

1: optimizer states, by torch's ZeroRedundancyOptimizer: whole parameters to each rank, beside DDP.
2, 3: gradients and weights too, by FSDP2: of every parameter each rank holds a run of rows (a DTensor). A layer's
weights are gathered before it computes; 3 frees them after its forward pass and gathers them once more for its
backward pass, 2 keeps them in between: half as much again on the wire for 3, and less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from netfold.train.mesh import Mesh
from netfold.train.model import Chain
from netfold.train.precision import Precision, keeps_statistics
from netfold.train.recipe import Recipe


def zero_level(recipe: Recipe, mesh: Mesh) -> int:
    """The recipe's, or 0 where there is nobody to share with."""
    return recipe.parallel.zero if mesh.data.size > 1 else 0


def shard(module: nn.Module, mesh: Mesh, precision: Precision, *, free_after_forward: bool) -> nn.Module:
    """Cut the parameters of `module` in place over the data axis, a `Chain` layer by layer; names stay.

    Collective over the data axis in every forward and backward pass from now on. Where a module is no chain, all of it
    is one layer: it is gathered at once.
    """
    layers = list(module.layers.values()) if isinstance(module, Chain) else []
    # From the inside out. Batch norm computes with f32 weights whatever it normalises.
    norms = [part for part in module.modules() if keeps_statistics(part)] if precision.name != "f32" else []
    policies = dict.fromkeys([*norms, *layers, module], precision.policy())
    policies.update(dict.fromkeys(norms, MixedPrecisionPolicy(cast_forward_inputs=False)))
    for part, policy in policies.items():
        fully_shard(part, mesh=mesh.device_mesh["data"], reshard_after_forward=free_after_forward, mp_policy=policy)
    return module


def reshard(module: nn.Module) -> None:
    """Leave each rank its own parts alone. After a forward pass that no backward pass followed (ZeRO 2 keeps what it
    gathered): the next one would compute with weights from before the optimizer's step."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shard_optimizer(
    parameters: Sequence[Any],
    kind: Callable[..., torch.optim.Optimizer],
    mesh: Mesh,
    sizes: Mapping[nn.Parameter, int],
    **options: Any,
) -> torch.optim.Optimizer:
    """ZeRO 1's optimizer: each rank steps on its share of the parameters and sends them to the others.

    parameters: a list, or groups as torch's optimizers take them. sizes: what to count each parameter for. Ranks with
    parts of the same parameter must count alike, however many elements each has: they step on it in the same place of
    the data axis.
    """
    return _SharedOut(
        parameters,
        kind,
        sizes,
        process_group=mesh.data.group,
        # One broadcast a rank instead of one a parameter; its buffer has one dtype.
        parameters_as_bucket_view=len({parameter.dtype for parameter in sizes}) == 1,
        **options,
    )


class _SharedOut(ZeroRedundancyOptimizer):
    def __init__(
        self,
        parameters: Sequence[Any],
        kind: Callable[..., torch.optim.Optimizer],
        sizes: Mapping[nn.Parameter, int],
        **options: Any,
    ) -> None:
        self._sizes = sizes
        # Its argument's type is stricter than what it takes: anything that makes an optimizer of groups and options.
        super().__init__(parameters, kind, **options)  # type: ignore[arg-type]

    def _partition_parameters(self, params_per_rank: list[list[Tensor]] | None = None) -> list[list[dict[str, Any]]]:
        """As torch's own (the largest first, each to the rank that has least so far), by the sizes that were given."""
        made: list[list[dict[str, Any]]] = self._partition_parameters_cache  # type: ignore[attr-defined]
        if made:
            return made
        owners: dict[Tensor, int] = {}
        load = [0] * self.world_size
        for parameter in sorted(self._sizes, key=lambda parameter: -self._sizes[parameter]):
            owners[parameter] = load.index(min(load))
            load[owners[parameter]] += self._sizes[parameter]
        # torch's own takes shares that are given for a single group alone.
        made.extend([] for _ in range(self.world_size))
        for group in self.param_groups:
            shares: list[list[Tensor]] = [[] for _ in range(self.world_size)]
            for parameter in sorted(group["params"], key=lambda parameter: -self._sizes[parameter]):
                shares[owners[parameter]].append(parameter)
            self._partition_param_group(group, shares)  # type: ignore[attr-defined]
        return made

    def _verify_same_dense_param_type(self) -> None:
        """Parameters sent one by one may differ in dtype, as batch norm's do under bf16 and f16: torch checks it for
        the buffers that it lays them out in otherwise."""
