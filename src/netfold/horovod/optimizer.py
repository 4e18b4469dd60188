"""An optimizer whose gradients are every rank's."""

from __future__ import annotations

from typing import Any

from netfold.horovod import job
from netfold.horovod.session import Average, Compression, Session


class DistributedOptimizer:
    """Wraps anything that has `update(gradients, ...)`: gradients are averaged over the ranks first.

    That one method is the whole protocol. It is what an optax GradientTransformation has (`update(gradients, state,
    parameters)` returns updates and the new state), and what a plain optimizer of a few lines can have
    (`update(gradients)` changes its parameters in place). Whatever else the optimizer has (`init`, a learning rate) is
    reached as before. A `step()` that finds its gradients somewhere itself does not fit: call `grouped_allreduce` on
    them before it.

    gradients: a tree of arrays, the same on every rank; fused into few messages. Call `update` outside of `jax.jit`: a
    traced array has no values to send. With `op="sum"` gradients are added instead; `compression`: see `Compression`.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        op: str = Average,
        compression: str | None = Compression.none,
        session: Session | None = None,
    ) -> None:
        """`session`: the ranks to average over; default: those of `netfold.horovod.init`."""
        if not hasattr(optimizer, "update"):
            raise TypeError(
                f"DistributedOptimizer: a {type(optimizer).__name__} has no update(gradients, ...); call "
                "grouped_allreduce on the gradients, and then your optimizer"
            )
        self._optimizer = optimizer
        self._op = op
        self._compression = compression
        self._session = session

    def update(self, gradients: Any, *args: Any, **options: Any) -> Any:
        """`optimizer.update` with the ranks' average of `gradients` in their place."""
        session = self._session or job.session()
        reduced = session.grouped_allreduce(gradients, op=self._op, compression=self._compression)
        return self._optimizer.update(reduced, *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # a copy that is not filled in yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)
