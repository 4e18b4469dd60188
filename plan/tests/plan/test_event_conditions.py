"""Effects that closed forms omit: jitter, stragglers, shared links, and computing that messages slow down."""

import math

import pytest
from even_model import EvenModel, cluster

from netfold_plan.events import IDEAL, Conditions, simulate
from netfold_plan.job import Job, Split

CLUSTER, EVEN = cluster(), EvenModel()
PIPELINE = Job(64, 1, Split(data=2, pipeline=4))


def step_s(conditions, model=EVEN, at=CLUSTER, job=PIPELINE):
    return simulate(model, at, job, conditions).prediction.step_s


def test_the_same_seed_gives_the_same_step_and_another_seed_another():
    assert step_s(Conditions(jitter=0.1, seed=3)) == step_s(Conditions(jitter=0.1, seed=3))
    assert step_s(Conditions(jitter=0.1, seed=3)) != step_s(Conditions(jitter=0.1, seed=4))


def test_more_jitter_makes_a_step_longer():
    calm, little, much = (step_s(Conditions(jitter=jitter)) for jitter in (0.0, 0.05, 0.3))
    assert calm < little < much


def test_jitter_of_one_rank_alone_averages_out():
    job = Job(4096, 1, Split())
    assert step_s(Conditions(jitter=0.2), job=job) == pytest.approx(step_s(IDEAL, job=job), rel=0.02)


def test_two_replicas_take_the_expected_maximum_of_two_normal_sums():
    # Of 1024 microbatches each a sum is normal: the larger of two is its deviation / sqrt(pi) above the mean.
    job, jitter = Job(2048, 1, Split(data=2)), 0.5
    computing = simulate(EVEN, CLUSTER, job, IDEAL).prediction.compute_s
    late = [step_s(Conditions(jitter=jitter, seed=seed), job=job) - step_s(IDEAL, job=job) for seed in range(24)]
    # A microbatch is a forward pass and a backward pass of twice its length.
    deviation = jitter * computing / 3 * math.sqrt(1 + 2**2) / math.sqrt(1024)
    assert sum(late) / len(late) == pytest.approx(deviation / math.sqrt(math.pi), abs=0.5 * deviation)


def test_a_straggler_of_a_replica_slows_all():
    job = Job(32, 1, Split(data=4, tensor=2))
    calm = simulate(EVEN, CLUSTER, job, IDEAL).prediction
    slow = simulate(EVEN, CLUSTER, job, Conditions(contention=False, stragglers={5: 1.5})).prediction
    assert slow.step_s - calm.step_s == pytest.approx(0.5 * calm.compute_s)
    assert slow.compute_s == pytest.approx(1.5 * calm.compute_s)


def test_a_faster_rank_shortens_no_step():
    job = Job(32, 1, Split(data=4))
    assert step_s(Conditions(stragglers={2: 0.5}), job=job) == pytest.approx(step_s(Conditions(), job=job))


def test_too_few_links_slow_the_messages_between_stages():
    model, job = EvenModel(input_bytes=1e7), Job(16, 1, Split(data=8, pipeline=4), schedule="gpipe")
    narrow = cluster(oversubscription=4.0)
    alone, shared = (
        simulate(model, narrow, job, Conditions(contention=contention)).prediction for contention in (False, True)
    )
    assert shared.exposed_s["pipeline"] == pytest.approx(4 * alone.exposed_s["pipeline"], rel=0.01)
    assert step_s(Conditions(), model, cluster(), job) == pytest.approx(step_s(IDEAL, model, cluster(), job))


def test_a_collective_on_unshared_links_takes_the_closed_forms_time():
    job = Job(16, 1, Split(data=16))
    for oversubscription in (1.0, 4.0):
        at = cluster(oversubscription=oversubscription)
        model = EvenModel(layer_parameters=1e8)
        assert step_s(Conditions(), model, at, job) == pytest.approx(step_s(IDEAL, model, at, job))


def test_gradients_in_transit_share_ports_with_activations():
    # Interleaved, so that a piece's gradients go out while others still pass activations on.
    model = EvenModel(input_bytes=5e7, layer_parameters=3e7)
    split = Split(data=8, pipeline=4, interleave=4)
    job = Job(32, 1, split, schedule="interleaved", overlap=True)
    assert step_s(Conditions(), model, CLUSTER, job) > step_s(IDEAL, model, CLUSTER, job)


def test_overlap_hides_gradients_and_interference_reduces_the_gain():
    model = EvenModel(layer_parameters=2e7)
    split = Split(data=8)
    one_after_the_other = step_s(IDEAL, model, job=Job(32, 1, split))
    hidden = step_s(IDEAL, model, job=Job(32, 1, split, overlap=True))
    disturbed = step_s(Conditions(contention=False, interference=1.3), model, job=Job(32, 1, split, overlap=True))
    assert hidden < disturbed < one_after_the_other


def test_impossible_conditions_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="jitter is a ratio of 0 or more, not -1"):
        Conditions(jitter=-1)
    with pytest.raises(ValueError, match=r"interference is 1 \(none\) or more, not 0\.5"):
        Conditions(interference=0.5)
    with pytest.raises(ValueError, match="rank 3 cannot compute 0 times as long; 1 is no straggler"):
        Conditions(stragglers={3: 0})
    with pytest.raises(ValueError, match="there is no rank 8 to be slow; ranks are 0 to 7"):
        simulate(EVEN, CLUSTER, PIPELINE, Conditions(stragglers={8: 2.0}))
    with pytest.raises(ValueError, match="jitter and stragglers make ranks differ"):
        simulate(EVEN, CLUSTER, PIPELINE, Conditions(jitter=0.1), folded=True)
