"""The same in JAX: `pip install jax`, then

    python examples/launch.py 3 examples/jax_mlp.py

The optimizer below is a GradientTransformation as optax has them; with optax, write `optax.sgd(RATE, momentum=0.9)`.
Gradients are computed and applied under jit; the ranks' averaging, which leaves JAX, stands between the two.

Rank 0 compares with training alone on whole batches, in float32: u = 2^-24. As examples/numpy_mlp.py says, parameters
differ by at most A S lr B u with the amplification A of later steps; momentum m = 0.9 makes a step's weight
1 / (1 - m) = 10 times the rate, so with A = 10 besides:

    bound = 10 * 10 * 60 * 0.02 * 48 * 2^-24 = 3.4e-4
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import netfold.horovod as hvd

STEPS, BATCH, RATE, MOMENTUM = 60, 48, 0.02, 0.9
BOUND = 10 / (1 - MOMENTUM) * STEPS * RATE * BATCH * 2.0**-24


class Transformation(NamedTuple):
    """A GradientTransformation of optax."""

    init: Any
    update: Any


def sgd_with_momentum() -> Transformation:
    def update(gradients: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(lambda m, g: MOMENTUM * m + g, state, gradients)
        return jax.tree.map(lambda m: -RATE * m, state), state

    return Transformation(lambda parameters: jax.tree.map(jnp.zeros_like, parameters), jax.jit(update))


def initial(seed: int) -> Any:
    one, two = jax.random.split(jax.random.key(seed))
    return [
        {"w": 0.5 * jax.random.normal(one, (4, 32)), "b": jnp.zeros(32)},
        {"w": 0.2 * jax.random.normal(two, (32, 1)), "b": jnp.zeros(1)},
    ]


def batch(step: int) -> tuple[Any, Any]:
    draw = np.random.default_rng((1, step))
    inputs = draw.uniform(-1, 1, (BATCH, 4)).astype(np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True) * 2)


@jax.jit
def loss(parameters: Any, inputs: Any, wanted: Any) -> Any:
    first, second = parameters
    hidden = jnp.tanh(inputs @ first["w"] + first["b"])
    return ((hidden @ second["w"] + second["b"] - wanted) ** 2).mean()


def train(parameters: Any, optimizer: Any, rank: int, ranks: int) -> Any:
    gradients_of = jax.jit(jax.grad(loss))
    state = optimizer.init(parameters)
    part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for step in range(STEPS):
        inputs, wanted = batch(step)
        updates, state = optimizer.update(gradients_of(parameters, inputs[part], wanted[part]), state, parameters)
        parameters = jax.tree.map(jnp.add, parameters, updates)
    return parameters


def main() -> None:
    hvd.init()
    if BATCH % hvd.size():
        raise SystemExit(f"a batch of {BATCH} cannot be cut evenly for {hvd.size()} ranks")
    parameters = hvd.broadcast_parameters(initial(seed=hvd.rank()))
    first = float(loss(parameters, *batch(STEPS)))
    parameters = train(parameters, hvd.DistributedOptimizer(sgd_with_momentum()), hvd.rank(), hvd.size())
    last = float(hvd.allreduce(loss(parameters, *batch(STEPS))))

    if hvd.rank() == 0:
        alone = train(initial(seed=0), sgd_with_momentum(), 0, 1)
        apart = max(
            float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (parameters, alone)), strict=True)
        )
        print(
            f"{hvd.size()} ranks: loss {first:.3f} -> {last:.3f}; parameters {apart:.1e} from a single process, "
            f"bound {BOUND:.1e}"
        )
        assert last < first / 2, "it did not learn"
        assert apart <= BOUND, "other parameters than a single process finds"
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
