"""A step played as events: as the closed forms where those are exact, and what they leave out."""

import pytest
from even_model import EvenModel, cluster

from netfold.plan.cluster import load_cluster
from netfold.plan.events import CALM, Conditions, simulate
from netfold.plan.job import Job, Split
from netfold.plan.model import Transformer
from netfold.plan.step import predict

CLUSTER = cluster()
GPT = Transformer("gpt", 2048, 16, 24, 1024)
A100 = load_cluster("dgx-a100")


def job(batch, *, micro_batch=1, schedule="1f1b", overlap=False, bucket_bytes=25 * 2**20, **split):
    return Job(batch, micro_batch, Split(**split), schedule=schedule, overlap=overlap, bucket_bytes=bucket_bytes)


def bubble(model, at, job):
    """As a ratio of what the busiest stage computes, as papers give it."""
    said = simulate(model, at, job, CALM).prediction
    return said.bubble_s / (said.compute_s + said.exposed_s["tensor"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 4), (4, 16), (8, 32), (8, 4)])
def test_the_bubble_of_one_piece_a_stage_is_stages_less_one_by_microbatches(schedule, stages, microbatches):
    ratio = bubble(EvenModel(), CLUSTER, job(microbatches, schedule=schedule, pipeline=stages))
    assert ratio == pytest.approx((stages - 1) / microbatches)


@pytest.mark.parametrize(("stages", "microbatches", "pieces"), [(2, 4, 2), (4, 8, 2), (4, 4, 4), (8, 32, 2)])
def test_pieces_divide_the_bubble(stages, microbatches, pieces):
    split = {"pipeline": stages, "interleave": pieces}
    ratio = bubble(EvenModel(), CLUSTER, job(microbatches, schedule="interleaved", **split))
    assert ratio == pytest.approx((stages - 1) / (pieces * microbatches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [{}, {"data": 8}, {"pipeline": 4, "data": 2}, {"pipeline": 8, "tensor": 2}])
def test_an_even_step_takes_what_the_closed_form_says(schedule, split):
    wanted = job(16, schedule=schedule, **split)
    said = simulate(EvenModel(), CLUSTER, wanted, CALM).prediction
    closed = predict(EvenModel(), CLUSTER, wanted)
    assert said.step_s == pytest.approx(closed.step_s)
    for part in ("compute_s", "bubble_s", "optimizer_s"):
        assert getattr(said, part) == pytest.approx(getattr(closed, part)), part
    assert said.exposed_s == pytest.approx(closed.exposed_s)


@pytest.mark.parametrize(
    ("batch", "split"),
    [
        (16, {"tensor": 8}),
        (32, {"tensor": 4, "data": 2}),
        (32, {"tensor": 2, "pipeline": 4}),
        (128, {"tensor": 8, "pipeline": 4, "data": 4}),
        (512, {"tensor": 8, "pipeline": 8, "data": 8}),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_transformer_takes_within_five_percent_of_the_closed_form(schedule, batch, split):
    wanted = job(batch, schedule=schedule, **split)
    said = simulate(GPT, A100, wanted, CALM).prediction.step_s
    assert said == pytest.approx(predict(GPT, A100, wanted).step_s, rel=0.05)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("contention", [False, True])
@pytest.mark.parametrize("oversubscription", [1.0, 4.0])
def test_replicas_folded_into_one_take_as_long_as_all_of_them(overlap, contention, oversubscription):
    model = EvenModel(input_bytes=1e7, layer_parameters=1e8)
    at = cluster(oversubscription=oversubscription, latency_s=1e-5)
    wanted = job(64, overlap=overlap, tensor=2, pipeline=4, data=8)
    conditions = Conditions(contention=contention)
    folded = simulate(model, at, wanted, conditions, folded=True).prediction
    assert folded == simulate(model, at, wanted, conditions, folded=False).prediction


@pytest.mark.parametrize("conditions", [CALM, Conditions(jitter=0.1), Conditions(interference=1.3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_a_step_add_up(conditions, overlap):
    model = EvenModel(input_bytes=1e7, layer_parameters=1e8)
    said = simulate(model, CLUSTER, job(32, overlap=overlap, tensor=2, pipeline=4, data=2), conditions).prediction
    parts = said.compute_s + said.bubble_s + said.optimizer_s + sum(said.exposed_s.values())
    assert parts == pytest.approx(said.step_s)
    assert min(said.compute_s, said.bubble_s, said.optimizer_s, *said.exposed_s.values()) >= -1e-12
