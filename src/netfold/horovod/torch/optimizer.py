"""A torch optimizer whose gradients are every rank's: reduced while the backward pass goes on."""

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
from netfold.horovod.torch.exchange import sparse_allreduce_async
from netfold.horovod.torch.handles import Average
from netfold.horovod.torch.process_sets import ProcessSet, global_process_set
from netfold.horovod.torch.reductions import check_operator
from netfold.horovod.torch.world import size

Tensor = torch.Tensor

# Ranks make their optimizers in the same order, and a bucket's name says which one it is of.
_numbers = itertools.count()
_GROUPS = "groups is the number of buckets, or a list of lists of parameters"


class Gradients:
    """The hooks on an optimizer's parameters, and the operations that these began."""

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
        self._sparse: dict[Tensor, Callable[[], Tensor] | None] = {}  # parameters with sparse gradients
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
        """Whether operations were begun and not synchronized."""
        return any(bucket.handle is not None for bucket in self._buckets) or any(
            wait is not None for wait in self._sparse.values()
        )

    def reset(self) -> None:
        """Forget what is under way: a state was loaded, or the job began anew."""
        self._left = dict.fromkeys(self._left, self.passes)
        self.synchronized = False
        self.should_synchronize = True
        self._sparse = dict.fromkeys(self._sparse)
        for bucket in self._buckets:
            bucket.handle, bucket.ready = None, 0

    def synchronize(self) -> None:
        """Begin what was not begun, wait for all, and put the results into the gradients."""
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
        """torch calls this when a gradient was added to `param.grad`."""
        bucket = self._of[param]
        if self._left[param] <= 0:
            raise AssertionError(
                f"the gradient of {self.names[param]} was computed more than {self.passes} times since the last "
                "step(): say backward_passes_per_step=N for N backward passes a step"
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
    """What `DistributedOptimizer` puts before the class of the optimizer that it was given."""

    _gradients: Gradients

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        # Horovod's, by this name; scripts read it.
        return self._gradients.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Backward passes whose gradients are added on this rank before they are reduced."""
        self._gradients.passes = passes
        self._gradients.reset()

    def synchronize(self) -> None:
        """Wait until the gradients are every rank's; for clipping, before `step` inside `skip_synchronize`."""
        self._gradients.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A `step` inside does not synchronize: `synchronize` was called before."""
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
        """As the wrapped optimizer does. AssertionError between a backward pass and its `step` or `synchronize`."""
        if self._gradients.pending:
            raise AssertionError(
                "zero_grad() would change gradients that are being reduced: call step() or synchronize() first"
            )
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """As the wrapped optimizer does; what is under way is forgotten."""
        self._gradients.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]


def DistributedOptimizer(  # noqa: N802 - Horovod's name; what it returns is of the wrapped optimizer's class
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
    """The optimizer with its gradients reduced over all ranks, begun as soon as the backward pass has made them.

    Gradients are packed into buckets of 1 MB, then 25 MB, from the last parameter to the first; each bucket is one
    allreduce, begun when its last gradient is there. Every rank makes its optimizers in the same order, with the same
    parameters in the same order; where buckets differ, `synchronize` raises and names the parameters of both ranks.

    named_parameters: `model.named_parameters()`, for these messages. backward_passes_per_step: passes whose gradients
    are added here before they are reduced. gradient_predivide_factor: an average is made as sum(g / f) * f / size.
    groups: how many buckets, or the parameters of each; parameters in none go alone. sparse_as_dense: reduce sparse
    gradients as dense ones, and not as the ranks' entries one after the other. process_set: whose gradients.
    The given optimizer's state and parameter groups are shared; use only the returned one from now on.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=hvd.Average, and op is {op}")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} must be 1 or more")
    if num_groups:
        warnings.warn("num_groups is an old name: say groups=", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    if process_set.included():
        op = check_operator(op, process_set)
    kind = type(optimizer)
    if issubclass(kind, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already")
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": __name__}))
    # All but the `step` that a learning-rate scheduler may have put on the given one.
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
    own = [
        (f"noname.{i}.{j}", param)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if named is None:
        return {param: name for name, param in own}
    pairs = list(named)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters takes pairs of a name and a parameter, as model.named_parameters() makes them"
        )
    twice = sorted(name for name, times in collections.Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ValueError(f"named_parameters has names that occur twice: {', '.join(twice)}")
    found = {param: name for name, param in pairs}
    unnamed = [name for name, param in own if param not in found]
    if unnamed:
        raise ValueError(
            "named_parameters lacks parameters that the optimizer has; by their group and place in it: "
            f"{', '.join(unnamed)}"
        )
    return found


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(_GROUPS)
        return
    if not isinstance(groups, list):
        raise ValueError(_GROUPS)
    seen: set[int] = set()
    for param in itertools.chain.from_iterable(groups):
        if not isinstance(param, torch.Tensor):
            raise ValueError(_GROUPS)
        if id(param) in seen:
            raise ValueError("groups has a parameter twice")
        seen.add(id(param))
