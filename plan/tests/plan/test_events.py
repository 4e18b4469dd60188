"""A step simulated as events: equal to the closed forms where these are exact, with the effects that they omit."""

import random
from dataclasses import replace

import pytest
from even_model import EvenModel, cluster

from netfold_plan.cluster import load_cluster
from netfold_plan.events import IDEAL, Conditions, simulate
from netfold_plan.events.schedule import BACKWARD, FORWARD, WEIGHTS, turn_order
from netfold_plan.job import Job, Split
from netfold_plan.model import Layered, Transformer
from netfold_plan.step import costs, predict
from netfold_plan.step.memory import waiting

CLUSTER = cluster()
GPT = Transformer("gpt", 2048, 16, 24, 1024)
A100 = load_cluster("dgx-a100")


def job(batch, *, micro_batch=1, schedule="1f1b", overlap=False, bucket_bytes=25 * 2**20, **split):
    return Job(batch, micro_batch, Split(**split), schedule=schedule, overlap=overlap, bucket_bytes=bucket_bytes)


def bubble(model, at, job):
    """As a ratio of what the busiest stage computes, as papers give it."""
    said = simulate(model, at, job, IDEAL).prediction
    return said.bubble_s / (said.compute_s + said.exposed_s["tensor"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (4, 4), (4, 16), (8, 32), (8, 4)])
def test_the_bubble_is_stages_minus_one_over_microbatches(schedule, stages, microbatches):
    ratio = bubble(EvenModel(), CLUSTER, job(microbatches, schedule=schedule, pipeline=stages))
    assert ratio == pytest.approx((stages - 1) / microbatches)


@pytest.mark.parametrize(("stages", "microbatches", "virtual_stages"), [(2, 4, 2), (4, 8, 2), (4, 4, 4), (8, 32, 2)])
def test_virtual_stages_divide_the_bubble(stages, microbatches, virtual_stages):
    split = {"pipeline": stages, "interleave": virtual_stages}
    ratio = bubble(EvenModel(), CLUSTER, job(microbatches, schedule="interleaved", **split))
    assert ratio == pytest.approx((stages - 1) / (virtual_stages * microbatches))


@pytest.mark.parametrize(("schedule", "input_bytes"), [("gpipe", 1e7), ("1f1b", 0.0), ("1f1b", 1e7)])
@pytest.mark.parametrize("split", [{}, {"data": 8}, {"pipeline": 4, "data": 2}, {"pipeline": 8, "tensor": 2}])
def test_an_even_step_takes_the_closed_forms_time(schedule, input_bytes, split):
    # Of nodes as large as a stage, so that all messages go between nodes.
    model, at, wanted = EvenModel(input_bytes=input_bytes), cluster(node=2), job(16, schedule=schedule, **split)
    said, closed = simulate(model, at, wanted, IDEAL).prediction, predict(model, at, wanted)
    assert said.step_s == pytest.approx(closed.step_s)
    for part in ("compute_s", "bubble_s", "optimizer_s"):
        assert getattr(said, part) == pytest.approx(getattr(closed, part)), part
    assert said.exposed_s == pytest.approx(closed.exposed_s)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 16), (4, 4), (4, 64), (8, 64), (16, 256)])
def test_one_forward_one_backward_waits_for_messages_in_every_phase(stages, microbatches):
    # Stage s has p - s microbatches on their way, too few to hide both messages of each: 2 (p-1)/p of one a microbatch,
    # and 2 (p-2) to fill and drain. Found here, for stages that take the same.
    wanted, nodes_of_one = job(microbatches, pipeline=stages), cluster(node=1)
    quiet, talking = (
        simulate(EvenModel(input_bytes=size), nodes_of_one, wanted, IDEAL).prediction for size in (0, 1e6)
    )
    messages = (talking.step_s - quiet.step_s) / talking.stages[0].send_s
    assert messages == pytest.approx(2 * ((stages - 1) * microbatches / stages + stages - 2))
    assert talking.exposed_s["pipeline"] == pytest.approx(messages * talking.stages[0].send_s, rel=0.05)


@pytest.mark.parametrize(("batch", "micro_batch"), [(3, 1), (12, 1), (16, 4), (30, 2), (64, 1)])
@pytest.mark.parametrize("split", [{"pipeline": 3}, {"pipeline": 4, "tensor": 4}, {"pipeline": 8, "tensor": 8}])
def test_messages_of_uneven_stages_take_the_closed_forms_time(batch, micro_batch, split):
    # The first and the last stage have words on top, few enough that messages are not hidden behind them.
    model, slow = Transformer("gpt", 2048, 16, 24, 1024, vocabulary=1024), cluster()
    wanted = job(batch, micro_batch=micro_batch, **split)
    said, closed = simulate(model, slow, wanted, IDEAL).prediction, predict(model, slow, wanted)
    assert said.step_s == pytest.approx(closed.step_s, rel=0.01)


@pytest.mark.parametrize(("stages", "microbatches", "virtual_stages"), [(2, 8, 2), (4, 16, 2), (4, 64, 4), (8, 64, 2)])
def test_interleaved_stages_wait_for_messages_only_while_they_fill_and_drain(stages, microbatches, virtual_stages):
    model = EvenModel(input_bytes=1e6)
    wanted = job(microbatches, schedule="interleaved", pipeline=stages, interleave=virtual_stages)
    assert simulate(model, CLUSTER, wanted, IDEAL).prediction.step_s == pytest.approx(
        predict(model, CLUSTER, wanted).step_s
    )


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
def test_a_transformers_time_is_within_five_percent_of_the_closed_form(schedule, batch, split):
    wanted = job(batch, schedule=schedule, **split)
    said = simulate(GPT, A100, wanted, IDEAL).prediction.step_s
    assert said == pytest.approx(predict(GPT, A100, wanted).step_s, rel=0.05)


@pytest.mark.parametrize("name", ["resnet50", "vgg16", "dlrm", "bert-large"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_catalogue_models_time_is_within_five_percent_of_the_closed_form(name, overlap):
    wanted = job(512, micro_batch=32, overlap=overlap, data=16)
    said, closed = simulate(Layered(name), A100, wanted, IDEAL).prediction, predict(Layered(name), A100, wanted)
    assert said.step_s == pytest.approx(closed.step_s, rel=0.05)
    assert said.exposed_s["tables"] == pytest.approx(closed.exposed_s["tables"])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("contention", [False, True])
@pytest.mark.parametrize("oversubscription", [1.0, 4.0])
def test_one_simulated_replica_takes_the_time_of_all_replicas(overlap, contention, oversubscription):
    model = EvenModel(input_bytes=1e7, layer_parameters=1e8)
    at = cluster(oversubscription=oversubscription, latency_s=1e-5)
    wanted = job(64, overlap=overlap, tensor=2, pipeline=4, data=8)
    conditions = Conditions(contention=contention)
    folded = simulate(model, at, wanted, conditions, folded=True).prediction
    assert folded == simulate(model, at, wanted, conditions, folded=False).prediction


@pytest.mark.parametrize("conditions", [IDEAL, Conditions(jitter=0.1), Conditions(interference=1.3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_parts_of_a_step_add_up(conditions, overlap):
    model = EvenModel(input_bytes=1e7, layer_parameters=1e8)
    said = simulate(model, CLUSTER, job(32, overlap=overlap, tensor=2, pipeline=4, data=2), conditions).prediction
    parts = said.compute_s + said.bubble_s + said.optimizer_s + sum(said.exposed_s.values())
    assert parts == pytest.approx(said.step_s)
    assert min(said.compute_s, said.bubble_s, said.optimizer_s, *said.exposed_s.values()) >= -1e-12


@pytest.mark.parametrize("layer_parameters", [1e6, 1e7])
def test_prefetched_weights_take_the_closed_forms_time(layer_parameters):
    model = EvenModel(layer_parameters=layer_parameters)
    wanted = job(64, bucket_bytes=2e6, data=8, zero=3)
    said, closed = simulate(model, CLUSTER, wanted, IDEAL).prediction, predict(model, CLUSTER, wanted)
    assert said.step_s == pytest.approx(closed.step_s, rel=0.05)
    assert said.compute_s == pytest.approx(closed.compute_s)


def test_a_step_with_slow_weight_gathers_takes_the_time_of_the_gathers():
    model = EvenModel(layer_parameters=1e9, moved_bytes=1e6)
    wanted = job(64, data=8, zero=3)
    parts, said = costs(model, CLUSTER, wanted), simulate(model, CLUSTER, wanted, IDEAL).prediction
    talking = 8 * (2 * parts.gathered_s + parts.data_s)
    assert said.step_s - said.optimizer_s == pytest.approx(talking, rel=0.01)
    assert said.exposed_s["data"] == pytest.approx(talking, rel=0.01)


@pytest.mark.parametrize("layer_parameters", [1e6, 1e7])
def test_without_prefetch_computing_waits_for_all_gathers_and_reductions(layer_parameters):
    model = EvenModel(layer_parameters=layer_parameters)
    wanted = replace(job(64, bucket_bytes=2e6, data=8, zero=3), prefetch=False)
    said, closed = simulate(model, CLUSTER, wanted, IDEAL).prediction, predict(model, CLUSTER, wanted)
    parts = costs(model, CLUSTER, wanted)
    assert closed.exposed_s["data"] == pytest.approx(8 * (2 * parts.gathered_s + parts.data_s))
    assert said.step_s == pytest.approx(closed.step_s, rel=0.01)


def test_pipelines_with_sharded_weights_finish():
    model = EvenModel(input_bytes=1e6, layer_parameters=1e7)
    for schedule, virtual_stages in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        wanted = job(64, schedule=schedule, data=4, pipeline=4, interleave=virtual_stages, zero=3)
        folded, whole = (simulate(model, CLUSTER, wanted, folded=folded).prediction for folded in (True, False))
        assert folded == whole and folded.exposed_s["data"] > 0


@pytest.mark.parametrize("layer_parameters", [1e6, 1e7, 1e8])
@pytest.mark.parametrize("split", [{"data": 8}, {"data": 4, "pipeline": 2}])
def test_gradients_beside_the_last_backward_pass_take_the_closed_forms_time(layer_parameters, split):
    model = EvenModel(layer_parameters=layer_parameters)
    wanted = job(64, overlap=True, bucket_bytes=1e7, **split)
    said, closed = simulate(model, CLUSTER, wanted, IDEAL).prediction, predict(model, CLUSTER, wanted)
    assert said.step_s == pytest.approx(closed.step_s, rel=0.05)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 16), (8, 32)])
def test_weight_gradients_fill_the_bubble_as_in_the_zero_bubble_paper(stages, microbatches):
    # Forward, gradients of inputs and of weights take as long as each other: (p-1) of one of them is left of 3 (p-1).
    thirds = EvenModel(weights=True)
    wanted = job(microbatches, schedule="zero-bubble", pipeline=stages)
    said, closed = simulate(thirds, CLUSTER, wanted, IDEAL).prediction, predict(thirds, CLUSTER, wanted)
    assert said.bubble_s / said.compute_s == pytest.approx((stages - 1) / (3 * microbatches), rel=0.01)
    assert said.step_s == pytest.approx(closed.step_s, rel=0.001)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 6), ("zero-bubble", 1)],
)
@pytest.mark.parametrize("batch", [4, 10, 16])
@pytest.mark.parametrize("stage", range(4))
def test_a_stage_holds_the_number_of_microbatches_of_the_memory_model(schedule, virtual_stages, batch, stage):
    wanted = job(batch, schedule=schedule, pipeline=4, interleave=virtual_stages)
    ends = WEIGHTS if schedule == "zero-bubble" else BACKWARD
    kept = most = 0
    for turn in turn_order(schedule, stage, 4, batch, virtual_stages):
        kept += (turn.kind == FORWARD) - (turn.kind == ends)
        most = max(most, kept)
    assert most / virtual_stages == pytest.approx(waiting(stage, batch, wanted))


@pytest.mark.parametrize("seed", range(60))
def test_every_step_finishes_and_its_parts_add_up(seed):
    chance = random.Random(seed)
    schedule = chance.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"])
    stages, data = chance.choice([1, 2, 4]), chance.choice([1, 2, 3])
    split = {
        "data": data,
        "tensor": chance.choice([1, 2]),
        "pipeline": stages,
        "interleave": chance.choice([1, 2, 4]) if schedule in ("interleaved", "zero-bubble") else 1,
        "zero": chance.choice([0, 0, 1, 2, 3]),
    }
    microbatches = stages * chance.randint(1, 4)
    wanted = job(
        microbatches * data,
        schedule=schedule,
        overlap=chance.random() < 0.5,
        bucket_bytes=10 ** chance.uniform(6, 8),
        **split,
    )
    model = EvenModel(
        input_bytes=10 ** chance.uniform(4, 8),
        layer_parameters=10 ** chance.uniform(4, 8),
        weights=chance.random() < 0.5,
    )
    conditions = Conditions(contention=chance.random() < 0.7, interference=chance.choice([1.0, 1.2]))
    at = cluster(node=chance.choice([1, 2, 4]), oversubscription=chance.choice([1.0, 2.0, 8.0]))
    folded, whole = (simulate(model, at, wanted, conditions, folded=folded) for folded in (True, False))
    said = whole.prediction
    if (split["data"] * split["tensor"]) % at.node == 0 or at.tiers[1].oversubscription == 1:
        assert folded.prediction.step_s == pytest.approx(said.step_s)
    parts = said.compute_s + said.bubble_s + said.optimizer_s + sum(said.exposed_s.values())
    assert parts == pytest.approx(said.step_s)
    assert min(said.compute_s, said.bubble_s, said.optimizer_s, *said.exposed_s.values()) >= -1e-9 * said.step_s
    assert all(sum(row) <= said.step_s * (1 + 1e-9) for row in whole.built.step.seconds)
    assert all(0 <= began <= ended for stage in whole.times.buckets_s for began, ended in stage)
