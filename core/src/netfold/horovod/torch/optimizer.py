"""A torch optimizer that reduces gradients over all ranks, during the backward pass."""

from __future__ import annotations

import collections
import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from netfold.horovod.torch.buckets import Bucket, plan
from netfold.horovod.torch.compression import Compression
from netfold.horovod.torch.operations import Average, check_operator, sparse_allreduce_async
from netfold.horovod.torch.world import ProcessSet, global_process_set, size

Tensor = torch.Tensor

# Ranks make their optimizers in the same order. The names of buckets contain the optimizer's number.
_numbers = itertools.count()


class Gradients:
    """The hooks on an optimizer's parameters, and the operations that the hooks began."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[Tensor, str],
        compression: Any,
        passes: int,
        op: str,
        predivide: float,
        groups: int | Sequence[Sequence[Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.passes = passes
        self.names = names
        self._compression = compression
        self._op = op
        self._predivide = predivide
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._prefix = f"optimizer.{next(_numbers)}"
        # By parameter with sparse gradients: the function that waits for the operation under way.
        self._sparse: dict[Tensor, Callable[[], Tensor] | None] = {}
        self.synchronized = False
        self.should_synchronize = True
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        self._left = dict.fromkeys(params, passes)
        self._buckets: list[Bucket] = []
        if process_set.included() and size() > 1:
            self._buckets = self._grouped(params, groups)
            for bucket in self._buckets:
                for param in bucket.params:
                    register: Any = param.register_post_accumulate_grad_hook
                    register(self._hook)
        self._of = {param: bucket for bucket in self._buckets for param in bucket.params}

    @property
    def pending(self) -> bool:
        """Whether any operation was begun and is not synchronized."""
        return any(each is not None for each in (*(bucket.handle for bucket in self._buckets), *self._sparse.values()))

    def reset(self) -> None:
        """Forget the operations under way, after a state was loaded or the number of passes has changed."""
        self._left = dict.fromkeys(self._left, self.passes)
        self.synchronized = False
        self.should_synchronize = True
        self._sparse = dict.fromkeys(self._sparse)
        for bucket in self._buckets:
            bucket.handle, bucket.ready = None, 0

    def synchronize(self) -> None:
        """Begin the operations that were not begun, wait for all, and copy the results into the gradients."""
        for bucket in self._buckets:
            if bucket.handle is None and bucket.params:
                self._launch(bucket)
        for param, wait in list(self._sparse.items()):
            if wait is None:
                self._launch_sparse(param)
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.finish(self._compression)
        for param, wait in self._sparse.items():
            assert wait is not None
            param.grad = wait().to(param.dtype)
            self._sparse[param] = None
        self._left = dict.fromkeys(self._left, self.passes)
        self.synchronized = True

    def _hook(self, param: Tensor) -> None:
        """Count a gradient. torch calls this after it has added a gradient to `param.grad`."""
        bucket = self._of[param]
        if self._left[param] <= 0:
            raise AssertionError(
                f"the gradient of {self.names[param]} was computed more than {self.passes} times since the last "
                "step(): pass backward_passes_per_step=N for N backward passes a step"
            )
        self._left[param] -= 1
        if param.grad is not None and param.grad.is_sparse and not self._sparse_as_dense and param not in self._sparse:
            self._sparse[param] = None
            bucket.remove(param)
        if self._left[param] > 0:
            return
        if param in self._sparse:
            self._launch_sparse(param)
        else:
            bucket.ready += 1
        if bucket.params and bucket.handle is None and bucket.ready == len(bucket.params):
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch(self._compression, self._op, self._predivide, self._process_set)

    def _launch_sparse(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is None:
            empty = torch.zeros((param.dim(), 0), dtype=torch.int64)
            gradient = torch.sparse_coo_tensor(empty, param.new_zeros(0), param.shape, check_invariants=False)
        name = f"{self._prefix}.{self.names[param]}"
        self._sparse[param] = sparse_allreduce_async(gradient, name, self._op, self._process_set)

    def _grouped(self, params: list[Tensor], groups: int | Sequence[Sequence[Tensor]] | None) -> list[Bucket]:
        if not groups:
            return plan(params, self.names, self._prefix)
        if isinstance(groups, int):
            backward = params[::-1]
            count = min(groups, len(backward))
            bounds = [len(backward) * i // count for i in range(count + 1)]
            listed = [backward[a:b] for a, b in itertools.pairwise(bounds)]
        else:
            own = {id(param) for param in params}
            listed = [[param for param in group if id(param) in own] for group in groups]
            named = {id(param) for group in listed for param in group}
            listed += [[param] for param in params if id(param) not in named]
        return [
            Bucket(f"{self._prefix}.group.{number}", group, self.names)
            for number, group in enumerate(group for group in listed if group)
        ]


class _Distributed:
    """The first base class of the optimizers that `DistributedOptimizer` makes; the second is the given one's class."""

    _gradients: Gradients

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        # Scripts read Horovod's attribute of this name.
        return self._gradients.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up their gradients on this rank before a reduction."""
        self._gradients.passes = passes
        self._gradients.reset()

    def synchronize(self) -> None:
        """Wait until the gradients are reduced. To clip them, call this and then `step` inside `skip_synchronize`."""
        self._gradients.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have a `step` inside the context not synchronize, since `synchronize` was called before."""
        self._gradients.should_synchronize = False
        try:
            yield
        finally:
            self._gradients.should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Synchronize, then step as the wrapped optimizer does."""
        gradients = self._gradients
        if gradients.should_synchronize:
            if gradients.synchronized:
                warnings.warn(
                    "step() reduces the gradients again, which synchronize() had done: call step() inside "
                    "`with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            gradients.synchronize()
        gradients.synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset as the wrapped optimizer does. AssertionError between a backward pass and `step` or `synchronize`."""
        if self._gradients.pending:
            raise AssertionError(
                "zero_grad() would change gradients that are being reduced: call step() or synchronize() first"
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state as the wrapped optimizer does, and forget the operations under way."""
        self._gradients.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name; it returns an object of the wrapped optimizer's class
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the optimizer with its gradients reduced over all ranks.

    Gradients are packed into buckets of 1 MB, then 25 MB, from the last parameter to the first. Each bucket is one
    allreduce, which begins when the bucket's last gradient is computed. All ranks make their optimizers in the same
    order, with the same parameters in the same order. If buckets differ, `synchronize` raises and names the parameters
    of both ranks.

    named_parameters: `model.named_parameters()`, for these messages.
    backward_passes_per_step: passes that add up their gradients on this rank before a reduction.
    gradient_predivide_factor: an average is computed as sum(g / f) * f / size.
    groups: the number of buckets, or the parameters of each; parameters in no group are reduced alone.
    sparse_as_dense: reduce sparse gradients as dense ones, in place of gathering all ranks' entries.
    process_set: the ranks whose gradients are reduced.
    The new optimizer shares the given optimizer's state and parameter groups. Use only the new one.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=hvd.Average, and op is {op}")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more")
    if num_groups:
        warnings.warn("num_groups is the former name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    if process_set.included():
        op = check_operator(op, process_set)
    kind = type(optimizer)
    if issubclass(kind, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": __name__}))
    # A learning-rate scheduler may have set a `step` on the given optimizer: leave it out.
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    made._gradients = Gradients(
        optimizer,
        _names(optimizer, named_parameters),
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return made


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    own = {
        param: f"noname.{i}.{j}"
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    }
    if named is None:
        return own
    pairs = list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters takes pairs of a name and a parameter, as of model.named_parameters()")
    twice = sorted(name for name, times in collections.Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ValueError(f"named_parameters has names that occur twice: {', '.join(twice)}")
    found = {param: name for name, param in pairs}
    unnamed = [name for param, name in own.items() if param not in found]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks parameters of the optimizer, by group and index: {', '.join(unnamed)}"
        )
    return found


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    params = list(itertools.chain.from_iterable(groups)) if isinstance(groups, list) else [None]
    if not all(isinstance(param, torch.Tensor) for param in params):
        raise ValueError("groups is the number of buckets, or a list of lists of parameters")
    if len({id(param) for param in params}) < len(params):
        raise ValueError("groups has a parameter twice")
