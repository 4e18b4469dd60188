"""An optimizer that averages gradients over the ranks."""

from __future__ import annotations

from typing import Any

from netfold.horovod import job
from netfold.horovod.session import Average, Compression, Session


class DistributedOptimizer:
    """Wraps an object with a method `update(gradients, ...)`, and averages the gradients over the ranks first.

    An optax GradientTransformation has this method: `update(gradients, state, parameters)` returns updates and the new
    state. A plain optimizer may have `update(gradients)`, which changes its parameters in place. Other attributes of
    the optimizer (`init`, a learning rate) are accessible as before. An optimizer whose `step()` finds the gradients
    itself does not fit: call `grouped_allreduce` on the gradients before `step()`.

    gradients: a tree of arrays, of the same shapes on every rank; fused into few messages.
    Call `update` outside of `jax.jit`: a traced array has no values to send.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        op: str = Average,
        compression: str | None = Compression.none,
        session: Session | None = None,
    ) -> None:
        """Wrap an optimizer.

        op: "sum" adds the gradients instead of averaging them.
        compression: see `Compression`.
        session: the ranks to average over; by default those of `netfold.horovod.init`.
        """
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
        """Call `optimizer.update` with the average of all ranks' gradients."""
        session = self._session or job.session()
        reduced = session.grouped_allreduce(gradients, op=self._op, compression=self._compression)
        return self._optimizer.update(reduced, *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # `copy` has made an object without attributes yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)
