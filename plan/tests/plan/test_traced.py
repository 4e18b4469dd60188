"""Traced models in the planner: cut into blocks and buckets, and interpolated between two batch sizes."""

from __future__ import annotations

import pytest

from netfold_plan.cluster import load_cluster
from netfold_plan.events import simulate
from netfold_plan.job import Job, Split
from netfold_plan.model import Gradient, Kernels, Matmul, Part, ShardSpec, TensorSize, Traced
from netfold_plan.step import predict


def part(name: str, samples: int, received: int, parameters: int = 64 * 64) -> Part:
    """A product by a weight, whose gradient is another one; it receives so many numbers per sample."""
    forward = Kernels((Matmul(samples, 64, 64),), TensorSize(100.0 + samples), 2)
    backward = Kernels((Matmul(samples, 64, 64), Matmul(64, 64, samples)), TensorSize(2.0 * samples), 3)
    return Part(
        name,
        forward,
        backward,
        parameters,
        TensorSize(64.0 * samples, 8.0 * samples),
        TensorSize(received * samples),
        1,
    )


# A residual block's inside hands on more than its ends.
RECEIVED = (0, 64, 128, 128, 64, 128, 64)
MODEL = Traced(
    "seven",
    4,
    tuple(part(f"{number}", 4, received) for number, received in enumerate(RECEIVED)),
    tuple(part(f"{number}", 8, received) for number, received in enumerate(RECEIVED)),
    tuple(Gradient(64 * 64, number) for number in reversed(range(7))),
)


def test_a_traced_model_is_cut_where_the_fewest_bytes_pass() -> None:
    assert [(block.start, block.stop) for block in MODEL.blocks] == [(0, 1), (1, 4), (4, 6), (6, 7)]
    sent = [layer.input_bytes for layer in MODEL.layers(ShardSpec(4))]
    assert sent == [0, 64 * 4 * 2, 64 * 4 * 2, 64 * 4 * 2]


def test_costs_at_other_batch_sizes_are_linear_in_samples() -> None:
    once, thrice = MODEL.layers(ShardSpec(4)), MODEL.layers(ShardSpec(12))
    assert [each.forward.matmuls[0].m for each in once] == [4] * 4
    assert thrice[0].forward.matmuls == (Matmul(12, 64, 64),)
    assert thrice[0].backward.matmuls == (Matmul(12, 64, 64), Matmul(64, 64, 12))
    assert thrice[0].forward.moved_bytes == (100 + 12) * 2
    assert thrice[0].kept_bytes == 64 * 12 * 2 + 8 * 12


def test_integers_have_the_same_size_in_every_precision() -> None:
    halves, whole = (MODEL.layers(ShardSpec(4, item_bytes=item))[0].kept_bytes for item in (2, 4))
    assert halves == 64 * 4 * 2 + 8 * 4 and whole == 64 * 4 * 4 + 8 * 4


def test_recomputation_keeps_a_blocks_input() -> None:
    layers = MODEL.layers(ShardSpec(4, recomputation="full"))
    assert [layer.kept_bytes for layer in layers] == [0, 64 * 4 * 2, 64 * 4 * 2, 64 * 4 * 2]
    assert all(layer.again == layer.forward for layer in layers)


def test_a_traced_model_names_the_splits_it_lacks() -> None:
    with pytest.raises(ValueError, match="use tensor 1"):
        MODEL.layers(ShardSpec(1, tensor=2))
    with pytest.raises(ValueError, match="for transformers"):
        MODEL.layers(ShardSpec(1, recomputation="selective"))


def test_a_bucket_closes_with_the_gradient_that_fills_it_and_the_first_bucket_is_smaller() -> None:
    big = 2**18  # a megabyte of f32
    parts = tuple(part(f"{number}", 4, 64, big) for number in range(6))
    gradients = tuple(Gradient(big, number) for number in reversed(range(6)))
    model = Traced("six", 4, parts, parts, gradients)
    found = [(bucket.elements / big, bucket.layer) for bucket in model.buckets(2.5 * 2**20, 4)]
    assert found == [(1, 5), (3, 2), (2, 0)]


def test_the_last_bucket_is_exposed_by_the_closed_form_and_in_simulation() -> None:
    big = 2**22
    parts = tuple(part(f"{number}", 4, 64, big) for number in range(6))
    gradients = tuple(Gradient(big, number) for number in reversed(range(6)))
    model = Traced("six", 4, parts, parts, gradients)
    job = Job(64, 4, Split(data=16), overlap=True)
    for network in ("ethernet-1g", "ethernet-100g"):
        cluster = load_cluster(network)
        found, played = predict(model, cluster, job), simulate(model, cluster, job).prediction
        assert found.exposed_s["data"] > 0
        assert played.step_s == pytest.approx(found.step_s, rel=1e-9)


def test_layers_of_equal_width_may_be_cut_anywhere() -> None:
    parts = tuple(part(f"{number}", 4, 64 if number else 0) for number in range(5))
    assert len(Traced("five", 4, parts, parts, ()).blocks) == 5
