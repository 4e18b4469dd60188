"""Train a small network in plain NumPy on several ranks, each on its part of every batch.

    python examples/launch.py 3 examples/numpy_mlp.py        # or mpirun, srun, torchrun

At the end rank 0 trains once more, alone, on whole batches, and compares the parameters. Both do the same sums in
another order. A gradient is a mean over a batch of B samples. In another order of summation the gradient differs by at
most about B u |g|, with u = 2^-53 and |g| the mean of the terms' magnitudes (Higham 2002, section 4.2). So a step of
rate lr moves the parameters apart by lr B u |g|. Over S steps, with |g| about 1 here and earlier differences amplified
by no more than a factor A = 100 by later steps:

    bound = A * S * lr * B * u = 100 * 200 * 0.2 * 48 * 2^-53 = 2.1e-11
"""

from typing import Any

import numpy as np

import netfold.horovod as hvd

STEPS, BATCH, RATE = 200, 48, 0.2  # 48 samples are cut evenly for 1, 2, 3, 4, 6, 8 ... ranks
BOUND = 100 * STEPS * RATE * BATCH * 2.0**-53

Parameters = dict[str, Any]


def initial(seed: int) -> Parameters:
    draw = np.random.default_rng(seed)
    return {
        "w1": draw.normal(0, 0.5, (4, 32)), "b1": np.zeros(32),
        "w2": draw.normal(0, 0.2, (32, 1)), "b2": np.zeros(1),
    }  # fmt: skip


def batch(step: int) -> tuple[Any, Any]:
    draw = np.random.default_rng((1, step))
    inputs = draw.uniform(-1, 1, (BATCH, 4))
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True) * 2)


def loss_and_gradients(p: Parameters, inputs: Any, wanted: Any) -> tuple[float, Parameters]:
    hidden = np.tanh(inputs @ p["w1"] + p["b1"])
    error = hidden @ p["w2"] + p["b2"] - wanted
    back = 2 * error / len(inputs)
    into = (back @ p["w2"].T) * (1 - hidden**2)
    gradients = {"w1": inputs.T @ into, "b1": into.sum(axis=0), "w2": hidden.T @ back, "b2": back.sum(axis=0)}
    return float((error**2).mean()), gradients


class Sgd:
    """All that `DistributedOptimizer` asks of an optimizer: `update(gradients)`."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def update(self, gradients: Parameters) -> None:
        for name, gradient in gradients.items():
            self.parameters[name] -= RATE * gradient


def train(parameters: Parameters, optimizer: Any, rank: int, ranks: int) -> float:
    """The last step's loss on this rank's part."""
    loss = 0.0
    part = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for step in range(STEPS):
        inputs, wanted = batch(step)
        loss, gradients = loss_and_gradients(parameters, inputs[part], wanted[part])
        optimizer.update(gradients)
    return loss


def main() -> None:
    hvd.init()
    if BATCH % hvd.size():
        raise SystemExit(f"a batch of {BATCH} cannot be cut evenly for {hvd.size()} ranks")
    parameters = hvd.broadcast_parameters(initial(seed=hvd.rank()))
    first, _ = loss_and_gradients(parameters, *batch(STEPS))
    train(parameters, hvd.DistributedOptimizer(Sgd(parameters)), hvd.rank(), hvd.size())
    last, _ = loss_and_gradients(parameters, *batch(STEPS))
    last = hvd.allreduce(last)

    if hvd.rank() == 0:
        alone = initial(seed=0)
        train(alone, Sgd(alone), 0, 1)
        apart = max(float(np.abs(parameters[name] - alone[name]).max()) for name in alone)
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
