"""A predicted step: its parts add up, its memory equals the papers', and impossible jobs are refused in a sentence."""

from dataclasses import replace

import pytest

from netfold_plan.cluster import Cluster, load_cluster
from netfold_plan.job import Job, Split
from netfold_plan.model import Layer, Matmul, Pass, ShardSpec, Transformer
from netfold_plan.step import FITTED, predict
from netfold_plan.step.compute import matmul_s
from netfold_plan.step.memory import waiting
from netfold_plan.step.traffic import Group, collective_s

GPT = Transformer("GPT 22B", 6144, 64, 48, 2048)


@pytest.fixture(scope="module")
def dgx() -> Cluster:
    return load_cluster("dgx-a100")


class _Equal:
    """Layers that all take the same time and send next to nothing."""

    name = "equal"
    parameters = 8.0
    flops = 1.0

    def layers(self, share: ShardSpec) -> tuple[Layer, ...]:
        work = Pass((Matmul(4096, 4096, 4096 * share.micro_batch),), kernels=1)
        return (Layer("layer", work, work, Pass(), 1.0, 1.0, 1.0, count=64),)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (4, 4), (8, 8), (8, 32), (64, 64)])
def test_the_bubble_of_equal_stages_equals_the_talks_formula(dgx: Cluster, stages: int, microbatches: int) -> None:
    prediction = predict(_Equal(), dgx, Job(microbatches, 1, Split(pipeline=stages), optimizer="sgd"))
    idle = prediction.bubble_s / (prediction.bubble_s + prediction.compute_s)
    assert idle == pytest.approx((stages - 1) / (stages + microbatches - 1))


@pytest.mark.parametrize(
    "job",
    [
        Job(64, 4, Split(data=2, tensor=8, pipeline=4)),
        Job(64, 1, Split(tensor=8, pipeline=4, interleave=3, sequence=True), recomputation="selective"),
        Job(64, 1, Split(data=64, zero=3), overlap=True),
        Job(64, 1, Split(data=8, tensor=8, zero=1), recomputation="full"),
    ],
)
def test_the_parts_of_a_step_add_up(dgx: Cluster, job: Job) -> None:
    found = predict(GPT, dgx, job)
    parts = found.compute_s + found.bubble_s + found.optimizer_s + sum(found.exposed_s.values())
    assert found.step_s == pytest.approx(parts)
    assert found.low_s < found.step_s < found.high_s
    assert 0 < found.mfu < 1 and found.samples_per_s == pytest.approx(64 / found.step_s)


def test_recomputing_adds_a_third_of_the_arithmetic(dgx: Cluster) -> None:
    nothing, all_of_it = (
        predict(GPT, dgx, Job(4, 4, Split(tensor=8), recomputation=word)) for word in ("none", "full")
    )
    assert 1.2 < all_of_it.compute_s / nothing.compute_s < 1.35
    assert all_of_it.memory.activations < nothing.memory.activations / 10


def test_activation_bytes_equal_korthikantis_formula(dgx: Cluster) -> None:
    """Table 2 and section 4.2.3, of blocks; embeddings and logits come on top."""
    job = Job(64, 1, Split(tensor=8, pipeline=8, interleave=3))
    model = Transformer("GPT 175B", 12288, 96, 96, 2048)
    block = model.layers(ShardSpec(1, 8))[1]
    assert block.kept_bytes == pytest.approx(2048 * 12288 * (10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8)))
    small = model.layers(ShardSpec(1, 8, sequence=True, recomputation="selective"))[1]
    assert small.kept_bytes == pytest.approx(2048 * 12288 * 34 / 8)
    assert waiting(0, job.microbatches, job) == pytest.approx(8 * (1 + 7 / 24))


def test_an_uneven_division_of_layers_makes_the_first_stages_longer(dgx: Cluster) -> None:
    odd = replace(GPT, depth=50)
    stages = predict(odd, dgx, Job(8, 1, Split(tensor=8, pipeline=4))).stages
    block = odd.layers(ShardSpec(1, 8))[1].parameters
    held = [stage.parameters / block for stage in stages]
    assert held[1] == pytest.approx(13) and held[2] == pytest.approx(12)
    assert stages[1].total_s > stages[2].total_s


def test_more_stages_than_layers_are_refused(dgx: Cluster) -> None:
    with pytest.raises(ValueError, match=r"49 pipeline stages .* 48 layers"):
        predict(GPT, dgx, Job(8, 1, Split(pipeline=49)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_schedule_bounds_the_microbatches_in_flight(schedule: str) -> None:
    job = Job(32, 1, Split(pipeline=4), schedule=schedule)
    assert [waiting(index, 32, job) for index in range(4)] == ([32] * 4 if schedule == "gpipe" else [4, 3, 2, 1])


@pytest.mark.parametrize(("level", "part"), [(0, (1, 1, 1)), (1, (1, 1, 8)), (2, (1, 8, 8)), (3, (8, 8, 8))])
def test_zero_splits_state_from_its_level(dgx: Cluster, level: int, part: tuple[int, int, int]) -> None:
    whole = predict(GPT, dgx, Job(8, 1, Split(data=8))).memory
    split = predict(GPT, dgx, Job(8, 1, Split(data=8, zero=level))).memory
    assert (split.weights, split.gradients, split.optimizer) == pytest.approx(
        (whole.weights / part[0], whole.gradients / part[1], whole.optimizer / part[2])
    )


def test_eighteen_bytes_a_parameter_with_adam_in_16_bits(dgx: Cluster) -> None:
    found = predict(GPT, dgx, Job(8, 1, Split(data=8)))
    held = found.memory.weights + found.memory.gradients + found.memory.optimizer
    assert held == pytest.approx(18 * GPT.parameters, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_bytes_per_parameter_equal_the_zero_papers(dgx: Cluster, ranks: int) -> None:
    """16 with Adam in 16 bits; 4 + 12/d, 2 + 14/d, 16/d (Rajbhandari et al. 2020, figure 1)."""
    for level, (whole, shared) in enumerate(((16, 0), (4, 12), (2, 14), (0, 16))):
        memory = predict(GPT, dgx, Job(64, 1, Split(data=ranks, zero=level), gradient_bytes=2)).memory
        held = (memory.weights + memory.gradients + memory.optimizer) / GPT.parameters
        assert held == pytest.approx(whole + shared / ranks, rel=1e-3), level


def test_an_unaligned_matmul_takes_longer(dgx: Cluster) -> None:
    aligned, unaligned = (matmul_s(Matmul(8192, words, 2048), dgx.device, "f16", 2, FITTED) for words in (50304, 50257))
    assert unaligned > 2 * aligned


def test_a_ring_inside_a_node_and_one_across_nodes_meet_their_slowest_link(dgx: Cluster) -> None:
    size = 1 << 30
    inside = collective_s("all_reduce", size, Group(8), dgx, FITTED)
    # Eight ranks of each node leave by eight adapters; one of each node, 8 devices apart, by one.
    across = collective_s("all_reduce", size, Group(64), dgx, FITTED)
    alone = collective_s("all_reduce", size, Group(8, stride=8), dgx, FITTED)
    assert 2 * 7 / 8 * size / inside == pytest.approx(230e9, rel=0.02)
    assert inside < across < alone
    assert alone == pytest.approx(2 * 7 / 8 * size / 25e9, rel=0.05)


def test_reductions_in_the_network_send_half(dgx: Cluster) -> None:
    adding = replace(dgx, tiers=(dgx.tiers[0], replace(dgx.tiers[1], in_network=True)))
    group = Group(64, stride=8)
    ring, switch = (
        collective_s("all_reduce", 1 << 30, group, adding, FITTED, in_network=word) for word in (False, True)
    )
    assert ring / switch == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job(5000, 1, Split(data=5000)), "needs 5000 devices; dgx-a100 has 4480"),
        (Job(5, 1, Split(tensor=5)), "64 heads cannot be split over 5 tensor ranks"),
    ],
)
def test_an_impossible_split_is_refused_in_a_sentence(dgx: Cluster, job: Job, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict(GPT, dgx, job)


def test_an_indivisible_batch_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 32"):
        Job(24, 4, Split(data=8))
