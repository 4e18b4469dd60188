"""Whole numbers followed through a pass of fake tensors: the rows and classes that a model is asked for.

A fake tensor has a shape and no values, so a table with too few rows passes. Whole numbers are small: what is made of
them alone is computed beside it, and held against the tables that it is looked up in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class IndexTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it inside the fake mode. A row that a table has not, and a class beyond the last one, raise ValueError."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        # With the fake tensor itself, so that no other one has its number.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def tell(self, fake: Tensor, real: Tensor) -> None:
        """What `fake` stands for, where it is whole numbers."""
        if not real.is_floating_point():
            self._known[id(fake)] = fake, real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("embedding", "_embedding_bag"):
            self._check(args[1], args[0].shape[0], self._names.get(id(args[0]), "a table"), "rows")
        elif name in ("nll_loss_forward", "nll_loss2d_forward"):
            self._check(args[1], args[0].shape[1 if args[0].ndim > 1 else 0], "the loss", "classes", args[4])
        result = func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        whole = isinstance(result, Tensor) and not result.is_floating_point() and not result.is_complex()
        drawn = torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or func._schema.is_mutable
        if whole and not drawn and all(id(each) in self._known for each in given):
            real_args, real_kwargs = tree_map_only(Tensor, lambda each: self._known[id(each)][1], (args, kwargs))
            with unset_fake_temporarily():
                self.tell(result, func(*real_args, **real_kwargs))
        return result

    def _check(self, asked: Tensor, count: int, where: str, what: str, ignored: int | None = None) -> None:
        if id(asked) not in self._known:
            return
        with unset_fake_temporarily():
            numbers = self._known[id(asked)][1]
            beyond = (numbers < 0) | (numbers >= count)
            wrong = numbers[beyond if ignored is None else beyond & (numbers != ignored)]
            worst = int(wrong.max()) if wrong.numel() else None
        if worst is not None:
            raise ValueError(f"{where} has {count} {what}, and is asked for number {worst}")
