"""Steps and bytes of all_reduces, and the optimizer's work, by the formulas of NVIDIA's talk (Hot Chips 2020)."""

import math
from dataclasses import replace

import pytest

from netfold.tuning import DEFAULT_LINKS, Link, Topology
from netfold.tuning.cost import predict
from netfold_plan.cluster import load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Transformer
from netfold_plan.step import Prediction
from netfold_plan.step import predict as predict_step


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_a_ring_takes_2n_minus_2_steps_of_an_nth_each(ranks: int) -> None:
    assert _seconds("all_reduce", "ring", ranks, latency_s=1.0) == 2 * (ranks - 1)
    assert _seconds("all_reduce", "ring", ranks, bytes_per_s=1.0) == pytest.approx(2 * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_two_direct_halves_take_two_steps_and_as_many_bytes_as_a_ring(ranks: int) -> None:
    halves = [(half, "direct", ranks) for half in ("reduce_scatter", "all_gather")]
    assert sum(_seconds(*half, latency_s=1.0) for half in halves) == 2
    sent = sum(_seconds(*half, bytes_per_s=1.0) for half in halves)
    assert sent == pytest.approx(2 * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 8, 512])
def test_in_network_reduction_takes_two_steps_and_sends_the_tensor_once(ranks: int) -> None:
    assert _seconds("all_reduce", "in_network", ranks, latency_s=1.0) == 2
    assert _seconds("all_reduce", "in_network", ranks, bytes_per_s=1.0) == 1


@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 2), ("momentum", 4), ("adam", 6)])
def test_an_optimizer_needs_two_to_six_times_the_weights(optimizer: str, times: int) -> None:
    memory = _step(Job(8, 1, Split(data=8), optimizer=optimizer)).memory
    assert memory.optimizer == pytest.approx(times * memory.weights)


def test_a_distributed_optimizer_has_a_part_of_the_work_and_of_the_state() -> None:
    whole, part = (_step(Job(8, 1, Split(data=8, zero=level))) for level in (0, 1))
    assert part.optimizer_s == pytest.approx(whole.optimizer_s / 8)
    assert part.memory.optimizer == pytest.approx(whole.memory.optimizer / 8)


def _seconds(
    operation: str, algorithm: str, ranks: int, *, latency_s: float = 0.0, bytes_per_s: float = math.inf
) -> float:
    """Of one byte: the time is then the number of steps, or the bytes per byte of the tensor."""
    links = replace(
        DEFAULT_LINKS,
        switches=(bytes_per_s,),  # one port per worker
        network=Link(latency_s, bytes_per_s),
        reduce_bytes_per_s=math.inf,
        message_s=0.0,
        crowding=0.0,
    )
    return predict(operation, algorithm, 1.0, Topology.apart(ranks), links, switch=True)


def _step(job: Job) -> Prediction:
    return predict_step(Transformer("GPT", 1024, 16, 24, 1024), load_cluster("dgx-a100"), job)
