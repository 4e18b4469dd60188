"""The search over splits, and its products: fronts, curves, gains, comparisons."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from netfold_plan.cluster import load_cluster
from netfold_plan.cluster.networks import networks, with_network
from netfold_plan.job import Job
from netfold_plan.model.registry import find_model
from netfold_plan.search import SearchResult, Space, search
from netfold_plan.training import Prices, TrainingLength, training_cost
from netfold_plan.variants.compare import compare, parse_comparison
from netfold_plan.variants.hardware import sensitivity
from netfold_plan.variants.scaling_curve import parse_range, scaling_curve

MODEL = find_model("megatron-7b5")
CLUSTER = load_cluster("dgx-a100")
JOB = Job(32)


@cache
def found() -> SearchResult:
    return search(MODEL, CLUSTER, 32, JOB)


def test_every_split_uses_all_devices_and_divides_evenly() -> None:
    assert len(found().candidates) > 500
    for way in found().candidates:
        split = way.job.split
        assert split.ranks == 32 and 32 % (split.data * way.job.micro_batch) == 0
        assert 36 % (split.pipeline * split.interleave) == 0
        assert split.interleave == 1 or way.job.microbatches % split.pipeline == 0
        assert not (split.zero >= 2 and split.pipeline > 1)
    assert len({way.job for way in found().candidates}) == len(found().candidates)


def test_the_best_split_fits_and_no_fitting_split_is_faster() -> None:
    best = found().best.prediction
    assert best.fits
    # The simplest of the splits that are equal to three digits is chosen.
    assert all(way.prediction.step_s >= 0.99 * best.step_s for way in found().candidates if way.prediction.fits)


def test_no_fitting_split_beats_the_pareto_front_in_time_and_memory() -> None:
    front = found().front
    assert front[0] is found().best
    for kept in front:
        for way in found().fitting:
            quicker = way.prediction.step_s < 0.99 * kept.prediction.step_s
            assert not (quicker and way.prediction.memory.total < 0.999 * kept.prediction.memory.total)


def test_fixed_dimensions_stay_and_meaningless_combinations_are_omitted() -> None:
    ways = search(
        MODEL, CLUSTER, 32, JOB, Space(tensor=4, pipeline=1, zero=1, interleave=3, recomputation="full")
    ).candidates
    assert {(way.job.split.tensor, way.job.split.pipeline, way.job.split.data) for way in ways} == {(4, 1, 8)}
    assert {way.job.split.interleave for way in ways} == {1}
    assert {way.job.recomputation for way in ways} == {"full"} and {way.job.split.zero for way in ways} == {1}


def test_zero_3_is_searched_within_the_validated_range_and_beyond_it_on_request() -> None:
    def levels(space: Space) -> set[tuple[int, int]]:
        ways = search(MODEL, CLUSTER, 256, Job(256), space).candidates
        return {(way.job.split.data, way.job.split.zero) for way in ways}

    free = Space(pipeline=1, recomputation="full", micro_batch=1)
    assert (128, 3) in levels(free) and (256, 3) not in levels(free) and (256, 2) in levels(free)
    assert (256, 3) in levels(replace(free, zero=3))


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (Space(tensor=4, pipeline=3), "the fixed ranks make 12"),
        (Space(pipeline=8), "pipeline x interleave does not divide"),
        (Space(tensor=2, pipeline=2, zero=3), "ZeRO 2 and 3 are not for pipelines"),
        (Space(data=32, micro_batch=2), "must be a multiple of data x micro_batch"),
    ],
)
def test_an_uneven_split_is_refused_with_the_reason(space: Space, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        search(MODEL, CLUSTER, 32, JOB, space)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_the_error_for_a_model_that_fits_no_split_has_the_missing_bytes() -> None:
    large = search(find_model("megatron-1t"), CLUSTER, 8, Job(8))
    with pytest.raises(ValueError, match=r"does not fit, however split .* GB too little"):
        _ = large.best


def test_twice_the_memory_makes_no_step_slower_and_gains_are_sorted() -> None:
    gains = sensitivity(MODEL, CLUSTER, found())
    factors = [gain.factor for gain in gains]
    assert factors == sorted(factors, reverse=True) and factors[0] > 1
    assert all(factor > 0.99 for factor in factors)
    assert {gain.what for gain in gains} >= {"2x the memory", "10x the bandwidth of NVSwitch"}


def test_twice_the_flops_give_at_most_twice_the_speed() -> None:
    (gain,) = [gain for gain in sensitivity(MODEL, CLUSTER, found()) if "arithmetic" in gain.what]
    assert 1 < gain.factor <= 2 and "buys" in gain.sentence()


def test_a_job_inside_one_node_ignores_the_links_between_nodes() -> None:
    inside = sensitivity(MODEL, CLUSTER, search(MODEL, CLUSTER, 8, Job(8)))
    assert not [gain for gain in inside if "InfiniBand" in gain.what]


def test_a_scaling_curve_begins_at_efficiency_1_and_marks_sizes_that_do_not_fit() -> None:
    sizes = parse_range("1..16")
    assert sizes == (1, 2, 4, 8, 16)
    points = scaling_curve(MODEL, CLUSTER, Job(16), Space(), devices=16, sizes=sizes, scaling="strong")
    assert points[0].choice is None and "too little" in points[0].why
    there = [point for point in points if point.choice is not None]
    assert there[0].efficiency == 1 and all(point.batch == 16 for point in points)
    weak = scaling_curve(MODEL, CLUSTER, Job(16), Space(), devices=16, sizes=(8, 16), scaling="weak")
    assert [point.batch for point in weak] == [8, 16]


@pytest.mark.parametrize("text", ["8..", "16..8", "a,b", "0..4", "0"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a doubling range"):
        parse_range(text)


def test_a_slower_network_never_makes_a_step_faster_and_affects_only_traffic_between_nodes() -> None:
    slow = with_network(CLUSTER, "ethernet-1")
    assert slow.tiers[0] == CLUSTER.tiers[0] and slow.tiers[1].bytes_per_s == pytest.approx(0.94e9 / 8 / 8)
    variants = compare(found(), MODEL, CLUSTER, parse_comparison("network=ethernet-1,ethernet-10", CLUSTER))
    assert [each.name for each in variants] == ["as it is", "ethernet-1", "ethernet-10"]
    assert variants[1].factor <= variants[2].factor <= 1.01


def test_an_aggregating_network_is_used_and_an_unknown_network_is_refused() -> None:
    (_, there) = compare(found(), MODEL, CLUSTER, parse_comparison("network=in-network", CLUSTER))
    assert there.choice is not None and there.choice.job.in_network
    with pytest.raises(ValueError, match=r"did you mean tcp\?"):
        parse_comparison("network=tpc", CLUSTER)
    with pytest.raises(ValueError, match=r"did you mean network\?"):
        parse_comparison("netwrk=tcp", CLUSTER)


def test_disabled_aggregation_stays_disabled_except_in_a_comparison_of_it() -> None:
    able = with_network(CLUSTER, "in-network")
    without = search(MODEL, able, 32, replace(JOB, in_network=False), Space(tensor=1, pipeline=1))
    variants = compare(without, MODEL, able, parse_comparison("network=infiniband-edr,in-network", able))
    assert [each.choice is not None and each.choice.job.in_network for each in variants] == [False, False, True]


def test_for_a_device_too_small_the_needed_memory_is_reported() -> None:
    tight = search(MODEL, CLUSTER, 32, JOB, Space(tensor=2, pipeline=1, zero=0))
    (_, there) = compare(tight, MODEL, CLUSTER, parse_comparison("cluster=edsr-v100", CLUSTER))
    assert there.choice is None and "does not fit: v100-16 has 16.0 GB" in there.why


def test_compared_splits_fit_beside_the_reserved_memory() -> None:
    # Of 80 GiB, 60 are not for tensors: what the search rejects is not offered elsewhere either.
    full = replace(CLUSTER, device=replace(CLUSTER.device, reserved_bytes=60 * 2**30))
    ways = search(MODEL, full, 32, JOB, Space(pipeline=1))
    assert ways.best.prediction.fits and not ways.candidates[0].prediction.fits
    variants = compare(ways, MODEL, full, parse_comparison("network=infiniband-edr,ethernet-10", full))
    assert all(each.choice is not None and each.choice.prediction.fits for each in variants)
    # A device that would hold the smallest way, were none of its memory taken.
    tight = search(MODEL, CLUSTER, 32, JOB, Space(tensor=4, pipeline=1, zero=0, micro_batch=1, recomputation="none"))
    need = tight.least.prediction.memory.total
    small = replace(CLUSTER, device=replace(CLUSTER.device, name="small", memory_bytes=need + 1, reserved_bytes=2**30))
    (_, there) = compare(tight, MODEL, CLUSTER, (("small", small),))
    assert there.choice is None and there.why == (
        f"does not fit: small has {need / 2**30:.1f} GB, {need / 2**30 - 1:.1f} GB of it for tensors, and needs "
        f"{need / 2**30:.1f} GB"
    )


def test_every_network_names_its_source() -> None:
    assert all(network.source for network in networks().values())


def test_epochs_are_interpolated_between_batches_and_unknown_beyond_them() -> None:
    training = TrainingLength(dataset=1000, epochs=((32.0, 4.0), (128.0, 16.0)))
    assert training.epochs_at(64) == pytest.approx(8.0)
    assert training.epochs_at(16) is None and training.seconds(256, 10.0) is None
    assert training.seconds(32, 100.0) == pytest.approx(40.0)
    assert TrainingLength(samples=500).seconds(7, 100.0) == 5.0 and TrainingLength().seconds(7, 100.0) is None


def test_money_is_charged_by_the_hour_and_energy_by_device_power() -> None:
    spent = training_cost(3600.0, 10, CLUSTER, Prices(gpu_hour=2.0, kwh=0.5))
    assert spent.gpu_hours == 10 and spent.energy_kwh == 4.0 and spent.money == 22.0
    unknown = replace(CLUSTER, device=replace(CLUSTER.device, power_w=0.0))
    assert training_cost(3600.0, 10, unknown, Prices()).energy_kwh is None
