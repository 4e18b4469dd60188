"""The catalogue's models in the planner."""

import pytest

from netfold_plan.cluster import load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Layered, ShardSpec
from netfold_plan.model.catalogue import MODELS, find_model
from netfold_plan.step import predict


@pytest.mark.parametrize("name", MODELS)
def test_the_matmuls_of_a_layer_have_its_flops(name: str) -> None:
    model = Layered(name)
    listed = find_model(name).layers
    for layer, one in zip(listed, model.layers(ShardSpec(3)), strict=True):
        if one.forward.matmuls and layer.flops >= 2 * max(layer.counts):
            assert one.forward.flops == pytest.approx(3 * layer.flops, rel=1e-9), layer.name
        assert one.parameters == sum(layer.counts)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "dlrm", "edsr"])
def test_a_measured_model_takes_its_published_time(name: str) -> None:
    speed = find_model(name).speed
    job = Job(speed.batch, speed.batch, Split(), precision="f32", optimizer="sgd")
    found = predict(Layered(name, measured=True), load_cluster("dgx-1"), job)
    assert found.compute_s == pytest.approx(speed.batch / speed.samples_per_s)


def test_resnet_50_keeps_about_12_gb_at_a_batch_of_256() -> None:
    job = Job(256, 256, Split(), precision="f16", optimizer="momentum", gradient_bytes=2)
    found = predict(Layered("resnet50"), load_cluster("dgx-1"), job)
    assert found.memory.activations == pytest.approx(12e9, rel=0.1)


def test_in_network_reduction_speeds_up_a_model_with_many_parameters() -> None:
    cluster, model = load_cluster("switchml-10g"), Layered("vgg16", measured=True)
    split = Split(data=8)
    ring, switch = (
        predict(model, cluster, Job(512, 64, split, "f32", optimizer="momentum", overlap=True, in_network=word))
        for word in (False, True)
    )
    assert 1.2 < switch.samples_per_s / ring.samples_per_s < 4


def test_a_recommender_waits_for_its_tables() -> None:
    cluster, job = load_cluster("dgx-1"), Job(65536, 4096, Split(data=16), precision="f32", optimizer="sgd")
    found = predict(Layered("dlrm", measured=True), cluster, job)
    assert found.exposed_s["tables"] > 0


def test_tensor_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor ranks cannot split its layers; use tensor 1"):
        Layered("vgg16").layers(ShardSpec(1, tensor=2))
